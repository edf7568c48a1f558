"""train, score and verify as a user meets them: on real small runs, with good and with bad input."""

import json
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import leaveout as lo
from commands import OWN, SMALL, Shell, started
from leaveout.builtin import config
from leaveout.builtin.config import Config, DataPart, ModelPart, OptimizerPart, TrainPart
from leaveout.cli import methods
from problems import only_estimated
from refusal import refused


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """One small run with its config, to be copied."""
    path = tmp_path_factory.mktemp("trained") / "run"
    config.run_config(
        Config(
            DataPart("digits", 60, 30, flip=0.1),
            ModelPart("mlp", hidden=[6], activation="tanh"),
            OptimizerPart(lr=0.5),
            TrainPart(epochs=3, batch_size=20),
        ),
        path,
    )
    return path


@pytest.fixture
def run(trained, shell) -> Path:
    shutil.copytree(trained, shell.folder / "runs/x")
    return shell.folder / "runs/x"


@pytest.fixture
def own(shell, monkeypatch) -> Shell:
    """A run of the user's own, made by a plain loop in the user's own module."""
    (shell.folder / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(shell.folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    import mine

    task, _ = mine.make_task()
    lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.1), 3, 10, 0, "runs/own")
    yield shell
    sys.modules.pop("mine", None)


def states(path: Path) -> list[torch.Tensor]:
    found = lo.open_run(path)
    return [tensor for i in found.kept for slot in found.state(i).values() for tensor in slot.values()]


# train


def test_train_records_a_run_that_its_config_repeats_bit_by_bit(shell):
    done = shell("train", *SMALL, "--flip", "0.2", "--momentum", "0.5", "--seed", "3", "--out", "runs/a", "--json")
    assert done.told["steps"] == 6
    assert done.told["config"] == "runs/a/config.toml"
    again = shell("train", "--config", "runs/a/config.toml", "--out", "runs/b")
    assert again.code == 0, again.err
    one, other = states(shell.folder / "runs/a"), states(shell.folder / "runs/b")
    assert len(one) == len(other) == 7 * 4 * 2  # states, parameters, slots
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert (shell.folder / "runs/a/config.toml").read_text() == (shell.folder / "runs/b/config.toml").read_text()
    third = shell("train", "--config", "runs/a/config.toml", "--seed", "4", "--out", "runs/c")
    assert third.code == 0
    assert not torch.equal(one[0], states(shell.folder / "runs/c")[0])


def test_the_loss_that_train_tells_is_the_final_models(shell):
    told = shell("train", *SMALL, "--out", "runs/a", "--json").told
    subject = config.prepare(config.read("runs/a/config.toml"))
    subject.task.model.load_state_dict(lo.open_run("runs/a").final()["param"])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(subject.task.model(subject.query.x), subject.query.y)
    assert told["validation_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_train_says_where_the_run_is_and_what_comes_next(shell):
    done = shell("train", *SMALL)
    assert "6 steps are recorded in runs/digits-mlp" in done.words
    assert "leaveout score runs/digits-mlp" in done.words


def test_a_run_is_not_overwritten(shell):
    assert shell("train", *SMALL, "--out", "runs/a").code == 0
    before = {file.name: file.read_bytes() for file in (shell.folder / "runs/a").iterdir()}
    done = shell("train", *SMALL, "--lr", "0.7", "--out", "runs/a")
    assert (done.code, "already holds a run" in done.refusal) == (1, True)
    assert before == {file.name: file.read_bytes() for file in (shell.folder / "runs/a").iterdir()}


def test_a_config_in_an_otherwise_empty_directory_is_used_and_kept(shell):
    folder = shell.folder / "runs/a"
    folder.mkdir(parents=True)
    text = "# mine\n[data]\nn_train = 60\nn_val = 30\n[train]\nepochs = 1\n"
    (folder / "config.toml").write_text(text)
    other = shell("train", *SMALL, "--out", "runs/a")
    assert (other.code, other.error, "describes another run" in other.refusal) == (1, "config-of-another-run", True)
    assert shell("train", "--config", "runs/a/config.toml", "--out", "runs/a").code == 0
    assert (folder / "config.toml").read_text() == text


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--data", "digit"], 2, ["--data: ", "no data set 'digit'", "did you mean digits?"]),
        (["--model=mlpp"], 2, ["--model: ", "no model 'mlpp'", "did you mean mlp?"]),
        (["--optimizer", "adan"], 2, ["--optimizer: ", "no optimizer 'adan'", "did you mean adam?"]),
        (["--optimizer", "adam", "--momentum", "0.9"], 2, ["adam takes lr, weight_decay, betas, eps", "not momentum"]),
        (["--lr", "-1"], 2, ["sgd cannot be made", "learning rate"]),
        (["--activation", "sine"], 2, ["--activation: ", "no activation 'sine'", "relu, tanh"]),
        (["--model", "logistic"], 1, ["outputs of shape []", "10 classes", "take the model mlp"]),
        (["--model", "mnist-cnn"], 1, ["mnist-cnn does not take digits's examples"]),
        (["--model", "logistic", "--hidden", "3"], 1, ["takes (features: int)"]),
        (["--epochs", "0"], 2, ["--epochs 0", "at least 1"]),
        (["--flip", "2"], 2, ["--flip 2.0"]),
        (["--seed", "-1"], 2, ["--seed -1", "from 0 to 4294967295"]),
        (["--hidden", "1000000000000000"], 1, ["hidden", "make it smaller"]),
        (["--keep", "some"], 2, ["--keep 'some'"]),
        (["--n-train", "5000"], 2, ["--n-train 5000", "--n-val 400", "together at most 1797"]),
        (["--hidden", "a,b"], 2, ["not a list of widths"]),
        (["--epochs", "x"], 2, ["--epochs", "valid integer"]),
        (["--config", "nowhere.toml"], 2, ["--config: ", "nowhere.toml cannot be read"]),
    ],
)
def test_train_refuses_with_a_sentence_and_leaves_nothing(shell, args, code, said):
    done = shell("train", *args, "--out", "runs/a")
    assert done.code == code
    for words in said:
        assert words in done.refusal
    assert not [file for file in shell.folder.rglob("*") if file.is_file() and file.name != "config.toml"]


