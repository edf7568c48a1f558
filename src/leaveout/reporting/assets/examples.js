// Cards of examples, and the list that search, order and filter work on.
const COUNT = TABLE.id.length;
const READ = Object.values(DATA.shown).some((shown) => shown.text || shown.row.length);
const PAGE = READ ? 12 : 20;

function seen(shown, what) {
  if (!shown) return null;
  if (shown.picture) return el("div", { class: "seen picture" }, picture(shown, what));
  if (shown.text) return el("div", { class: "seen text", tabindex: "0", role: "group", "aria-label": "Text of " + what }, shown.text);
  if (!shown.row.length) return null;
  const rows = shown.row.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, minus(value))));
  const rest = shown.more ? el("p", { class: "rest" }, `and ${shown.more} more`) : null;
  return el("div", { class: "seen values" }, el("table", { "aria-label": "Features of " + what }, el("tbody", {}, ...rows)), rest);
}

function picture(shown, what) {
  const image = el("img", { src: shown.picture, alt: what });
  image.addEventListener("load", () => image.classList.toggle("coarse", image.naturalWidth < 64));
  return image;
}

function described(row) {
  const label = nameOf(TABLE.label[row]);
  return `${noun(1)} ${TABLE.id[row]}` + (label ? `, ${LABELLED} ${label}` : "");
}

function target(label) {
  return label ? el("p", { class: "label" }, `${LABELLED} `, el("b", {}, CLASSES ? label : minus(label))) : null;
}

function opinion(label, says, p) {
  if (!says) return null;
  if (p === null || p === undefined) return el("p", { class: "says" }, "model says " + minus(says));
  if (says === label) return el("p", { class: "says" }, `model agrees, ${percent(p)} confident`);
  return el("p", { class: "says differs" }, `model says ${says}; label probability ${percent(p)}`);
}

const ISSUE = new Map((DATA.issues?.place ?? []).map((place, i) => [place, i]));

function change(given, suggested) {
  return el("p", { class: "label" }, el("span", { class: "was" }, given), " → ", el("b", {}, suggested));
}

// Under a bad verdict only labels, and examples that were retrained without, are to be decided on.
function mayDecide(row, issue) {
  const { act } = METHOD().trust;
  return !DATA.groups && (issue !== undefined || act === "all" || (act === "exact" && exactOf(row)));
}

// `score` is the one shown: that of the mean loss, or that of one query. In the list of labels it says what it is.
function card(row, score, line, issue = ISSUE.get(row), what = "") {
  const kind = score < 0 ? "harm" : "help";
  const label = nameOf(TABLE.label[row]);
  const body = el("div", { class: "body" },
    el("div", { class: "top" },
      el("h3", { class: DATA.groups ? "name" : "number" }, titleOf(row)),
      el("span", { class: `score ${kind}`, title: score < 0 ? "did harm" : "helped" }, what ? el("span", { class: "what" }, what) : null, signed(score))),
    issue === undefined ? target(label) : change(label, nameOf(DATA.issues.suggested[issue])),
    issue === undefined ? null : el("p", { class: "why" }, DATA.issues.why[issue]),
    opinion(label, nameOf(TABLE.says[row]), TABLE.p[row]),
    exactOf(row) && score === scoreOf(row) ? el("span", { class: "badge" }, "retrained without it") : null,
    line && DATA.lines[row] ? spark(DATA.lines[row]) : null,
    mayDecide(row, issue) ? marker(row, issue) : null);
  return el("li", { class: "card", "data-id": TABLE.id[row] }, seen(DATA.shown[row], described(row)), body);
}

const HAYSTACK = TABLE.id.map((id, row) => {
  const shown = DATA.shown[row];
  const words = shown ? [shown.text, ...shown.row.flat()] : [];
  return [id, DATA.called[row] ?? "", nameOf(TABLE.label[row]), ...words].join(" ").toLowerCase();
});

function matches(row, choice) {
  if (choice.side === "harmful" && scoreOf(row) >= 0) return false;
  if (choice.side === "helpful" && scoreOf(row) < 0) return false;
  if (choice.label !== "" && TABLE.label[row] !== Number(choice.label)) return false;
  if (choice.disputed && !disputed(row)) return false;
  if (!choice.search) return true;
  // A number is an example's own number, or a word of its label or text; never a piece of another number.
  if (/^#?\d+$/.test(choice.search)) return HAYSTACK[row].split(/[^\p{L}\p{N}]+/u).includes(choice.search.replace("#", ""));
  return choice.search.split(/\s+/).every((word) => HAYSTACK[row].includes(word));
}

function compare(order, side) {
  const forward = side === "helpful" ? -1 : 1;
  if (order === "id") return (a, b) => (DATA.groups ? String(TABLE.id[a]).localeCompare(String(TABLE.id[b])) : TABLE.id[a] - TABLE.id[b]);
  if (order === "p") return (a, b) => TABLE.p[a] - TABLE.p[b] || a - b;
  const by = (a, b) => scoreOf(a) - scoreOf(b) || a - b;
  return order === "reverse" ? (a, b) => forward * by(b, a) : (a, b) => forward * by(a, b);
}

function chosen() {
  const form = new FormData($("controls"));
  return {
    side: form.get("side"), order: $("order").value, search: $("search").value.trim().toLowerCase(),
    label: $("label") ? $("label").value : "", disputed: $("disputed") ? $("disputed").checked : false,
  };
}

function examples() {
  let rows = [], shown = 0;
  $("cards").classList.toggle("read", READ);
  if (COUNT <= PAGE || !METHOD().score.some((score) => score < 0)) document.querySelector("input[value=all]").checked = true;
  const labels = [...new Set(TABLE.label)].filter((number) => number >= 0);
  labels.sort((a, b) => TABLE.names[a].localeCompare(TABLE.names[b], undefined, { numeric: true }));
  if ($("label")) $("label").append(...labels.map((number) => el("option", { value: number }, TABLE.names[number])));

  const extend = () => {
    const next = rows.slice(shown, shown + PAGE);
    $("cards").append(...next.map((row) => card(row, scoreOf(row), true)));
    shown += next.length;
    $("more").hidden = shown >= rows.length;
    $("count").textContent = rows.length ? `${shown} of ${rows.length.toLocaleString("en")} ${noun(rows.length)}` : `No ${noun(1)} matches: search for something else or choose All.`;
  };
  const update = () => {
    const choice = chosen();
    rows = [];
    for (let row = 0; row < COUNT; row++) if (matches(row, choice)) rows.push(row);
    rows.sort(compare(choice.order, choice.side));
    $("cards").replaceChildren();
    shown = 0;
    extend();
  };
  $("controls").addEventListener("input", update);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("more").addEventListener("click", () => {
    const first = shown;
    extend();
    const card = $("cards").children[first];  // the keyboard goes on where the new ones begin
    if (card) { card.tabIndex = -1; card.focus({ preventScroll: true }); }
  });
  update();
  return update;
}

// The examples of one class, from wherever a class is clicked.
function showClass(name) {
  $("label").value = String(TABLE.names.indexOf(name));
  document.querySelector("input[value=all]").checked = true;
  $("controls").dispatchEvent(new Event("input"));
  $("examples").scrollIntoView();
}
