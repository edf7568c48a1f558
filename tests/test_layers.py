"""PyTorch's layers, losses and operations: every derivative that scores are made of, or a refusal in words.

Each case goes through the guard when its task is made, and then end to end: SGD-IE backward for the mean, backward for
each query and forward are three ways through other formulas of PyTorch, and all of them are compared with differences
of real retraining.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.errors import UnsupportedError
from problems import mostly_full

pytestmark = pytest.mark.compared_anew

WIDTH = 6


class Around(nn.Module):
    """A function with modules of its own between two linear layers."""

    def __init__(self, function: Callable, *modules: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.function = nn.Linear(WIDTH, WIDTH), nn.ModuleList(modules), function
        with torch.no_grad():
            width = self._within(torch.randn(3, WIDTH)).shape[1]
        self.last = nn.Linear(width, 2)

    def _within(self, x: Tensor) -> Tensor:
        out = self.function(self.first(x), *self.inner)
        return out.reshape(len(x), -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._within(x))


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


@dataclass(frozen=True)
class Case:
    """How a model is made, the loss, and the words of a refusal where there is one."""

    function: Callable
    modules: Callable[[], tuple] = tuple
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    refused: str = ""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Around(self.function, *self.modules()).double()


def layer(make: Callable[[], nn.Module], *shape: int) -> Case:
    """A module on the hidden values, given a shape."""
    return Case(lambda h, m: m(h.reshape(-1, *shape) if shape else h), lambda: (make(),))


def sequence(make: Callable[[], nn.Module]) -> Case:
    """A recurrent layer on three steps of two values."""
    return Case(lambda h, m: m(h.reshape(-1, 3, 2))[0], lambda: (make(),))


def operation(function: Callable[[Tensor], Tensor]) -> Case:
    return Case(lambda h: function(h))


def loss(make: Callable[[], nn.Module], target: Callable[[Tensor], Tensor], outputs: Callable = lambda o: o) -> Case:
    """A loss module on the two outputs, with targets made from the labels."""

    def value(out: Tensor, y: Tensor) -> Tensor:
        module = make()
        module.reduction = "none"
        found = module(outputs(out), target(y))
        return found.reshape(len(y), -1).mean(1)

    return Case(lambda h: h.tanh(), loss=value)


def square(h: Tensor) -> Tensor:
    """A positive definite 2 x 2 matrix for each example."""
    half = h[:, :4].reshape(-1, 2, 2)
    return half @ half.mT + 2 * torch.eye(2, dtype=h.dtype)


def frozen_gate(h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = h.sigmoid()
    return h * gate


class Reversed(torch.autograd.Function):
    """Gradient reversal."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def focal(out: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    return (1 - (-losses).exp()).square().detach() * losses


encoder = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
one_hot = lambda y: F.one_hot(y, 2).double()  # noqa: E731
signs = lambda y: 2.0 * F.one_hot(y, 2) - 1  # noqa: E731

SHORT = {
    "LayerNorm": layer(lambda: nn.LayerNorm(WIDTH)),
    "TransformerEncoderLayer": layer(lambda: nn.TransformerEncoderLayer(**encoder), 1, WIDTH),
    "InstanceNorm1d": layer(lambda: nn.InstanceNorm1d(2, affine=True), 2, 3),
    "linalg.solve": operation(lambda h: torch.linalg.solve(square(h), h[:, 4:].unsqueeze(-1))),
    "weight_norm": Case(lambda h, m: m(h).tanh(), lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),)),
    "detach": operation(lambda h: h * h.detach().sigmoid()),
    "detached focal loss": Case(lambda h: h.tanh(), loss=focal),
    "GLU": layer(nn.GLU),
    "LSTM": sequence(lambda: nn.LSTM(2, 3, batch_first=True)),
    "gradient reversal": Case(lambda h: Reversed.apply(h.tanh()), refused="a gradient of their own"),
    "cdist": Case(lambda h: torch.cdist(h.reshape(-1, 2, 3), h.reshape(-1, 2, 3) + 1), refused="second derivative"),
}