def test_everything_wrong_in_a_config_is_said_at_once(shell):
    (shell.folder / "bad.toml").write_text(
        'train = 3\n[data]\nname = "digits"\nntrain = 5\nflip = "much"\n'
        '[optimiser]\nlr = 1\n[model]\nhidden = [1, "x"]\n'
    )
    done = shell("train", "--config", "bad.toml", "--out", "runs/a")
    assert done.code == 1
    for words in (
        "train is a section of its own",
        "[data] has no key 'ntrain' (did you mean n_train?)",
        "[data] flip = 'much' must be a number",
        "no section [optimiser] (did you mean optimizer?)",
        "[model] hidden = [1, 'x'] must be a list of whole numbers",
    ):
        assert words in done.refusal
    assert not (shell.folder / "runs").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\nflip = 0\nflip = 1\n", "is not TOML"),
        (f"[data]\nseed = {'9' * 5000}\n", "is not TOML"),
        (f"[model]\nhidden = {'[' * 5000}\n", "is not TOML"),
        ("[model]\nseed = 99999999999999999999\n", "seed=99999999999999999999"),
        ('[optimizer]\nname = "adam"\nbetas = [0.9]\n', "betas=[0.9] must be two numbers"),
        ("[train]\nl2 = nan\n", "l2=nan must be a finite number"),
    ],
)
def test_a_config_that_no_run_can_have(shell, text, words):
    (shell.folder / "bad.toml").write_text(text)
    done = shell("train", "--config", "bad.toml", "--out", "runs/a")
    assert (done.code, words in done.refusal) == (1, True), done.err
    assert not (shell.folder / "runs").exists()


