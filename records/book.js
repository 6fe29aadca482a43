// Of the pages that `python records/ledger book` writes.
"use strict";

// ← and → lead to the previous and the next page.
document.addEventListener("keydown", (event) => {
  const isPlain = !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey;
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = document.querySelector(`nav a[rel="${rel}"]`);
  const isBusy = event.target.closest("input, select, textarea, pre, table");
  if (isPlain && link && !isBusy) location.href = link.href;
});
