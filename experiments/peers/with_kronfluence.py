"""kronfluence: influence functions with EK-FAC."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from estimate import Estimate, timed
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from subjects import DECAY, Subject
from torch import Tensor, nn


class Objective(Task):
    """The subject's loss, summed over the batch."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        """Sum the losses; with ``sample``, of targets drawn from the model's own distribution."""
        x, y = batch
        outputs = model(x)
        if sample:
            with torch.no_grad():
                if self.subject.binary:
                    y = torch.bernoulli(outputs.sigmoid())
                else:
                    y = torch.distributions.Categorical(logits=outputs.movedim(1, -1)).sample()
        return self.subject.losses(outputs, y).sum()

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        """Sum the query's losses."""
        return self.compute_train_loss(batch, model)


def estimates(subject: Subject) -> Iterator[Estimate]:
    """EK-FAC with the default damping (a tenth of the mean eigenvalue), and with the weight decay as damping."""
    yield timed("EK-FAC", "default", lambda: _scored(subject, ScoreArguments()))
    decay = ScoreArguments(damping_factor=DECAY)
    yield timed("EK-FAC", f"damping {DECAY:g}", lambda: _scored(subject, decay))


def _scored(subject: Subject, arguments: ScoreArguments) -> Tensor:
    task = Objective(subject)
    model = prepare_model(subject.copied(), task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("peers", model, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", subject.train, factor_args=FactorArguments(strategy="ekfac"))
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            subject.query,
            subject.train,
            per_device_query_batch_size=min(50, len(subject.query)),
            per_device_train_batch_size=min(100, len(subject.train)),
            score_args=arguments,
        )
        pairs = analyzer.load_pairwise_scores("scores")["all_modules"]
    return pairs.mean(0) / len(subject.train)
