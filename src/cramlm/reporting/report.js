"use strict";
// Tables: sorting, filtering, and long ones folded. The page is complete without this script.
const FOLD_AT = 10;
const SLACK = 4; // rows that are not worth folding

for (const table of document.querySelectorAll("table.tools")) {
  const body = table.tBodies[0];
  const written = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];
  let folded = written.length > FOLD_AT + SLACK;
  let query = "";

  const show = () => {
    let position = 0;
    for (const row of body.rows) {
      row.hidden = !row.textContent.toLowerCase().includes(query);
      row.classList.toggle("folded", folded && query === "" && position >= FOLD_AT);
      position += 1;
    }
  };

  const value = (row, column) => {
    const cell = row.cells[column];
    return headers[column].className === "text" ? cell.textContent.trim() : Number(cell.dataset.order ?? "-Infinity");
  };

  headers.forEach((header, column) => {
    const isText = header.className === "text";
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const before = header.getAttribute("aria-sort");
      const first = isText ? "ascending" : "descending";
      const second = isText ? "descending" : "ascending";
      const now = before === null ? first : before === first ? second : null; // the third click restores the original order
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      const rows = [...written];
      if (now !== null) {
        header.setAttribute("aria-sort", now);
        const sign = now === "ascending" ? 1 : -1;
        rows.sort((a, b) => {
          const [x, y] = [value(a, column), value(b, column)];
          return sign * (isText ? x.localeCompare(y) : x === y ? 0 : x < y ? -1 : 1);
        });
      }
      body.append(...rows);
      show();
    });
  });

  if (!folded) continue;
  const box = document.createElement("label");
  const input = document.createElement("input");
  const count = document.createElement("span");
  input.type = "search";
  input.autocomplete = "off";
  count.setAttribute("role", "status");
  box.className = "filter";
  input.placeholder = "filter";
  input.setAttribute("aria-label", `Filter: ${table.caption.textContent}`);
  box.append(input, count);
  table.caption.append(box);
  input.addEventListener("input", () => {
    query = input.value.trim().toLowerCase();
    show();
    unfold.hidden = !folded || query !== "";
    count.textContent = query === "" ? "" : `${written.filter((row) => !row.hidden).length} of ${written.length} rows`;
  });
  const unfold = document.createElement("button");
  unfold.type = "button";
  unfold.className = "unfold";
  unfold.textContent = `Show all ${written.length} rows`;
  unfold.addEventListener("click", () => {
    folded = false;
    unfold.remove();
    show();
  });
  table.after(unfold);
  show();
}
