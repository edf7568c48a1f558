"""Large problems as shapes alone, for ``leaveout plan --model``: models and one example on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from leaveout.evaluate.scale import Described


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, with GroupNorm."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.GroupNorm(32, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.GroupNorm(32, width),
            nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False),
            nn.GroupNorm(32, out),
        )
        same = stride == 1 and inside == out
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.GroupNorm(32, out))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs."""
        return F.relu(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    """Build ResNet-50, with 25.6 million parameters; its last block is ``blocks.15``."""
    model = nn.Sequential()
    model.add_module(
        "stem",
        nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    )
    blocks, inside = [], 64
    for width, count, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            blocks.append(Bottleneck(inside, width, first if number == 0 else 1))
            inside = 4 * width
    model.add_module("blocks", nn.Sequential(*blocks))
    model.add_module("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000)))
    return model


class LanguageModel(nn.Module):
    """A decoder: embeddings, pre-norm transformer layers, and the embeddings again as the last layer."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of every token's successor."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T


class Layer(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next layer's inputs."""
        parts = self.attention(self.before(x)).chunk(3, 2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.network(self.after(x))


def imagenet() -> Described:
    """Describe ResNet-50 on one image, trained with momentum; its last block is scored."""
    with torch.device("meta"):
        image, label = torch.empty(1, 3, 224, 224), torch.empty(1, dtype=torch.int64)
        return Described(resnet50(), image, label, F.cross_entropy, ("blocks.15.*",), slots=2)


def language_model(layers: tuple[str, ...] = ("*",)) -> Described:
    """Describe a model of 100 million parameters on one text of 512 tokens, trained with momentum and scored whole."""
    with torch.device("meta"):
        model, text = LanguageModel(37_400, 768, 10, 12, 512), torch.empty(1, 512, dtype=torch.int64)
        return Described(model, text, text, _next_token, layers, slots=2)


def language_model_last() -> Described:
    """Describe the same with only its last layer scored."""
    return language_model(("layers.9.*",))


def _next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
