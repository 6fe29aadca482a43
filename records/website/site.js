// Of the pages that `python records/ledger site` writes.
"use strict";

// ← and → lead to the previous and the next page.
document.addEventListener("keydown", (event) => {
  const isPlain = !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey;
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = document.querySelector(`nav a[rel="${rel}"]`);
  const isBusy = event.target.closest("input, select, textarea, pre, table, .wide");
  if (isPlain && link && !isBusy) location.href = link.href;
});

// Equal lines between the places of a change: a button shows them, once scripts.js is read.
function addGaps() {
  for (const gap of document.querySelectorAll("tbody.gap")) {
    const count = Number(gap.dataset.count);
    gap.innerHTML = `<tr><td colspan="2"><button>Show ${count} equal line${count > 1 ? "s" : ""}`
      + "</button></td></tr>";
    gap.querySelector("button").addEventListener("click", () => withScripts(() => fill(gap)));
  }
}

function withScripts(action) {
  if (typeof SCRIPTS !== "undefined") return action();
  const script = document.createElement("script");
  script.src = "scripts.js";
  script.addEventListener("load", action);
  document.head.append(script);
}

function fill(gap) {
  const name = location.pathname.split("/").pop().replace(/\.html$/, "");
  const { runs } = SCRIPTS[gap.closest("table").dataset.script || name];
  const ids = runs.flatMap(([first, count]) =>
    Array.from({ length: count }, (_, index) => first + index));
  const count = Number(gap.dataset.count), start = Number(gap.dataset.new);
  const cell = (side, first) => {
    const lines = Array.from({ length: count }, (_, index) =>
      `<div data-n="${first + index}">${LINES[ids[start - 1 + index]]}</div>`);
    return `<td class="${side}">${lines.join("")}</td>`;
  };
  gap.innerHTML = `<tr class="equal">${cell("old", Number(gap.dataset.old))}`
    + `${cell("new", start)}</tr>`;
  gap.classList.remove("gap");
}
addGaps();

// Paper shows what is folded.
addEventListener("beforeprint", () =>
  document.querySelectorAll("details").forEach((part) => { part.open = true; }));

// A box above a long table keeps the rows that have all its words: of ideas, authors, numbers.
function addFilter() {
  const tables = [...document.querySelectorAll(".long")];
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
  // The ladder has no authors: they are those of the public records that its rows name.
  const last = tables.at(-1).tBodies[0].rows;
  const authors = new Map([...last].map((row) => [row.cells[0].textContent,
    row.cells.length > 4 ? row.cells[4].textContent : ""]));
  const texts = new Map(rows.map((row) => {
    const numbers = new Set(row.textContent.match(/#\d+/g));
    return [row, [row.textContent, ...[...numbers].map((one) => authors.get(one))].join(" ")];
  }));
  const label = document.createElement("p");
  label.innerHTML = '<label>Show the rows with: <input id="filter" type="search" '
    + 'placeholder="idea, author, #number"></label> <output></output>';
  tables[0].before(label);
  const box = label.querySelector("input");
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [row, text] of texts) {
      const found = text.toLowerCase();
      row.hidden = !words.every((word) =>
        /^#\d+$/.test(word) ? new RegExp(`${word}(?!\\d)`).test(found) : found.includes(word));
      count += !row.hidden;
    }
    label.querySelector("output").textContent = words.length ? `${count} of ${rows.length}, in `
      + (tables.length > 1 ? "both tables" : "the table") : "";
  };
  box.addEventListener("input", filter);
  filter(); // what the box had before the page was read again
}
if (document.querySelector(".long")) addFilter();
