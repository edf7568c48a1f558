"""A study says run, task and query once, remembers what was answered, and answers as the functions do."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from leaveout.estimators import timeline
from leaveout.evaluate.verdict import Verdict
from leaveout.study import report as report_module
from leaveout.study import study as study_module
from leaveout.study.answers import most_trusted
from refusal import refused


def data(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    digits = lo.data.load("digits", n_train=80, n_val=20)
    noisy = lo.data.flip(digits.train, 0.1, seed=1).examples
    torch.manual_seed(0)
    task = lo.Task(nn.Linear(64, 10), nn.CrossEntropyLoss(), noisy)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
    run = lo.train(task, optimizer, epochs=4, batch_size=20, seed=0, out=tmp_path_factory.mktemp("study") / "run")
    return run, task, digits.val, digits.test


@pytest.fixture
def study(problem):
    return lo.Study(*problem[:3], show=lambda example: example[0].reshape(8, 8))


def test_it_answers_as_the_functions_do(problem, study):
    run, task, query, test = problem
    scores = study.score(lo.SGDIE())
    plain = lo.SGDIE().score(run, task, query)
    assert torch.equal(scores.values, plain.values)
    check = study.verify(scores, replays=8)
    assert check.table.equals(lo.verify(plain, run, task, query, replays=8).table)
    assert torch.equal(study.refine(scores, top=4).values, lo.refine(plain, run, task, query, top=4).values)
    assert study.labels().table.equals(lo.labels(run, task, scores=plain, check=check).table)
    curve = study.cleanse(scores, test, [4], random=1)
    assert curve.table.equals(lo.cleanse(plain, run, task, test, [4], random=1).table)
    assert torch.equal(study.timeline().values, lo.timeline(run, task, query).values)


def test_printed_it_says_the_answers(study):
    assert "try labels() and score()" in str(study)
    scores = study.score(lo.SGDIE())
    labels = study.labels()
    assert str(labels) in str(study)
    assert f"SGD-IE: {scores.harmful_count} of 80 training examples have a score below zero; not verified" in str(study)


def test_labels_take_the_check_of_the_scores_that_are_given(study):
    study.verify(study.score(lo.TracIn()), replays=8)
    scores = study.score(lo.SGDIE())
    check = study.verify(scores, replays=8)
    plain = lo.labels(study.run, study.task, scores=scores, check=check)
    assert study.labels(scores=scores).table.equals(plain.table)


def test_scores_that_were_chosen_keep_the_check_of_the_choice(problem):
    run, task, query, _ = problem
    study = lo.Study(run, task, query)
    choice = lo.choose(run, task, query, methods=[lo.TracIn(), lo.SGDIE()], ids=range(60))
    assert choice.exact, "few enough to replay"
    scores = lo.SGDIE().score(run, task, query)
    check = lo.verify(scores, run, task, query, replays=40)
    assert check.verdict in (Verdict.GOOD, Verdict.COARSE)
    study._take(replace(choice, scores=scores, check=check))
    assert study.verify(scores, replays=8) is check
    assert study.verify(scores, replays=44) is not check, "more replays say more"
    backwards = replace(check.random.kendall, value=-1.0, low=-1.0, high=-1.0)
    bad = replace(check, random=replace(check.random, kendall=backwards))
    study._take(replace(choice, scores=scores, check=bad))
    assert study.verify(scores, replays=16) is not bad, "it looks for the cause"


def test_a_short_answer_does_not_stand_in_for_a_whole_one(problem, study, tmp_path):
    whole = study.score(lo.SGDIE())
    few = study.score(lo.SGDIE(), ids=[3, 1, 2])
    assert len(few.train_ids) == 3
    assert study.scores["SGD-IE"] is study.best is whole
    assert sorted(data(study.report(tmp_path / "page.html"))["table"]["id"]) == list(range(80))
    curve = study.cleanse(test_set=problem[3], random=0)
    assert curve.harmful == {"SGD-IE": whole.harmful_count}
    assert few in study.answers.values(), "it is still an answer to its own question"
    alone = lo.Study(*problem[:3])
    assert alone.score(lo.SGDIE(), ids=[3, 1, 2]) is not few
    assert alone.best.train_ids == (3, 1, 2), "the only answer there is"


def test_groups_do_not_replace_single_examples(problem, study):
    single = study.score(lo.SGDIE())
    study.verify(single, replays=8)
    groups = study.score(lo.SGDIE(), groups={"a": [0, 1], "b": [2, 3]})
    assert study.scores["SGD-IE"] is single
    assert "SGD-IE" in study.checks, "the check of the single examples stays"
    assert {groups.train_ids, single.train_ids} == {one.train_ids for one in study.answers.values()}
    assert "of 2 groups have" in str(study)


@pytest.mark.parametrize("mean_first", [True, False])
def test_scores_of_single_queries_go_into_the_report(study, tmp_path, mean_first):
    ways = [{}, {"queries": "each"}]
    for options in ways if mean_first else ways[::-1]:
        scores = study.score(lo.SGDIE(), **options)
        if not options:
            check = study.verify(scores, replays=8)
    study.score(lo.TracIn())
    said = data(study.report(tmp_path / "page.html"))
    assert [method["name"] for method in said["methods"]] == list(study.scores)
    assert said["methods"][0]["name"] == "SGD-IE"
    assert len(said["queries"]) == 20
    assert study.checks["SGD-IE"] is check, "the verified scores come first"
    assert said["methods"][0]["check"] is not None


def test_single_queries_of_another_method_are_shown_under_its_name(study, tmp_path):
    study.score(lo.TracIn(), queries="each")
    study.score(lo.Replay())
    said = data(study.report(tmp_path / "page.html"))
    assert said["methods"][0]["name"] == "Replay"
    assert len(said["queries"]) == 20
    assert said["queries_by"].startswith("TracIn")


def test_the_timeline_is_swept_once(problem, study, tmp_path, monkeypatch):
    swept, sweep = [], timeline.timeline

    def counted(*args, **options):
        swept.append(args)
        return sweep(*args, **options)

    for home in (study_module, report_module):
        monkeypatch.setattr(home, "timeline" if home is study_module else "find_timeline", counted)
    study.score(lo.SGDIE())
    when = study.timeline()
    for name in ("one.html", "two.html"):
        said = data(study.report(tmp_path / name))
        assert said["spans"] == list(when.spans)
        assert len(said["lines"]) > 0
    assert len(swept) == 1


def test_resources_of_one_question(problem, study):
    seen = []

    class Watched(lo.Resources):
        def track(self, items, *args):
            seen.append(args[-1])
            return super().track(items, *args)

    own = Watched(progress=False)
    for ask in (
        lambda: study.score(lo.SGDIE(), resources=own),
        lambda: study.verify(replays=8, resources=own),
        lambda: study.refine(top=2, resources=own),
        lambda: study.labels(resources=own),
        lambda: study.timeline(resources=own),
        lambda: study.cleanse(problem[3], remove=[2], random=0, resources=own),
    ):
        seen.clear()
        ask()
        assert seen, "the resources that were given were used"
    assert study.score(lo.SGDIE()) is study.score(lo.SGDIE(), resources=own), "what is asked is the same"


def test_an_earlier_state_is_another_question(problem, study, tmp_path):
    run, task, query, _ = problem
    end, middle = study.score(lo.SGDIE()), study.score(lo.SGDIE(), at=8)
    assert study.scores["SGD-IE"] is end
    check = study.verify(middle, replays=8)
    assert check.table.equals(lo.verify(middle, run.head(8), task, query, replays=8).table)
    alone = lo.Study(run, task, query)
    alone.score(lo.SGDIE(), at=8)
    assert data(alone.report(tmp_path / "page.html"))["facts"][1] == ["Steps", "8"]


def test_a_section_that_fails_does_not_stop_the_page(study, tmp_path, monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(study_module, "labels", broken)
    monkeypatch.setattr(study_module, "timeline", broken)
    monkeypatch.setattr(report_module, "opinions", broken)
    said = data(study.report(tmp_path / "page.html"))
    assert len(said["methods"]) == 1
    assert sum("out of luck" in note for note in said["notes"]) == 4


def test_by_default_no_more_is_removed_than_is_harmful(problem):
    study = lo.Study(*problem[:3])
    few = replace(study.score(lo.SGDIE()), values=torch.cat([-torch.ones(5, 1), torch.ones(75, 1)]))
    curve = study.cleanse(few, problem[3], random=0)  # a warning, as if 8 had been asked for, would be an error here
    assert sorted(curve.table["removed"]) == [0, 2, 4, 5]
    with refused(lo.InputError, "remove-out-of-range", "remove=[0]"):
        study.cleanse(few, problem[3], remove=0)
    both = [study.cleanse(few, problem[3], remove=2, random=0), study.cleanse(problem[3], remove=2, random=0)]
    assert both[0].table.equals(both[1].table), "the newest scores are the ones to rank by"


def test_it_remembers(problem, study):
    scores = study.score(lo.SGDIE())
    assert study.score(lo.SGDIE()) is scores
    assert study.score(lo.SGDIE(), queries="each") is not scores
    study = lo.Study(*problem[:3])
    scores = study.score(lo.SGDIE())
    check = study.verify(replays=8)
    assert check.method == scores.method
    assert study.verify(scores, replays=8) is check
    assert study.verify(scores, replays=10) is not check
    assert study.labels() is study.labels() is study.issues
    assert study.cleanse(test_set=problem[3], remove=[4], random=0) is study.curve
    assert study.cleanse(test_set=problem[3], remove=[4], random=0) is study.curve
    assert "SGD-IE" in repr(study)


def test_long_arrays_are_told_apart(problem):
    """Their reprs are the same: that of a long array leaves out its middle."""
    study, asked = lo.Study(*problem[:3]), []
    for middle in (5, 6, 5):
        ids = torch.arange(2000)
        ids[1000] = middle
        for options in ({"ids": ids}, {"ids": ids.numpy(), "groups": [ids]}):
            study._once(("timeline", options), lambda: asked.append(1))
    assert len(asked) == 4


def test_it_replays_everything_where_that_is_affordable(study):
    assert study.score(budget=600).all_exact
    assert study.choice is not None
    assert not study.score(lo.SGDIE()).all_exact
    assert study.best is not None
    assert study.best.all_exact, "exact scores are preferred to newer ones"


def test_the_most_trusted_scores(problem):
    run, task, query, _ = problem
    weak, good = lo.TracIn().score(run, task, query), lo.ACC("exact").score(run, task, query)
    checks = {one.method: lo.verify(one, run, task, query, replays=16) for one in (weak, good)}
    assert checks[good.method].random.kendall.low > checks[weak.method].random.kendall.low
    unchecked = lo.SGDIE().score(run, task, query)
    assert most_trusted([good, weak, unchecked], checks) is good
    assert most_trusted([good, unchecked], {}) is unchecked
    assert most_trusted([], {}) is None


def test_scores_that_were_computed_elsewhere(problem, study):
    run, task, query, _ = problem
    scores = lo.SGDIE().score(run, task, query)
    check = study.verify(scores, replays=8)
    assert study.checks["SGD-IE"] is check
    assert study.best is scores
    with pytest.raises(lo.InputError) as refused:
        study.cleanse(scores)
    assert refused.value.code == "test-set-missing"


def test_a_report_without_any_question_before(study, tmp_path):
    page = study.report(tmp_path / "page.html")
    assert page.exists()
    assert len(study.scores) == 1


def test_a_report_of_a_regression(tmp_path):
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1))
    torch.manual_seed(0)
    task = lo.Task(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), nn.MSELoss(), data)
    run = lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.1), 2, 10, 0, tmp_path / "run")
    study = lo.Study(run, task, data)
    assert study.report(tmp_path / "page.html").exists()
    assert study.issues is None


def test_a_run_is_opened_by_its_directory(problem):
    run, task, *_ = problem
    study = lo.Study(str(run.path), task)
    assert study.run.fingerprint == run.fingerprint
    assert len(study.labels().table) == 80, "labels need no query"
    with refused(lo.InputError, "query-missing", "lo.Study(run, task, query)"):
        study.score(lo.SGDIE())


def test_the_page_goes_beside_the_run(problem):
    run, task, query, test = problem
    study = lo.Study(run, task, query)
    study.score(lo.SGDIE())
    assert study.report(overwrite=True) == run.path / "report.html"
    assert study.cleanse(test_set=test, remove=4, random=0).table["removed"].tolist() == [0, 4]


WRONG = {
    "a loader": (lambda run, task, query: lo.Study(run, task, DataLoader(query)), "dataset-expected", "loader.dataset"),
    "a tensor": (lambda run, task, query: lo.Study(run, task, query[0][0]), "dataset-expected", "TensorDataset(inputs"),
    "a pair": (lambda run, task, query: lo.Study(run, task, tuple(query[0])), "dataset-expected", "TensorDataset(*"),
    "a task first": (lambda run, task, query: lo.Study(task, run, query), "run-expected", "not a Task"),
    "a model second": (lambda run, task, query: lo.Study(run, task.model, query), "task-expected", "not a Linear"),
    "a name": (lambda run, task, query: lo.Study(run, task, query).score("acc"), "estimator-expected", "lo.ACC()"),
    "a class": (
        lambda run, task, query: lo.Study(run, task, query).score(lo.SGDIE),
        "estimator-expected",
        "lo.SGDIE()",
    ),
    "no scores": (lambda run, task, query: lo.Study(run, task, query).verify("acc"), "scores-expected", "not a str"),
    "a training loader": (
        lambda run, task, query: lo.Task(task.model, task.loss, DataLoader(query)),
        "dataset-expected",
        "loader.dataset",
    ),
    "loss and model": (
        lambda run, task, query: lo.Task(task.loss, task.model, query),
        "model-expected",
        "CrossEntropy",
    ),
    "data first": (lambda run, task, query: lo.Task(query, task.model, task.loss), "model-expected", "not an Examples"),
    "a loss class": (lambda run, task, query: lo.Task(task.model, nn.MSELoss, query), "loss-expected", "MSELoss()"),
    "a loss name": (lambda run, task, query: lo.Task(task.model, "mse", query), "loss-expected", "not a str"),
    "parameters": (lambda run, task, query: recorder(task.model.parameters()), "model-expected", "not a generator"),
    "an optimizer class": (
        lambda run, task, query: recorder(task.model, torch.optim.SGD),
        "optimizer-expected",
        "the class SGD",
    ),
}


def recorder(model, optimizer=None):
    return lo.Recorder("nowhere", model, optimizer or torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


@pytest.mark.parametrize("name", WRONG)
def test_what_a_newcomer_gets_wrong_is_said_with_the_remedy(problem, name, untyped):
    ask, code, words = WRONG[name]
    with refused(lo.InputError, code, words):
        ask(*problem[:3])


def test_a_task_says_what_it_is(problem):
    assert repr(problem[1]) == "Task(Linear, CrossEntropyLoss, 80 training examples)"
