// Queries, methods, light and dark; then everything is put in its place.
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

// A bad verdict closes the list, and says what to do instead.
function mute() {
  const { level, headline, instead } = METHOD().trust;
  if (!DATA.groups) $("examples-title").textContent = instead ? "Examples by their score" : "Examples to remove";
  $("instead").hidden = !instead;
  $("instead").className = `trust ${level}`;
  $("instead").replaceChildren(el("p", { class: "headline" }, `${headline}.`), el("p", {}, instead));
  $("list").classList.toggle("plain", !instead);
  $("list").open = !instead;
}

// Another method's scores in every list and chart that shows them.
function methods(update) {
  const show = () => {
    update();
    histogram();
    if (METHOD().parts.length) sums();
    if ($("scatter")) $("scatter").hidden = !METHOD().check;
    if ($("measures")) $("measures").hidden = !METHOD().check;
    if (METHOD().check) {
      scatter();
      $("measures").replaceChildren(table("Agreement with exact replays, with 95% intervals in brackets", ["Measure", "Most extreme", "At random"], METHOD().check.measures));
    }
    $("found").textContent = METHOD().sentence;
    const { level, headline, sentence, brief, instead } = METHOD().trust;
    $("verdict").className = `trust ${level}`;
    $("verdict").replaceChildren(el("p", { class: "headline" }, `${METHOD().name}: ${headline}`), el("p", {}, `${brief} ${instead}`),
      sentence ? el("details", {}, el("summary", {}, "The figures"), el("p", {}, sentence)) : "");
    mute();
  };
  $("method")?.addEventListener("change", () => { CURRENT = Number($("method").value); show(); });
  show();
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

// Within a notebook's frame (srcdoc), a link to a section would open the notebook's own address there.
function links() {
  if (location.protocol !== "about:") return;
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest('a[href^="#"]') : null;
    if (link === null) return;
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).scrollIntoView();
  });
}

theme();
links();
tips();
marks();
issues();
methods(examples());
queries();
if ($("growth")) growth();
if (DATA.cleansing) cleansing();
