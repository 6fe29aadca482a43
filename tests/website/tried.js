// What test_browser.py has a browser do with the site; it reads `found` afterwards.
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

// ---- Contrast, as WCAG counts it ----
function channels(color) {
  const canvas = channels.canvas ||= Object.assign(document.createElement("canvas"),
    { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, alpha / 255];
}

function over(front, back) {
  const share = front[3];
  return [0, 1, 2].map((place) => share * front[place] + (1 - share) * back[place]).concat(1);
}

function luminance(color) {
  const [red, green, blue] = color.slice(0, 3).map((value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrastOf(element, view, pseudo) {
  let back = [0, 0, 0, 0], opacity = 1;
  const parents = [];
  for (let one = element; one; one = one.parentElement) parents.unshift(one);
  for (const one of parents) {
    const style = view.getComputedStyle(one);
    back = over(channels(style.backgroundColor), back);
    opacity *= Number(style.opacity);
  }
  const style = view.getComputedStyle(element, pseudo);
  if (pseudo) opacity *= Number(style.opacity);
  const color = channels(style.color);
  color[3] *= opacity;
  const lights = [luminance(over(color, back)), luminance(back)].sort((a, b) => a - b);
  return (lights[1] + 0.05) / (lights[0] + 0.05);
}

// The words of a page that are hard to read, by the look that they have
function faint(frame) {
  const view = frame.contentWindow, looks = {};
  const walker = frame.contentDocument.createTreeWalker(frame.contentDocument.body,
    NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("svg, script, style, option")) continue;
    const look = [element.tagName, element.className, element.parentElement.tagName,
      element.parentElement.className, element.closest("tr")?.className,
      element.closest("td")?.className, !!element.closest("mark, .marked")].join(" ");
    if (seen.has(look)) continue;
    seen.add(look);
    const contrast = contrastOf(element, view);
    if (contrast < 4.5) looks[look] = contrast;
    if (element.dataset.n && contrastOf(element, view, "::before") < 4.5) {
      looks[`${look} number`] = contrastOf(element, view, "::before");
    }
  }
  return looks;
}

async function main({ first, third, steps, pages, widths, contrast }) {
  found.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  found.faint = {};
  for (const page of contrast) {
    const frame = await open(page);
    if (page.startsWith("compare")) await new Promise((done) => setTimeout(done, 50));
    Object.assign(found.faint, faint(frame));
    frame.remove();
  }
  if (!pages.length) return;

  // Sideways scrolling: how far a page is wider than its window. What scrolls in it can be reached.
  found.wider = {};
  found.tabs = {};
  for (const page of pages) {
    for (const width of widths) {
      const frame = await open(page, width);
      found.wider[`${page} ${width}`] = frame.contentDocument.documentElement.scrollWidth - width;
      const main = all(frame, "main")[0];
      const stops = all(frame, "a[href], button, input, select, summary").filter(
        (one) => one.tabIndex >= 0);
      found.tabs[page] = { first: stops[0].textContent, before: stops.filter((one) =>
        one.compareDocumentPosition(main) & Node.DOCUMENT_POSITION_FOLLOWING).length };
      frame.remove();
    }
  }

  // The filter, and links of the ladder's points
  let frame = await open("ladder.html");
  const box = all(frame, "#filter")[0];
  box.value = "muon #4";
  box.dispatchEvent(new Event("input"));
  found.filter = all(frame, "output")[0].textContent;
  found.hidden = all(frame, "tr[hidden]").length;
  frame = await open("index.html");
  found.points = all(frame, ".chart-svg a").map((link) => link.getAttribute("href"));
  let next = loaded(frame);
  all(frame, `.chart-svg a[href="${first}.html"]`)[0].dispatchEvent(
    new MouseEvent("click", { bubbles: true }));
  await next;
  found.clicked = addressOf(frame);

  // Keys lead to the neighbours, but not from where they scroll
  found.keys = [];
  for (const key of ["ArrowRight", "ArrowLeft"]) {
    const scrolled = all(frame, ".wide")[0];
    scrolled.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
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
  found.title = frame.contentDocument.title;
  frame = await open(`compare.html#a=${first}&b=${third}&all=1`);
  found.shown = all(frame, ".new div").length;
  found.gaps = all(frame, ".gap, .folded").length;
  frame = await open(`compare.html#b=${third}&line=30-31,40`);
  found.marked = all(frame, ".marked").map((line) => line.id);
  frame = await open("compare.html");
  found.newest = all(frame, "h1")[0].textContent;
  frame = await open("compare.html#b=nothing");
  found.unknown = all(frame, "#shown p")[0].textContent;

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
