"""TRAK, of the one recorded model."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator

import torch
from estimate import Estimate, timed
from subjects import Subject
from torch import Tensor, nn
from trak import TRAKer
from trak.modelout_functions import AbstractModelOutput


class LogOdds(AbstractModelOutput):
    """log(p / (1 - p)), p the probability of the target: e to the minus loss."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def get_output(
        self, model: nn.Module, weights: Iterable[Tensor], buffers: Iterable[Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        """Return the log odds of one example."""
        outputs = torch.func.functional_call(model, (weights, buffers), x.unsqueeze(0))
        loss = self.subject.losses(outputs, y.unsqueeze(0)).sum()
        return -loss - torch.log(-torch.expm1(-loss.clamp_min(1e-6)))

    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Iterable[Tensor], buffers: Iterable[Tensor], batch: Iterable[Tensor]
    ) -> Tensor:
        """Return 1 - p for each example."""
        x, y = batch
        outputs = torch.func.functional_call(model, (weights, buffers), x)
        return (1 - torch.exp(-self.subject.losses(outputs, y))).clone().detach().unsqueeze(-1)


def estimates(subject: Subject) -> Iterator[Estimate]:
    """TRAK as it comes (2,048 dimensions), and with a ridge and queries weighted by dloss/doutput.

    The ridge was the best of five tried on seed 0 of two subjects.
    """
    yield timed("TRAK", "default", lambda: _scored(subject).mean(1), unit=False)

    def weighted() -> Tensor:
        x, y = subject.query.tensors
        with torch.no_grad():
            missing = 1 - torch.exp(-subject.losses(subject.model(x), y))
        return _scored(subject, proj_dim=512, use_half_precision=False, lambda_reg=40.0).double() @ missing.double()

    yield timed("TRAK", "512 dimensions, float32, ridge 40, queries weighted by 1 - p", weighted, unit=False)


def _scored(subject: Subject, **options: object) -> Tensor:
    model, n, q = subject.copied(), len(subject.train), len(subject.query)
    with tempfile.TemporaryDirectory() as folder:
        tool = TRAKer(
            *(model, LogOdds(subject), n, folder),
            device="cpu",
            logging_level=logging.ERROR,
            **{"proj_dim": 2048, **options},
        )
        tool.load_checkpoint(model.state_dict(), model_id=0)
        for rows in torch.arange(n).split(50):
            tool.featurize(batch=subject.train[rows], num_samples=len(rows))
        tool.finalize_features()
        tool.start_scoring_checkpoint("query", model.state_dict(), model_id=0, num_targets=q)
        for rows in torch.arange(q).split(50):
            tool.score(batch=subject.query[rows], num_samples=len(rows))
        return torch.as_tensor(tool.finalize_scores("query")).clone()
