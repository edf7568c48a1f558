"""What commands say of a training, of scores and of each other; refine, export; the same command twice."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

import leaveout as lo
from commands import OWN, SMALL, Shell
from leaveout.builtin import config
from leaveout.reporting import Page
from problems import only_estimated


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.fixture
def trained(shell) -> Shell:
    assert shell("train", *SMALL, "--flip", "0.1", "--out", "runs/x").code == 0
    return shell


def test_train_says_how_accurate_the_model_is(shell):
    told = shell("train", *SMALL, "--epochs", "60", "--out", "runs/x", "--json").told
    task, query = (subject := config.prepare(config.read("runs/x/config.toml"))).task, subject.query
    params = lo.open_run("runs/x").final()["param"]
    for name, data in (("training", task.train_set), ("validation", query)):
        guess = torch.func.functional_call(task.model, params, (data.x,)).argmax(1)
        assert told[f"{name}_accuracy"] == pytest.approx(float((guess == data.y).double().mean()))
    assert told["warning"] == ""
    words = shell("train", *SMALL, "--epochs", "60", "--out", "runs/x").words
    assert f"{told['training_accuracy']:.1%} of the training labels as given" in words


@pytest.mark.parametrize("lr", ["0", "1e30"])
def test_train_warns_of_a_training_that_failed(shell, lr):
    done = shell("train", *SMALL, "--lr", lr, "--out", "runs/x")
    assert done.code == 0
    assert "most frequent class" in done.refusal
    assert "try another learning rate" in done.refusal


def test_train_says_where_little_was_learned(shell):
    little = "--data digits --n-train 100 --n-val 40 --hidden 8 --epochs 6 --lr 0.1 --out runs/little"
    done = shell("train", *little.split())
    assert "right for only" in done.err.replace("\n", " ")
    words = shell("labels", "runs/little").words
    assert "before you believe this count" in words


def test_train_twice_answers_from_disk(trained):
    before = {file: file.stat().st_mtime_ns for file in Path("runs/x").iterdir()}
    done = trained("train", *SMALL, "--flip", "0.1", "--out", "runs/x")
    assert (done.code, "steps are recorded in runs/x" in done.words) == (0, True)
    assert before == {file: file.stat().st_mtime_ns for file in Path("runs/x").iterdir()}


def test_the_same_commands_again_read_no_data(trained, monkeypatch):
    commands = [
        ["train", *SMALL, "--flip", "0.1", "--out", "runs/x"],
        ["score", "runs/x"],
        ["score", "runs/x", "--method", "sgd-ie", "--method", "acc", "--queries", "each"],
        ["labels", "runs/x"],
        ["verify", "runs/x", "--method", "sgd-ie-each", "--replays", "8"],
        ["cleanse", "runs/x", "--labels", "--random", "1"],
        ["report", "runs/x"],
        ["export", "runs/x"],
    ]
    first = [trained(*command) for command in commands]
    assert [done.code for done in first] == [0] * len(commands), [done.err for done in first]
    monkeypatch.setattr(config, "prepare", lambda _: pytest.fail("the data were read again"))
    for command, before in zip(commands, first, strict=True):
        again = trained(*command)
        assert again.code == 0, again.err
        new = ["rows, ", "exact replay"]
        words = [line for line in before.out.splitlines() if not any(word in line for word in new)]
        assert all(line in again.out for line in words if command[0] != "score" or line.startswith("  ")), again.out
    facts = json.loads(Path("runs/x/training.json").read_text())
    Path("runs/x/training.json").write_text(json.dumps({**facts, "flipped": []}))
    with pytest.raises(pytest.fail.Exception, match="read again"):
        trained("score", "runs/x")  # a file that was changed does not count


def test_ctrl_c_before_the_first_step_does_not_say_that_steps_were_kept(shell, monkeypatch):
    monkeypatch.setattr(config, "train", interrupted)
    done = shell("train", *SMALL, "--out", "runs/x")
    assert done.code == 130
    assert "No step was kept yet; the same command begins again" in done.refusal
    monkeypatch.undo()


@pytest.mark.parametrize("command", ["plan", "report", "labels"])
def test_ctrl_c_before_the_work_is_answered_too(trained, monkeypatch, command):
    if command == "report":
        trained("score", "runs/x", "--method", "tracin")
    monkeypatch.setattr(config, "read", interrupted)
    done = trained(command, "runs/x")
    assert (done.code, "Interrupted. The same command" in done.refusal) == (130, True)


def interrupted(*args, **options):
    raise KeyboardInterrupt


def test_advice_after_scores(trained):
    assert "Next: leaveout verify runs/x" in trained("score", "runs/x", "--method", "replay").words
    assert "Next: leaveout verify runs/x" in trained("score", "runs/x", "--method", "sgd-ie").words
    Path("by.json").write_text(json.dumps({f"g{i}": [i] for i in range(7)}))
    words = trained("score", "runs/x", "--method", "sgd-ie", "--groups", "by.json").words
    assert "Next: leaveout score --method replay --groups by.json runs/x" in words
    assert "leaveout verify" not in words


def test_a_groups_file_that_is_not_there(trained):
    done = trained("score", "runs/x", "--groups", "nowhere.json")
    assert done.error == "groups-file-unreadable"
    assert "nowhere.json cannot be read (No such file or directory)" in done.refusal
    assert "hold" not in done.refusal


def test_show_says_how_many_examples_were_trained_on(shell, monkeypatch):
    Path("mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(shell.folder))
    task, _ = __import__("mine").make_task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    lo.train(task, optimizer, 2, 10, 0, "runs/own")
    assert shell("show", "runs/own", "--json").told["train_size"] == 30


def test_verify_prints_one_table_and_what_to_do_next(trained):
    trained("score", "runs/x", "--method", "acc(exact)", "--method", "tracin")
    done = trained("verify", "runs/x", "--replays", "16")
    assert done.code == 0, done.err
    assert done.out.count("Compared with 16 exact replays") == 1
    assert all(name in done.words for name in ("ACC(exact)", "TracIn", "verdict"))
    assert done.out == trained("verify", "runs/x", "--replays", "16").out
    trained("score", "runs/x", "--method", "tracin", "--results", "weak")
    weak = lo.Scores.load("weak/scores/tracin.safetensors")
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(weak.values.shape, generator=generator).double()
    lo.Scores(mixed, weak.train_ids, weak.query_ids, weak.method, run_fingerprint=weak.run_fingerprint).save(
        "weak/scores/tracin.safetensors", overwrite=True
    )
    done = trained("verify", "runs/x", "--replays", "16", "--results", "weak")
    assert "refine replaces the most extreme ones by exact replays" in done.words
    assert "Next: leaveout refine runs/x --results weak" in done.words


def test_refine_replaces_the_most_extreme(trained):
    trained("score", "runs/x", "--method", "sgd-ie")
    told = trained("refine", "runs/x", "--top", "8", "--json").told
    assert (told["method"], told["exact"]) == ("SGD-IE + Replay", 8)
    refined, plain = lo.Scores.load(told["file"]), lo.Scores.load("runs/x/scores/sgd-ie.safetensors")
    subject = config.prepare(config.read("runs/x/config.toml"))
    again = lo.refine(plain, lo.open_run("runs/x"), subject.task, subject.query, top=8)
    assert torch.equal(refined.values, again.values)
    before = Path(told["file"]).stat().st_mtime_ns
    assert "8 of 60 scores are exact now, the 8 most" in trained("refine", "runs/x", "--top", "8").words
    assert Path(told["file"]).stat().st_mtime_ns == before
    refused = trained("refine", "runs/x", "--top", "10")
    assert (refused.code, refused.error, "other replays: give --again" in refused.refusal) == (
        1,
        "refined-in-the-way",
        True,
    )
    assert trained("refine", "runs/x", "--top", "10", "--again", "--json").told["exact"] == 10


def test_exact_scores_are_only_asked_whether_their_effects_are_reproducible(trained):
    assert "Next: leaveout verify runs/x" in trained("score", "runs/x", "--method", "replay").words
    skipped = trained("verify", "runs/x", "--moves", "0")
    assert skipped.words.startswith("Replay: every score is an exact replay, nothing is estimated.")
    assert not Path("runs/x/checks").exists(), "nothing was replayed again"
    done = trained("verify", "runs/x", "--replays", "8")
    assert done.words.startswith("Replay: every score is an exact replay, nothing is estimated.")
    assert "Exact replays from 3 starts 0.001 apart agree" in done.words
    assert "Next: leaveout report runs/x" in done.words
    told = trained("verify", "runs/x", "--replays", "8", "--json").told
    assert told["exact"] == ["Replay"]
    assert (told["checks"][0]["exact"], told["checks"][0]["ceiling"]["moves"]) == (True, 2)
    assert "reproducible" in trained("report", "runs/x").out


def test_report_prints_what_the_page_opens_with(trained):
    trained("labels", "runs/x")
    trained("score", "runs/x")
    done = trained("report", "runs/x")
    page = Page("runs/x/report.html")
    assert len(page.headlines) == 3
    assert done.out.splitlines()[:3] == [f"{headline}." for headline in page.headlines]
    assert done.out == trained("report", "runs/x").out, "from disk too"


def test_show_says_what_is_there_and_what_comes_next(trained):
    assert "Next: leaveout labels runs/x" in trained("show", "runs/x").words
    said = trained("labels", "runs/x").out.splitlines()[0][:40]
    done = trained("show", "runs/x")
    assert said in done.words
    assert "Next: leaveout score runs/x" in done.words
    trained("score", "runs/x")
    assert "Next: leaveout report runs/x" in trained("show", "runs/x").words
    trained("report", "runs/x")
    assert "Next" not in trained("show", "runs/x").words
    assert len(trained("show", "runs/x", "--json").told["labels"]) == 1


def test_a_run_with_another_name_is_suggested_by_its_name(trained):
    assert "(did you mean runs/x?)" in trained("score", "runs/mnist17").refusal, "the only one"
    Path("runs/x").rename("runs/digits")
    trained("train", *SMALL, "--out", "runs/news")
    assert "(did you mean runs/digits?)" in trained("score", "runs/digts").refusal
    assert "(there are digits, news)" in trained("score", "runs/mnist17").refusal


def test_columns_of_chosen_scores_have_their_methods_name(trained):
    trained("score", "runs/x")
    assert trained("export", "runs/x", "--json").told["columns"] == ["replay", "replay_exact"]
    trained("score", "runs/x", "--method", "replay")
    columns = trained("export", "runs/x", "--again", "--json").told["columns"]
    assert columns == ["auto", "auto_exact", "replay", "replay_exact"]


def test_chosen_scores_are_refined_and_keep_their_check(trained, monkeypatch):
    only_estimated(monkeypatch, 16)
    assert trained("score", "runs/x").code == 0
    chosen = lo.Scores.load("runs/x/scores/auto.safetensors")
    assert not chosen.all_exact
    told = trained("refine", "runs/x", "--top", "50", "--json").told
    refined = lo.Scores.load(told["file"])
    assert told["method"] == refined.method == chosen.method
    assert refined.exact[chosen.extreme(50)].all()
    assert refined.exact[chosen.exact].all()
    assert torch.equal(refined.values[chosen.exact], chosen.values[chosen.exact]), "not replayed again"
    subject = config.prepare(config.read("runs/x/config.toml"))
    truth = lo.Replay().score(lo.open_run("runs/x"), subject.task, subject.query).values
    assert torch.allclose(refined.values[refined.exact], truth[refined.exact], rtol=1e-4, atol=1e-6)
    assert "exact now" in trained("refine", "runs/x", "--top", "50").words, "from disk"
    assert trained("report", "runs/x", "--json").told["checked"], "the choice's own check still holds"


def test_refine_without_estimates(trained):
    trained("score", "runs/x", "--method", "replay")
    refused = trained("refine", "runs/x")
    assert (refused.code, refused.error, "no estimates to refine" in refused.refusal) == (1, "nothing-to-refine", True)


def test_export_has_a_row_per_example(trained):
    refused = trained("export", "runs/x")
    assert (refused.code, refused.error, "nothing to export: run leaveout labels" in refused.refusal) == (
        1,
        "nothing-to-export",
        True,
    )
    trained("labels", "runs/x")
    trained("score", "runs/x", "--method", "replay", "--method", "sgd-ie")
    told = trained("export", "runs/x", "--json").told
    table = pd.read_csv(told["file"], index_col="train")
    assert len(table) == 60
    scores = lo.Scores.load("runs/x/scores/sgd-ie.safetensors")
    assert table["sgd-ie"].tolist() == pytest.approx(scores.mean().tolist())
    assert table["replay_exact"].all()
    assert table["is_label_issue"].sum() == len(lo.Labels.load("runs/x/labels.json"))
    assert trained("export", "runs/x").code == 0, "the same again is the same"
    assert trained("export", "runs/x", "--out", "all.jsonl").code == 0
    rows = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert [row["train"] for row in rows] == list(range(60))
    trained("score", "runs/x", "--method", "tracin")
    refused = trained("export", "runs/x")
    assert (refused.code, "give --again" in refused.refusal) == (1, True)
    assert trained("export", "runs/x", "--out", "all.xml").code == 2


def test_cleanse_twice_answers_from_disk(trained):
    trained("score", "runs/x", "--method", "sgd-ie")
    asked = ("cleanse", "runs/x", "--remove", "3", "--random", "1")
    first = trained(*asked)
    assert first.code == 0, first.err
    before = Path("runs/x/cleanse.json").stat().st_mtime_ns
    assert trained(*asked).out == first.out
    assert Path("runs/x/cleanse.json").stat().st_mtime_ns == before
    for other in (["--remove", "4"], ["--random", "2"], ["--shuffles", "1"]):
        refused = trained(*asked, *other)
        assert (refused.code, "give --again to replace it" in refused.refusal) == (1, True), other


def test_labels_lead_to_what_removing_them_brings(trained):
    assert "Next: leaveout cleanse --labels runs/x" in trained("labels", "runs/x").words
    done = trained("cleanse", "--labels", "runs/x", "--remove", "3", "--random", "0")
    assert done.code == 0, done.err
    assert lo.Curve.load("runs/x/cleanse.json").choices == ["labels"]
    assert "Next: leaveout score runs/x" in done.words


def test_cleanse_removes_labels_that_look_wrong(trained):
    trained("score", "runs/x", "--method", "sgd-ie")
    asked = ("cleanse", "runs/x", "--labels", "--remove", "3", "--random", "0")
    refused = trained(*asked)
    assert (refused.code, refused.error, "run leaveout labels runs/x first" in refused.refusal) == (
        1,
        "labels-missing",
        True,
    )
    trained("labels", "runs/x")
    first = trained(*asked)
    assert first.code == 0, first.err
    assert lo.Curve.load("runs/x/cleanse.json").choices == ["labels", "SGD-IE"]
    assert trained(*asked).out == first.out
    assert trained("report", "runs/x").code == 0
    assert "labels that look most wrong" in Path("runs/x/report.html").read_text()


def test_refusals_speak_of_options(trained):
    trained("score", "runs/x", "--method", "sgd-ie")
    assert "--remove [900] must be numbers" in trained("cleanse", "runs/x", "--remove", "900").refusal
    assert "--top 0" in trained("refine", "runs/x", "--top", "0").refusal
