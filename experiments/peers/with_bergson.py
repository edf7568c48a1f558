"""bergson: MAGIC, the metagradient of the training run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch
import torchopt
from bergson.magic import BackwardState, Trainer
from estimate import Estimate, timed
from subjects import DECAY, Subject
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Weighted(nn.Module):
    """A model that returns its weighted loss, as bergson's trainer calls it."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model, self.losses = subject.copied(), subject.losses

    def forward(self, input_ids: Tensor, target: Tensor, example_weight: Tensor, **_: object) -> Tensor:
        """Return the mean over the batch of weight times loss."""
        return (example_weight * self.losses(self.model(input_ids), target)).mean()


class Recorded:
    """The recorded batches in their order, with one weight per training example."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.device = subject, torch.device("cpu")
        self.weights = nn.Parameter(torch.ones(len(subject.train)))
        self.requires_grad = True

    def __len__(self) -> int:
        return len(self.subject.run)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        ids = torch.as_tensor(self.subject.run.record(step).ids)
        x, y = self.subject.train[ids]
        return {
            "input_ids": x,
            "target": y,
            "example_weight": self.weights[ids],
            "shift_loss_mask": torch.ones(len(ids)),  # what bergson divides micro-batches by
        }

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[step] for step in range(len(self)))

    def __reversed__(self) -> Iterator[dict[str, Tensor]]:
        return (self[step] for step in reversed(range(len(self))))


def estimates(subject: Subject) -> Iterator[Estimate]:
    """Train the recorded batches again with bergson's trainer, and go back through them.

    Attention takes its plain form, as in bergson's own command: the fused kernel has no second derivative.
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield timed("MAGIC", "default", lambda: _metagradient(subject))


def _metagradient(subject: Subject) -> Tensor:
    start = subject.run.state(0)["param"]
    holder = Weighted(subject)
    holder.model.load_state_dict(start)
    lr = subject.settings["lr"]
    if subject.settings["model"] == "gpt":
        optimizer = torchopt.adamw(lr, betas=(0.9, 0.95), weight_decay=DECAY)
    else:
        decay = DECAY if subject.settings["model"] != "mnist-cnn" else 0.0
        optimizer = torchopt.sgd(lr, weight_decay=decay)
    trainer, state = Trainer.initialize(holder, optimizer)
    stream = Recorded(subject)
    with tempfile.TemporaryDirectory() as folder:
        state = trainer.train(state, stream, save_dir=folder, inplace=False)
        last = {name.removeprefix("model."): value for name, value in state.params.items()}
        off, way = _distance(last, subject.run.final()["param"]), _distance(start, subject.run.final()["param"])
        if off > 0.01 * way:  # a run may magnify rounding, but not as far as that
            raise ValueError(f"another run: its end is {off:.2g} away, of {way:.2g} travelled")
        params = {name: value.detach().requires_grad_() for name, value in state.params.items()}
        x, y = subject.query.tensors
        inner = {name.removeprefix("model."): value for name, value in params.items()}
        loss = subject.losses(torch.func.functional_call(subject.copied(), inner, x), y).mean()
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        opt = [torch.zeros_like(t) for t in state.differentiable_tensors()[len(params) :]]
        back = BackwardState(grads, opt, torch.zeros_like(stream.weights))
        back = trainer.backward(folder, stream, back, state)
    return -back.weight_grads


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name].detach() - value).norm()) ** 2 for name, value in other.items()) ** 0.5
