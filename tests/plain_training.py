"""Plain PyTorch training that really leaves examples out, for runs with everything that real runs have.

Nothing here uses leaveout. Dropout draws its mask for the whole batch, as the recorded run did, and then takes the rows
that are there; an example that is left out of the statistics is really taken out of the batch.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class RowDropout(nn.Module):
    """``nn.Dropout`` with masks for all rows of the recorded batch, of which ``rows`` are there."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.rows, self.count = p, None, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        whole = x.new_empty((self.count, *x.shape[1:]))
        return x * whole.bernoulli_(1 - self.p).div_(1 - self.p)[self.rows]


class WeightedNorm(nn.Module):
    """BatchNorm with a weight for every row, written out: what a fraction of an example in the statistics means."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.norm, self.weights = norm, None

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not self.training:
            return norm(x)
        w = self.weights.view(-1, *[1] * (x.ndim - 1))
        dims = [0, *range(2, x.ndim)]
        n = self.weights.sum() * x[0, 0].numel()
        mean = (w * x).sum(dims, keepdim=True) / n
        var = (w * (x - mean) ** 2).sum(dims, keepdim=True) / n
        with torch.no_grad():
            norm.num_batches_tracked += 1
            share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean.flatten(), share)
            norm.running_var.lerp_((var * n / (n - 1)).flatten(), share)
        y = (x - mean) / (var + norm.eps).sqrt()
        shape = [1, -1, *[1] * (x.ndim - 2)]
        return y if norm.weight is None else y * norm.weight.view(shape) + norm.bias.view(shape)


def with_row_dropout(model: nn.Module, weighted: bool = False) -> nn.Module:
    """Return a copy in which every ``nn.Dropout`` is a ``RowDropout``; with ``weighted``, BatchNorm has weights."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, RowDropout(child.p))
            elif weighted and isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(module, name, WeightedNorm(child))
    return model


class Case:
    """One way of training: a model, its data, and the loop."""

    def __init__(
        self,
        model: nn.Module,
        data: list[Tensor],
        *,
        optimizer=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        total=None,
        counts=None,
        batch: int = 4,
        window: int = 1,
        epochs: int = 2,
        clip_norm=None,
        clip_value=None,
        divide: str = "mean",
        leave: str = "leave",
        turn=lambda model, step: None,
        to_none: bool = True,
    ) -> None:
        self.model, self.data, self.optimizer = model, data, optimizer
        self.total = total or (lambda out, y: F.cross_entropy(out, y, reduction="none"))
        self.counts = counts or (lambda y: torch.ones(len(y), dtype=torch.float64))
        self.batch, self.window, self.epochs = batch, window, epochs
        self.clip_norm, self.clip_value, self.divide, self.leave = clip_norm, clip_value, divide, leave
        self.turn, self.to_none = turn, to_none

    def batches(self) -> list[list[list[int]]]:
        """The ids of every micro-batch of every step."""
        order = torch.Generator().manual_seed(7)
        steps = []
        for _ in range(self.epochs):
            parts = [part.tolist() for part in torch.randperm(len(self.data[0]), generator=order).split(self.batch)]
            steps += [parts[i : i + self.window] for i in range(0, len(parts), self.window)]
        return steps

    def train(self, out: int | None = None, weight: float = 0.0, steps: int | None = None, start=None) -> nn.Module:
        """Train with one example left out, or its weight changed; the seed of the forward passes is fixed."""
        weighted = weight != 0 and self.leave == "leave"
        model = with_row_dropout(self.model if start is None else start, weighted)
        model.train()
        optimizer = self.optimizer(model.parameters())
        torch.manual_seed(5)
        for number, parts in enumerate(self.batches()[:steps]):
            self.turn(model, number)
            optimizer.zero_grad(set_to_none=self.to_none)
            window = sum(float(self.counts(self.data[-1][ids]).sum()) for ids in parts)
            for ids in parts:
                self.backward(model, ids, out, weight, len(parts), window)
            if self.clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), self.clip_value)
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), *self.clip_norm)
            optimizer.step()
        return model

    def backward(self, model, ids, out, weight, parts, window) -> None:
        rows = torch.arange(len(ids))
        weights = torch.ones(len(ids), dtype=torch.float64)
        if out in ids and self.leave == "leave" and weight == 0:
            rows = rows[torch.tensor(ids) != out]  # really taken out of the batch
        weights[torch.tensor(ids) == out] = weight if out in ids else 1.0
        for module in model.modules():
            if isinstance(module, RowDropout):
                module.rows, module.count = rows, len(ids)
            if isinstance(module, WeightedNorm):
                module.weights = weights
        x, y = self.data[0][ids], self.data[-1][ids]
        own = float(self.counts(y).sum())
        factor = {"mean": own * parts, "sum": own, "window": window, "one": 1.0, "fixed": own * self.window}[
            self.divide
        ]
        (weights[rows] * self.total(model(x[rows]), y[rows])).sum().div(factor).backward()

    def record(self, path, stop: int | None = None, **options):
        """The same training as a user would write it, recorded; the model is trained in place.

        With ``stop`` the loop fails before that step; ``resume=True`` then goes on with it.
        """
        import leaveout as lo

        model = self.model
        model.train()
        optimizer = self.optimizer(model.parameters())
        data = torch.utils.data.TensorDataset(*self.data)
        with lo.Recorder(path, model, optimizer, **options) as recorder:
            torch.manual_seed(5)
            for number, parts in enumerate(self.batches()):
                self.turn(model, number)
                if number < recorder.done:
                    continue
                if number == stop:
                    raise KeyboardInterrupt
                optimizer.zero_grad(set_to_none=self.to_none)
                window = sum(float(self.counts(self.data[-1][ids]).sum()) for ids in parts)
                for ids in parts:
                    x, y = (tensor[ids] for tensor in self.data)
                    own = float(self.counts(y).sum())
                    factor = {
                        "mean": own * len(parts),
                        "sum": own,
                        "window": window,
                        "one": 1.0,
                        "fixed": own * self.window,
                    }[self.divide]
                    recorder.step(ids, [x, y], epoch=number // max(1, len(self.batches()) // self.epochs))
                    self.total(model(x), y).sum().div(factor).backward()
                if self.clip_value is not None:
                    nn.utils.clip_grad_value_(model.parameters(), self.clip_value)
                if self.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), *self.clip_norm)
                optimizer.step()
            run = recorder.finish()
        return run, data
