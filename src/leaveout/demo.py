"""The main job on the digits that scikit-learn ships: train, record, score, verify, and find the flipped labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from leaveout import data
from leaveout.beside import Beside
from leaveout.cleanse import Curve, cleanse
from leaveout.estimators import ACC, SGDIE
from leaveout.report import Show, report
from leaveout.resources import Resources
from leaveout.scores import Scores
from leaveout.store import Run
from leaveout.task import Task
from leaveout.train import train
from leaveout.verify import Check, verify

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

    def found(self, method: str) -> int:
        """How many of the flipped labels are among as many most harmful examples."""
        return len(self.flipped & set(self.scores[method].harmful(len(self.flipped))))


def run_demo(out: Path, *, examples: int = 500, replays: int = 64, resources: Resources | None = None) -> Demo:
    """Trains a small network on digits with a tenth of the labels flipped, and asks who did the harm.

    The run goes to the new directory ``out``, with scores, checks, cleansing curve and report beside it.
    """
    digits = data.load("digits", n_train=examples, n_val=400)
    noisy = data.flip(digits.train, 0.1, seed=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    task = Task(model, nn.CrossEntropyLoss(), noisy.examples, l2=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    run = train(task, optimizer, epochs=15, batch_size=50, seed=0, out=out, resources=resources)
    scores, checks, beside = {}, {}, Beside(out)
    for estimator in (SGDIE(readout="exact"), ACC("exact", readout="exact")):
        found = estimator.score(run, task, digits.val, queries="each", resources=resources)
        scores[found.method] = found
        file = found.save(beside.scores(found.method))
        checks[found.method] = verify(found, run, task, digits.val, replays=replays, resources=resources)
        checks[found.method].save(beside.check(file))
    curve = cleanse(found, run, task, digits.test, [m for m in REMOVED if m < examples], resources=resources)
    curve.save(beside.cleanse)
    show = Show(example=lambda example: example[0].reshape(8, 8), title="Digits, a tenth of the labels flipped")
    page = report(
        beside.report,
        run,
        found,
        checks[found.method],
        curve,
        task=task,
        query=digits.val,
        show=show,
        resources=resources,
    )
    flipped = frozenset(noisy.touched.nonzero().flatten().tolist())
    return Demo(run, scores, checks, curve, page, flipped, noisy.examples.y.tolist(), digits.train.y.tolist())
