"""What the guard finds when a task is made, and at the state that is scored."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.diff.forms import Form
from leaveout.diff.hessian import Hessian
from leaveout.errors import UnsupportedError
from leaveout.task import preparing
from leaveout.task.guard.agreement import slope
from leaveout.task.guard.compare import compared
from leaveout.task.guard.differences import are_transposed, difference
from leaveout.task.guard.points import trial
from leaveout.task.preparing import trial_batch
from refusal import refused

pytestmark = pytest.mark.compared_anew


@pytest.fixture(params=["small", "large"], autouse=True)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test is taken as for a large model too, for which fewer passes are made."""
    if request.param == "large":
        monkeypatch.setattr(preparing, "LARGE", 0)
    return request.param


def data(n: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(2, (n,), generator=generator))


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_a_product_that_is_wrong_across_one_direction_is_noticed():
    """The error has no part along the other direction, and later one that differences are too coarse to show."""
    matrix = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    measured = difference(lambda at: {"w": (matrix @ at["w"]).sin()}, {"w": torch.ones(6, dtype=torch.float64)})
    slopes = (matrix @ torch.ones(6, dtype=torch.float64)).cos()[:, None] * matrix
    u, v = (direction["w"] for direction in measured.directions)
    right = slopes.T @ u
    across = u - (u @ v) / (v @ v) * v
    off = right.norm() * across / across.norm()
    assert measured.agrees_transposed({"w": right})
    assert not measured.agrees_transposed({"w": right + 1e-2 * off})

    assert measured.agrees_transposed({"w": right + 1e-6 * off})
    stack = torch.stack([u, v])
    pushed = {"w": stack @ slopes.T}
    assert are_transposed({"w": stack @ slopes}, pushed, {"w": stack}, measured.gradient)
    assert not are_transposed({"w": (right + 1e-6 * off)[None]}, pushed, {"w": stack}, measured.gradient)


def test_products_are_those_of_the_dense_hessian():
    """One vector goes another way than two; both must give the matrix that plain double backward gives."""
    model, train = normalised(), data(5)
    task = lo.Task(model, nn.CrossEntropyLoss(), train)
    params = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in params.values()]

    def named(flat: Tensor) -> dict[str, Tensor]:
        return {n: part.reshape(p.shape) for (n, p), part in zip(params.items(), flat.split(sizes), strict=True)}

    def mean(flat: Tensor) -> Tensor:
        out = torch.func.functional_call(model, named(flat), (train.tensors[0],))
        return nn.functional.cross_entropy(out, train.tensors[1])

    dense = torch.autograd.functional.hessian(mean, torch.cat([p.flatten() for p in params.values()]))
    vectors = torch.randn(2, len(dense), dtype=torch.float64)
    for count in (1, 2):
        stack = {n: torch.stack([named(v)[n] for v in vectors[:count]]) for n in params}
        curved = Hessian(task.objective, params, list(train.tensors)).pull(stack).curved
        found = torch.cat([curved[n].flatten(1) for n in params], dim=1)
        torch.testing.assert_close(found, vectors[:count] @ dense, rtol=1e-9, atol=1e-12)


def test_the_quick_form_is_kept_where_it_is_right():
    plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    assert lo.Task(plain, nn.CrossEntropyLoss(), data()).objective.abilities.vector is Form.REVERSE_FORWARD
    assert lo.Task(normalised(), nn.CrossEntropyLoss(), data()).objective.abilities.vector is Form.REVERSE_FORWARD
    layers = (nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(6, 2))
    wrong = lo.Task(nn.Sequential(*layers).double(), nn.CrossEntropyLoss(), data())
    assert wrong.objective.abilities.vector is not Form.REVERSE_FORWARD
    unchecked = lo.Task(plain, nn.CrossEntropyLoss(), data(), check=False).objective.abilities
    assert unchecked.vector is Form.FORWARD_REVERSE  # not compared, so not the one that is wrong most often


