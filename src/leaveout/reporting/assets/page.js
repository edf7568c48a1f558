// Queries, labels to check, light and dark; then everything is put in its place.
function queries() {
  const select = $("query");
  if (!select) return;
  const title = (query) => {
    const label = query.label ? `, ${LABELLED} ${query.label}` : "";
    const says = query.says && query.says !== query.label ? `, model says ${query.says}` : "";
    return `query ${query.id}${label}${says}` + (query.loss === null ? "" : `, loss ${short(query.loss)}`);
  };
  select.append(...DATA.queries.map((query, i) => el("option", { value: i }, title(query))));
  $("drivers").classList.toggle("read", READ);
  const side = (heading, rows) => {
    const list = el("ul", { class: "cards", "aria-label": heading }, ...rows.map(([row, score]) => card(row, score, false)));
    list.classList.toggle("read", READ);
    return el("div", { class: "side" }, el("h3", {}, heading), list);
  };
  const show = () => {
    const i = Number(select.value), query = DATA.queries[i];
    const body = el("div", { class: "body" }, el("h3", { class: "number" }, `query ${query.id}`),
      target(query.label),
      opinion(query.label, query.says, query.p),
      query.loss === null ? null : el("p", { class: "says" }, `loss ${short(query.loss)}`));
    const own = el("div", { class: "card" }, seen(query.shown, title(query)), body);
    $("drivers").replaceChildren(own, el("div", {},
      side("Raised its loss: without them it would be lower", query.harmful.filter(([, score]) => score < 0)),
      side("Lowered its loss: without them it would be higher", query.helpful.filter(([, score]) => score > 0))));
    $("previous").disabled = i === 0;
    $("next").disabled = i === DATA.queries.length - 1;
  };
  const move = (by) => () => { select.value = Number(select.value) + by; show(); };
  select.addEventListener("change", show);
  $("previous").addEventListener("click", move(-1));
  $("next").addEventListener("click", move(1));
  show();
}

// A cell that a spreadsheet may take for a formula begins with an apostrophe: also behind white space, which some drop,
// and by the full-width forms of = + - @, which some read as the plain ones.
function csvCell(value) {
  let cell = String(value);
  if (typeof value === "string" && /^\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|^[\t\r\n]/.test(cell)) cell = "'" + cell;
  return /[",\n\r]|^\s|\s$/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}

function candidates() {
  if (!$("suspect-table")) return;
  const chosenRows = () => {
    const only = $("suspects") ? $("suspects").checked : false;
    return [...TABLE.id.keys()].filter((row) => TABLE.score[row] < 0 && (!only || disputed(row)));
  };
  const pictures = Object.values(DATA.shown).some((shown) => shown.picture);
  const update = () => {
    const rows = chosenRows();
    const heads = [pictures ? "Picture" : null, "Number", CLASSES ? "Label" : "Target", "Model says", "Score", "P(label)"].filter(Boolean);
    const line = (row) => el("tr", {},
      pictures ? el("td", {}, DATA.shown[row]?.picture ? picture(DATA.shown[row], described(row)) : "") : null,
      el("th", { scope: "row" }, String(TABLE.id[row])), el("td", {}, nameOf(TABLE.label[row])), el("td", {}, nameOf(TABLE.says[row])),
      el("td", { class: "n harm" }, signed(TABLE.score[row])), el("td", { class: "n" }, TABLE.p.length ? percent(TABLE.p[row]) : ""));
    const head = el("tr", {}, ...heads.map((name, i) => el("th", { scope: "col", class: i >= heads.length - 2 ? "n" : null }, name)));
    $("suspect-table").replaceChildren(el("caption", { class: "hidden" }, "Labels to check, most harmful first"), el("thead", {}, head), el("tbody", {}, ...rows.slice(0, 50).map(line)));
    const more = rows.length > 50 ? "; the first 50 are listed, the file has all" : "";
    $("suspect-count").textContent = `${rows.length.toLocaleString("en")} ${noun(rows.length)}${more}`;
    $("download").disabled = rows.length === 0;
  };
  $("download").addEventListener("click", () => {
    const rows = chosenRows().map((row, i) => [i + 1, TABLE.id[row], nameOf(TABLE.label[row]), nameOf(TABLE.says[row]), TABLE.p[row] ?? "", TABLE.score[row]]);
    const lines = [["rank", "id", "label", "model_says", "probability_of_label", "score"], ...rows].map((cells) => cells.map(csvCell).join(","));
    const address = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv;charset=utf-8" }));
    const link = el("a", { href: address, download: "labels-to-check.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  });
  $("suspects")?.addEventListener("change", update);
  if ($("suspects") && !chosenRows().length) $("suspects").checked = false;
  update();
}

function theme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let own = null;
  const apply = () => {
    const dark = own ?? system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    $("theme").textContent = dark ? "Light mode" : "Dark mode";
  };
  $("theme").addEventListener("click", () => { own = document.documentElement.dataset.theme !== "dark"; apply(); });
  system.addEventListener("change", apply);
  apply();
}

theme();
tips();
examples();
queries();
candidates();
histogram();
if (DATA.parts.length) sums();
if ($("growth")) growth();
if (DATA.check) scatter();
if (DATA.cleansing) cleansing();
