// Filters of the catalogue: a text, and an engine. Without scripts the whole catalogue shows.
"use strict";

(() => {
  const place = document.getElementById("catalogue-filter");
  if (!place) return;
  const tables = [...document.querySelectorAll("article table")].filter((table) =>
    [...table.querySelectorAll("thead th")].some((cell) => cell.textContent.trim() === "formula"),
  );

  const text = document.createElement("input");
  text.type = "search";
  text.placeholder = "Filter by name, formula, source, year …";
  text.setAttribute("aria-label", "Filter the catalogue");

  const engine = document.createElement("select");
  engine.setAttribute("aria-label", "Engine");
  for (const name of ["any engine", "sdpa", "fused", "streaming", "reference"]) engine.add(new Option(name));

  const count = document.createElement("output");
  place.append(text, engine, count);

  function show() {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let seen = 0, all = 0;
    for (const table of tables) {
      const column = [...table.querySelectorAll("thead th")].findIndex((cell) => cell.textContent.trim() === "engines");
      let here = 0;
      for (const row of table.tBodies[0].rows) {
        const content = row.textContent.toLowerCase();
        const engines = column < 0 ? "" : row.cells[column].textContent;
        const fits = words.every((word) => content.includes(word)) &&
          (engine.selectedIndex === 0 || engines.split(/,\s*/).includes(engine.value));
        row.hidden = !fits;
        here += fits ? 1 : 0;
        all += 1;
      }
      seen += here;
      table.closest("section").hidden = here === 0;
    }
    count.textContent = `${seen} of ${all}`;
  }
  text.addEventListener("input", show);
  engine.addEventListener("change", show);
  show();
})();