LONG = {
    "logdet": operation(lambda h: torch.logdet(square(h))),
    "slogdet": operation(lambda h: torch.linalg.slogdet(square(h))[1]),
    "det": operation(lambda h: torch.linalg.det(square(h))),
    "inv": operation(lambda h: torch.linalg.inv(square(h))),
    "cholesky": operation(lambda h: torch.linalg.cholesky(square(h))),
    "eigvalsh": operation(lambda h: torch.linalg.eigvalsh(square(h))),
    "svdvals": operation(lambda h: torch.linalg.svdvals(h.reshape(-1, 2, 3))),
    "qr": operation(lambda h: torch.linalg.qr(square(h))[1]),
    "matrix_exp": operation(lambda h: torch.linalg.matrix_exp(0.1 * square(h))),
    "solve_triangular": operation(lambda h: torch.linalg.solve_triangular(square(h).tril(), square(h), upper=False)),
    "pinv": operation(lambda h: torch.linalg.pinv(square(h))),
    "vector_norm": operation(lambda h: torch.linalg.vector_norm(h, dim=1)),
    "normalize": operation(F.normalize),
    "cosine_similarity": operation(lambda h: F.cosine_similarity(h[:, :3], h[:, 3:])),
    "logsumexp": operation(lambda h: h.logsumexp(1)),
    "cumsum": operation(lambda h: h.cumsum(1).tanh()),
    "cumprod": operation(lambda h: h.cumprod(1)),
    "prod": operation(lambda h: h.prod(1)),
    "einsum": operation(lambda h: torch.einsum("bi,bj->bij", h, h.tanh())),
    "std": operation(lambda h: h.std(1)),
    "var": operation(lambda h: h.var(1)),
    "sort": operation(lambda h: h.sort(1)[0].tanh()),
    "topk": operation(lambda h: h.topk(2)[0].tanh()),
    "gather": operation(lambda h: h.tanh().gather(1, torch.arange(3).expand(len(h), 3))),
    "where": operation(lambda h: torch.where(h > 0, h.square(), h.sin())),
    "erf": operation(torch.erf),
    "lgamma": operation(lambda h: torch.lgamma(h.square() + 1)),
    "digamma": operation(lambda h: torch.digamma(h.square() + 1)),
    "i0": operation(torch.special.i0),
    "sinc": operation(torch.sinc),
    "atan2": operation(lambda h: torch.atan2(h[:, :3], h[:, 3:])),
    "pow": operation(lambda h: (h.square() + 0.1) ** 0.7),
    "fft": operation(lambda h: torch.fft.rfft(h.tanh()).abs()),
    "unfold": operation(lambda h: F.unfold(h.tanh().reshape(-1, 1, 2, 3), 2)),
    "fold": operation(lambda h: F.fold(h.reshape(-1, 2, 3).tanh(), (1, 4), (1, 2))),
    "interpolate": operation(
        lambda h: F.interpolate(h.tanh().reshape(-1, 1, 2, 3), scale_factor=2, mode="bilinear", align_corners=False)
    ),
    "grid_sample": operation(
        lambda h: F.grid_sample(h.reshape(-1, 1, 2, 3), 0.3 * h[:, :4].reshape(-1, 1, 2, 2).tanh(), align_corners=False)
    ),
    "affine_grid": operation(lambda h: F.affine_grid(h.tanh().reshape(-1, 2, 3), [len(h), 1, 2, 2], False)),
    "pixel_shuffle": operation(lambda h: F.pixel_shuffle(h[:, :4].reshape(-1, 4, 1, 1).tanh(), 2)),
    "no_grad": operation(frozen_gate),
    ".data": operation(lambda h: h * h.data.sigmoid()),
    "detach behind a LayerNorm": Case(lambda h, m: m(h) * h.detach().sigmoid(), lambda: (nn.LayerNorm(WIDTH),)),
    "weight_norm, old": Case(lambda h, m: m(h).tanh(), lambda: (nn.utils.weight_norm(nn.Linear(6, 4)),)),
    "weight_norm, whole": Case(lambda h, m: m(h).tanh(), lambda: (nn.utils.weight_norm(nn.Linear(6, 4), dim=None),)),
    "weight_norm, convolution": Case(
        lambda h, m: m(h.reshape(-1, 2, 3)).tanh(),
        lambda: (nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 2), dim=1),),
    ),
    "orthogonal": Case(lambda h, m: m(h).tanh(), lambda: (nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),)),
    "GroupNorm": layer(lambda: nn.GroupNorm(2, WIDTH), WIDTH, 1),
    "RMSNorm": layer(lambda: nn.RMSNorm(WIDTH)),
    "LocalResponseNorm": layer(lambda: nn.LocalResponseNorm(2), 2, 3),
    "InstanceNorm2d": layer(lambda: nn.InstanceNorm2d(1, affine=True), 1, 2, 3),
    "InstanceNorm3d": layer(lambda: nn.InstanceNorm3d(1, affine=True), 1, 1, 2, 3),
    "LayerNorm without parameters": layer(lambda: nn.LayerNorm(WIDTH, elementwise_affine=False)),
    "BatchNorm1d in eval": Case(lambda h, m: m(h).tanh(), lambda: (nn.BatchNorm1d(WIDTH).eval(),)),
    "BatchNorm2d in eval": Case(lambda h, m: m(h.reshape(-1, 2, 1, 3)).tanh(), lambda: (nn.BatchNorm2d(2).eval(),)),
    "MultiheadAttention": Case(
        lambda h, m: m(*3 * (h.reshape(-1, 3, 2),), need_weights=False)[0],
        lambda: (nn.MultiheadAttention(2, 1, batch_first=True),),
    ),
    "MultiheadAttention with weights": Case(
        lambda h, m: m(*3 * (h.reshape(-1, 3, 2),))[0], lambda: (nn.MultiheadAttention(2, 2, batch_first=True),)
    ),
    "scaled_dot_product_attention": operation(lambda h: F.scaled_dot_product_attention(*3 * (h.reshape(-1, 1, 3, 2),))),
    "causal attention": operation(
        lambda h: F.scaled_dot_product_attention(*3 * (h.reshape(-1, 1, 3, 2),), is_causal=True)
    ),
    "TransformerEncoderLayer in eval": layer(lambda: nn.TransformerEncoderLayer(**encoder).eval(), 1, WIDTH),
    "TransformerEncoderLayer, norm first, GELU": layer(
        lambda: nn.TransformerEncoderLayer(**encoder, norm_first=True, activation="gelu"), 1, WIDTH
    ),
    "TransformerDecoderLayer": Case(
        lambda h, m: m(h.reshape(-1, 1, WIDTH), h.reshape(-1, 1, WIDTH).tanh()),
        lambda: (nn.TransformerDecoderLayer(**encoder),),
    ),
    "GRU": sequence(lambda: nn.GRU(2, 3, batch_first=True)),
    "RNN": sequence(lambda: nn.RNN(2, 3, batch_first=True)),
    "RNN, ReLU": sequence(lambda: nn.RNN(2, 3, nonlinearity="relu", batch_first=True)),
    "LSTM, two layers, both ways": sequence(lambda: nn.LSTM(2, 2, 2, batch_first=True, bidirectional=True)),
    "LSTM, projected": sequence(lambda: nn.LSTM(2, 3, batch_first=True, proj_size=2)),
    "LSTMCell": Case(lambda h, m: m(h)[0], lambda: (nn.LSTMCell(WIDTH, 3),)),
    "GRUCell": layer(lambda: nn.GRUCell(WIDTH, 3)),
    "RNNCell": layer(lambda: nn.RNNCell(WIDTH, 3)),
    "Bilinear": Case(lambda h, m: m(h, h.tanh()), lambda: (nn.Bilinear(6, 6, 3),)),
    "Conv1d": Case(lambda h, m: m(h.reshape(-1, 2, 3)).tanh(), lambda: (nn.Conv1d(2, 2, 2),)),
    "Conv2d": Case(lambda h, m: m(h.reshape(-1, 1, 2, 3)).tanh(), lambda: (nn.Conv2d(1, 2, 2),)),
    "Conv2d, grouped, dilated, strided": Case(
        lambda h, m: m(h.reshape(-1, 2, 1, 3)).tanh(),
        lambda: (nn.Conv2d(2, 4, (1, 2), stride=(1, 1), dilation=(1, 2), groups=2),),
    ),
    "Conv2d, circular": Case(
        lambda h, m: m(h.reshape(-1, 1, 2, 3)).tanh(), lambda: (nn.Conv2d(1, 2, 2, padding=1, padding_mode="circular"),)
    ),
    "Conv3d": Case(lambda h, m: m(h.reshape(-1, 1, 1, 2, 3)).tanh(), lambda: (nn.Conv3d(1, 2, (1, 2, 2)),)),
    "ConvTranspose1d": Case(lambda h, m: m(h.reshape(-1, 2, 3)).tanh(), lambda: (nn.ConvTranspose1d(2, 2, 2),)),
    "ConvTranspose2d": Case(lambda h, m: m(h.reshape(-1, 1, 2, 3)).tanh(), lambda: (nn.ConvTranspose2d(1, 2, 2),)),
    "ConvTranspose3d": Case(
        lambda h, m: m(h.reshape(-1, 1, 1, 2, 3)).tanh(), lambda: (nn.ConvTranspose3d(1, 2, (1, 2, 2)),)
    ),
    "Embedding": Case(lambda h, m: h * m((h.detach() > 0).long().sum(1)), lambda: (nn.Embedding(WIDTH + 1, WIDTH),)),
    "EmbeddingBag": Case(
        lambda h, m: h * m((h.detach() > 0).long(), None), lambda: (nn.EmbeddingBag(2, WIDTH, mode="sum"),)
    ),
    "EmbeddingBag, mean with padding": Case(
        lambda h, m: h * m((h.detach() > 0).long(), None),
        lambda: (nn.EmbeddingBag(2, WIDTH, mode="mean", padding_idx=0),),
    ),
    "temperature": Case(lambda h, m: h.tanh() / m.scale, lambda: (Scale(),)),
    **{
        name: layer(getattr(nn, name))
        for name in (
            "CELU",
            "ELU",
            "GELU",
            "Hardshrink",
            "Hardsigmoid",
            "Hardswish",
            "Hardtanh",
            "LeakyReLU",
            "LogSigmoid",
            "Mish",
            "PReLU",
            "ReLU",
            "ReLU6",
            "SELU",
            "SiLU",
            "Sigmoid",
            "Softplus",
            "Softshrink",
            "Softsign",
            "Tanh",
            "Tanhshrink",
        )
    },
    "Softmax": layer(lambda: nn.Softmax(1)),
    "Softmin": layer(lambda: nn.Softmin(1)),
    "LogSoftmax": layer(lambda: nn.LogSoftmax(1)),
    "Threshold": layer(lambda: nn.Threshold(0.1, 0.0)),
    "AvgPool1d": layer(lambda: nn.Sequential(nn.Tanh(), nn.AvgPool1d(2)), 2, 3),
    "AvgPool2d": layer(lambda: nn.Sequential(nn.Tanh(), nn.AvgPool2d((1, 2))), 1, 2, 3),
    "AvgPool3d": layer(lambda: nn.Sequential(nn.Tanh(), nn.AvgPool3d((1, 1, 2))), 1, 1, 2, 3),
    "MaxPool1d": layer(lambda: nn.Sequential(nn.Tanh(), nn.MaxPool1d(2)), 2, 3),
    "MaxPool2d": layer(lambda: nn.Sequential(nn.Tanh(), nn.MaxPool2d((1, 2))), 1, 2, 3),
    "MaxPool3d": layer(lambda: nn.Sequential(nn.Tanh(), nn.MaxPool3d((1, 1, 2))), 1, 1, 2, 3),
    "AdaptiveAvgPool2d": layer(lambda: nn.Sequential(nn.Tanh(), nn.AdaptiveAvgPool2d((1, 2))), 1, 2, 3),
    "AdaptiveMaxPool2d": layer(lambda: nn.Sequential(nn.Tanh(), nn.AdaptiveMaxPool2d((1, 2))), 1, 2, 3),
    "LPPool1d": layer(lambda: nn.Sequential(nn.Softplus(), nn.LPPool1d(2, 2)), 2, 3),
    "Upsample": layer(lambda: nn.Sequential(nn.Tanh(), nn.Upsample(scale_factor=2)), 2, 3),
    "ReflectionPad1d": layer(lambda: nn.Sequential(nn.Tanh(), nn.ReflectionPad1d(1)), 2, 3),
    "ReplicationPad1d": layer(lambda: nn.Sequential(nn.Tanh(), nn.ReplicationPad1d(1)), 2, 3),
    "MSELoss": loss(nn.MSELoss, one_hot),
    "L1Loss": loss(nn.L1Loss, one_hot),
    "SmoothL1Loss": loss(nn.SmoothL1Loss, one_hot),
    "HuberLoss": loss(nn.HuberLoss, one_hot),
    "BCELoss": loss(nn.BCELoss, one_hot, torch.sigmoid),
    "BCEWithLogitsLoss": loss(nn.BCEWithLogitsLoss, one_hot),
    "CrossEntropyLoss, smoothed": loss(lambda: nn.CrossEntropyLoss(label_smoothing=0.1), lambda y: y),
    "CrossEntropyLoss of probabilities": loss(nn.CrossEntropyLoss, lambda y: 0.8 * one_hot(y) + 0.1),
    "NLLLoss": loss(nn.NLLLoss, lambda y: y, lambda o: o.log_softmax(1)),
    "KLDivLoss": loss(nn.KLDivLoss, lambda y: 0.8 * one_hot(y) + 0.1, lambda o: o.log_softmax(1)),
    "PoissonNLLLoss": loss(nn.PoissonNLLLoss, one_hot),
    "SoftMarginLoss": loss(nn.SoftMarginLoss, signs),
    "HingeEmbeddingLoss": loss(nn.HingeEmbeddingLoss, signs),
    "MultiMarginLoss": loss(nn.MultiMarginLoss, lambda y: y),
    "MultiMarginLoss, squared and weighted": loss(
        lambda: nn.MultiMarginLoss(p=2, weight=torch.tensor([1.0, 3.0], dtype=torch.float64)), lambda y: y
    ),
    "GaussianNLLLoss": Case(
        lambda h: h.tanh(), loss=lambda o, y: F.gaussian_nll_loss(o[:, 0], y.double(), o[:, 1].exp(), reduction="none")
    ),
    "MultiLabelSoftMarginLoss": loss(nn.MultiLabelSoftMarginLoss, one_hot),
}