def test_a_config_that_is_not_toml_names_the_line(shell):
    (shell.folder / "bad.toml").write_text('[data]\nname = "digits"\nn_train = = 3\n')
    done = shell("train", "--config", "bad.toml")
    assert (done.code, "bad.toml is not TOML, line 3" in done.refusal) == (1, True)
    (shell.folder / "bad.toml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in shell("train", "--config", "bad.toml").refusal


def test_a_config_survives_its_file(tmp_path):
    every = Config(
        DataPart("adult", 7, 8, 9, 0.25, 11),
        ModelPart("mlp", 2, [4, 5], "gelu"),
        OptimizerPart("adamw", 1e-3, weight_decay=0.1, betas=[0.5, 0.75], eps=1e-7),
        TrainPart(2, 3, 4, 1e-4, 10),
    )
    for given in (every, Config()):
        (tmp_path / "c.toml").write_text(config.to_toml(given))
        assert config.read(tmp_path / "c.toml") == given


@pytest.mark.parametrize(
    "optimizer", [["--optimizer", "adam", "--lr", "0.01"], ["--optimizer", "adamw", "--weight-decay", "0.1"]]
)
def test_other_optimizers_are_recorded(shell, optimizer):
    assert shell("train", *SMALL, *optimizer, "--out", "runs/a").code == 0
    rule = lo.open_run("runs/a").rule
    assert rule.kind.lower() == optimizer[1]


# score


def test_score_gives_what_the_library_gives(shell, run):
    told = shell("score", "runs/x", "--method", "acc", "--method", "sgd-ie", "--method", "tracin", "--json").told
    subject, recorded = config.prepare(config.read(run / "config.toml")), lo.open_run(run)
    for row, method in zip(told["scores"], (lo.ACC("free"), lo.SGDIE(), lo.TracIn()), strict=True):
        expected = method.score(recorded, subject.task, subject.query)
        found = lo.Scores.load(row["file"])
        torch.testing.assert_close(found.values, expected.values)
        assert row["method"] == found.method == expected.method
        assert [each["id"] for each in row["harmful"]] == expected.harmful(10)
        assert row["helpful"][0]["score"] == pytest.approx(float(expected.values.max()))
    assert sorted(file.name for file in (run / "scores").iterdir()) == [
        "acc-free.safetensors",
        "sgd-ie.safetensors",
        "tracin.safetensors",
    ]
    assert told["scores"][0]["hvps"] == told["scores"][1]["hvps"] == 9  # one sweep for both


def test_work_may_be_shared_by_processes(shell, run):
    here = shell("score", "runs/x", "--method", "replay", "--json").told["scores"][0]
    before = lo.Scores.load(here["file"]).values
    there = shell("score", "runs/x", "--method", "replay", "--processes", "2", "--again", "--json").told["scores"][0]
    torch.testing.assert_close(lo.Scores.load(there["file"]).values, before)
    both = shell("score", "runs/x", "--processes", "2", "--ray", "auto")
    assert (both.code, "give one of them" in both.refusal) == (2, True)


def test_score_prints_who_did_harm_and_what_comes_next(shell, run):
    done = shell("score", "runs/x", "--method", "acc", "--top", "2")
    assert done.code == 0, done.err
    scores = lo.Scores.load(run / "scores/acc-free.safetensors")
    worst = scores.harmful(1)[0]
    assert f"most harmful: {worst} (" in done.words
    assert "of the 6 flipped labels are among the 6 most harmful" in done.words
    assert "leaveout verify runs/x" in done.words


def test_score_without_a_method_replays_what_is_affordable(shell, run):
    done = shell("score", "runs/x", "--budget", "1e9")
    assert done.code == 0, done.err
    assert "each replayed exactly" in done.words
    assert "leaveout report runs/x" in done.words
    scores = lo.Scores.load(run / "scores/auto.safetensors")
    assert scores.all_exact
    assert shell("score", "runs/x", "--json").told["scores"][0]["new"] is False


def test_score_without_a_method_keeps_the_best_with_its_check(shell, run, monkeypatch):
    only_estimated(monkeypatch, 128)
    assert shell("train", "--data", "digits", "--n-train", "140", "--epochs", "2", "--out", "runs/more").code == 0
    run = run.parent / "more"
    told = shell("score", "runs/more", "--json").told["scores"][0]
    assert told["method"].endswith(" + Replay")
    assert {row["method"] for row in told["chosen"]["methods"]} >= {"ACC(free)", "SGD-IE", "DVEmb(ggn)", "TracIn"}
    check = lo.Check.load(run / "checks/auto.json")
    check.check_same_scores(lo.Scores.load(run / "scores/auto.safetensors"))
    assert told["chosen"]["sentence"].endswith(str(check))
    before = (run / "checks/auto.json").read_bytes()
    assert shell("verify", "runs/more").code == 0
    assert (run / "checks/auto.json").read_bytes() == before
    assert shell("report", "runs/more").code == 0
    said = shell("score", "runs/more", "--again").words
    assert "Compared with exact replays" in said


def test_scores_that_are_there_are_not_computed_again_unless_asked(shell, run):
    shell("score", "runs/x", "--method", "acc")
    file = run / "scores/acc-free.safetensors"
    before = file.read_bytes()
    told = shell("score", "runs/x", "--method", "acc", "--method", "tracin", "--json").told["scores"]
    assert [row["new"] for row in told] == [False, True]
    assert file.read_bytes() == before
    assert shell("score", "runs/x", "--method", "acc", "--again", "--json").told["scores"][0]["new"]
    assert file.read_bytes() != before  # the seconds differ


def test_scores_of_another_question_are_not_taken_for_the_answer(shell, run):
    assert shell("score", "runs/x", "--method", "replay(ids=[0, 1, 2])").code == 0
    file = run / "scores/replay.safetensors"
    before = file.read_bytes()
    done = shell("score", "runs/x", "--method", "replay")
    assert (done.code, done.error, "other examples or queries: give --again" in done.refusal) == (
        1,
        "scores-in-the-way",
        True,
    )
    assert file.read_bytes() == before
    assert shell("score", "runs/x", "--method", "replay", "--again").code == 0
    assert len(lo.Scores.load(file).train_ids) == 60


def test_scores_in_the_place_of_others_are_not_taken_for_them(shell, run):
    """Of another run, by another method, by another weight, or of groups with the same names and other members."""
    (shell.folder / "by.json").write_text(json.dumps({"a": [0, 1], "b": [2, 3]}))
    asked = ("score", "runs/x", "--method", "sgd-ie")
    assert shell(*asked).code == shell(*asked, "--groups", "by.json").code == 0
    file = run / "scores/sgd-ie.safetensors"
    good = lo.Scores.load(file)
    for given, words in (
        ({"run_fingerprint": 1}, "scores of another run: give --again"),
        ({"method": "TracIn"}, "scores of another method, TracIn: give --again"),
    ):
        replace(good, **given).save(file, overwrite=True)
        done = shell(*asked)
        assert (done.code, words in done.refusal) == (1, True), done.refusal
    replace(good, run_fingerprint=None, query_fingerprint=None).save(file, overwrite=True)
    assert shell(*asked, "--json").told["scores"][0]["new"] is False  # an older file does not say
    (shell.folder / "by.json").write_text(json.dumps({"a": [0, 4], "b": [2, 3]}))
    done = shell(*asked, "--groups", "by.json")
    assert (done.code, "groups with other members: give --again" in done.refusal) == (1, True)
    assert shell("score", "runs/x", "--method", "replay(ids=[0, 1], weight=0.5)").code == 0
    told = shell("score", "runs/x", "--method", "replay(ids=[0, 1])", "--json").told["scores"][0]
    assert (told["new"], told["method"]) == (True, "Replay")


def test_methods_that_were_swept_together_are_so_after_a_crash_between_them(shell, run):
    asked = ("score", "runs/x", "--method", "acc", "--method", "sgd-ie", "--json")
    first = [lo.Scores.load(row["file"]).values for row in shell(*asked).told["scores"]]
    for name in ("sgd-ie", "acc-free"):
        (run / f"scores/{name}.safetensors").unlink()
        told = shell(*asked).told["scores"]
        assert sorted(row["new"] for row in told) == [False, True]
        again = {row["method"]: lo.Scores.load(row["file"]).values for row in told}
        assert torch.equal(again["ACC(free)"], first[0])
        assert torch.equal(again["SGD-IE"], first[1])


def test_a_scores_folder_that_is_a_link_is_refused(shell, run):
    """A stranger's run must not lead elsewhere what is written or deleted."""
    (shell.folder / "mine").mkdir()
    (shell.folder / "mine/kept").write_text("here")
    (run / "scores").symlink_to(shell.folder / "mine")
    done = shell("score", "runs/x", "--method", "sgd-ie")
    assert (done.code, done.error, "scores is a link to another place" in done.refusal) == (
        1,
        "link-not-followed",
        True,
    ), done.refusal
    assert [file.name for file in (shell.folder / "mine").iterdir()] == ["kept"]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"x": "12"}', "group 'x' holds '1'"),
        ('{"x": [2.9]}', "group 'x' holds 2.9"),
        ('{"x": 5}', "group 'x' is 5, not a list"),
        ('{"x": [0], "x": [1]}', "'x' is there twice"),
        ("[[0], [1]]", "does not hold groups"),
        ("[" * 100_000, "does not hold groups"),
    ],
)
def test_a_groups_file_is_taken_as_it_is_or_not_at_all(shell, run, text, said):
    (shell.folder / "by.json").write_text(text)
    done = shell("score", "runs/x", "--method", "acc", "--groups", "by.json")
    assert (done.code, said in done.refusal) == (1, True), done.refusal
    assert done.error == "groups-file-not-groups" or text.startswith("{")
    assert not (run / "scores").exists()


