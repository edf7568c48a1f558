"""The main job on the digits that scikit-learn ships: train, record, score, verify, and find the flipped labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from leaveout.builtin.config import Config, DataPart, ModelPart, OptimizerPart, TrainPart, run_config
from leaveout.compute.resources import Resources
from leaveout.estimators import ACC, SGDIE
from leaveout.evaluate.check import Check
from leaveout.evaluate.cleanse import cleanse
from leaveout.evaluate.curve import Curve
from leaveout.evaluate.label_issues import Labels
from leaveout.evaluate.labels import labels as find_labels
from leaveout.evaluate.verify import verify
from leaveout.reporting.show import built_in
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.study.report import report

REMOVED = (5, 10, 20, 30, 40, 50, 75, 100)


@dataclass(frozen=True)
class Demo:
    """What the demo found."""

    run: Run
    scores: dict[str, Scores]
    checks: dict[str, Check]
    curve: Curve
    page: Path
    flipped: frozenset[int]
    labels: list[int]
    truth: list[int]
    issues: Labels

    def caught(self, method: str) -> int:
        """Count the flipped labels among as many most harmful examples."""
        return len(self.flipped & set(self.scores[method].harmful(len(self.flipped))))


def run_demo(out: Path, *, examples: int = 500, replays: int = 64, resources: Resources | None = None) -> Demo:
    """Train a small network on digits with a tenth of the labels flipped, and find which examples did harm.

    The run goes to the new directory ``out``, with its config, scores, checks, cleansing curve and report beside it.
    """
    plan = Config(
        DataPart("digits", examples, 400, flip=0.1),
        ModelPart("mlp", hidden=[16], activation="tanh"),
        OptimizerPart("sgd", lr=0.2, momentum=0.5),
        TrainPart(epochs=15, batch_size=50, l2=1e-3),
    )
    run, subject = run_config(plan, out, resources)
    task, query, digits = subject.task, subject.query, subject.data
    assert digits is not None  # noqa: S101 - a config names its data
    scores, checks, paths = {}, {}, RunPaths(out)
    for estimator in (SGDIE(readout="exact"), ACC("exact", readout="exact")):
        result = estimator.score(run, task, query, queries="each", resources=resources)
        scores[result.method] = result
        file = result.save(paths.scores(result.method, "each"))
        checks[result.method] = verify(result, run, task, query, replays=replays, resources=resources)
        checks[result.method].save(paths.check(file))
    issues = find_labels(run, task, classes=digits.classes, resources=resources)
    issues.save(paths.labels)
    most = min(result.harmful_count, len(issues))
    removed = [m for m in REMOVED if m <= most] or list(REMOVED[:1])
    curve = cleanse([issues, result], run, task, digits.test, removed, resources=resources)
    curve.save(paths.cleanse)
    page = report(
        paths.report,
        run,
        list(scores.values())[::-1],
        list(checks.values()),
        curve,
        labels=issues,
        task=task,
        query=query,
        show=replace(built_in(digits), title="Digits, a tenth of the labels flipped"),
        resources=resources,
    )
    labels = [int(task.train_set[i][1]) for i in range(examples)]
    return Demo(run, scores, checks, curve, page, frozenset(subject.flipped), labels, digits.train.y.tolist(), issues)
