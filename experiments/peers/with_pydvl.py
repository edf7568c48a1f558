"""pyDVL: influence functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from estimate import Estimate, timed
from pydvl.influence.torch import CgInfluence, DirectInfluence, NystroemSketchInfluence, SecondOrderMode
from subjects import DECAY, Subject
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader


def estimates(subject: Subject) -> Iterator[Estimate]:
    """A Nyström sketch, and a direct solution where the Hessian fits; conjugate gradients or other curvature elsewhere.

    Attention takes its plain form: the fused kernel has no second derivative.
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield from _estimates(subject)


def _estimates(subject: Subject) -> Iterator[Estimate]:
    small, kind_of_model = sum(p.numel() for p in subject.model.parameters()) < 3000, subject.settings["model"]
    batch = 20 if kind_of_model == "gpt" else 100  # a batch is worked on for all vectors of a sketch at once

    def scored(kind: type, **options: object) -> Tensor:
        torch.manual_seed(0)
        mean = lambda outputs, targets: subject.losses(outputs, targets).mean()  # noqa: E731
        tool = kind(subject.copied(), mean, **options).fit(DataLoader(subject.train, batch_size=batch))
        chunks = torch.arange(len(subject.query)).split(50)
        pieces = [tool.influences(*subject.query[rows], *subject.train.tensors) for rows in chunks]
        return torch.cat(pieces).mean(0) / len(subject.train)

    sketch = {"rank": 50, "regularization": DECAY}
    yield timed(
        "NystroemSketchInfluence", f"rank 50, damping {DECAY:g}", lambda: scored(NystroemSketchInfluence, **sketch)
    )
    if small:
        options = {"regularization": DECAY}
        yield timed("DirectInfluence", "regularised by the weight decay", lambda: scored(DirectInfluence, **options))
    elif kind_of_model == "mlp":
        options = {"regularization": 0.1, "maxiter": 50, "solve_simultaneously": True, "warn_on_max_iteration": False}
        yield timed("CgInfluence", "damping 0.1, 50 iterations", lambda: scored(CgInfluence, **options))
    else:
        outer = {"rank": 500, "regularization": DECAY, "second_order_mode": SecondOrderMode.GAUSS_NEWTON}
        words = f"outer products of gradients, rank 500, damping {DECAY:g}"
        yield timed("NystroemSketchInfluence", words, lambda: scored(NystroemSketchInfluence, **outer))
