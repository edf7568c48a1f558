"""pyDVL: influence functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from estimate import Estimate, timed
from pydvl.influence.torch import CgInfluence, DirectInfluence, NystroemSketchInfluence
from subjects import DECAY, Subject
from torch import Tensor
from torch.utils.data import DataLoader


def estimates(subject: Subject) -> Iterator[Estimate]:
    """Direct solution where the Hessian fits, conjugate gradients and a Nyström sketch elsewhere."""
    small = sum(p.numel() for p in subject.model.parameters()) < 3000

    def scored(kind: type, **options: object) -> Tensor:
        torch.manual_seed(0)
        mean = lambda outputs, targets: subject.losses(outputs, targets).mean()  # noqa: E731
        tool = kind(subject.copied(), mean, **options).fit(DataLoader(subject.train, batch_size=100))
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
    elif subject.settings["model"] == "mlp":
        options = {"regularization": 0.1, "maxiter": 50, "solve_simultaneously": True, "warn_on_max_iteration": False}
        yield timed("CgInfluence", "damping 0.1, 50 iterations", lambda: scored(CgInfluence, **options))
