"""Layers from which random programs are put together: what models of real runs are made of, each of a few weights.

Every one maps ``(batch, WIDTH)`` to the same, or ``(batch, words, WIDTH)`` or ``(batch, channels, height, width)``;
those of words are also told which words count.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, LENGTH = 6, 9, 5
SMOOTH = (nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.Sigmoid, nn.Mish)


class Layer(nn.Module):
    """A function of a dense layer's output and its input."""

    def __init__(self, function, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inside = function, inside or nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inside(x), x)


class Swish(torch.autograd.Function):
    """A function with a derivative of its own, which is right."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x.sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, _output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class Reversed(torch.autograd.Function):
    """Gradient reversal: the gradient is not the derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(_ctx, gradient):
        return -0.5 * gradient


class Tied(nn.Module):
    """One matrix, there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.T)


class Experts(nn.Module):
    """A mixture of two layers, with a third that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.parts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        return sum(share[..., i : i + 1] * self.parts[i](x).tanh() for i in range(2))


class Adapter(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Branches(nn.Module):
    """Another path in training than in evaluation, a layer that is skipped at random, and noise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inside = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + 0.5 * self.inside(x).tanh()
        if self.kind == "noise":
            return x + 0.5 * self.inside(x).tanh() + 0.1 * torch.randn_like(x)
        if self.kind == "skipped" and float(torch.rand(())) < 0.4:
            return x
        return x + self.inside(F.dropout(x, 0.3)).tanh()


class Held(nn.Module):
    """Divides by a buffer: a constant, or a mean of what it saw, which training moves."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.moves = moves
        self.register_buffer("size", torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.moves and self.training:
            with torch.no_grad():
                self.size.mul_(0.9).add_(0.1 * x.square().mean().sqrt())
        return x / self.size


class Grouped(nn.GroupNorm):
    """GroupNorm of vectors, or of every word's vector over all words."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT if x.ndim == 3 else super().forward(x)


def limited(x: Tensor, _: Tensor) -> Tensor:
    """Long vectors are shortened to one length, which is a constant: of short ones, nothing is stopped."""
    return x / x.detach().norm(dim=-1, keepdim=True).clamp_min(1.2)


VECTOR = {
    "dense": lambda act: nn.Sequential(nn.Linear(WIDTH, WIDTH), act()),
    "residual": lambda act: Layer(lambda h, x: x + act()(h)),
    "LayerNorm": lambda _: nn.LayerNorm(WIDTH),
    "GroupNorm": lambda _: Grouped(2, WIDTH),
    "RMSNorm": lambda _: nn.RMSNorm(WIDTH),
    "BatchNorm1d": lambda _: nn.BatchNorm1d(WIDTH),
    "Dropout": lambda _: nn.Dropout(0.3),
    "AlphaDropout": lambda _: nn.AlphaDropout(0.2),
    "training": lambda _: Branches("training"),
    "skipped": lambda _: Branches("skipped"),
    "noise": lambda _: Branches("noise"),
    "weight_norm": lambda act: nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), act()),
    "detach": lambda _: Layer(lambda h, _: h + h.detach().sin()),
    "target": lambda _: Layer(lambda h, x: x + h * (h.detach() - 1)),
    "limited": lambda _: Layer(limited),
    "own function": lambda _: Layer(lambda h, x: x + Swish.apply(h)),
    "reversal": lambda _: Layer(lambda h, x: x + Reversed.apply(h).tanh()),
    "where": lambda _: Layer(lambda h, x: torch.where(x > 0.8, h.detach(), h)),
    "tied": lambda _: Tied(),
    "experts": lambda _: Experts(),
    "adapter": lambda _: Adapter(),
    "frozen": lambda act: nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), act()),
    "bilinear": lambda _: Layer(lambda h, x: x + 0.2 * h * x, nn.Linear(WIDTH, WIDTH, bias=False)),
    "constant": lambda _: Held(False),
    "moving": lambda _: Held(True),
    "checkpoint": lambda act: Layer(
        lambda h, _: h, Layer(lambda h, x: checkpoint(lambda t: act()(t) + x, h, use_reentrant=False))
    ),
    "ReLU": lambda _: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
    "PReLU": lambda _: nn.PReLU(),
    "softmax": lambda _: Layer(lambda h, x: x + h.softmax(-1)),
    "sorted": lambda _: Layer(lambda h, x: h.sort(-1).values + x),
}

PICTURE = {
    "conv": lambda act: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), act()),
    "conv, depthwise": lambda act: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), act()),
    "conv, dilated": lambda act: nn.Sequential(nn.Conv2d(4, 4, 2, dilation=2), act(), nn.Upsample(6)),
    "transposed": lambda act: nn.Sequential(nn.ConvTranspose2d(4, 4, 2, stride=2), act(), nn.AvgPool2d(2)),
    "BatchNorm2d": lambda _: nn.BatchNorm2d(4),
    "GroupNorm": lambda _: nn.GroupNorm(2, 4),
    "InstanceNorm2d": lambda _: nn.InstanceNorm2d(4, affine=True),
    "Dropout2d": lambda _: nn.Dropout2d(0.3),
    "bilinear": lambda _: nn.Sequential(nn.AvgPool2d(2), nn.Upsample(6, mode="bilinear")),
    "maximum": lambda _: nn.MaxPool2d(3, 1, 1),
    "reflected": lambda act: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(4, 4, 3), act()),
}


class Recurrent(nn.Module):
    """An LSTM, GRU or RNN over the words, whole or packed."""

    def __init__(self, kind: type[nn.RNNBase], *, packed: bool = False, **options) -> None:
        super().__init__()
        both = options.get("bidirectional", False)
        self.rnn, self.packed = kind(WIDTH, WIDTH // (1 + both), batch_first=True, **options), packed

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if not self.packed:
            return self.rnn(x)[0]
        lengths = counts.sum(1).clamp(min=1).cpu()
        out, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]


class Attention(nn.Module):
    """Attention of one kind, from which hidden words are kept; of an empty text, nothing is left."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "module":
            self.inside = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        elif kind == "encoder":
            self.inside = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.2, "gelu", batch_first=True)
        elif kind == "decoder":
            self.inside = nn.TransformerDecoderLayer(WIDTH, 2, 8, 0.2, "gelu", batch_first=True)
        else:
            self.inside = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if self.kind == "module":
            return x + self.inside(x, x, x, key_padding_mask=~counts, need_weights=False)[0]
        if self.kind == "encoder":
            return self.inside(x, src_key_padding_mask=~counts)
        if self.kind == "decoder":
            later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            return self.inside(x, x, tgt_mask=later, memory_key_padding_mask=~counts)
        heads = self.inside(x).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0).transpose(-2, -3)
        if self.kind == "causal":
            out = F.scaled_dot_product_attention(*heads, is_causal=True)
        elif self.kind == "masked":
            out = F.scaled_dot_product_attention(*heads, attn_mask=counts[:, None, None])
        else:
            scores = heads[0] @ heads[1].mT / math.sqrt(WIDTH // 2)
            out = scores.masked_fill(~counts[:, None, None], -1e9).softmax(-1) @ heads[2]
        return x + out.transpose(-2, -3).flatten(-2)


class Across(nn.Module):
    """A layer over the words that does not look at which of them count."""

    def __init__(self, inside: nn.Module, turned: bool = False) -> None:
        super().__init__()
        self.inside, self.turned = inside, turned

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.inside(x.mT).mT if self.turned else self.inside(x)


TEXT = {
    "LSTM": lambda _: Recurrent(nn.LSTM),
    "LSTM, packed": lambda _: Recurrent(nn.LSTM, packed=True, bidirectional=True),
    "GRU, two layers": lambda _: Recurrent(nn.GRU, num_layers=2, dropout=0.2),
    "RNN": lambda _: Recurrent(nn.RNN),
    "attention module": lambda _: Attention("module"),
    "encoder layer": lambda _: Attention("encoder"),
    "decoder layer": lambda _: Attention("decoder"),
    "causal attention": lambda _: Attention("causal"),
    "masked attention": lambda _: Attention("masked"),
    "attention, written out": lambda _: Attention("written out"),
    "Conv1d": lambda act: Across(nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), act()), turned=True),
    "LayerNorm": lambda _: Across(nn.LayerNorm(WIDTH)),
    "dense": lambda act: Across(nn.Sequential(nn.Linear(WIDTH, WIDTH), act(), nn.Dropout(0.2))),
}
FRONTS = ("numbers", "picture", "text", "bag", "tokens")


