"""captum: TracInCP and influence functions."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from captum.influence import TracInCP
from captum.influence._core.arnoldi_influence_function import ArnoldiInfluenceFunction
from captum.influence._core.influence_function import NaiveInfluenceFunction
from estimate import Estimate, timed
from subjects import DECAY, Subject
from torch import Tensor, nn


class SumOfMeans(nn.Module):
    """A batch's loss as captum differentiates it: examples add up, an example's own tokens are averaged."""

    def __init__(self, subject: Subject, reduction: str) -> None:
        super().__init__()
        self.losses, self.reduction = subject.losses, reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one number, or one per example where the reduction is ``"none"``."""
        losses = self.losses(outputs, targets)
        return losses if self.reduction == "none" else losses.sum()


def estimates(subject: Subject) -> Iterator[Estimate]:
    """TracInCP over the epochs' checkpoints, influence functions where the model is small enough for their Hessian."""
    model, states = subject.copied(), subject.checkpoints()
    numbered = {str(place): state for place, state in enumerate(states)}
    rate = subject.settings["lr"] / subject.settings["batch"]

    def load(model: nn.Module, name: str) -> float:
        model.load_state_dict({key: copy.deepcopy(value) for key, value in numbered[name].items()})
        return rate

    quick = subject.settings["model"] != "gpt"  # per-example gradients by hooks: linear and convolutional layers only
    loss = SumOfMeans(subject, "sum" if quick else "none")
    common = {"checkpoints_load_func": load, "loss_fn": loss, "sample_wise_grads_per_batch": quick}
    x, y = subject.query.tensors

    def tracin(names: list[str]) -> Tensor:
        tool = TracInCP(model, subject.train, names, batch_size=64 if quick else 1, **common)
        return tool.influence((x, y), show_progress=False).mean(0)

    yield timed("TracInCP", "a checkpoint per epoch", lambda: tracin(list(numbered)))
    if subject.settings["model"] not in ("logistic", "mlp"):
        return  # Arnoldi's iteration takes 200 products with the Hessian: on the CNN it had not ended after six minutes
    last = str(len(states) - 1)

    def influence(kind: type, **options: float) -> Tensor:
        torch.manual_seed(0)
        tool = kind(model, subject.train, last, batch_size=len(subject.train), **common, **options)
        return tool.influence((x, y)).mean(0)

    yield timed("ArnoldiInfluenceFunction", "default", lambda: influence(ArnoldiInfluenceFunction))
    small = sum(p.numel() for p in model.parameters()) < 3000
    if small:
        yield timed("NaiveInfluenceFunction", "default", lambda: influence(NaiveInfluenceFunction))
        whole = {"projection_dim": 3000, "hessian_reg": DECAY * len(subject.train)}
        yield timed(
            "NaiveInfluenceFunction",
            "all eigenvectors, regularised by the weight decay",
            lambda: influence(NaiveInfluenceFunction, **whole),
        )
