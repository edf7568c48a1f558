"""Training programs drawn at random: a model, a loss, an optimizer and a loop, each a plain PyTorch loop.

A program is trained in two ways that share the loop: as a user would write it, recorded; and with a weight for every
example, by whose change the effect of leaving one out is known. Nothing of leaveout is in the latter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import leaveout as lo
from plain_training import WeightedNorm
from random_layers import FRONTS, LENGTH, PICTURE, SMOOTH, TEXT, VECTOR, WORDS, Net

COUNT, CLASSES = 14, 3
WEIGHT = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.2),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.05),
    "Nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
    "AMSGrad": lambda p: torch.optim.Adam(p, 0.02, eps=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.02, eps=1e-3, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.02, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.02, eps=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.02, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, eps=1e-3, lr_decay=0.1, initial_accumulator_value=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0, eps=1e-3),
}


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return not {"momentum", "betas"}.isdisjoint(optimizer.defaults)


SCHEDULES = {
    "none": None,
    "steps": lambda o, steps: StepLR(o, 2, 0.5),
    "cosine": lambda o, steps: CosineAnnealingLR(o, steps),
    "warm-up": lambda o, steps: LambdaLR(o, lambda i: min(1.0, (i + 1) / 3)),
    "one cycle": lambda o, steps: OneCycleLR(
        o, [1.5 * g["lr"] for g in o.param_groups], steps + 1, cycle_momentum=_has_momentum(o)
    ),
}


def classes(order: torch.Generator, count: int) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=order)


def numbers(order: torch.Generator, count: int) -> Tensor:
    return torch.rand(count, CLASSES, dtype=torch.float64, generator=order)


def shares(order: torch.Generator, count: int) -> Tensor:
    return numbers(order, count).softmax(1)


def words(order: torch.Generator, count: int) -> Tensor:
    """Texts of different lengths, filled up with zeros; the third is empty."""
    tokens = torch.randint(1, WORDS, (count, LENGTH), generator=order)
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=order)
    lengths[2] = 0
    return tokens * (torch.arange(LENGTH) < lengths)


def following(order: torch.Generator, count: int) -> Tensor:
    tokens = words(order, count)
    return torch.where(tokens > 0, tokens, -100)


class Loss(NamedTuple):
    """A loss as users have it, the same for every example, and what each counts in the denominator."""

    given: Any
    each: Callable[[Tensor, Tensor], Tensor]
    counts: Callable[[Tensor], Tensor] = lambda y: torch.ones(len(y), dtype=torch.float64)
    targets: Callable[[torch.Generator, int], Tensor] = classes
    summed: bool = False

    def batch(self, out: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch, as users compute it."""
        value = self.given(out.mT if out.ndim == 3 else out, y)
        if isinstance(value, tuple):
            return value[0].sum() / value[1].sum()
        return value.mean()


def entries(function: Callable, **options: Any) -> Callable:
    return lambda out, y: function(out, y, reduction="none", **options).mean(1)


