"""Noted draws, handed out under every transform, give what plain autograd gives from the same generator state."""

import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.func import functional_call, functionalize, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import leaveout as lo
from leaveout.task.batches import leaves, map_leaves
from leaveout.task.draws import has_randomness, note, random_state, replay, set_random_state
from leaveout.task.example_draws import by_example, example_axes
from leaveout.task.execution import looped
from leaveout.task.trace import tracer as tracing
from leaveout.task.trace.tracer import Tracer
from problems import call_traced
from refusal import refused

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

COUNT, TIME, WIDTH = 5, 3, 4


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Swapped(nn.Module):
    """A module that wants time before examples, and gets a permuted view."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.transpose(0, 1)).transpose(0, 1)


class First(nn.Module):
    """The first of a module's results."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


class SelfAttention(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.4, **kwargs)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class DropConnect(nn.Module):
    """A linear layer whose weights are masked: one draw for all examples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        mask = torch.bernoulli(torch.full_like(self.linear.weight, 0.5))
        return F.linear(x, self.linear.weight * mask, self.linear.bias)


class Inplace(nn.Module):
    def forward(self, x):
        return F.dropout(x * 1, 0.4, inplace=True)


def heads(x):
    return x.unflatten(-1, (2, 2)).transpose(1, 2)


def attended(x, **kwargs):
    q = heads(x)
    out = F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.4, **kwargs)
    return out.transpose(1, 2).flatten(-2)


def filled(x):
    """As it is done by hand: an empty tensor, filled in place, its result not looked at."""
    keep = x.new_empty((len(x), 1, 1))
    keep.bernoulli_(0.5)
    return x * keep


def noisy(x):
    noise = torch.empty((len(x), TIME, WIDTH), dtype=x.dtype)
    return x + noise.uniform_(-1, 1) + torch.zeros_like(x).normal_(0, 0.5) + torch.empty_like(x).exponential_(2.0)


def fresh(x):
    shape, like = tuple(x.shape), {"dtype": x.dtype}
    parts = [
        torch.rand(*shape, **like),
        torch.randn(shape, **like),
        torch.rand_like(x),
        torch.normal(x.detach(), 0.5),
        torch.normal(0.0, 1.0, size=shape, **like),
        torch.randint(0, 3, shape),
        torch.randint_like(x, 3),
        torch.poisson(x.detach().exp()),
        x.sigmoid().bernoulli(),
    ]
    return x * sum(parts)


def picked(x):
    return x * torch.multinomial(x[:, 0].softmax(-1), 1).unsqueeze(-1)


KINDS = {
    "Dropout": lambda: nn.Dropout(0.4),
    "Dropout, permuted": lambda: Swapped(nn.Dropout(0.4)),
    "Dropout, in place": Inplace,
    "Dropout, all": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Call(lambda x: x + F.dropout(x, 1.0))),
    "Dropout1d": lambda: nn.Dropout1d(0.4),
    "Dropout2d": lambda: Call(lambda x: F.dropout2d(x.unsqueeze(-1), 0.4).squeeze(-1)),
    "Dropout3d": lambda: Call(lambda x: F.dropout3d(x[..., None, None], 0.4).flatten(2)),
    "channels last": lambda: Call(
        lambda x: F.dropout(x.unsqueeze(-1).contiguous(memory_format=torch.channels_last), 0.4).squeeze(-1)
    ),
    "AlphaDropout": lambda: nn.AlphaDropout(0.4),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.4),
    "native_dropout": lambda: Call(lambda x: torch.native_dropout(x, 0.4, True)[0]),
    "RReLU": nn.RReLU,
    "RReLU, in place": lambda: Call(lambda x: F.rrelu(x * 1, training=True, inplace=True)),
    "attention": lambda: Call(attended),
    "attention, causal": lambda: Call(lambda x: attended(x, is_causal=True, scale=0.3)),
    "attention, masked": lambda: Call(lambda x: attended(x, attn_mask=torch.ones(TIME, TIME).tril(1).bool())),
    "MultiheadAttention": lambda: Swapped(SelfAttention()),
    "MultiheadAttention, batch first": lambda: SelfAttention(batch_first=True),
    "TransformerEncoderLayer": lambda: Swapped(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.4, "gelu")),
    "TransformerEncoderLayer, batch first": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, 8, 0.4, "gelu", batch_first=True
    ),
    "LSTM": lambda: Swapped(First(nn.LSTM(WIDTH, 2, 3, dropout=0.4, bidirectional=True))),
    "LSTM, batch first": lambda: First(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True, proj_size=2)),
    "GRU": lambda: First(nn.GRU(WIDTH, WIDTH, 2, bias=False, dropout=0.4, batch_first=True)),
    "RNN": lambda: First(nn.RNN(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)),
    "gumbel_softmax": lambda: Call(F.gumbel_softmax),
    "stochastic depth": lambda: Call(lambda x: x + x.sin() * (torch.rand(len(x), 1, 1, dtype=x.dtype) < 0.5)),
    "stochastic depth, in place": lambda: Call(filled),
    "noise, in place": lambda: Call(noisy),
    "noise": lambda: Call(fresh),
    "Normal": lambda: Call(lambda x: torch.distributions.Normal(x, x.exp(), validate_args=False).rsample()),
    "multinomial": lambda: Call(picked),
    "fractional pooling": lambda: Call(
        lambda x: F.fractional_max_pool2d(x.unsqueeze(1).tanh(), 2, output_size=(2, 3)).flatten(1)
    ),
    "drop connect": DropConnect,
}

NOT_BATCHED = {"channels last", "LSTM", "LSTM, batch first", "GRU", "RNN"}
"""Kinds that vmap over examples refuses with or without randomness: they go one example after the other."""


class Subject:
    """A small float64 model around one kind of layer, with everything that the tests ask of it."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.kind = kind
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), KINDS[kind](), nn.Tanh()).double()
        self.params = {name: p.detach() for name, p in self.model.named_parameters()}
        self.x = torch.randn(COUNT, TIME, WIDTH, dtype=torch.float64)
        self.state = random_state()
        self.draws = note(lambda: self.model(self.x), self.state)

    def rows(self, params, x):
        return (functional_call(self.model, params, (x,)) - 0.3).square().flatten(1).mean(1)

    def loss(self, params, x, draws):
        with replay(draws):
            return self.rows(params, x).mean()

    def eager(self, params=None):
        """The gradient as a training loop takes it."""
        leaves = {name: p.clone().requires_grad_() for name, p in (params or self.params).items()}
        set_random_state(self.state)
        return dict(zip(leaves, torch.autograd.grad(self.rows(leaves, self.x).mean(), leaves.values()), strict=True))

    def others(self):
        """The draws of a pass from another state."""
        return note(lambda: self.model(self.x), {"cpu": torch.Generator().manual_seed(9).get_state()})

    def moved(self, size, seed=1):
        torch.manual_seed(seed)
        return {name: p + size * torch.randn_like(p) for name, p in self.params.items()}


def difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(params=KINDS)
def subject(request):
    return Subject(request.param)


def test_the_gradient_is_the_eager_one_to_the_last_bit(subject):
    assert bool(subject.draws) == (subject.kind != "Dropout, all")
    found = grad(subject.loss)(subject.params, subject.x, subject.draws)
    for name, value in subject.eager().items():
        assert torch.equal(found[name], value)


def test_examples_under_vmap_get_their_own_draws(subject):
    axes = example_axes(lambda x: subject.rows(subject.params, x), subject.x, subject.draws)
    cut = by_example(subject.draws, axes, COUNT)
    over = looped if subject.kind in NOT_BATCHED else vmap
    found = over(grad(subject.loss), (None, 0, 0))(subject.params, subject.x.unsqueeze(1), cut)
    assert difference({name: value.mean(0) for name, value in found.items()}, subject.eager()) < 1e-13


def test_models_under_vmap_share_the_draws(subject):
    models = [subject.moved(0.1, seed) for seed in range(3)]
    stack = {name: torch.stack([model[name] for model in models]) for name in subject.params}
    over = looped if subject.kind == "channels last" else vmap
    found = over(grad(subject.loss), (0, None, None))(stack, subject.x, subject.draws)
    for i, model in enumerate(models):
        alone = grad(subject.loss)(model, subject.x, subject.draws)
        assert difference({name: value[i] for name, value in found.items()}, alone) < 1e-13


def test_second_derivatives_hold_the_draws_fixed(subject):
    vector, h = subject.moved(1.0), 1e-5
    slope = lambda p: grad(subject.loss)(p, subject.x, subject.draws)  # noqa: E731
    found = jvp(slope, (subject.params,), (vector,))[1]
    ends = [slope({name: p + s * h * vector[name] for name, p in subject.params.items()}) for s in (1, -1)]
    assert difference(found, {name: (ends[0][name] - ends[1][name]) / (2 * h) for name in found}) < 1e-6


def test_a_trace_takes_draws_as_inputs(subject):
    """Traced with one pass's draws, right with another's."""
    if "LSTM" in subject.kind:
        pytest.skip("seconds; the other recurrent layers show it")
    args = (subject.params, subject.x, subject.draws)

    def flat(*tensors):
        given = iter(tensors)
        return leaves(grad(subject.loss)(*map_leaves(lambda _: next(given), args)))

    module = make_fx(functionalize(flat))(*leaves(args))
    given = (subject.params, subject.x, subject.others())
    for a, b in zip(module(*leaves(given)), flat(*leaves(given)), strict=True):
        assert (a - b).abs().max() < 1e-14