class Scale(nn.Module):
    """A parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))


def check(case: Case, path) -> None:
    """The methods agree with differences of real retraining, or refuse in the case's words."""
    model = case.model()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, WIDTH, dtype=torch.float64, generator=generator)
    y = torch.randint(2, (9,), generator=generator)
    train, query = TensorDataset(x, y), TensorDataset(x[:2] + 0.1, y[:2])
    task = lo.Task(model, case.loss, train)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    with lo.Recorder(path, model, optimizer) as recorder:
        for ids in [*torch.arange(9).split(3), torch.tensor([0, 4, 8])]:
            optimizer.zero_grad()
            case.loss(model(x[ids]), y[ids]).mean().backward()
            recorder.step(ids, [x[ids], y[ids]])
            optimizer.step()
    run = lo.open_run(path)
    if case.refused:
        with pytest.raises(UnsupportedError, match=case.refused):
            lo.SGDIE().score(run, task, query)
        assert lo.Replay().score(run, task, query).values.abs().max() > 0
        return
    up, down = (lo.Replay(weight=1 + h).score(run, task, query).values for h in (1e-5, -1e-5))
    known = (down - up) / 2e-5
    ways = {
        "mean": lo.SGDIE().score(run, task, query).values,
        "each": lo.SGDIE().score(run, task, query, queries="each").values.mean(1, keepdim=True),
        "forward": lo.SGDIE(direction="forward").score(run, task, query).values,
        "timeline": lo.timeline(run, task, query).values.sum(1, keepdim=True),
    }
    scale = known.abs().max()
    assert scale > 1e-6
    wrong = {name: float((found - known).abs().max() / scale) for name, found in ways.items()}
    assert max(wrong.values()) <= 1e-5, wrong


@pytest.mark.parametrize("name", mostly_full(SHORT, "LayerNorm", "detach", "LSTM", "gradient reversal", "cdist"))
def test_layers_that_were_wrong(tmp_path, name):
    check(SHORT[name], tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("name", LONG)
def test_layers(tmp_path, name):
    check(LONG[name], tmp_path / "run")