class Gated(nn.Module):
    """Adds the batch's mean through a gate."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.body, self.gate, self.threshold = nn.Linear(4, 2), nn.Parameter(torch.zeros(())), threshold

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return out + torch.relu(self.gate.abs() - self.threshold) * out.mean(0)


def test_examples_mixed_behind_a_gate_that_is_zero():
    with refused(UnsupportedError, "task-not-supported", "depends on the other examples"):
        lo.Task(Gated(0.0).double(), nn.CrossEntropyLoss(), data())


def test_examples_mixed_at_the_last_state_only(tmp_path):
    model, train = Gated(0.5).double(), data()
    task = lo.Task(model, nn.CrossEntropyLoss(), train)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for ids in torch.arange(8).split(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train.tensors[0][ids]), train.tensors[1][ids]).backward()
            model.gate.grad = torch.full((), -1.0, dtype=torch.float64)  # opens with the first step
            recorder.step(ids, [t[ids] for t in train.tensors])
            optimizer.step()
    for method in (lo.SGDIE(), lo.TracIn(), lo.Replay()):
        with refused(UnsupportedError, "task-not-supported", "at the run's last state", "other examples"):
            method.score(lo.open_run(tmp_path / "run"), task, train)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Embedding(9, 2, scale_grad_by_freq=True), nn.Flatten()), "scale_grad_by_freq=False"),
        (nn.Sequential(nn.Embedding(9, 2, max_norm=1.0), nn.Flatten()), "changes its weights in the forward pass"),
        (nn.Sequential(nn.EmbeddingBag(9, 2, max_norm=1.0)), "changes its weights in the forward pass"),
    ],
)
def test_embeddings_that_depend_on_the_batch(model, words):
    tokens = torch.randint(9, (6, 1))
    with refused(UnsupportedError, "task-not-supported", words):
        lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(tokens, tokens[:, 0] % 2))


class With(nn.Module):
    """A linear layer and one more parameter."""

    def __init__(self, extra: Tensor) -> None:
        super().__init__()
        self.body, self.extra = nn.Linear(4, 2).double(), nn.Parameter(extra)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.extra.abs()


@pytest.mark.parametrize(
    ("dtype", "words"), [(torch.complex128, ["is complex"]), (torch.float32, ["of several types", "float32, float64"])]
)
def test_parameters_of_other_types(dtype, words):
    with refused(UnsupportedError, "task-not-supported", *words):
        lo.Task(With(torch.ones(2, dtype=dtype)), nn.CrossEntropyLoss(), data())


def test_weighted_classes_without_reduction():
    """With reduction='none' the loop takes the mean itself, so that nothing depends on the batch."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0], dtype=torch.float64), reduction="none")
    task = lo.Task(nn.Linear(4, 2).double(), loss, data())
    batch = task.read([0, 1, 2])
    torch.testing.assert_close(task.objective.losses(task.parameters(), batch), loss(task.model(batch[0]), batch[1]))


class Reversed(torch.autograd.Function):
    """Written for autograd alone: the gradient's other direction."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class InPlace(Reversed):
    """Writes into its input; the same backward pass is its derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.neg_()


class Uses(nn.Linear):
    function = Reversed

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function.apply(x * self.weight.sum()))


def test_a_function_whose_gradient_is_no_derivative_is_not_scored_by_derivatives():
    task = lo.Task(Uses(4, 2).double(), nn.CrossEntropyLoss(), data())
    assert not task.objective.abilities.slope


def test_a_function_that_writes_into_its_input_and_has_its_derivative_is_followed():
    model = Uses(4, 2).double()
    model.function = InPlace
    assert lo.Task(model, nn.CrossEntropyLoss(), data()).objective.abilities.slope


def test_a_kink_beside_the_state_does_not_make_a_right_derivative_wrong():
    """A unit that is 3e-7 from its kink: differences of the loss by larger steps cross it."""
    torch.manual_seed(0)
    model, train = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double(), data(3)
    with torch.no_grad():
        model[2].weight[:, 0] = torch.tensor([5.0, -5.0])
        model[0].bias[0] += 3e-7 - model[0](train.tensors[0])[0, 0]
    task, batch = lo.Task(model, nn.CrossEntropyLoss(), train), list(train.tensors)
    at = {name: param.detach() for name, param in model.named_parameters()}
    objective = task.objective
    assert slope(objective.untraced(), at, batch, trial(objective, at, batch, near=False).point)
    problem, abilities = compared(objective, at, trial_batch(objective, at, task.read([0, 1, 2])), objective.abilities)
    assert problem is None
    assert abilities.slope


class Stopped(nn.Module):
    """Stops a gradient within a product, so that the derivative of the gradient is no symmetric matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden * hidden.detach())


MODELS = {
    "linear": lambda: nn.Linear(4, 2),
    "layer norm": normalised,
    "instance norm": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(6, 2)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 2)),
    "a detached factor": Stopped,
    "attention": lambda: nn.Sequential(
        nn.Linear(4, 12), nn.Unflatten(1, (3, 4)), nn.TransformerEncoderLayer(4, 2, 5, 0.1, batch_first=True),
        nn.Flatten(), nn.Linear(12, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", ["large"], indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_fewer_passes_of_a_large_model_find_the_same(name: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the state that a task is made with, and at another as training sees it."""
    assert size == "large"
    found, passes = [], []
    for large in (0, 1 << 24):
        monkeypatch.setattr(preparing, "LARGE", large)
        torch.manual_seed(0)
        model, count = MODELS[name]().double(), [0]
        model.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        task = lo.Task(model.eval(), nn.CrossEntropyLoss(), data())
        trained = task.objective.in_mode(training=frozenset(part for part, _ in model.named_modules()))
        last = {key: param.detach() * 1.1 for key, param in model.named_parameters()}
        problem, abilities = compared(
            trained, last, trial_batch(trained, last, task.read([0, 1, 2])), trained.abilities
        )
        assert problem is None
        found.append((task.objective.abilities, abilities))
        passes.append(count[0])
    assert found[0] == found[1]
    assert passes[0] < passes[1]
