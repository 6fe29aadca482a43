// Of the pages that `python records/ledger book` writes: arrow keys, and a filter over the tables.
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT" || event.altKey || event.ctrlKey || event.metaKey) return;
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = rel && document.querySelector(`nav a[rel=${rel}]`);
  if (link) location.href = link.href;
});

const heading = document.getElementById("ladder");
if (heading) {
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter by idea, author or number";
  input.setAttribute("aria-label", input.placeholder);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase();
    for (const row of document.querySelectorAll("main tbody tr")) {
      row.hidden = !row.textContent.toLowerCase().includes(words);
    }
  });
  heading.after(input);
}
