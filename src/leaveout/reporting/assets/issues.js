// Labels that look wrong, as cards, with a matrix of given and suggested labels that filters them.
const MATRIX = 12;

function issues() {
  if (!$("issue-cards")) return;
  const { place, suggested, score, why } = DATA.issues;
  let pair = null, shown = 0, rows = [];
  const given = (i) => TABLE.label[place[i]];
  const extend = () => {
    const next = rows.slice(shown, shown + PAGE);
    $("issue-cards").append(...next.map((i) => card(place[i], scoreOf(place[i]), false, i, "influence ")));
    shown += next.length;
    $("more-issues").hidden = shown >= rows.length;
    const which = pair ? ` labelled ${nameOf(pair[0])} that look like ${nameOf(pair[1])}` : "";
    $("issue-count").textContent = `${shown} of ${rows.length.toLocaleString("en")}${which}, most suspicious first`;
  };
  const update = () => {
    rows = [...place.keys()].filter((i) => !pair || (given(i) === pair[0] && suggested[i] === pair[1]));
    $("issue-cards").replaceChildren();
    $("issue-cards").classList.toggle("read", READ);
    shown = 0;
    extend();
  };
  const counts = new Map();
  place.forEach((_, i) => { const key = `${given(i)} ${suggested[i]}`; counts.set(key, (counts.get(key) ?? 0) + 1); });
  const choose = (a, b) => { pair = pair && pair[0] === a && pair[1] === b ? null : [a, b]; update(); matrix(); };
  const matrix = () => {
    const totals = new Map();
    for (const [key, count] of counts) for (const name of key.split(" ")) totals.set(name, (totals.get(name) ?? 0) + count);
    const most = [...totals].sort((a, b) => b[1] - a[1]).slice(0, MATRIX).map(([name]) => Number(name));
    most.sort((a, b) => TABLE.names[a].localeCompare(TABLE.names[b], undefined, { numeric: true }));
    const largest = Math.max(...counts.values());
    const head = el("tr", {}, el("th", { scope: "col" }, "given ↓ suggested →"), ...most.map((b) => el("th", { scope: "col" }, nameOf(b))));
    const cell = (a, b) => {
      const count = counts.get(`${a} ${b}`);
      if (!count) return el("td", {});
      const pressed = pair !== null && pair[0] === a && pair[1] === b;
      const button = el("button", { type: "button", "aria-pressed": String(pressed), "aria-label": `${count} labelled ${nameOf(a)} that look like ${nameOf(b)}`, style: `--heat: ${Math.round(12 + (33 * count) / largest)}%` }, String(count));
      button.addEventListener("click", () => choose(a, b));
      return el("td", {}, button);
    };
    const lines = most.map((a) => el("tr", {}, el("th", { scope: "row" }, nameOf(a)), ...most.map((b) => cell(a, b))));
    const caption = totals.size > MATRIX ? [el("caption", {}, `The ${MATRIX} labels with the most issues.`)] : [];
    $("matrix").replaceChildren(...caption, el("thead", {}, head), el("tbody", {}, ...lines));
  };
  $("more-issues").addEventListener("click", () => {
    const first = shown;
    extend();
    const card = $("issue-cards").children[first];
    if (card) { card.tabIndex = -1; card.focus({ preventScroll: true }); }
  });
  $("download").addEventListener("click", () => {
    const lines = rows.map((i, rank) => [rank + 1, TABLE.id[place[i]], nameOf(given(i)), nameOf(suggested[i]), score[i], why[i], scoreOf(place[i]), exactOf(place[i])]);
    save("labels-to-check.csv", asCsv([["rank", "id", "given_label", "suggested_label", "label_score", "why", "score", "exact"], ...lines]), "text/csv");
  });
  if (place.length) { update(); matrix(); }
}
