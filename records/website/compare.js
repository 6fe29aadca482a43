// Of the page where a script is read, or two are compared; scripts.js has them.
"use strict";
const CONTEXT = 3; // equal lines that are shown beside changed ones

function read(name) {
  if (!SCRIPTS[name]) return { ids: [], parts: new Map() };
  const ids = SCRIPTS[name].runs.flatMap(([first, count]) =>
    Array.from({ length: count }, (_, index) => first + index));
  const parts = new Map(); // title: numbers of lines
  SCRIPTS[name].sections.forEach(([title, start], index, all) => {
    const end = index + 1 < all.length ? all[index + 1][1] : ids.length;
    const numbers = parts.get(title) || [];
    for (let number = start; number < end; number++) numbers.push(number);
    parts.set(title, numbers);
  });
  return { ids, parts };
}

// Blocks [isEqual, lines of a, lines of b] of the longest common subsequence of two lists.
function blocksOf(a, b, isSame) {
  const width = b.length + 1;
  const longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const here = i * width + j;
      longest[here] = isSame(a[i], b[j]) ? longest[here + width + 1] + 1
        : Math.max(longest[here + width], longest[here + 1]);
    }
  }
  const blocks = [];
  const add = (isEqual, line, other) => {
    if (!blocks.length || blocks.at(-1)[0] !== isEqual) blocks.push([isEqual, [], []]);
    if (line !== undefined) blocks.at(-1)[1].push(line);
    if (other !== undefined) blocks.at(-1)[2].push(other);
  };
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    const here = i * width + j;
    if (i < a.length && j < b.length && isSame(a[i], b[j])) add(true, a[i++], b[j++]);
    else if (j === b.length || (i < a.length && longest[here + width] >= longest[here + 1])) {
      add(false, a[i++], undefined);
    } else add(false, undefined, b[j++]);
  }
  return blocks;
}

function cell(side, script, numbers) {
  const lines = numbers.map((number) => {
    const anchor = side === "new" ? ` id="L${number + 1}"` : "";
    return `<div${anchor} data-n="${number + 1}">${LINES[script.ids[number]]}</div>`;
  });
  return `<td class="${side}">${lines.join("")}</td>`;
}

function row(kind, old, fresh, theirs, ours) {
  return `<tr class="${kind}">${cell("old", old, theirs)}${cell("new", fresh, ours)}</tr>`;
}

// Rows of equal lines; those far from a change are folded away, unless all are wanted.
function equalRows(old, fresh, theirs, ours, isFirst, isLast) {
  if (box("all").checked) return row("equal", old, fresh, theirs, ours);
  const start = isFirst ? 0 : CONTEXT, end = ours.length - (isLast ? 0 : CONTEXT);
  if (end - start < 2) return row("equal", old, fresh, theirs, ours);
  const part = (kind, from, to) =>
    row(kind, old, fresh, theirs.slice(from, to), ours.slice(from, to));
  return part("equal", 0, start) + `<tr class="gap"><td colspan="2"><button>Show ${end - start} `
    + `equal lines</button></td></tr>` + part("equal folded", start, end)
    + part("equal", end, ours.length);
}

// The lines that an address names, as 7 or 7-9,12; only those that are shown.
function linesOf(text) {
  const numbers = text.split(",").flatMap((part) => {
    const [first, last] = part.split("-").map(Number);
    return Array.from({ length: Math.min(5000, (last || first) - first + 1) || 0 },
      (_, index) => first + index);
  });
  return numbers.map((number) => document.getElementById(`L${number}`)).filter(Boolean);
}

const box = (id) => document.getElementById(id);

// The address in words: what is compared, which lines are marked, and whether all are shown.
function addressOf() {
  const wanted = new URLSearchParams();
  if (box("a").value) wanted.set("a", box("a").value);
  wanted.set("b", box("b").value);
  if (box("all").checked) wanted.set("all", "1");
  if (box("line").value) wanted.set("line", box("line").value);
  return `#${wanted}`;
}

// Set the controls by the address; what it names and is not there. Without one, the newest change.
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1) || location.search);
  const newest = box("b").options[box("b").options.length - 1];
  const isEmpty = !wanted.get("a") && !wanted.get("b");
  const names = isEmpty ? [newest.dataset.parent, newest.value]
    : [wanted.get("a") || "", wanted.get("b") || newest.value];
  const unknown = names.filter((name) => name && !SCRIPTS[name]);
  box("a").value = unknown.includes(names[0]) ? "" : names[0];
  box("b").value = unknown.includes(names[1]) ? newest.value : names[1];
  box("all").checked = wanted.has("all");
  box("line").value = wanted.get("line") || "";
  return unknown;
}

function mark(isInView) {
  document.querySelectorAll(".marked").forEach((line) => line.classList.remove("marked"));
  const lines = linesOf(box("line").value);
  for (const line of lines) line.classList.add("marked");
  if (isInView && lines.length) lines[0].scrollIntoView({ block: "center" });
}

function show() {
  const unknown = readAddress();
  const [first, second] = [box("a"), box("b")];
  const old = read(first.value), fresh = read(second.value);
  const words = (list) => list.selectedOptions[0].textContent;
  const title = first.value ? `${words(second)}, compared with ${words(first)}`
    : `${words(second)}, the whole script`;
  document.querySelector("h1").textContent = title;
  document.title = `${title} · ${document.title.split(" · ").pop()}`;
  let html = unknown.map((name) => `<p>No script here is called ${name.replace(/[<&]/g, "")}.</p>`)
    .join("");
  for (const title of new Set([...fresh.parts.keys(), ...old.parts.keys()])) {
    const theirs = old.parts.get(title) || [], ours = fresh.parts.get(title) || [];
    let rows = "";
    if (!first.value) rows = `<tr class="alone">${cell("new", fresh, ours)}</tr>`;
    else {
      const same = (i, j) => old.ids[i] === fresh.ids[j];
      const blocks = blocksOf(theirs, ours, same);
      if (!box("all").checked && blocks.every(([isEqual]) => isEqual)) continue;
      blocks.forEach(([isEqual, before, after], index) => {
        rows += isEqual
          ? equalRows(old, fresh, before, after, index === 0, index === blocks.length - 1)
          : row("changed", old, fresh, before, after);
      });
    }
    html += `<h2>${title}</h2><table class="diff">${rows}</table>`;
  }
  box("shown").innerHTML = html || "<p>Both are the same.</p>";
  mark(true);
}

for (const id of ["a", "b", "all"]) {
  box(id).addEventListener("change", () => { location.hash = addressOf(); });
}
box("line").addEventListener("change", () => {
  history.replaceState(null, "", addressOf()); // a link that can be sent
  mark(true);
});
box("shown").addEventListener("click", (event) => {
  const gap = event.target.closest(".gap"), line = event.target.closest(".new div");
  if (gap) {
    gap.nextElementSibling.classList.remove("folded");
    gap.remove();
  } else if (line && !getSelection().toString()) {
    box("line").value = line.dataset.n;
    history.replaceState(null, "", addressOf());
    mark(false);
  }
});
addEventListener("hashchange", show);
show();