def test_each_query_and_groups_have_files_of_their_own(shell, run):
    (shell.folder / "thirds.json").write_text(json.dumps({"a": list(range(20)), "b": list(range(20, 60))}))
    assert shell("score", "runs/x", "--method", "acc", "--queries", "each").code == 0
    assert shell("score", "runs/x", "--groups", "thirds.json", "--method", "acc(exact)").code == 0
    each = lo.Scores.load(run / "scores/acc-free-each.safetensors")
    by = lo.Scores.load(run / "scores/acc-exact-by-thirds.safetensors")
    assert each.values.shape == (60, 30)
    assert by.train_ids == ("a", "b")
    subject = config.prepare(config.read(run / "config.toml"))
    truth = lo.ACC("exact").score(lo.open_run(run), subject.task, subject.query, groups=[range(20), range(20, 60)])
    torch.testing.assert_close(by.values, truth.values)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["runs/y"], 2, ["runs/y does not hold a run (did you mean runs/x?)"]),
        (["elsewhere/y"], 2, ["does not hold a run", "Recorder wrote"]),
        (["runs/x", "--method", "acx"], 2, ["--method: ", "no method 'acx'", "did you mean acc?"]),
        (["runs/x", "--queries", "all"], 2, ["--queries", "'all' is neither mean nor each"]),
        (["runs/x", "--groups", "nowhere.json"], 2, ["--groups: ", "nowhere.json cannot be read"]),
        (["runs/x", "--memory", "lots"], 2, ["--memory 'lots'"]),
        (["runs/x", "--top", "-1"], 2, ["--top", "greater than or equal to 0"]),
        (["runs/x", "--task", "mine"], 2, ["package.module:function"]),
        ([], 2, ["Missing argument"]),
    ],
)
def test_score_refuses_with_a_sentence(shell, run, args, code, said):
    done = shell("score", *args)
    assert done.code == code
    for words in said:
        assert words in done.refusal
    assert not (run / "scores").exists()


