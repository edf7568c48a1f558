// The data, and the few helpers that everything below uses. What comes from the data is set as text, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const TABLE = DATA.table;

const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Hyphens in words stay what they are.
const minus = (text) => (text !== "" && Number.isFinite(Number(text)) ? text.replaceAll("-", "−") : text);
const signed = (value) => (value > 0 ? "+" : "") + minus(short(value));
const percent = (value) => (value >= 0.995 && value < 1 ? ">99%" : value > 0 && value < 0.005 ? "<1%" : Math.round(value * 100) + "%");

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.0001 || size >= 1e6) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

// Labels of classes come with probabilities; otherwise they are numbers to be predicted.
const CLASSES = TABLE.p.length > 0;
const LABELLED = CLASSES ? "labelled" : "target";
let CURRENT = 0;  // the method that is shown
const METHOD = () => DATA.methods[CURRENT];
const scoreOf = (row) => METHOD().score[row];
const exactOf = (row) => METHOD().exact[row];
const PLACE = new Map(TABLE.id.map((id, place) => [String(id), place]));
const titleOf = (row) => DATA.called[row] ?? `${DATA.groups ? "" : "#"}${TABLE.id[row]}`;
const nameOf = (number) => (number === undefined || number < 0 ? "" : TABLE.names[number]);
const disputed = (row) => CLASSES && TABLE.says[row] !== TABLE.label[row];
const noun = (count) => (DATA.groups ? (count === 1 ? "group" : "groups") : count === 1 ? "example" : "examples");

// With `open`, the first cell is an example that opens when it is clicked.
function table(caption, heads, rows, open = false) {
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
  const opener = (id) => {
    if (!open || !PLACE.has(String(id))) return String(id);
    const button = el("button", { type: "button", class: "link" }, String(id));
    button.addEventListener("click", () => detail(PLACE.get(String(id))));
    return button;
  };
  const body = rows.map((cells) =>
    el("tr", {}, ...cells.map((cell, i) => (i ? el("td", {}, String(cell)) : el("th", { scope: "row" }, opener(cell))))));
  return el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, ...body));
}

// Every chart has its numbers as a table beside it.
function asTable(caption, heads, rows, open = false) {
  const region = el("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" });
  const details = el("details", {}, el("summary", {}, "The numbers as a table"), region);
  details.addEventListener("toggle", () => {
    if (details.open && !region.firstChild) region.append(table(caption, heads, rows, open));
  });
  return details;
}

// One small box that follows the pointer over anything with data-tip.
function tips() {
  const box = $("tip");
  document.addEventListener("pointermove", (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    box.hidden = target === null;
    if (target === null) return;
    box.textContent = target.dataset.tip;
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.offsetWidth - 8);
    box.style.left = Math.max(8, left) + "px";
    box.style.top = Math.max(8, event.clientY - box.offsetHeight - 12) + "px";
  });
}

// A cell that a spreadsheet may take for a formula begins with an apostrophe: also behind white space, which some drop,
// and by the full-width forms of = + - @, which some read as the plain ones.
function csvCell(value) {
  let cell = String(value);
  if (typeof value === "string" && /^\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|^[\t\r\n]/.test(cell)) cell = "'" + cell;
  return /[",\n\r]|^\s|\s$/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}

// A file made here, offered as a download.
function save(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const link = el("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

const asCsv = (rows) => rows.map((cells) => cells.map(csvCell).join(",")).join("\r\n") + "\r\n";

// One example in a window of its own.
function detail(row) {
  const box = $("detail");
  const list = el("ul", { class: "cards one" }, card(row, scoreOf(row), true));
  const close = el("button", { type: "button", class: "quiet" }, "Close");
  close.addEventListener("click", () => box.close());
  box.replaceChildren(list, close);
  box.showModal();
}
