"""Weighted BatchNorm equals batches from which examples were really removed, plain PyTorch, and finite differences."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.func import functional_call, functionalize, grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import leaveout as lo
from leaveout._util.trees import each
from leaveout.task.batches import leaves, map_leaves
from leaveout.task.draws import note, random_state, replay, set_random_state
from leaveout.task.rewrites.batch_norm import refuse_single_values, weighted_batch_norm
from refusal import refused

COUNT, CHANNELS = 6, 3
LEFT = torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=torch.float64)


class Block(nn.Module):
    """Two convolutions and two BatchNorms around a shortcut, as in a residual network."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS, momentum=momentum)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.last = nn.BatchNorm2d(CHANNELS, momentum=momentum)

    def forward(self, x):
        return (x + self.last(self.second(self.norm(self.first(x)).tanh()))).tanh()


class Twice(nn.Module):
    """One BatchNorm that sees two batches in a pass."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS, momentum=momentum)

    def forward(self, x):
        return self.norm(self.norm(x).exp())


def settings(kind, shape):
    for affine in (True, False):
        for momentum in (0.1, None):
            for tracked in (True, False):
                given = {"affine": affine, "momentum": momentum, "track_running_stats": tracked}
                yield pytest.param(partial(kind, CHANNELS, **given), shape, id=f"{kind.__name__} {shape} {given}")


SETTINGS = [
    *settings(nn.BatchNorm1d, (CHANNELS,)),
    *settings(nn.BatchNorm1d, (CHANNELS, 4)),
    *settings(nn.BatchNorm2d, (CHANNELS, 2, 2)),
    *settings(nn.BatchNorm3d, (CHANNELS, 2, 2, 2)),
    pytest.param(Block, (CHANNELS, 4, 4), id="block"),
    pytest.param(lambda: Block(None), (CHANNELS, 4, 4), id="block, cumulative"),
    pytest.param(lambda: Twice(0.3), (CHANNELS,), id="twice"),
    pytest.param(lambda: Twice(None), (CHANNELS,), id="twice, cumulative"),
    pytest.param(
        lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True), (CHANNELS, 3, 3), id="instance"
    ),
    pytest.param(lambda: nn.InstanceNorm1d(CHANNELS), (CHANNELS, 3), id="instance, untracked"),
]


class Subject:
    """A model with its parameters and buffers after a first batch, and a second batch."""

    def __init__(self, make, shape):
        torch.manual_seed(0)
        self.model = make().double()
        for p in self.model.parameters():
            p.data += 0.3 * torch.randn_like(p)
        self.model(torch.randn(COUNT, *shape, dtype=torch.float64) + 1)
        self.params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.x = torch.randn(COUNT, *shape, dtype=torch.float64)

    def __call__(self, params, buffers, x, weights):
        with weighted_batch_norm(weights, buffers) as new:
            out = functional_call(self.model, {**params, **buffers}, (x,))
        return out, new

    def statistics(self):
        return {name: b for name, b in self.buffers.items() if b.is_floating_point()}

    def scalar(self, params, statistics, x, weights):
        """Something that depends on every output and every new running statistic."""
        out, new = self(params, {**self.buffers, **statistics}, x, weights)
        ends = [value.sin().sum() for value in new.values() if value.is_floating_point()]
        return (weights.view(-1, *(1 for _ in out.shape[1:])) * (out - 0.2).sin()).sum() + sum(ends)

    def plain(self, x):
        """What PyTorch does with a batch, on a copy of the model."""
        model = copy.deepcopy(self.model)
        return model(x), dict(model.named_buffers())


def near(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() < 1e-12, name


@pytest.mark.parametrize(("make", "shape"), SETTINGS)
def test_weight_zero_is_removal_from_the_batch(make, shape):
    subject = Subject(make, shape)
    kept, (out, new) = LEFT.bool(), subject(subject.params, subject.buffers, subject.x, LEFT)
    real, buffers = subject.plain(subject.x[kept])
    assert (out[kept] - real).abs().max() < 1e-12
    near({**subject.buffers, **new}, buffers)


@pytest.mark.parametrize(("make", "shape"), SETTINGS)
@pytest.mark.parametrize("weights", [None, torch.ones_like(LEFT)])
def test_weight_one_is_plain_pytorch(make, shape, weights):
    subject = Subject(make, shape)
    before = {name: value.clone() for name, value in subject.buffers.items()}
    out, new = subject(subject.params, subject.buffers, subject.x, weights)
    real, buffers = subject.plain(subject.x)
    assert (out - real).abs().max() < 1e-12
    near({**subject.buffers, **new}, buffers)
    near(subject.buffers, before)

    def loss(params, x):
        return (subject(params, subject.buffers, x, weights)[0] - 0.2).sin().sum()

    x = subject.x.clone().requires_grad_()
    real = torch.autograd.grad((subject.model(x) - 0.2).sin().sum(), [x, *subject.model.parameters()])
    params, inputs = grad(loss, (0, 1))(subject.params, subject.x)
    for a, b in zip([inputs, *params.values()], real, strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize(("make", "shape"), SETTINGS)
def test_derivatives_in_everything_equal_finite_differences(make, shape):
    """In parameters, running statistics, inputs and weights: forward mode, reverse mode, and forward over reverse."""
    subject, h = Subject(make, shape), 1e-5
    point = (subject.params, subject.statistics(), subject.x, LEFT)
    vector = map_leaves(torch.randn_like, point)

    def at(t):
        return [each(lambda a, b: a + t * b, p, v) if isinstance(p, dict) else p + t * v for p, v in zip(point, vector)]  # noqa: B905

    slope = grad(subject.scalar, (0, 1, 2, 3))
    for i in range(4):  # each alone, so that a missing part cannot hide behind the others
        ends = [subject.scalar(*point[:i], at(t)[i], *point[i + 1 :]) for t in (h, -h)]
        along = sum((a * b).sum() for a, b in zip(leaves(slope(*point)[i]), leaves(vector[i]), strict=True))
        assert abs(along - (ends[0] - ends[1]) / (2 * h)) < 1e-7 * (1 + abs(along))
    ends = [leaves(slope(*at(t))) for t in (h, -h)]
    pushed = leaves(jvp(slope, point, vector)[1])
    pulled = leaves(vjp(slope, *point)[1](vector))
    for a, b, up, down in zip(pushed, pulled, *ends, strict=True):
        scale = 1 + a.abs().max()
        assert (a - (up - down) / (2 * h)).abs().max() < 1e-6 * scale
        assert (a - b).abs().max() < 1e-11 * scale  # second derivatives are symmetric


@pytest.mark.parametrize("momentum", [0.1, None])
def test_models_under_vmap_have_their_own_weights_and_statistics(momentum):
    subject = Subject(lambda: Block(momentum), (CHANNELS, 4, 4))
    rows = [torch.ones_like(LEFT), LEFT, torch.zeros_like(LEFT)]
    models = [
        ({n: p + i for n, p in subject.params.items()}, {n: b + i for n, b in subject.buffers.items()})
        for i in range(3)
    ]
    params, buffers = ({n: torch.stack([m[k][n] for m in models]) for n in models[0][k]} for k in (0, 1))
    out, new = vmap(subject, (0, 0, None, 0))(params, buffers, subject.x, torch.stack(rows))
    for i, weights in enumerate(rows):
        alone, changed = subject(*models[i], subject.x, weights)
        assert (out[i] - alone).abs().max() < 1e-12
        near({name: value[i] for name, value in new.items()}, changed)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_trace_is_right_for_other_weights_and_counts(momentum):
    subject = Subject(lambda: Block(momentum), (CHANNELS, 4, 4))

    def flat(w, *buffers):
        out, new = subject(subject.params, dict(zip(subject.buffers, buffers, strict=True)), subject.x, w)
        return [out, *(new[name] for name in subject.buffers)]

    module = make_fx(functionalize(flat))(torch.ones_like(LEFT), *subject.buffers.values())
    for w, step in ((LEFT, 3), (torch.zeros_like(LEFT), 1)):
        given = [value + step for value in subject.buffers.values()]
        for a, b in zip(module(w, *given), flat(w, *given), strict=True):
            assert (a - b).abs().max() < 1e-14


def test_a_batch_that_every_example_has_left_was_not_seen():
    subject = Subject(lambda: Block(None), (CHANNELS, 4, 4))
    none = torch.zeros_like(LEFT)
    out, new = subject(subject.params, subject.buffers, subject.x, none)
    assert out.isfinite().all()
    near(new, subject.buffers)
    slopes = grad(subject.scalar, (0, 1, 3))(subject.params, subject.statistics(), subject.x, none)
    assert all(leaf.isfinite().all() for leaf in leaves(slopes))


def test_a_single_value_has_no_variance():
    subject = Subject(lambda: nn.BatchNorm1d(CHANNELS), (CHANNELS,))
    one = torch.eye(COUNT, dtype=torch.float64)[0]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        subject.model(subject.x[:1])
    with refused(lo.InputError, "batch-norm-single-value", "statistics='stay'"):
        subject(subject.params, subject.buffers, subject.x, one)
    with refused(lo.InputError, "batch-norm-single-value"):
        refuse_single_values(torch.stack([LEFT, one]), 1)
    refuse_single_values(torch.stack([LEFT, torch.zeros_like(LEFT)]), 1)
    refuse_single_values(one, 2)
    _, new = vmap(subject, (None, None, None, 0))(subject.params, subject.buffers, subject.x, torch.stack([LEFT, one]))
    assert new["running_var"].isnan().tolist() == [[False] * CHANNELS, [True] * CHANNELS]


def test_evaluation_mode_has_derivatives_in_the_running_statistics():
    subject = Subject(Block, (CHANNELS, 4, 4))
    subject.model.eval()
    out, new = subject(subject.params, subject.buffers, subject.x, None)
    assert (out - subject.model(subject.x)).abs().max() < 1e-12
    assert not new

    def loss(statistics):
        return subject(subject.params, {**subject.buffers, **statistics}, subject.x, None)[0].sin().sum()

    start = subject.statistics()
    vector, h = {name: torch.randn_like(b) for name, b in start.items()}, 1e-5

    def moved(t):
        """By plain PyTorch."""
        given = {name: b + t * vector[name] for name, b in start.items()}
        return functional_call(subject.model, {**subject.params, **subject.buffers, **given}, (subject.x,)).sin().sum()

    slope = grad(loss)(start)
    along = sum((slope[name] * vector[name]).sum() for name in slope)
    assert abs(along - (moved(h) - moved(-h)) / (2 * h)) < 1e-7


@pytest.mark.parametrize("outer", ["draws", "weights"])
def test_dropout_and_batch_norm_in_one_pass(outer):
    """Both modes together, in either order: a really smaller batch with the same masks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Dropout(0.4)).double()
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    x, state = torch.randn(COUNT, 4, dtype=torch.float64), random_state()
    draws = note(lambda: functional_call(model, {**params, **buffers}, (x,)), state)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    contexts = [replay(draws), weighted_batch_norm(LEFT, buffers)]
    with contexts[outer == "weights"] as a, contexts[outer == "draws"] as b:
        out = functional_call(model, {**params, **buffers}, (x,))
    kept, (mask,) = LEFT.bool(), draws.values()
    real = model[1](model[0](x[kept])) * mask[kept] / 0.6
    assert (out[kept] - real).abs().max() < 1e-12
    near(a or b, dict(model.named_buffers()))
    set_random_state(state)
    assert torch.equal(F.dropout(torch.ones_like(out), 0.4) != 0, mask)