def test_a_run_without_a_config_asks_for_the_task(own):
    done = own("score", "runs/own", "--method", "acc")
    assert (done.code, done.error) == (1, "task-missing")
    assert "--task package.module:function" in done.refusal


def test_an_own_task_is_scored_and_verified(own):
    import mine

    done = own("score", "runs/own", "--task", "mine:make_task", "--method", "acc(exact, exact)", "--json")
    assert "--task runs the code of mine.py in this directory" in done.refusal
    told = done.told
    task, query = mine.make_task()
    expected = lo.ACC("exact", "exact").score(lo.open_run("runs/own"), task, query)
    torch.testing.assert_close(lo.Scores.load(told["scores"][0]["file"]).values, expected.values)
    check = own("verify", "runs/own", "--task", "mine:make_task", "--replays", "8", "--json").told["checks"][0]
    assert check["extreme"]["kendall"]["value"] == pytest.approx(1.0)  # a quadratic loss: ACC is exact
    assert check["extreme"]["rmse"]["value"] < 1e-4 * check["spread"]["extreme"]


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("mine:mak_task", 2, ["mine has no 'mak_task' (did you mean make_task?)"]),
        ("nowhere:make_task", 2, ["no module 'nowhere'"]),
        ("mine:single", 2, ["returned a Task", "query set"]),
        ("mine:broken", 1, ["mine:broken failed with RuntimeError", "mine.py, line 22"]),
        ("mine:wants", 1, ["mine:wants failed with ModuleNotFoundError", "not_a_module_anyone_has"]),
    ],
)
def test_a_task_that_cannot_be_made_is_refused(own, where, code, said):
    done = own("score", "runs/own", "--method", "acc", "--task", where)
    assert done.code == code, done.err
    assert code == 2 or done.error == "task-function-failed"
    for words in said:
        assert words in done.refusal