class Net(nn.Module):
    """Inputs of one kind, some layers, and what the loss is given."""

    def __init__(self, front: str, layers: list[nn.Module], body: list[nn.Module], outputs: int, choice: int) -> None:
        super().__init__()
        self.kind = front
        if front == "picture":
            self.front, self.narrow = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 9, WIDTH)
        elif front == "bag":
            self.front = nn.EmbeddingBag(WORDS, WIDTH, mode=("mean", "sum")[choice], padding_idx=0)
        elif front == "numbers":
            self.front = nn.Linear(5, WIDTH)
        else:
            self.front = nn.Embedding(WORDS, WIDTH, padding_idx=(None, 0)[choice])
        self.layers, self.body = nn.ModuleList(layers), nn.Sequential(*body)
        self.head = nn.Linear(WIDTH, outputs)
        self.tied = front == "tokens" and outputs == WORDS and bool(choice)
        if self.tied:
            self.head.weight = self.front.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        for layer in self.layers:
            h = layer(h) if self.kind == "picture" else layer(h, x != 0)
        if self.kind == "picture":
            h = self.narrow(F.avg_pool2d(h, 2).flatten(1))
        if self.kind == "text":
            counts = (x != 0).to(h.dtype).unsqueeze(-1)
            h = (h * counts).sum(1) / counts.sum(1).clamp(min=1)
        return self.head(self.body(h))