def test_half_precision_is_computed_in_float32():
    subject = Subject(lambda: nn.BatchNorm1d(CHANNELS), (CHANNELS,))
    subject.model.float()
    x = subject.x.bfloat16()
    params = {name: p.float() for name, p in subject.params.items()}
    buffers = {name: b.clone() for name, b in subject.model.named_buffers()}
    out, new = subject(params, buffers, x, LEFT)
    real, changed = subject.plain(x[LEFT.bool()])
    assert out.dtype == real.dtype == torch.bfloat16
    assert torch.equal(out[LEFT.bool()], real)
    for name, value in changed.items():
        assert new[name].dtype == value.dtype
        assert (new[name] - value).abs().max() < 1e-6


def test_what_cannot_be_weighted_is_refused():
    subject = Subject(lambda: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(4)), (CHANNELS, 4))
    with refused(lo.UnsupportedError, "batch-norm-rows-unknown", "18 rows", "6 examples"):
        subject(subject.params, subject.buffers, subject.x, LEFT)
    out, _ = subject(subject.params, subject.buffers, subject.x, None)
    assert (out - subject.plain(subject.x)[0]).abs().max() < 1e-12
    with refused(lo.InputError, "batch-norm-buffers-missing"), weighted_batch_norm(None, {}):
        subject.model(subject.x)