# methods in words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("acc", lo.ACC()),
        ("ACC", lo.ACC()),
        ("sgd-ie", lo.SGDIE()),
        ("influence(damping=0.5)", lo.InfluenceFunction(damping=0.5)),
        (" SGD-IE ( readout = outputs ) ", lo.SGDIE(readout="outputs")),
        ("acc(exact, readout='exact')", lo.ACC("exact", readout="exact")),
        ("acc(transport=subspace(16))", lo.ACC(lo.Subspace(16))),
        ("acc(subspace)", lo.ACC("subspace")),
        ("acc(sketch=64)", lo.ACC(sketch=64)),
        ("acc(sketch=none)", lo.ACC()),
        ("replay(ids=[1, 2])", lo.Replay((1, 2))),
        ("replay(weight=-0.5)", lo.Replay(weight=-0.5)),
    ],
)
def test_methods_are_understood(text, expected):
    assert methods.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", "method-unreadable", "not a method"),
        ("acc)", "method-unreadable", "not a method"),
        ("acc(", "method-unreadable", "not a method"),
        ("acc(()", "method-unreadable", "cannot be read"),
        ("acc(free readout)", "method-unreadable", "cannot be read"),
        ("acc()()", "method-unreadable", "cannot be read"),
        ("tracing", "method-unknown", "did you mean tracin"),
        ("acc(transprt=free)", "method-option-unknown", "did you mean transport"),
        ("acc(free, transport=exact)", "method-option-unknown", "multiple values"),
        ("acc(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)", "method-option-unknown", "too many"),
        ("acc(**{})", "method-unreadable", "is not a name"),
        ("acc(transport=sideways)", "transport-unknown", "'free', 'subspace', 'jump' or 'exact'"),
        ("acc(sketch=wide)", "method-option-wrong-kind", "sketch"),
        ("acc(__import__('os').system('true'))", "method-unreadable", "is not a name, a number, a list"),
        ("acc([x for x in y])", "method-unreadable", "is not a name"),
        ("acc(f'{1}')", "method-unreadable", "is not a name"),
        ("acc(lambda: 1)", "method-unreadable", "is not a name"),
    ],
)
def test_anything_else_is_refused_and_never_run(text, code, said):
    with refused(lo.InputError, code, said):
        methods.parse(text)


# verify


def test_verify_checks_every_method_that_was_scored(shell, run):
    shell("score", "runs/x", "--method", "acc", "--method", "sgd-ie")
    done = shell("verify", "runs/x", "--replays", "12")
    assert done.code == 0, done.err
    assert "Compared with 12 exact replays" in done.words
    assert all(method in done.words for method in ("ACC(free)", "SGD-IE"))
    subject = config.prepare(config.read(run / "config.toml"))
    scores = lo.Scores.load(run / "scores/sgd-ie.safetensors")
    expected = lo.verify(scores, lo.open_run(run), subject.task, subject.query, replays=12)
    found = lo.Check.load(run / "checks/sgd-ie.json")
    assert found.sentence == expected.sentence
    assert found.table.index.tolist() == expected.table.index.tolist()


def test_a_check_is_kept_while_it_answers_the_question(shell, run):
    shell("score", "runs/x", "--method", "acc")
    shell("verify", "runs/x", "--replays", "12")
    file = run / "checks/acc-free.json"
    before = file.read_bytes()
    assert shell("verify", "runs/x", "--replays", "12").code == 0
    more = shell("verify", "runs/x", "--replays", "16")
    assert (more.code, more.error, "give --again" in more.refusal) == (1, "check-in-the-way", True)
    assert file.read_bytes() == before
    assert shell("verify", "runs/x", "--replays", "16", "--again").code == 0
    assert len(lo.Check.load(file).table) == 16


def test_verify_from_moved_starts_says_how_well_the_truth_repeats_itself(shell, run):
    shell("score", "runs/x", "--method", "sgd-ie")
    told = shell("verify", "runs/x", "--replays", "8", "--moves", "1", "--jitter", "0.01", "--json").told["checks"][0]
    assert (told["ceiling"]["moves"], told["ceiling"]["jitter"]) == (1, 0.01)
    assert "Exact replays from 2 starts 0.01 apart agree with each other" in told["sentence"]
    assert shell("verify", "runs/x", "--replays", "8").code == 0
    other = shell("verify", "runs/x", "--replays", "8", "--moves", "2")
    assert (other.code, "--again" in other.err) == (1, True)


def test_verify_of_chosen_methods(shell, run):
    none = shell("verify", "runs/x")
    assert (none.code, none.error, "leaveout score runs/x first" in none.refusal) == (1, "scores-missing", True)
    (shell.folder / "halves.json").write_text(json.dumps({"a": [0, 1], "b": [2, 3]}))
    shell("score", "runs/x", "--method", "acc", "--method", "sgd-ie", "--method", "tracin")
    shell("score", "runs/x", "--method", "acc(exact)", "--groups", "halves.json")
    told = shell("verify", "runs/x", "--method", "acc", "--method", "sgd-ie", "--replays", "8", "--json").told
    assert [check["method"] for check in told["checks"]] == ["ACC(free)", "SGD-IE"]
    wrong = shell("verify", "runs/x", "--method", "sgd-ei")
    assert (wrong.code, "did you mean sgd-ie?" in wrong.refusal) == (2, True)
    groups = shell("verify", "runs/x", "--method", "acc-exact-by-halves")
    assert (groups.code, "at least 8 scored examples or groups" in groups.refusal) == (1, True)
    told = shell("verify", "runs/x", "--replays", "8", "--json").told
    assert len(told["checks"]) == 3
    assert [(few["method"], few["rows"]) for few in told["too_few"]] == [("ACC(exact)", 2)]
    said = shell("verify", "runs/x", "--replays", "8").words
    assert "ACC(exact): 2 rows are too few to rank (it takes 8)" in said
    assert "leaveout score runs/x --method replay, for groups with the same --groups" in said