def test_the_tracer_repeats_a_pass_with_other_draws():
    subject, tracer = Subject("TransformerEncoderLayer, batch first"), Tracer()
    for draws in (*[subject.draws] * (tracing.WARM_UP + 2), subject.others()):
        found = call_traced(tracer, "gradient", grad(subject.loss), subject.params, subject.x, draws)
        assert difference(found, grad(subject.loss)(subject.params, subject.x, draws)) == 0
    assert [trace is not None for trace in tracer._traces.values()] == [True]
    assert difference(found, subject.eager()) > 0


def test_other_parameters_get_the_draws_of_the_recorded_pass():
    """A counterfactual pass equals an eager one with the same mask, written out."""
    subject = Subject("Dropout")
    params = subject.moved(0.5)
    (mask,) = subject.draws.values()
    out = (F.linear(subject.x, params["0.weight"], params["0.bias"]) * mask / 0.6).tanh()
    assert abs(subject.loss(params, subject.x, subject.draws) - (out - 0.3).square().mean()) < 1e-15


def test_a_slope_that_was_never_drawn_is_that_of_evaluation_mode():
    x = torch.tensor([-1.0, 2.0, -3.0])
    draws = note(lambda: F.rrelu(x, training=True))
    with replay(draws):
        again, other = F.rrelu(x, training=True), None
    with replay(draws):
        other = F.rrelu(torch.tensor([-1.0, -2.0, 3.0]), training=True)
    assert torch.equal(again, torch.stack([other[0], x[1], again[2]]))
    assert torch.equal(other[1:], torch.tensor([-2 * (1 / 8 + 1 / 3) / 2, 3.0]))


def test_a_batch_of_one_has_its_draws():
    subject = Subject("MultiheadAttention")
    x = subject.x[:1]
    draws = note(lambda: subject.model(x))
    cut = by_example(draws, example_axes(lambda x: subject.rows(subject.params, x), x, draws), 1)
    found = vmap(subject.loss, (None, 0, 0))(subject.params, x.unsqueeze(1), cut)
    assert abs(found[0] - subject.loss(subject.params, x, draws)) < 1e-15


def test_noting_and_asking_leave_the_generator_alone():
    subject, before = Subject("Dropout"), random_state()
    assert has_randomness(lambda: subject.model(subject.x))
    note(lambda: subject.model(subject.x), subject.state)
    subject.loss(subject.params, subject.x, subject.draws)
    subject.model.eval()
    assert not has_randomness(lambda: subject.model(subject.x))
    assert torch.equal(random_state()["cpu"], before["cpu"])


