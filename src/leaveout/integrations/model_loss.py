"""The loss that a Hugging Face transformers model computes itself, written as one number per example.

Such a model returns the mean over a whole batch. Which loss it is, is found by comparison: it is the one of the usual
losses that gives the same value as the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from leaveout.errors import UnsupportedError, first_line
from leaveout.task import batches

LABELS = "labels"
ITEMS = "num_items_in_batch"
IGNORED = -100
CURE = (
    "give task(forward=..., loss=...), a function of (model, batch) that returns its outputs and their targets, and "
    "one of these two that returns one loss per example, or (sums, counts)."
)
REQUIRING = "make_inputs_require_grad"
"""The name of those hooks in transformers and peft."""


@dataclass(frozen=True)
class ClassLoss:
    """Cross-entropy over classes, as sums and counts: of a whole sequence, or of all its unmasked tokens.

    ``shift``: the output at a token predicts the next one. ``smoothing``: label smoothing.

    >>> ClassLoss(shift=True)(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]))
    (tensor([0.6931]), tensor([1.]))
    """

    shift: bool = False
    smoothing: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each example's summed loss and how many labels it has."""
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        kept = labels != IGNORED
        flat = logits.reshape(-1, logits.shape[-1]), torch.where(kept, labels, 0).reshape(-1)
        values = F.cross_entropy(*flat, reduction="none", label_smoothing=self.smoothing).reshape(labels.shape)
        sums = torch.where(kept, values, 0).reshape(len(labels), -1).sum(1)
        return sums, kept.reshape(len(labels), -1).sum(1).to(logits.dtype)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error per example."""
    return (outputs.reshape(len(outputs), -1) - targets.reshape(len(targets), -1)).square().mean(1)


def several_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross-entropy per example."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").reshape(len(targets), -1).mean(1)


@dataclass(frozen=True)
class ModelCall:
    """``(model, batch) -> (logits, labels)``, with or without labels among the model's inputs.

    ``noise``: the strength of the noise that training added to embeddings (NEFTune).
    """

    with_labels: bool = False
    noise: float = 0.0

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Call the model."""
        given = {name: value for name, value in batch.items() if self.with_labels or name != LABELS}
        layer = embeddings_of(model)
        added = self.noise and not hasattr(layer, "neftune_noise_alpha")  # while it trains, Trainer's own hook adds it
        with noisy(layer, self.noise) if added else nullcontext(), unrequired(layer):
            logits = logits_of(model(**given), self.with_labels)
            return logits, behind_prompt(logits, batch[LABELS])


def behind_prompt(logits: Tensor, labels: Tensor) -> Tensor:
    """Prepend masked labels if the model puts a learned prompt before the tokens, as peft does."""
    longer = logits.shape[1] - labels.shape[1] if logits.ndim == 3 and labels.ndim == 2 else 0
    return labels if longer <= 0 else torch.cat([labels.new_full((len(labels), longer), IGNORED), labels], 1)


def embeddings_of(model: Any) -> nn.Module | None:
    """Return a model's token embeddings, even if the model is wrapped in adapters."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None


@contextmanager
def unrequired(layer: nn.Module | None) -> Iterator[None]:
    """Remove, in this context, hooks that make inputs require gradients for checkpointing: ``torch.func`` cannot."""
    hooks = {} if layer is None else layer._forward_hooks
    held = {key: hook for key, hook in hooks.items() if REQUIRING in getattr(hook, "__name__", "")}
    for key in held:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(held)


@contextmanager
def noisy(layer: Any, strength: float) -> Iterator[None]:
    """Add noise to embeddings in training mode: uniform, at most α/√(tokens · width) (NEFTune, arXiv 2310.05914)."""

    def add(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        most = float(strength / torch.sqrt(torch.tensor(output.shape[1] * output.shape[2])))
        return output + torch.zeros_like(output).uniform_(-most, most)

    hook = layer.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def logits_of(outputs: Any, with_labels: bool) -> Tensor:
    """Return the logits that the loss is computed from; a tuple begins with the loss if labels were given."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs["logits"]
    return outputs[1 if with_labels else 0]


def loss_of(outputs: Any) -> Tensor | None:
    """Return the loss among a model's outputs, as Trainer finds it."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return outputs[0] if isinstance(outputs, tuple | list) else None


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients in this context; restore the random generators after it."""
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def divides_by_items(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Say whether the model divides its loss by the number of items it is given; some ignore it."""
    if ITEMS not in inputs or LABELS not in inputs:
        return False
    items = torch.as_tensor(inputs[ITEMS])
    with undisturbed(model):
        losses = [loss_of(model(**{**inputs, ITEMS: items * times})) for times in (1, 2)]
    return losses[0] is not None and not torch.equal(losses[0], losses[1])  # type: ignore[arg-type]


def found_loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return the usual loss that agrees with the model's own on this batch.

    If the model computes it in 16 bits, in which losses are hard to tell apart, a copy in float32 is asked.
    """
    name = type(model).__name__
    try:
        with undisturbed(model):
            outputs = model(**batch)
    except Exception as error:
        raise UnsupportedError(
            f"{name} cannot be called with a whole batch ({first_line(error)}), as compute_loss seems to do otherwise: "
            f"{CURE}",
            code="model-loss-unknown",
        ) from error
    own = loss_of(outputs)
    if LABELS not in batch or (isinstance(outputs, Mapping) and "logits" not in outputs):
        raise UnsupportedError(
            f"{name} is not trained on logits and labels: {CURE}",
            code="model-loss-unknown",
        )
    if own is not None and own.dtype in (torch.float16, torch.bfloat16):
        return found_loss(copy.deepcopy(model).float(), batches.converted(batch, torch.float32))
    logits = logits_of(outputs, with_labels=True).to(torch.float32 if own is None else own.dtype)
    labels = behind_prompt(logits, batch[LABELS])
    for loss in _usual(logits, labels):
        values = loss(logits, labels)
        mean = values[0].sum() / values[1].sum() if isinstance(values, tuple) else values.mean()
        if own is not None and torch.allclose(mean.float(), own.float(), rtol=1e-4, atol=1e-7):
            return loss
    raise UnsupportedError(
        f"The loss that {name} computes is not one of those that leaveout recognises: give "
        "task(loss=...), a function of (logits, labels) that returns one loss per example, or (sums, counts).",
        code="model-loss-unknown",
    )


def _usual(logits: Tensor, labels: Tensor) -> list[Any]:
    """Return the losses that fit these shapes."""
    if labels.is_floating_point():
        return [squared_error, several_labels] if logits.numel() == labels.numel() else []
    if logits.shape[:-1] != labels.shape:
        return []
    return [ClassLoss(shift=True), ClassLoss()] if labels.ndim == 2 else [ClassLoss()]
