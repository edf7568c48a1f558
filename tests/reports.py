"""Small runs with reports that the tests share: pictures with a column per query, texts, and rows with groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo

EVIL = "<script>window.hacked=1</script>"
CLASSES = (EVIL, '=SUM(1,2)"', "<img src=x onerror=window.hacked=2>", "</script><b>bold", *"456789")
FEATURES = ("age", "a_long_name_that_has_not_a_single_space_in_it", "gain", "<i>loss</i>", "years")


@dataclass(frozen=True)
class Reported:
    path: Path
    run: lo.Run
    task: lo.Task
    query: TensorDataset
    scores: lo.Scores
    check: lo.Check | None = None

    @property
    def mean(self) -> torch.Tensor:
        """The scores as the page shows them: replayed values in place of estimates."""
        values = self.scores.mean().double().clone()
        for name, row in self.check.table.iterrows() if self.check else ():
            values[self.scores.train_ids.index(name)] = row["truth"]
        return values

    def harmful(self, k: int) -> list[int]:
        order = self.mean.argsort(stable=True).tolist()
        return [i for i in order if self.mean[i] < 0][:k]

    def helpful(self, k: int) -> list[int]:
        order = self.mean.argsort(stable=True, descending=True).tolist()
        return [i for i in order if self.mean[i] > 0][:k]


def trained(folder: Path, model: nn.Module, loss, train, *, lr: float = 0.5, epochs: int = 4, seed: int = 0):
    task = lo.Task(model, loss, train)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return lo.train(task, optimizer, epochs=epochs, batch_size=20, seed=seed, out=folder / "run"), task


def pictures(folder: Path, *, several: bool = False) -> Reported:
    """Digits with flipped labels, class names that would like to be markup, and a column for each query."""
    digits = lo.data.load("digits", n_train=160, n_val=12)
    noisy = lo.data.flip(digits.train, 0.15, seed=1).examples
    torch.manual_seed(0)
    run, task = trained(folder, nn.Linear(64, 10), nn.CrossEntropyLoss(), noisy)
    scores = lo.ACC().score(run, task, digits.val, queries="each")
    check = lo.verify(scores, run, task, digits.val, replays=16)
    curve = lo.cleanse(scores, run, task, digits.test, remove=[5, 20, 40], random=2)
    show = lo.Show(example=lambda e: e[0].reshape(8, 8), classes=CLASSES, title=f"Digits {EVIL}", top=10)
    every = [scores, lo.TracIn().score(run, task, digits.val)] if several else scores
    path = lo.report(folder / "report.html", run, every, check, curve, task=task, query=digits.val, show=show)
    return Reported(path, run, task, digits.val, scores, check)


def texts(folder: Path) -> Reported:
    """Bags of words that stand for texts; scores that nobody verified."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(60, 8, generator=generator) > 0.6).float()
    y = (x[:, 0] + x[:, 1] > x[:, 2] + 0.5).float()
    y[:6] = 1 - y[:6]
    words = [" ".join(f"word{j}" for j in row.nonzero().flatten().tolist()) for row in x]
    words = [f"{text} {EVIL} " + "long " * 200 if i % 10 == 0 else text for i, text in enumerate(words)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))
    run, task = trained(folder, model, nn.BCEWithLogitsLoss(), TensorDataset(x[:40], y[:40]))
    query = TensorDataset(x[40:], y[40:])
    scores = lo.SGDIE().score(run, task, query)
    show = lo.Show(train=words[:40], query=words[40:], classes=("ham", EVIL), title="Messages")
    path = lo.report(folder / "report.html", run, scores, task=task, query=query, show=show)
    return Reported(path, run, task, query, scores)


def table(folder: Path, *, left_out: str = "examples", queries: str = "mean") -> Reported:
    """Rows with feature names, a number to predict, and groups; scores of examples or of the groups themselves."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 5, generator=generator)
    y = x @ torch.tensor([1.0, -1.0, 0.5, 0.0, 0.2]) + 0.1 * torch.randn(50, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    run, task = trained(folder, model, nn.MSELoss(), TensorDataset(x[:40], y[:40]), lr=0.05)
    query = TensorDataset(x[40:], y[40:])
    groups = {f"source {EVIL}": list(range(15)), "source b": list(range(15, 40))}
    given = groups if left_out == "groups" else None
    estimator = lo.Replay() if given else lo.SGDIE()
    scores = estimator.score(run, task, query, groups=given, queries=queries)
    show = lo.Show(features=FEATURES, groups=groups)
    path = lo.report(folder / "report.html", run, scores, task=task, query=query, show=show)
    return Reported(path, run, task, query, scores)