def trained(recorded):
    """Parameters after some steps with dropout, and the gradients taken again from recorded states."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(COUNT, TIME, WIDTH)

    def loss(params, draws):
        with replay(draws):
            return functional_call(model, params, (x,)).square().mean()

    for _ in range(4):
        state = random_state() if recorded else None
        model(x).square().mean().backward()
        if recorded:
            params = {name: p.detach() for name, p in model.named_parameters()}
            again = grad(loss)(params, note(lambda: model(x), state))
            assert all(torch.equal(again[name], p.grad) for name, p in model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def test_recording_changes_no_bit_of_training_and_gives_its_gradients():
    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))


def test_masks_are_small_and_travel():
    subject = Subject("Dropout, permuted")
    again = pickle.loads(pickle.dumps(subject.draws))  # noqa: S301 - made here
    assert [value.dtype for value in again.values()] == [torch.bool]
    for name, value in subject.draws.items():
        assert torch.equal(again[name], value)
        assert again[name].stride() == value.stride()


def test_what_is_handed_out_may_be_written_into():
    def forward():
        return torch.rand(3).zero_(), F.dropout(torch.ones(3)), torch.ones(3).normal_().zero_()

    draws = note(forward)
    before = {name: value.clone() for name, value in draws.items()}
    with replay(draws):
        forward()
    assert all(torch.equal(draws[name], before[name]) for name in before)


def packed(model, x):
    sequence = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 3, 2, 2, 1]), batch_first=True)
    return model(sequence)[0].data


def test_packed_sequences_by_plain_autograd():
    torch.manual_seed(0)
    model = nn.LSTM(WIDTH, WIDTH, 3, dropout=0.4, bidirectional=True).double()
    x, state = torch.randn(COUNT, TIME, WIDTH).double(), random_state()
    draws = note(lambda: packed(model, x), state)
    set_random_state(state)
    eager = torch.autograd.grad(packed(model, x).square().mean(), list(model.parameters()))
    with replay(draws):
        out = packed(model, x)
    for a, b in zip(eager, torch.autograd.grad(out.square().mean(), list(model.parameters())), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("forward", "code", "named"),
    [
        (lambda: torch.rand(3), "draws-of-other-kind", "rand of shape [3] where random draw 0 randn"),
        (lambda: torch.randn(3), "draws-too-few-taken", "1 random draws instead of 2"),
        (lambda: torch.randn(4), "draws-of-other-kind", "randn of shape [4] where random draw 0 randn of shape [3]"),
        (lambda: [torch.randn(3) for _ in range(3)], "draws-too-many-asked", "all of its 2 random draws"),
        (
            lambda: (torch.randn(3), torch.randn(3), torch._standard_gamma(torch.ones(2))),
            "draw-not-replayed",
            "went past",
        ),
    ],
)
def test_another_path_is_an_error(forward, code, named):
    draws = note(lambda: (torch.randn(3), torch.randn(3)))
    with refused(lo.MismatchError, code, named), replay(draws):
        forward()


@pytest.mark.parametrize(
    ("forward", "code", "named"),
    [
        (lambda: torch._standard_gamma(torch.ones(2)), "draw-not-known", "inside _standard_gamma"),
        (lambda: torch.rand(2, generator=torch.Generator()), "draw-from-private-generator", "of its own"),
        (lambda: torch.default_generator.manual_seed(3), "draw-not-declared", "does not say so"),
    ],
)
def test_draws_that_cannot_be_noted_are_refused(forward, code, named):
    before = random_state()
    with refused(lo.UnsupportedError, code, named):
        note(lambda: (torch.rand(1), forward(), torch.rand(1)))
    assert torch.equal(random_state()["cpu"], before["cpu"])


def mixed(x):
    return x + x[torch.randperm(len(x))]


def one_by_one(x):
    return torch.stack([row * torch.rand(()) for row in x])


def pairs(x):
    return (x.sum((1, 2)) * torch.rand(len(x), len(x))).mean(1)


def shuffled(x):
    """Draws in an order of examples that is neither theirs nor that of other parts."""
    return x * torch.rand(len(x), 1, 1).flip(0)


def by_time(x):
    """Time outside, examples inside one dimension."""
    return F.dropout(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (TIME, len(x))).transpose(0, 1)


@pytest.mark.parametrize(
    ("forward", "code", "named"),
    [
        (mixed, "draw-shape-not-by-example", "0 randperm"),
        (one_by_one, "draws-not-by-example", "take 5 random draws, and one alone takes 1"),
        (pairs, "draw-shape-not-by-example", "0 rand has shape"),
        (shuffled, "example-draws-differ", "order that is not known"),
    ],
)
def test_draws_that_belong_to_no_example_are_refused(forward, code, named):
    torch.manual_seed(0)
    x = torch.randn(COUNT, TIME, WIDTH)
    with refused(lo.UnsupportedError, code, named):
        example_axes(forward, x, note(lambda: forward(x)))


def test_draws_of_another_path_than_was_looked_at_are_refused():
    with refused(lo.MismatchError, "draws-of-other-path", "0 rand instead of 0 randn"):
        by_example(note(lambda: torch.rand(3)), {"0 randn": None}, 3)


def test_a_draw_into_a_given_tensor_is_refused():
    draws = note(lambda: torch.rand(3))
    with refused(lo.UnsupportedError, "draw-into-out", "out="), replay(draws):
        torch.rand(3, out=torch.empty(3))


def test_a_draw_into_a_tensor_that_examples_share_is_refused():
    shared = torch.empty(())
    draws = {name: value.expand(3) for name, value in note(lambda: shared.uniform_()).items()}

    def drawn(own):
        with replay(own):
            return shared.uniform_() * 2

    with refused(lo.UnsupportedError, "draw-into-shared-tensor", "uniform_", "torch.empty"):
        vmap(drawn)(draws)


def test_examples_inside_a_merged_dimension_are_recognised():
    torch.manual_seed(0)
    x = torch.randn(COUNT, TIME, WIDTH)
    state = random_state()
    draws = note(lambda: by_time(x), state)
    axes = example_axes(by_time, x, draws)
    assert [axis.inner for axis in axes.values()] == [True]

    def forward(x, draws):
        with replay(draws):
            return by_time(x.unsqueeze(0))[0]

    set_random_state(state)
    assert torch.equal(vmap(forward)(x, by_example(draws, axes, COUNT)), by_time(x))
