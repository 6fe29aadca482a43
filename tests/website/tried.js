// What test_site.py has a browser do with the site; it reads `found` afterwards.
"use strict";
const found = {};

function open(page, width = 1280) {
  const frame = document.createElement("iframe");
  frame.style.width = `${width}px`;
  frame.style.height = "900px";
  frame.src = page;
  document.body.append(frame);
  return loaded(frame);
}

function loaded(frame) {
  return new Promise((done) => frame.addEventListener("load", () => done(frame), { once: true }));
}

const all = (frame, selector) => [...frame.contentDocument.querySelectorAll(selector)];
const addressOf = (frame) => frame.contentWindow.location.href.split("/").pop();

async function main({ first, third, pages, widths }) {
  // Sideways scrolling: how far a page is wider than its window
  found.wider = {};
  for (const page of pages) {
    for (const width of widths) {
      const frame = await open(page, width);
      found.wider[`${page} ${width}`] = frame.contentDocument.documentElement.scrollWidth - width;
      frame.remove();
    }
  }

  // The filter, and links of the ladder's points
  let frame = await open("index.html");
  const box = all(frame, "#filter")[0];
  box.value = "muon #4";
  box.dispatchEvent(new Event("input"));
  found.filter = all(frame, "output")[0].textContent;
  found.hidden = all(frame, "tr[hidden]").length;
  found.points = all(frame, ".ladder a").map((link) => link.getAttribute("href"));
  let next = loaded(frame);
  all(frame, `.ladder a[href="${first}.html"]`)[0].dispatchEvent(
    new MouseEvent("click", { bubbles: true }));
  await next;
  found.clicked = addressOf(frame);

  // Keys
  found.keys = [];
  for (const key of ["ArrowRight", "ArrowLeft"]) {
    next = loaded(frame);
    frame.contentDocument.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await next;
    found.keys.push(addressOf(frame));
  }

  // A comparison of distant records, and the lines of one script that an address names
  const numbers = (side) => all(frame, `tr.changed .${side} div`).map((line) => +line.dataset.n);
  frame = await open(`compare.html#a=${first}&b=${third}`);
  found.old = numbers("old");
  found.new = numbers("new");
  frame = await open(`compare.html#b=${third}&line=30-31,40`);
  found.marked = all(frame, ".marked").map((line) => line.id);

  // Equal lines of a change unfold
  frame = await open(`${found.keys[0]}`);
  const gap = all(frame, "tbody.gap")[0];
  found.gap = { ...gap.dataset };
  gap.querySelector("button").click();
  while (gap.classList.contains("gap")) await new Promise((done) => setTimeout(done, 10));
  found.unfolded = [...gap.querySelectorAll(".new div")].map((line) => line.textContent);
}

main(WANTED).catch((error) => { found.error = `${error}`; }).finally(() => {
  const end = document.createElement("pre");
  end.id = "found";
  end.textContent = JSON.stringify(found);
  document.body.append(end);
});