# cleanse


def test_cleanse_gives_what_the_library_gives(shell, run):
    shell("score", "runs/x", "--method", "sgd-ie")
    shell("score", "runs/x", "--method", "acc", "--queries", "each")  # not a ranking of its own
    told = shell("cleanse", "runs/x", "--remove", "3", "--remove", "6", "--random", "2", "--json").told
    subject = config.prepare(config.read(run / "config.toml"))
    scores = lo.Scores.load(run / "scores/sgd-ie.safetensors")
    expected = lo.cleanse(scores, lo.open_run(run), subject.task, subject.test, [3, 6], random=2)
    found = lo.Curve.load(told["file"])
    assert found.table.round(6).equals(expected.table.round(6))
    taken = shell("cleanse", "runs/x")
    assert (taken.code, "give --again" in taken.refusal) == (1, True)
    again = shell("cleanse", "runs/x", "--again", "--random", "1")
    assert again.code == 0
    assert "the most harmful example by SGD-IE" in again.words  # 2 % of 60
    assert "the 6 most harmful examples by SGD-IE" in again.words
    assert again.words.startswith("Retrained without the 3 most harmful examples by SGD-IE, the test error on 1,707")


def test_cleanse_by_scores_of_single_queries_and_not_by_those_of_groups(shell, run):
    (shell.folder / "by.json").write_text(json.dumps({"a": [0, 1], "b": [2, 3]}))
    assert shell("score", "runs/x", "--method", "sgd-ie", "--groups", "by.json").code == 0
    done = shell("cleanse", "runs/x")
    assert (done.code, done.error, "only of groups" in done.refusal) == (1, "scores-not-of-examples", True), (
        done.refusal
    )
    assert "run leaveout score runs/x first" in done.refusal
    assert shell("score", "runs/x", "--method", "sgd-ie", "--queries", "each").code == 0
    told = shell("cleanse", "runs/x", "--remove", "3", "--random", "0", "--json").told
    subject = config.prepare(config.read(run / "config.toml"))
    each = lo.Scores.load(run / "scores/sgd-ie-each.safetensors")
    plain = replace(each, values=each.values.mean(1, keepdim=True), query_ids=("mean",))
    expected = lo.cleanse(plain, lo.open_run(run), subject.task, subject.test, [3], random=0)
    assert lo.Curve.load(told["file"]).table.round(6).equals(expected.table.round(6))


def test_cleanse_refuses_with_a_sentence(own):
    assert "has no scores yet" in own("cleanse", "runs/own", "--task", "mine:make_task").refusal
    own("score", "runs/own", "--method", "acc", "--task", "mine:make_task")
    done = own("cleanse", "runs/own", "--task", "mine:make_task")
    assert (done.code, "(task, query set, test set)" in done.refusal) == (1, True)
    assert own("cleanse", "runs/own", "--task", "mine:with_test", "--remove", "2", "--random", "1").code == 0
    many = own("cleanse", "runs/own", "--task", "mine:with_test", "--remove", "200", "--again")
    assert (many.code, "from 1 to 30" in many.refusal) == (2, True)


# plan


@pytest.mark.full
def test_plan_knows_what_a_built_in_run_is_about(shell, run):
    told = shell("plan", "runs/x", "--json").told["methods"]
    assert {row["method"] for row in told} >= {"TracIn", "SGD-IE", "ACC(free)", "ACC(exact)", "Replay"}
    assert all(row["seconds"] > 0 and row["memory"] > 0 for row in told)
    asked = shell("plan")
    assert (asked.code, "--task" in asked.refusal) == (2, True)


# help, version, Ctrl-C


@pytest.mark.parametrize("command", ["train", "score", "verify", "cleanse", "plan"])
def test_help_teaches_by_example(shell, command):
    done = shell(command, "--help")
    assert done.code == 0
    assert done.words.count(f"$ leaveout {command}") >= 2
    assert "Exit codes" in shell("--help").words


def test_version(shell):
    assert shell("--version").out.startswith("leaveout 0.")


