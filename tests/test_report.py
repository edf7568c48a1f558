"""The report in a real browser: what it shows, what its controls do, and that everybody can use it."""

import csv
import io
import json
import re
import shutil
from functools import partial
from itertools import pairwise

import pytest
import torch

import leaveout as lo
from reports import CLASSES, EVIL, FEATURES, pictures, table, texts

playwright = pytest.importorskip("playwright.sync_api", reason="the report's tests need playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser: install chromium to test the report")

GROUPS = partial(table, left_out="groups")
METHODS = partial(pictures, several=True)
MAKERS = {
    "pictures": pictures,
    "methods": METHODS,
    "texts": texts,
    "table": partial(table, queries="each"),
    "groups": GROUPS,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Each report, made when it is first asked for."""
    made = {}

    def get(name):
        if name not in made:
            torch.set_num_threads(1)
            made[name] = MAKERS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, reports):
    """Opens a report from disk; in the end nothing may have been loaded, logged as an error, or run by the data."""
    opened = []

    def go(name="pictures", *, width=1280, height=900, dark=False):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", accept_downloads=True
        )
        context.set_default_timeout(10_000)
        page = context.new_page()
        noise = []
        page.on("console", lambda message: noise.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda request: noise.append(request.url) if _outside(request.url) else None)
        page.goto(reports(name).path.as_uri())
        opened.append((page, noise))
        return page

    yield go
    for page, noise in opened:
        assert noise == []
        assert page.evaluate("window.hacked") is None
        page.context.close()


def _outside(url: str) -> bool:
    return not url.startswith(("data:", "blob:")) and not re.fullmatch(r"file://.*/report\.html(#.*)?", url)


def ids(page, selector="#cards .card") -> list[int]:
    return [int(i) for i in page.eval_on_selector_all(selector, "cards => cards.map(card => card.dataset.id)")]


def opinions(report) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels, the model's choices and the labels' probabilities, from the model as training left it."""
    x, y = report.task.train_set.tensors
    p = report.task.model(x).softmax(1)
    return y, p.argmax(1), p[torch.arange(len(y)), y].detach()


@pytest.mark.parametrize("name", MAKERS)
def test_loads_from_disk_alone(visit, reports, name):
    page = visit(name)
    assert reports(name).path.stat().st_size < 1_000_000
    assert page.locator("h1").count() == 1
    mean = reports(name).mean
    some = int((mean < 0).sum()) if len(mean) > 12 else len(mean)  # a few are shown all at once
    assert page.locator("#cards .card").count() == min(20 if name in ("pictures", "methods") else 12, some)
    assert page.locator("main svg[role=img]").count() >= 3
    assert page.evaluate("document.scripts.length") == 2, "the data brought no script"


def test_most_harmful_and_most_helpful(visit, reports):
    page, report = visit(), reports("pictures")
    assert ids(page) == report.harmful(20)
    first = page.locator("#cards .card").first.inner_text()
    worst = report.harmful(1)[0]
    assert f"−{abs(float(report.mean[worst])):.3g}" in first
    page.get_by_text("Most helpful", exact=True).click()
    assert ids(page) == report.helpful(20)
    page.get_by_text("All", exact=True).click()
    assert "20 of 160 examples" in page.locator("#count").inner_text()
    while page.locator("#more").is_visible():
        page.locator("#more").click()
    assert ids(page) == report.mean.argsort(stable=True).tolist()


def test_cards_say_what_the_model_says(visit, reports):
    page, report = visit(), reports("pictures")
    labels, says, p = opinions(report)
    for i in ids(page):
        words = page.locator(f'#cards .card[data-id="{i}"]').inner_text()
        assert CLASSES[labels[i]] in words
        if says[i] == labels[i]:
            assert f"model agrees, {round(float(p[i]) * 100)}% confident" in words
        else:
            assert f"model says {CLASSES[says[i]]}" in words


def test_pictures_are_the_examples(visit, reports):
    page, report = visit(), reports("pictures")
    worst = report.harmful(1)[0]
    shown = page.evaluate(
        """async () => {
            const image = document.querySelector("#cards img");
            await image.decode();
            const canvas = document.createElement("canvas");
            [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
            const context = canvas.getContext("2d");
            context.drawImage(image, 0, 0);
            return [image.alt, ...context.getImageData(0, 0, canvas.width, canvas.height).data];
        }"""
    )
    assert shown[0].startswith(f"example {worst}, labelled ")
    grey = torch.tensor(shown[1:]).reshape(8, 8, 4)[:, :, 0]
    assert torch.equal(grey, (report.task.train_set[worst][0].reshape(8, 8) * 255 + 0.5).floor().long())


def test_search_filter_and_order(visit, reports):
    page, report = visit(), reports("pictures")
    labels, says, p = opinions(report)
    page.get_by_text("All", exact=True).click()
    page.get_by_label("Search").fill("#17")
    assert 17 in ids(page)
    assert all(i == 17 for i in ids(page)), "no class or text of this report holds the word 17"
    page.get_by_label("Search").fill("nowhere to be found")
    assert ids(page) == []
    assert "No example matches" in page.locator("#count").inner_text()
    page.get_by_label("Search").fill("")
    page.get_by_label("Label", exact=True).select_option(label=CLASSES[1])
    page.get_by_label("Order").select_option("id")
    assert ids(page) == [i for i in range(160) if labels[i] == 1][:20]
    page.get_by_label("Label", exact=True).select_option("")
    page.get_by_label("Order").select_option("p")
    page.locator("#disputed").check()
    expected = sorted((i for i in range(160) if says[i] != labels[i]), key=lambda i: float(p[i]))
    assert ids(page) == expected[:20]
    page.get_by_label("Order").select_option("reverse")
    page.get_by_text("Most harmful", exact=True).click()
    mean = report.mean
    harmful = sorted((i for i in range(160) if says[i] != labels[i] and mean[i] < 0), key=lambda i: -float(mean[i]))
    assert ids(page) == harmful[:20]


def test_texts_are_searched(visit, reports):
    page = visit("texts")
    page.get_by_text("All", exact=True).click()
    page.get_by_label("Search").fill("word3 word5")
    found = ids(page)
    x = reports("texts").task.train_set.tensors[0]
    assert found
    assert set(found) == {i for i in range(40) if x[i, 3] and x[i, 5]}


def test_a_chosen_query_shows_what_drives_it(visit, reports):
    page, scores = visit(), reports("pictures").scores
    query = page.locator("#query")
    assert query.locator("option").count() == 12
    seen = set()
    for _ in range(3):
        number = int(re.search(r"query (\d+)", query.locator("option:checked").inner_text())[1])
        column = scores.values[:, scores.query_ids.index(number)]
        order = torch.argsort(column, stable=True).tolist()
        lists = page.locator("#drivers ul")
        assert ids(page, "#drivers ul:nth-of-type(1) .card")[:6] == order[:6]
        assert [int(i) for i in lists.nth(1).locator(".card").evaluate_all("c => c.map(x => x.dataset.id)")] == order[
            ::-1
        ][:6]
        assert f"{float(column[order[0]]):.3g}".replace("-", "−") in page.locator("#drivers .card").nth(1).inner_text()
        seen.add(number)
        page.get_by_label("Next query").click()
    assert len(seen) == 3
    page.get_by_label("Previous query").click()
    assert query.input_value() == "2"
    losses = [float(re.search(r"loss ([\d.e-]+)", text)[1]) for text in query.locator("option").all_inner_texts()]
    assert losses == sorted(losses, reverse=True)


def test_labels_to_check(visit, reports):
    page, report = visit(), reports("pictures")
    answer = lo.labels(report.run, report.task, classes=CLASSES)
    assert f"{len(answer)} labels look wrong" in page.locator("#answer").inner_text()
    assert ids(page, "#issue-cards .card") == answer.ids[:20]
    first = page.locator("#issue-cards .card").first.inner_text()
    row = answer.issues.iloc[0]
    assert f"{row['given_label']} → {row['predicted_label']}" in first
    assert row["why"] in first
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download this list").click()
    assert waiting.value.suggested_filename == "labels-to-check.csv"
    rows = list(csv.DictReader(io.StringIO(waiting.value.path().read_text(), newline="")))
    assert [int(row["id"]) for row in rows] == answer.ids
    for row in rows:
        expected = answer.table.loc[int(row["id"])]
        guarded = "'" if expected["given_label"].startswith("=") else ""
        assert row["given_label"] == guarded + expected["given_label"]
        assert float(row["label_score"]) == pytest.approx(expected["label_score"], rel=1e-3)
        assert float(row["score"]) == pytest.approx(float(report.mean[int(row["id"])]), rel=1e-4)


def test_the_matrix_filters(visit, reports):
    page, report = visit(), reports("pictures")
    issues = lo.labels(report.run, report.task, classes=CLASSES).issues
    pairs = issues.groupby(["given_label", "predicted_label"]).size()
    page.locator("#filter summary").click()
    buttons = page.locator("#matrix button")
    assert sum(int(text) for text in buttons.all_inner_texts()) == len(issues)
    (given, suggested), count = pairs.idxmax(), pairs.max()
    page.get_by_role("button", name=f"{count} labelled {given} that look like {suggested}", exact=True).click()
    chosen = issues[(issues["given_label"] == given) & (issues["predicted_label"] == suggested)]
    assert ids(page, "#issue-cards .card") == chosen.index.tolist()
    page.locator("#matrix button[aria-pressed=true]").click()
    assert ids(page, "#issue-cards .card") == issues.index.tolist()[:20]


def test_decisions_are_marked_and_exported(visit, reports):
    page, report = visit(), reports("pictures")
    assert page.locator("#marked").is_hidden()
    issues = lo.labels(report.run, report.task, classes=CLASSES).issues
    first, second = issues.index[:2].tolist()
    page.locator(f'#issue-cards .card[data-id="{first}"] button.relabel').click()
    page.locator(f'#issue-cards .card[data-id="{second}"] button.keep').click()
    worst = next(i for i in report.harmful(20) if i not in (first, second))
    page.locator(f'#cards .card[data-id="{worst}"] button.remove').click()
    assert "3 marked: 1 keep, 1 relabel, 1 remove" in page.locator("#marked").inner_text()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Export JSON").click()
    rows = {row["id"]: row for row in json.loads(waiting.value.path().read_text())}
    assert set(rows) == {first, second, worst}
    assert rows[first]["new_label"] == issues.loc[first, "predicted_label"]
    assert rows[second]["new_label"] == issues.loc[second, "given_label"]
    assert rows[worst]["decision"] == "remove"
    assert rows[worst]["score"] == pytest.approx(float(report.mean[worst]), rel=1e-4)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Export CSV").click()
    lines = list(csv.DictReader(io.StringIO(waiting.value.path().read_text(), newline="")))
    assert {int(line["id"]): line["decision"] for line in lines} == {first: "relabel", second: "keep", worst: "remove"}
    select = page.locator(f'#issue-cards .card[data-id="{first}"] select')
    select.select_option(label=CLASSES[5])
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Export JSON").click()
    assert {row["id"]: row for row in json.loads(waiting.value.path().read_text())}[first]["new_label"] == CLASSES[5]
    page.get_by_role("button", name="Clear").click()
    assert page.locator("#marked").is_hidden()


def test_points_and_rows_open_their_example(visit, reports):
    page, report = visit(), reports("pictures")
    point = page.locator("#scatter .clickable").first
    number = int(re.search(r"example (\d+)", point.get_attribute("data-tip"))[1])
    point.click(force=True)
    box = page.locator("dialog[open]")
    assert f"#{number}" in box.inner_text()
    assert "retrained without it" in box.inner_text()
    box.get_by_role("button", name="Close").click()
    page.locator("#scatter summary").click()
    page.locator("#scatter tbody button").nth(2).click()
    assert f"#{report.check.table.index[2]}" in page.locator("dialog[open]").inner_text()


def test_several_methods_have_a_selector_and_one_table(visit, reports):
    page, report = visit("methods"), reports("methods")
    assert page.locator("#verdicts tbody tr").count() == 2
    assert ids(page) == report.harmful(20)
    page.get_by_label("Method", exact=True).select_option(label="TracIn")
    other = lo.TracIn().score(report.run, report.task, report.query).mean().double()
    for name, row in report.check.table.iterrows():
        other[name] = row["truth"]
    assert ids(page) == [i for i in other.argsort(stable=True).tolist() if other[i] < 0][:20]
    assert "TracIn: Not verified" in page.locator("#verdict").inner_text()
    assert page.locator("#scatter").is_hidden()


def test_axis_labels_have_as_many_decimals(visit):
    page = visit()
    for low, high in ((17.7, 18.6), (0.0, 0.031), (-3.0, 7.0)):
        words = page.evaluate(
            "([low, high]) => { const t = ticks(low, high, 4); return t.map(tickText(t.step, largestOf(t))); }",
            [low, high],
        )
        assert len({len(word.partition(".")[2]) for word in words}) == 1, words
        values = [float(word.replace("−", "-")) for word in words]
        steps = {round(b - a, 9) for a, b in pairwise(values)}
        assert len(steps) == 1, words


def test_charts_have_their_numbers_as_tables(visit, reports):
    page, report = visit(), reports("pictures")
    assert page.locator("#scatter [data-tip]").count() == 16
    counts = {"histogram": None, "sums": 10, "growth": 4, "scatter": 16, "curve": 6}
    for chart, rows in counts.items():
        page.locator(f"#{chart} summary").click()
        found = page.locator(f"#{chart} tbody tr")
        found.first.wait_for()
        assert rows is None or found.count() == rows, chart
    truth = {str(i): row for i, row in report.check.table.iterrows()}
    for cells in page.locator("#scatter tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.innerText))"
    ):
        assert float(cells[2].replace("−", "-")) == pytest.approx(truth[cells[0]]["truth"], rel=6e-3)
    labels = report.task.train_set.tensors[1]
    for cells in page.locator("#sums tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.innerText))"
    ):
        members = report.mean[labels == CLASSES.index(cells[0])]
        assert int(cells[1]) == len(members)
        assert float(cells[4].replace("−", "-")) == pytest.approx(float(members.sum()), rel=6e-3)


def test_unverified_scores_say_so(visit):
    page = visit("texts")
    assert "Not verified" in page.locator("#answer").inner_text()
    assert "Not verified" in page.locator("#verdict").inner_text()
    assert page.locator("#scatter").count() == 0


def test_rows_and_groups(visit, reports):
    page = visit("table")
    example = reports("table").scores.harmful(1)[0]
    values = reports("table").task.train_set.tensors[0][example]
    card = page.locator("#cards .card").first
    for name, value in zip(FEATURES, values.tolist(), strict=True):
        cell = card.locator("tr", has=page.get_by_role("rowheader", name=name, exact=True)).locator("td")
        assert cell.inner_text() == f"{value:.4g}".replace("-", "−")
    assert f"source {EVIL}" in page.locator("#sums [data-tip]").first.get_attribute("data-tip")
    assert "target" in card.inner_text()
    for name in ("groups", "table"):
        bars = visit(name).locator("#cards .spark")
        assert bars.count()
        assert all("by SGD-IE" in words for words in bars.all_inner_texts()), "bars of another method than the scores'"
    for control in ("#label", "#disputed", "#labels"):
        assert page.locator(control).count() == 0, "a number has no other class to be mistaken for"


def test_hyphens_in_words_are_no_minus_signs(visit):
    words = visit("table").evaluate("['Never-married', '-2.5e-5', '-', '', 'Craft-repair'].map(minus)")
    assert words == ["Never-married", "−2.5e−5", "-", "", "Craft-repair"]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_sideways_scrolling(visit, name, width):
    page = visit(name, width=width, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """width => [...document.querySelectorAll("main *")].filter((node) => {
            const box = node.getBoundingClientRect();
            return box.right > width + 1 && box.width > 0 && !node.closest(".scroll, nav, .hidden");
        }).map(node => node.outerHTML.slice(0, 120))""",
        width,
    )
    assert outside == []
    cut = "cards => cards.filter(c => c.scrollWidth > c.clientWidth).map(c => c.outerHTML.slice(0, 200))"
    assert page.eval_on_selector_all(".card, .card .seen", cut) == []


REACHED = """(selector) => {
    for (const details of document.querySelectorAll("details")) details.open = true;
    return new Promise((ready) => requestAnimationFrame(() => requestAnimationFrame(() => {
        const clipped = [], range = document.createRange();
        let count = 0;
        for (const node of document.querySelectorAll(selector)) {
            if (!node.textContent.trim() || !node.getClientRects().length) continue;
            count++;
            node.scrollIntoView({ block: "center", inline: "nearest", behavior: "instant" });
            range.selectNodeContents(node);
            for (const box of range.getClientRects()) {  // both ends of each line of text
                for (const x of [box.left + 1, box.right - 1]) {
                    const top = document.elementFromPoint(x, box.top + box.height / 2);
                    const seen = top !== null && (node.contains(top) || top.contains(node));
                    if (!seen) clipped.push([node.textContent, x]);
                }
            }
        }
        return ready([count, clipped]);
    })));
}"""


@pytest.mark.parametrize("name", MAKERS)
def test_no_text_of_a_table_or_card_is_cut_off_on_a_phone(visit, name):
    page = visit(name, width=390, height=844)
    cells = "main table:not(.seen table) :is(th, td):not(#verdicts thead th)"  # whose heads are repeated in each row
    for selector in (cells, ".card .says, .card .label"):
        count, clipped = page.evaluate(REACHED, selector)
        assert clipped == []
        assert count or (name == "groups" and "card" in selector), "there is something to read"
    wide = "tables => tables.filter(t => t.scrollWidth > t.closest('.scroll').clientWidth).map(t => t.id)"
    assert page.eval_on_selector_all("#verdicts, #measures table", wide) == [], "nothing is to be scrolled sideways"
    rows = page.eval_on_selector_all(".marker", "m => m.map(x => new Set([...x.children].map(b => b.offsetTop)).size)")
    assert set(rows) <= {1}, "keep, relabel and remove stand side by side"
    if name in ("pictures", "methods"):
        shown = page.locator("#cards .says.differs")
        assert shown.count()
        assert all(re.search(r"label probability (<1|\d+)%", words) for words in shown.all_inner_texts())


CONTRAST = """() => {
    const luminance = (rgb) => rgb.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const colour = parse(getComputedStyle(node).backgroundColor);
            if (colour.length < 4 || colour[3] === 1) return colour.slice(0, 3);
        }
        return [255, 255, 255];
    };
    const poor = [];
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
        if (!own || !node.getClientRects().length || node.closest("button:disabled, .skip, .hidden, script")) continue;
        const style = getComputedStyle(node);
        const front = luminance(parse(node.closest("svg") ? style.fill : style.color).slice(0, 3));
        const back = luminance(behind(node));
        const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
        if (ratio < 4.5) poor.push([node.textContent.slice(0, 40), node.className, ratio]);
    }
    return poor;
}"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_text_can_be_read_in_light_and_dark(visit, name, dark):
    page = visit(name, dark=dark)
    assert page.evaluate(CONTRAST) == []


def test_light_and_dark(visit):
    shade = "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    light, dark = visit(), visit(dark=True)
    assert light.evaluate(shade) > 200
    assert dark.evaluate(shade) < 60
    light.get_by_role("button", name="Dark mode").click()
    assert light.evaluate(shade) < 60
    light.get_by_role("button", name="Light mode").click()
    assert light.evaluate(shade) > 200


def test_keyboard_reaches_everything_and_shows_where_it_is(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(160):
        page.keyboard.press("Tab")
        where = page.evaluate(
            """() => {
                const node = document.activeElement;
                const seen = node.matches(".segments input") ? node.nextElementSibling : node;
                const style = getComputedStyle(seen);
                return [node.id || node.name || node.textContent, style.outlineStyle, parseFloat(style.outlineWidth)];
            }"""
        )
        reached.add(where[0])
        if page.evaluate("document.activeElement !== document.body"):
            assert where[1] not in ("none", "hidden"), where
            assert where[2] >= 2, where
    for wanted in (
        "theme",
        "side",
        "search",
        "label",
        "order",
        "disputed",
        "download",
    ):
        assert wanted in reached, (wanted, reached)
    before = ids(page)
    page.locator("input[name=side]:checked").focus()
    page.keyboard.press("ArrowRight")
    assert ids(page) != before
    page.locator("#more").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.classList.contains('card')")


@pytest.mark.parametrize("name", MAKERS)
def test_everything_has_a_name(visit, name):
    page = visit(name)
    nameless = page.evaluate(
        """() => {
            const found = [];
            const check = (selector, good) => document.querySelectorAll(selector).forEach((node) => {
                if (!good(node)) found.push(node.outerHTML.slice(0, 150));
            });
            const text = (node) => node.getAttribute("aria-label") || node.textContent.trim();
            const named = (id) => id && document.getElementById(id)?.textContent.trim();
            check("img", (node) => node.alt.trim());
            const labelled = (node) => node.labels.length && [...node.labels].every((l) => l.textContent.trim());
            check("input, select", (node) => node.ariaLabel || labelled(node));
            check("button, a, summary, option, legend, caption, th", text);
            check("svg:not([aria-hidden])", (node) => node.getAttribute("role") === "img" && text(node));
            const areas = "section, nav, aside, [role=region], [role=group], form";
            check(areas, (node) => node.getAttribute("aria-label") || named(node.getAttribute("aria-labelledby")));
            check("th", (node) => node.scope);
            check("[id]", (node) => document.querySelectorAll("#" + CSS.escape(node.id)).length === 1);
            check("a[href^='#']", (node) => document.querySelector(node.getAttribute("href")));
            return found;
        }"""
    )
    assert nameless == []
    levels = page.eval_on_selector_all("h1, h2, h3", "heads => heads.map(head => Number(head.tagName[1]))")
    assert all(after - before <= 1 for before, after in pairwise(levels)), levels
    assert page.evaluate("document.documentElement.lang") == "en"


def test_markup_in_the_data_is_shown_as_it_is_written(visit):
    page = visit()
    assert page.title() == f"Digits {EVIL}"
    assert page.locator("h1").inner_text() == f"Digits {EVIL}"
    assert page.locator("main b:text-is('bold')").count() == 0
    page.get_by_text("All", exact=True).click()
    page.get_by_label("Label", exact=True).select_option(label=CLASSES[2])
    assert CLASSES[2] in page.locator("#cards .card").first.inner_text()
    for name in ("texts", "table"):
        assert EVIL in visit(name).locator("body").inner_text()
