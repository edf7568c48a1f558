"""The models of the experiments, by name, with PyTorch's default initialisation.

A model of one output gives logits of shape (batch,), to go with `BCEWithLogitsLoss`; the others (batch, classes), to
go with `CrossEntropyLoss`. No layer here mixes examples or draws random numbers, so per-example gradients are exact.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from leaveout.errors import InputError, check_seed, closest

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
}


MOST_LAYERS = 100
"""The most hidden layers of a network: a config may come from an untrusted source, and each layer takes time."""


class OneLogit(nn.Module):
    """Drops the last axis, of size 1: (batch, 1) becomes (batch,)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits without their last axis."""
        return x.squeeze(-1)


def logistic(features: int) -> nn.Module:
    """Build logistic regression: ⟨w, x⟩ + b, one logit.

    >>> logistic(62)(torch.zeros(5, 62)).shape
    torch.Size([5])
    """
    return mlp(features, hidden=())


def mlp(features: int, hidden: Sequence[int] = (8, 8), outputs: int = 1, activation: str = "relu") -> nn.Module:
    """Build a network on flat features, by default features-8-8-1 with ReLU.

    >>> mlp(784, outputs=10)(torch.zeros(5, 784)).shape
    torch.Size([5, 10])
    """
    sizes = [features, *hidden, outputs]
    if len(hidden) > MOST_LAYERS:
        raise InputError(f"hidden has {len(hidden):,} layers: give at most {MOST_LAYERS}.", code="model-too-deep")
    if min(sizes) < 1:
        raise InputError(f"hidden={list(hidden)} must be widths of at least 1.", code="layer-empty")
    if activation not in ACTIVATIONS:
        raise InputError(
            f"there is no activation {activation!r}{closest(activation, ACTIVATIONS)}; "
            f"choose one of {', '.join(ACTIVATIONS)}.",
            code="activation-unknown",
        )
    layers: list[nn.Module] = []
    for inputs, units in pairwise(sizes):
        layers += [nn.Linear(inputs, units), ACTIVATIONS[activation]()]
    layers[-1:] = [OneLogit()] if outputs == 1 else []  # no activation after the last layer
    return nn.Sequential(*layers)


def mnist_cnn() -> nn.Module:
    """Build conv5(20)-pool-conv5(20)-pool-fc10 with ReLU, on (batch, 1, 28, 28)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(20 * 4 * 4, 10)),
    )


def cifar_cnn() -> nn.Module:
    """Build 3 blocks of two 3 x 3 convolutions (32, 32, 64, 64, 128, 128 channels), pool, fc10, on (batch, 3, 32, 32).

    The original experiments normalise each block's first convolution by BatchNorm. There an example's loss depends on
    the rest of its batch, and no per-example gradient exists; GroupNorm is used here instead.
    """
    blocks: list[nn.Module] = []
    for inputs, channels in ((3, 32), (32, 64), (64, 128)):
        blocks += [nn.Conv2d(inputs, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.ReLU()]
        blocks += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


class Block(nn.Module):
    """One layer of a transformer: causal attention, then two linear maps with GELU between, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, of the same shape as its inputs (batch, positions, width)."""
        parts = self.mixed(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """A small language model: (batch, positions) word numbers to logits of the next word (batch, words, positions)."""

    def __init__(self, words: int, width: int, layers: int, heads: int, positions: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, with the words before the positions, as ``CrossEntropyLoss`` takes them."""
        x = self.word(tokens) + self.position.weight[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x)).transpose(1, 2)


def gpt(words: int = 500, width: int = 32, layers: int = 2, heads: int = 4, positions: int = 32) -> nn.Module:
    """Build a GPT, by default with 58,496 parameters.

    >>> gpt()(torch.zeros(5, 32, dtype=torch.int64)).shape, sum(p.numel() for p in gpt().parameters())
    (torch.Size([5, 500, 32]), 58496)
    """
    return GPT(words, width, layers, heads, positions)


_MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "mnist-cnn": mnist_cnn,
    "cifar-cnn": cifar_cnn,
    "gpt": gpt,
}


def names() -> tuple[str, ...]:
    """Name the models that `build` knows.

    >>> names()
    ('logistic', 'mlp', 'mnist-cnn', 'cifar-cnn', 'gpt')
    """
    return tuple(_MODELS)


def build(name: str, seed: int | None = None, **options: Any) -> nn.Module:
    """Build a model by name; with a seed its weights are reproducible and the global random state is not changed.

    >>> build("mlp", seed=0, features=62, hidden=(16,))(torch.zeros(5, 62)).shape
    torch.Size([5])
    """
    if name not in _MODELS:
        raise InputError(
            f"there is no model {name!r}{closest(name, _MODELS)}; choose one of {', '.join(_MODELS)}.",
            code="model-unknown",
        )
    make = _MODELS[name]
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise InputError(
            f"the model {name!r} takes {inspect.signature(make)}, but {error}.", code="model-option-unknown"
        ) from error
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(check_seed(seed))
        try:
            return make(**options)
        except (RuntimeError, TypeError, OverflowError) as error:  # what PyTorch raises for widths beyond memory
            reason = str(error).splitlines()[0]
            raise InputError(
                f"the model {name!r} cannot be made with {options}: {reason}; make it smaller.", code="model-too-large"
            ) from None