def until(condition, process, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.full
def test_ctrl_c_while_training_keeps_the_steps(tmp_path):
    process = started("train", *SMALL[:-2], "--epochs", "100000", "--out", "run", cwd=tmp_path)
    until((tmp_path / "run/manifest.json").exists, process)
    time.sleep(1)  # the manifest is there before the first step is
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in err
    assert "the same command continues" in " ".join(err.split())
    assert len(lo.open_run(tmp_path / "run", partial=True)) > 0


@pytest.mark.full
def test_training_that_was_killed_goes_on_with_the_same_command(tmp_path, shell):
    small = (*SMALL[:-2], "--epochs", "600")
    whole = tmp_path / "whole"
    assert shell("train", *small, "--out", str(whole)).code == 0
    process = started("train", *small, "--out", "run", cwd=tmp_path, shard_steps=100)
    manifest = tmp_path / "run/manifest.json"
    until(lambda: manifest.exists() and '"number": 0' in manifest.read_text(), process)
    process.kill()
    process.wait()
    done = lo.open_run(tmp_path / "run", partial=True)
    assert 0 < len(done) < len(lo.open_run(whole))
    assert shell("train", *small[:-1], "601", "--out", str(tmp_path / "run")).code == 1
    assert shell("train", *small, "--out", str(tmp_path / "run")).code == 0
    one, two = lo.open_run(tmp_path / "run"), lo.open_run(whole)
    assert (len(one), one.kept) == (len(two), two.kept)
    assert all(torch.equal(tensor, two.final()["param"][n]) for n, tensor in one.final()["param"].items())


def test_ctrl_c_while_scoring_keeps_what_was_finished(tmp_path):
    config.run_config(Config(DataPart("digits", 400, 50), train=TrainPart(epochs=30, batch_size=20)), tmp_path / "run")
    process = started("score", "run", "--method", "acc", "--method", "replay", cwd=tmp_path)
    first = tmp_path / "run/scores/acc-free.safetensors"
    until(first.exists, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "the same command continues from there" in " ".join(err.split())
    assert lo.Scores.load(first).method == "ACC(free)"
    assert [file.name for file in first.parent.iterdir()] == [first.name]


def test_show_says_what_a_run_holds(run, shell):
    shell("score", "runs/x", "--method", "sgd-ie")
    told = shell("show", "runs/x", "--json").told
    opened = lo.open_run(run)
    assert told["parameters"] == sum(t.numel() for t in opened.final()["param"].values())
    assert (told["steps"], told["epochs"], told["batch_size"]) == (len(opened), 3, 20)
    assert (told["optimizer"], told["first_step"][0]["lr"]) == ("SGD", 0.5)
    assert told["disk"] == sum(file.stat().st_size for file in run.glob("*.safetensors")) + (
        (run / "manifest.json").stat().st_size
    )
    assert [found["method"] for found in told["scores"]] == ["SGD-IE"]
    words = shell("show", "runs/x", "--check").words
    assert all(word in words for word in ("9, finished", "SGD-IE, 60 x 1", "lr 0.5", "Every file is as it was written"))


def test_show_names_damaged_files(run, shell):
    file = run / "shard-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = shell("show", "runs/x", "--check")
    assert done.code == 1
    assert f"{file.name} is not the file that was written" in done.err.replace("\n", " ")
    done = shell("show", "runs/x", "--check", "--json")
    assert (done.code, len(json.loads(done.out)["damage"])) == (1, 1)
    assert shell("show", "runs/y").code == 2


def test_show_counts_damaged_results_as_damage(run, shell):
    for name in ("scores/a.safetensors", "checks/a.json", "cleanse.json"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("something else")
    assert shell("show", "runs/x").code == 0
    done = shell("show", "runs/x", "--check")
    assert (done.code, "Every file is as it was written" in done.words) == (1, False)
    for words in ("does not hold scores", "does not hold a check", "does not hold a cleansing curve"):
        assert words in done.refusal
    assert len(json.loads(shell("show", "runs/x", "--check", "--json").out)["damage"]) == 3


def test_names_are_never_taken_for_markup(run, shell):
    scores = lo.Scores(torch.zeros(1, 1), (0,), ("mean",), "[/red]method")
    scores.save(run / "scores" / "a.safetensors")
    run.rename(shell.folder / "[bold]")
    done = shell("show", "[bold]")
    assert done.code == 0, done.err
    assert all(words in done.words for words in ("[bold]", "[/red]method"))
    done = shell("data", "fetch", "[/x]")
    assert (done.code, "no data set '[/x]'" in done.refusal) == (2, True)