def focal(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(out, y, reduction="none")
    return loss * (1 - (-loss).exp()) ** 2


def unsure(out: Tensor, y: Tensor) -> Tensor:
    logs = out.log_softmax(1)
    return F.nll_loss(logs, y, reduction="none") + 0.1 * (logs.exp() * logs).sum(1)


def soft(out: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(out.log_softmax(1), y, reduction="none").sum(1)


def similar(out: Tensor, y: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(out, y - 0.5, dim=1)


def importance(y: Tensor) -> Tensor:
    return (y[:, 0] > 0.3).double() + 0.5


def pairs(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return importance(y) * (out - y).square().sum(1), importance(y)


def tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.mT, y, ignore_index=-100, reduction="none").sum(1) / kept(y).clamp(min=1)


def kept(y: Tensor) -> Tensor:
    return (y != -100).sum(1).double()


CE = partial(F.cross_entropy, reduction="none")
LOGISTIC = F.binary_cross_entropy_with_logits
LOSSES = {
    "CE": Loss(nn.CrossEntropyLoss(), CE),
    "CE, function": Loss(F.cross_entropy, CE),
    "CE, smoothed": Loss(nn.CrossEntropyLoss(label_smoothing=0.2), partial(CE, label_smoothing=0.2)),
    "CE, weights": Loss(nn.CrossEntropyLoss(WEIGHT), CE, lambda y: WEIGHT[y]),
    "CE, both": Loss(
        nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1),
        lambda out, y: CE(out, y, WEIGHT, label_smoothing=0.1) / WEIGHT[y],
        lambda y: WEIGHT[y],
    ),
    "CE, sum": Loss(nn.CrossEntropyLoss(reduction="sum"), CE, summed=True),
    "CE, shares": Loss(nn.CrossEntropyLoss(), CE, targets=shares),
    "BCE": Loss(nn.BCEWithLogitsLoss(), entries(LOGISTIC), targets=numbers),
    "BCE, weights": Loss(
        nn.BCEWithLogitsLoss(pos_weight=WEIGHT), entries(LOGISTIC, pos_weight=WEIGHT), targets=numbers
    ),
    "MSE": Loss(nn.MSELoss(), entries(F.mse_loss), targets=numbers),
    "Huber": Loss(nn.HuberLoss(delta=0.5), entries(F.huber_loss, delta=0.5), targets=numbers),
    "Poisson": Loss(nn.PoissonNLLLoss(), entries(F.poisson_nll_loss), targets=numbers),
    "focal": Loss(focal, focal),
    "unsure": Loss(unsure, unsure),
    "KL": Loss(soft, soft, targets=shares),
    "cosine": Loss(similar, similar, targets=numbers),
    "pairs": Loss(pairs, lambda out, y: (out - y).square().sum(1), importance, numbers),
}
TOKENS = {
    "tokens": Loss(nn.CrossEntropyLoss(), tokens, kept, following),
    "tokens, sum": Loss(nn.CrossEntropyLoss(reduction="sum"), tokens, kept, following, summed=True),
}


class Examples(Dataset):
    """Inputs and targets; numbers and pictures may be noisy anew each time they are read."""

    def __init__(self, program: Program, count: int, seed: int, noise: float = 0.0) -> None:
        order = torch.Generator().manual_seed(seed)
        sizes = {"numbers": (5,), "picture": (1, 6, 6)}
        self.y, self.noise = program.loss.targets(order, count), noise
        if program.front in sizes:
            self.x = torch.randn(count, *sizes[program.front], dtype=torch.float64, generator=order)
        else:
            self.x = words(order, count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + self.noise * torch.randn_like(self.x[i]) if self.noise else self.x[i], self.y[i]


class Program:
    """A program; ``str`` says what was drawn. Some of it may be given instead."""

    def __init__(self, seed: int, **given: Any) -> None:
        draw = self.draw = random.Random(seed)
        self.seed, self.front = seed, draw.choice(FRONTS)
        self.is_tokens = self.front == "tokens"
        self.loss_name = draw.choice(list(TOKENS if self.is_tokens else LOSSES))
        self.loss = (TOKENS if self.is_tokens else LOSSES)[self.loss_name]
        self.act = draw.choice(SMOOTH)
        kinds = {"picture": PICTURE, "text": TEXT, "tokens": TEXT}.get(self.front, {})
        self.layers = draw.sample(list(kinds), draw.randint(1, 2)) if kinds else []
        vectors = [name for name in VECTOR if not (self.is_tokens and name.startswith("BatchNorm"))]
        self.body = draw.sample(vectors, draw.randint(1, 3))
        self.choice = draw.randint(0, 1)
        self.optimizer_name, self.schedule = draw.choice(list(OPTIMIZERS)), draw.choice(list(SCHEDULES))
        self.groups = draw.random() < 0.3
        self.clip_norm = draw.choice([None, None, None, 0.3, 1.0, (0.5, 1.0), (0.1, math.inf)])
        self.clip_value = draw.choice([None, None, None, 0.02])
        self.window, self.divide = draw.choice([(1, "mean")] * 3 + [(2, "mean"), (2, "sum"), (2, 2), (3, "window")])
        plain = self.loss.counts is Loss._field_defaults["counts"] and not self.loss.summed
        self.l2 = draw.choice([0.0, 0.0, 0.05]) if plain and self.divide == "mean" else 0.0
        self.batch, self.epochs, self.again = draw.choice([2, 3, 5]), 2, draw.random() < 0.15
        self.noise = draw.choice([0.0, 0.0, 0.0, 0.2]) if self.front in ("numbers", "picture") else 0.0
        self.watched, self.to_none = draw.random() < 0.5 or self.noise > 0, draw.random() < 0.8
        self.looks = draw.random() < 0.3
        self.turn = draw.choice([None, None, None, "freeze", "freeze for a while", "evaluation mode"])
        self.average = draw.choice([None, None, None, "EMA", "SWA"])
        self.statistics = draw.choice(["leave", "stay"])
        self.keep = draw.choice(["auto", "all", 3])
        self.trace = draw.random() < 0.25  # traces take longer than such a program
        vars(self).update(given)
        if self.loss.summed and self.divide == "window":  # a sum is divided by nothing
            self.divide = "sum"
        self.leaves_norm = self.statistics == "leave" and any(
            "BatchNorm" in name for name in (*self.layers, *self.body)
        )
        if self.leaves_norm:  # of two rows, leaving one out leaves no variance
            self.batch = max(self.batch, 3)
        self.data, self.query = Examples(self, COUNT, 2 * seed, self.noise), Examples(self, 4, 2 * seed + 1)

    def __str__(self) -> str:
        hidden = ("draw", "loss", "data", "query")
        return ", ".join(f"{key}={value}" for key, value in vars(self).items() if key not in hidden)

    def model(self) -> nn.Module:
        """Build the model, always with the same weights."""
        torch.manual_seed(self.seed)
        kinds = PICTURE if self.front == "picture" else TEXT
        layers, body = ([kinds[name](self.act) for name in self.layers], [VECTOR[name](self.act) for name in self.body])
        return Net(self.front, layers, body, WORDS if self.is_tokens else CLASSES, self.choice).double().train()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer, over one group of parameters or two."""
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[self.optimizer_name](trained)
        if self.groups:
            moved = optimizer.param_groups[0]["params"]
            optimizer.param_groups[0]["params"] = moved[:2]
            optimizer.add_param_group({"params": moved[2:], "lr": optimizer.param_groups[0]["lr"] / 2})
        return optimizer

    def windows(self) -> list[list[list[int]]]:
        """The ids of every micro-batch of every step; an example may be in a batch twice."""
        order, steps = torch.Generator().manual_seed(self.seed), []
        for _ in range(self.epochs):
            if self.again:
                ids = torch.randint(COUNT, (COUNT,), generator=order)
            else:
                ids = torch.randperm(COUNT, generator=order)
            parts = list(filter(self.can_train, (part.tolist() for part in ids.split(self.batch))))
            steps += [parts[i : i + self.window] for i in range(0, len(parts), self.window)]
        return steps

    def can_train(self, part: list[int]) -> bool:
        """Say whether a micro-batch has a loss, whichever example is left out of it."""
        rest = len(part) - (max(map(part.count, part)) if self.leaves_norm else 0)
        return rest > 1 and float(self.loss.counts(self.data.y[part]).sum()) > 0  # BatchNorm needs two

    def train(self, weights: Tensor | None = None, path: Any = None) -> tuple[nn.Module, lo.Run | None]:
        """Return the trained model, or its average, and the run if a path was given."""
        model = self.model()
        if weights is not None and self.statistics == "leave":
            weighted(model)
        optimizer, steps = self.optimizer(model), self.windows()
        schedule = SCHEDULES[self.schedule] and SCHEDULES[self.schedule](optimizer, len(steps))
        average = None
        if self.average:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7) if self.average == "EMA" else None)
        loader = DataLoader(self.data, batch_sampler=[part for parts in steps for part in parts])
        recorder = lo.Recorder(path, model, optimizer, keep=self.keep, average=average) if path else None
        torch.manual_seed(self.seed + 1)
        with recorder or nullcontext():
            batches = iter(recorder.watch(loader) if recorder and self.watched else loader)
            for number, parts in enumerate(steps):
                self.change(model, number)
                optimizer.zero_grad(set_to_none=self.to_none)
                total = sum(float(self.loss.counts(self.data.y[ids]).sum()) for ids in parts)
                for ids in parts:
                    x, y = next(batches)
                    if recorder and not self.watched:
                        recorder.step(ids, [x, y])
                    self.backward(model, x, y, ids, weights, len(parts), total)
                if self.clip_value is not None:
                    nn.utils.clip_grad_value_(model.parameters(), self.clip_value)
                if self.clip_norm is not None:
                    norm = self.clip_norm if isinstance(self.clip_norm, tuple) else (self.clip_norm,)
                    nn.utils.clip_grad_norm_(model.parameters(), *norm)
                optimizer.step()
                if schedule:
                    schedule.step()
                if average:
                    average.update_parameters(model)
                if self.looks:
                    model.eval()
                    self.query_loss(model)
                    model.train()
            return (average.module if average else model), recorder and recorder.finish()

    def backward(self, model, x, y, ids, weights, parts: int, total: float) -> None:
        """Take the gradient of a micro-batch's loss."""
        own = self.loss.counts(y).sum()
        if weights is None:
            loss = self.loss.batch(model(x), y)
            loss = loss * own / total if self.divide == "window" and not self.loss.summed else loss
            loss = loss + 0.5 * self.l2 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        else:
            for module in model.modules():
                if isinstance(module, WeightedNorm):
                    module.weights = weights[ids]
            losses = self.loss.counts(y) * self.loss.each(model(x), y)
            losses = losses + 0.5 * self.l2 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
            loss = (weights[ids] * losses).sum()
            if not self.loss.summed:
                loss = loss / (total if self.divide == "window" else own)
        divisor = {"mean": parts, "sum": 1, "window": 1}.get(self.divide, self.divide)
        (loss / divisor).backward()

    def change(self, model: nn.Module, number: int) -> None:
        """Freeze a layer, thaw it, or set it to evaluation mode, before some step."""
        part = model.body[0]
        if self.turn == "evaluation mode" and number >= 2:
            part.eval()
        elif self.turn in ("freeze", "freeze for a while") and number == 2:
            model.front.requires_grad_(False)
            for param in model.front.parameters():
                param.grad = None
        elif self.turn == "freeze for a while" and number == 4:
            model.front.requires_grad_()

    def query_loss(self, model: nn.Module) -> float:
        """The loss of the queries; the fused layers of evaluation mode know no empty texts."""
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            value = self.loss.each(model.eval()(self.query.x), self.query.y).mean()
        torch.backends.mha.set_fastpath_enabled(fast)
        return float(value)

    def task(self, model: nn.Module) -> lo.Task:
        """What a user says of the program."""
        clip = {"clip_norm": self.clip_norm, "clip_value": self.clip_value}
        loss = self.loss.given
        return lo.Task(
            model,
            loss,
            self.data,
            self.l2,
            accumulation=self.divide,
            statistics=self.statistics,
            trace=self.trace,
            **clip,
        )

    def effect(self, example: int, weight: float) -> float:
        """The query loss after a plain training in which one example has this weight."""
        weights = torch.ones(COUNT, dtype=torch.float64)
        weights[example] = weight
        return self.query_loss(self.train(weights)[0])


def weighted(model: nn.Module) -> None:
    """Give BatchNorm a weight for every row: of weight 0, it is not in the batch's statistics."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(module, name, WeightedNorm(child))
