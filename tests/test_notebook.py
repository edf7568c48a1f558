"""What notebooks show, plots, progress in a cell, and cells that run twice."""

import gc
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import leaveout as lo
from leaveout._util.trees import PARAM
from leaveout.compute import progress
from problems import only_estimated
from refusal import refused, settle


class Balanced(HTMLParser):
    """Refuses HTML whose elements do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.words = [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += f" {data}"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    digits = lo.data.load("digits", n_train=60, n_val=20)
    noisy = lo.data.flip(digits.train, 0.1, seed=1).examples
    torch.manual_seed(0)
    task = lo.Task(nn.Linear(64, 10), nn.CrossEntropyLoss(), noisy)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
    run = lo.train(task, optimizer, epochs=4, batch_size=20, seed=0, out=tmp_path_factory.mktemp("nb") / "run")
    study = lo.Study(run, task, digits.val)
    study.score(lo.SGDIE())
    study.verify(replays=8)
    study.labels()
    study.cleanse(test_set=digits.test, remove=[2, 5], random=1)
    return study


def test_results_show_themselves(study):
    scores, check = study.scores["SGD-IE"], study.checks["SGD-IE"]
    for thing, words in (
        (
            scores,
            [
                f"{scores.harmful_count} of 60 training examples have a score below zero",
                *(f" {i} " for i in scores.harmful(5) + scores.helpful(5)),
            ],
        ),
        (check, [check.short, "8 exact replays"]),
        (study.issues, [study.issues.issues["why"].iloc[0]]),
        (study.curve, ["in pairs", "SGD-IE"]),
        (study.run, ["12", "SGD"]),
        (study, [study.issues.sentence, "SGD-IE", check.short]),
    ):
        shown = Balanced(thing._repr_html_()).words
        for word in words:
            assert word in shown, (type(thing), word)


def test_a_choice_shows_its_comparison(study, monkeypatch):
    only_estimated(monkeypatch, 12)
    chosen = lo.choose(study.run, study.task, study.query)
    assert Balanced(chosen._repr_html_()).words.count(chosen.scores.method) >= 2
    assert chosen.to_frame().equals(chosen.table)
    assert repr(chosen) == f"Chosen({chosen.scores.method})"


def test_names_in_the_data_are_escaped():
    scores = lo.Scores(torch.tensor([[1.0], [-1.0]]), ("<b>a", "c"), ("mean",), "<i>ACC")
    assert "&lt;b&gt;a" in scores._repr_html_()
    assert "<i>" not in scores._repr_html_()


def test_a_page_shows_itself(study, tmp_path):
    page = study.report(tmp_path / "page.html")
    assert isinstance(page, Path)
    shown = page._repr_html_()
    source = re.search(r'srcdoc="([^"]*)"', shown)[1]
    assert source.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&#x27;", "'").replace(
        "&amp;", "&"
    ) == page.read_text(encoding="utf-8")


def test_links_of_a_page_stay_within_their_frame(study, tmp_path):
    browsers = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser: install chromium to test the page in a frame")
    page = study.report(tmp_path / "page.html")
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>notebook</title>{page._repr_html_()}")
    with browsers.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1000, "height": 800}, reduced_motion="reduce")
        tab.goto((tmp_path / "notebook.html").as_uri())
        frame = tab.frames[1]
        frame.get_by_role("link", name="Trust", exact=True).click()
        frame.wait_for_function("document.getElementById('trust').getBoundingClientRect().top < 300")
        assert frame.title().startswith("Training data influence"), "the notebook was opened in its own frame"
        browser.close()


def test_plots(study):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    counted = study.scores["SGD-IE"].plot()
    assert sum(patch.get_height() for patch in counted.patches) == 60
    points = study.checks["SGD-IE"].plot().collections
    assert sum(len(part.get_offsets()) for part in points) == 8
    assert int(study.issues.plot().images[0].get_array().sum()) == len(study.issues)
    curve = study.curve.plot()
    assert [line.get_label() for line in curve.lines] == ["nothing removed", "SGD-IE", "random"]
    assert curve is study.curve.plot(curve), "axes of one's own are drawn on"
    pyplot.close("all")


def test_a_plot_without_matplotlib_says_what_to_do(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(lo.UnsupportedError) as refused:
        study.curve.plot()
    assert refused.value.code == "extra-missing"


def test_bars_in_a_notebook(monkeypatch):
    assert not progress.in_notebook()

    class ZMQInteractiveShell:
        pass

    class IPython:
        get_ipython = staticmethod(ZMQInteractiveShell)

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert progress.in_notebook()


def trained(path, epochs, **options):
    digits = lo.data.load("digits", n_train=40, n_val=20)
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(path, model, optimizer, **options)
    for _ in range(epochs):
        for x, y in recorder.watch(DataLoader(digits.train, batch_size=20)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return recorder.finish(), lo.Task(model, nn.CrossEntropyLoss(), digits.train), digits.val


def test_a_cell_that_records_runs_twice(tmp_path):
    run, task, query = trained(tmp_path / "run", 3)
    lo.SGDIE().score(run, task, query).save(tmp_path / "run/scores/sgd-ie.safetensors")
    with refused(lo.RunError, "run-exists", "overwrite=True"):
        trained(tmp_path / "run", 2)
    run, *_ = trained(tmp_path / "run", 2, overwrite=True)
    assert len(run) == len(lo.open_run(tmp_path / "run")) == 4
    assert not (tmp_path / "run/scores").exists(), "the scores were of the run that is gone"
    assert lo.check_run(tmp_path / "run") == []
    assert len(trained(tmp_path / "new", 1, overwrite=True)[0]) == 2


def test_overwriting_takes_nothing_of_others(tmp_path):
    trained(tmp_path / "run", 1)
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(lo.RunError) as refused:
        trained(tmp_path / "run", 1, overwrite=True)
    assert refused.value.code == "directory-not-empty"
    assert (tmp_path / "run/notes.txt").read_text() == "mine"


def interrupted(path, steps, seed=0, **options):
    """The recorder and the optimizer of a cell that is interrupted after so many steps."""
    torch.manual_seed(seed)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(path, model, optimizer, **options)
    loader = DataLoader(lo.data.load("digits", n_train=40, n_val=20).train, batch_size=4)
    for number, (x, y) in enumerate(recorder.watch(loader)):
        if number == steps:
            return recorder, optimizer
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    raise AssertionError("not interrupted")


@pytest.mark.parametrize("kept", [True, False], ids=["still referred to", "gone"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_cell_that_was_interrupted_runs_again(steps, kept, tmp_path):
    first = interrupted(tmp_path / "run", steps)
    if not kept:
        first = None
        gc.collect()
    run = trained(tmp_path / "run", 3, overwrite=True)[0]
    other = trained(tmp_path / "other", 3)[0]
    assert len(run) == len(other) == 6
    assert all(torch.equal(run.final()[PARAM][name], tensor) for name, tensor in other.final()[PARAM].items())
    assert lo.check_run(run.path) == []
    if first is not None:
        first[1].step()  # is recorded no more
        with refused(lo.RunError, "run-cut-short" if steps else "nothing-recorded"):
            first[0].finish()
        assert lo.check_run(run.path) == []
        assert len(lo.open_run(run.path)) == 6


def test_a_cell_that_was_interrupted_is_resumed(tmp_path):
    kept = interrupted(tmp_path / "run", 3)
    again, _ = interrupted(tmp_path / "run", 4, seed=1, resume=True)  # other first weights: they are restored
    assert again.done == 7
    run, whole = again.finish(), interrupted(tmp_path / "whole", 7)[0].finish()
    assert all(torch.equal(run.final()[PARAM][name], tensor) for name, tensor in whole.final()[PARAM].items())
    with refused(lo.RunError, "run-cut-short"):
        kept[0].finish()
    assert lo.check_run(run.path) == []


def test_a_run_that_is_being_written_is_not_overwritten_unasked(tmp_path):
    recorder, _ = interrupted(tmp_path / "run", 2)
    with pytest.raises(lo.RunError) as error:
        trained(tmp_path / "run", 1)
    assert error.value.code in ("directory-busy", "run-exists"), "whether its first files are written yet"
    assert len(recorder.finish()) == 2


def test_a_run_whose_directory_was_deleted_is_recorded_again(tmp_path):
    kept = interrupted(tmp_path / "run", 2)
    settle(tmp_path)  # what a thread is still writing cannot be deleted
    shutil.rmtree(tmp_path / "run")
    assert len(trained(tmp_path / "run", 1, overwrite=True)[0]) == 2
    del kept
