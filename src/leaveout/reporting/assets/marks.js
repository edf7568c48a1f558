// What the reader decides: keep, relabel or remove; kept in this browser where it allows that, and exported as a file.
const KEY = "leaveout " + DATA.key;
const DECISIONS = ["keep", "relabel", "remove"];
const MARKS = new Map(remembered());

function remembered() {
  try { return JSON.parse(localStorage.getItem(KEY)) ?? []; } catch { return []; }
}

function remember() {
  try { localStorage.setItem(KEY, JSON.stringify([...MARKS])); } catch { /* a page from disk may not be allowed to */ }
}

// Three buttons, and for another label a choice of classes.
function marker(row, issue) {
  const id = String(TABLE.id[row]);
  const group = el("div", { class: "marker", role: "group", "aria-label": `Decide on ${titleOf(row)}` });
  const choices = CLASSES ? DECISIONS : ["keep", "remove"];
  const fill = () => {
    const mark = MARKS.get(id);
    const buttons = choices.map((decision) => {
      const button = el("button", { type: "button", class: decision, "aria-pressed": String(mark?.decision === decision) }, decision);
      button.addEventListener("click", () => {
        if (mark?.decision === decision) MARKS.delete(id);
        else MARKS.set(id, { decision, ...(decision === "relabel" ? { label: suggestion(row, issue) } : {}) });
        changed(id);
        $$(`.marker[data-id="${CSS.escape(id)}"] .${decision}`, group.parentElement)[0]?.focus();
      });
      return button;
    });
    group.replaceChildren(...buttons);
    if (mark?.decision !== "relabel") return;
    const select = el("select", { "aria-label": `New label of ${titleOf(row)}` }, ...TABLE.names.map((name) => el("option", { value: name }, name)));
    select.value = mark.label;
    select.addEventListener("change", () => { MARKS.set(id, { decision: "relabel", label: select.value }); changed(id); });
    group.append(select);
  };
  group.dataset.id = id;
  group.addEventListener("refill", fill);
  fill();
  return group;
}

const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const suggestion = (row, issue) => nameOf(issue === undefined ? TABLE.says[row] : DATA.issues.suggested[issue]);

function changed(id) {
  remember();
  for (const group of $$(id === undefined ? ".marker" : `.marker[data-id="${CSS.escape(id)}"]`)) group.dispatchEvent(new Event("refill"));
  bar();
}

function bar() {
  $("marked").hidden = MARKS.size === 0;
  const counts = DECISIONS.map((name) => [[...MARKS.values()].filter((mark) => mark.decision === name).length, name]);
  $("marked-count").textContent = `${MARKS.size} marked: ` + counts.filter(([count]) => count).map(([count, name]) => `${count} ${name}`).join(", ");
}

// A row for each decision, in the order of the table.
function decisions() {
  const rows = [...MARKS].filter(([id]) => PLACE.has(id)).map(([id, mark]) => [PLACE.get(id), mark]).sort(([a], [b]) => a - b);
  return rows.map(([row, mark]) => {
    const issue = ISSUE.get(row);
    return {
      id: TABLE.id[row], ...(DATA.called[row] === undefined ? {} : { name: DATA.called[row] }), decision: mark.decision, given_label: nameOf(TABLE.label[row]),
      new_label: mark.decision === "relabel" ? mark.label : nameOf(TABLE.label[row]), suggested_label: issue === undefined ? "" : nameOf(DATA.issues.suggested[issue]),
      label_score: issue === undefined ? "" : DATA.issues.score[issue], score: scoreOf(row), exact: exactOf(row), method: METHOD().name,
    };
  });
}

function marks() {
  $("export-csv")?.addEventListener("click", () => {
    const rows = decisions();
    save("decisions.csv", asCsv([Object.keys(rows[0]), ...rows.map(Object.values)]), "text/csv");
  });
  $("export-json")?.addEventListener("click", () => save("decisions.json", JSON.stringify(decisions(), null, 1) + "\n", "application/json"));
  $("forget")?.addEventListener("click", () => { MARKS.clear(); changed(); });
  if ($("marked")) bar();
}
