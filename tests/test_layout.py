"""Operations on images laid out anew give what they gave before."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.diff import operator as products
from leaveout.diff.hessian import Hessian
from leaveout.task import batches
from leaveout.task.trace import layout
from leaveout.task.trace import tracer as tracing
from problems import mostly_full


class Viewing(nn.Module):
    """Views its activations, as many people's networks do; that fails on other layouts than the usual one."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(48, 4)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).view(len(x), -1))


class Behind(nn.Module):
    """Counts its dimensions from behind."""

    def forward(self, x):
        return x.permute(0, -1, 1, 2)


NETWORKS = {
    "plain": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, 4)
    ),
    "strides": lambda: nn.Sequential(nn.Conv2d(2, 4, (3, 2), stride=(2, 1)), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4)),
    "padding": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=(1, 2)), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)),
    "dilation": lambda: nn.Sequential(nn.Conv2d(2, 4, 2, dilation=(2, 3)), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)),
    "groups": lambda: nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(2, 2, 1), nn.ConvTranspose2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    ),
    "norms": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.LazyLinear(4)
    ),
    "overlapping": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(3, 1, 1),
        nn.Conv2d(4, 3, 2),
        nn.ReLU(),
        nn.MaxPool2d((2, 3)),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "viewing": Viewing,
    "one number": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=(1,)), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)),
    "from behind": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), Behind(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)),
}


def task_of(network, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 6, 6, dtype=dtype), torch.randint(4, (6,))
    model = NETWORKS[network]().to(dtype)
    model(x)  # lazy layers take their size from it
    return lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, y))


@pytest.fixture
def relaid(monkeypatch):
    """The graphs that were laid out anew."""
    made, real = [], layout.for_images

    def noting(*given):
        made.append(real(*given))
        return made[-1]

    monkeypatch.setattr(layout, "for_images", noting)
    return made


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", mostly_full([torch.float64, torch.float32], torch.float64), ids=str)
@pytest.mark.parametrize("network", mostly_full(NETWORKS, "plain", "transposed", "norms", "viewing"))
def test_products_of_networks(network, dtype, relaid):
    task = task_of(network, dtype)
    params = {name: p.detach() for name, p in task.parameters().items()}
    batch = task.read(range(6))
    vector = {name: torch.randn_like(p) for name, p in params.items()}
    one = {name: p[None] for name, p in vector.items()}
    stack = {name: torch.randn(6, *p.shape, dtype=dtype) for name, p in params.items()}
    weights = torch.rand(2, 6, 6, dtype=dtype)
    zero = {name: torch.zeros_like(p)[None] for name, p in params.items()}
    Hessian(task.objective, params, batch).pull(zero)  # what is traced with zeros is right for others
    relaid.pop()
    calls = {
        "one": lambda operator: operator.pull(one)[:2],
        "shared": lambda operator: operator.example_products(batch, vector),
        "own": lambda operator: operator.example_products(batch, stack),
        "gradients": lambda operator: operator.example_gradients(batch),
        "hessian": lambda operator: operator.pull(stack)[:3],
        "changes": lambda operator: operator.push(stack, *weights),
    }
    for name, call in calls.items():
        traced, eager = (
            batches.leaves(call(Hessian(objective, params, batch)))
            for objective in (task.objective, task.objective.untraced())
        )
        assert name == "one" or relaid.pop() is not None, name
        for a, b in zip(eager, traced, strict=True):
            assert b.is_contiguous(), name
            torch.testing.assert_close(b, a, rtol=0, atol=200 * torch.finfo(dtype).eps * float(a.abs().max()))
    assert all(trace is not None for trace in task.objective.execution.tracer._traces.values())


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("network", ["plain", "overlapping"])
def test_curvature_of_kinks_through_max_pooling(network, relaid):
    """Slopes go back through max-pooling twice: once they are added to zeros at the places that it chose."""
    task = task_of(network, torch.float64)
    objective = task.objective.in_mode(kinks=True)
    params = {name: p.detach() for name, p in task.parameters().items()}
    batch, vector = task.read(range(6)), {name: torch.randn_like(p)[None] for name, p in params.items()}
    traced = batches.leaves(Hessian(objective, params, batch).pull(vector)[:2])
    used = [node for node in relaid.pop().graph.nodes if node.users]
    assert any(node.target is torch.ops.aten.max_pool2d_with_indices_backward.default for node in used)
    assert not any(node.target is torch.ops.aten.scatter_add.default and node.meta["val"].ndim == 3 for node in used)
    eager = Hessian(objective.untraced(), params, batch).pull(vector)[:2]
    for a, b in zip(batches.leaves(eager), traced, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-13 * float(a.abs().max()))


@pytest.mark.parametrize("cache", [1, 1 << 20])
@pytest.mark.parametrize("channels", [1, 7])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    itertools.product([(3, 2), (1, 3)], [(1, 1), (2, 3)], [(0, 0), (2, 1)], [(1, 1), (2, 3)]),
)
def test_gradients_of_kernels_example_by_example(kernel, stride, padding, dilation, channels, cache, monkeypatch):
    """Against PyTorch's own, one example at a time."""
    monkeypatch.setattr(layout, "CACHE", cache)
    torch.manual_seed(0)
    images = torch.randn(5, channels, 9, 11, dtype=torch.float64)
    weights = torch.randn(4, channels, *kernel, dtype=torch.float64)
    options = (stride, padding, dilation, False, (0, 0), 1)
    slopes = torch.randn_like(torch.convolution(images, weights, None, *options))
    both = [slopes, torch.randn_like(slopes)]
    made = layout.example_kernels(images, both, (20, channels, *kernel), stride, padding, dilation)
    for slope, kernels in zip(both, made, strict=True):
        for i, found in enumerate(kernels.unflatten(0, (5, 4))):
            one = torch.ops.aten.convolution_backward(
                slope[i : i + 1], images[i : i + 1], weights, None, *options, [False, True, False]
            )[1]
            torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-12)


def test_recorded_steps_are_taken_again_to_the_last_bit(relaid):
    """Where bits count, nothing is laid out anew."""
    task = task_of("plain", torch.float32)
    params = {name: p.detach() for name, p in task.parameters().items()}
    stack = {name: torch.stack([p, p]) for name, p in params.items()}
    for _ in range(tracing.RARE + 1):
        products.gradient(task.objective, params, task.read(range(6)))
        products.stacked_gradients(task.objective, stack, torch.ones(2, 6), task.read(range(6)))
    assert not relaid
    assert len(task.objective.execution.tracer._traces) == 2


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("network", mostly_full(NETWORKS, "plain", "padding"))
def test_replays_are_laid_out_as_a_whole(network, relaid):
    """Forward pass and all, also what decides at a kink; in float64 nothing decides otherwise."""
    task = task_of(network, torch.float64)
    given = {name: p.detach() for name, p in task.parameters().items()}, torch.rand(6).double(), task.read(range(6))
    trace = task.objective.execution.tracer.trace((1, tracing.WARM_UP), "one gradient", task.objective.gradient, *given)
    assert trace is not None
    assert len(relaid) == 1
    for name, found in trace(*given).items():
        torch.testing.assert_close(found, task.objective.gradient(*given)[name], rtol=1e-9, atol=1e-12)
    if network == "plain":
        kinds = [node.target for node in relaid[0].graph.nodes]
        assert torch.ops.aten.max_pool2d_with_indices.default in kinds  # as its images lie, and not copied back


@pytest.mark.parametrize("other", [torch.ops.aten.tanh.default, torch.ops.aten.det.default], ids=str)
def test_a_layout_that_changes_the_result_or_fails_is_not_used(other, monkeypatch):
    real = layout.for_images
    monkeypatch.setattr(layout, "for_images", lambda *given: _in_place_of_relu(other, real(*given)))
    task = task_of("plain", torch.float64)
    params = {name: p.detach() for name, p in task.parameters().items()}
    traced, eager = (
        products.example_gradients(objective, params, task.read(range(6)))
        for objective in (task.objective, task.objective.untraced())
    )
    assert all(torch.equal(eager[name], traced[name]) for name in eager)


def _in_place_of_relu(other, module):
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.relu.default:
            node.target = other
    return module


def test_inputs_that_do_not_move_cost_nothing(relaid):
    """Two layers: the first has an image and two kernels, the second also a moving input; backwards one and three."""
    task = task_of("plain", torch.float64)
    params = {name: p.detach() for name, p in task.parameters().items()}
    one = {name: tensor[None] for name, tensor in params.items()}
    Hessian(task.objective, params, task.read(range(6))).pull(one)
    targets = [node.target for node in relaid[-1].graph.nodes]
    assert targets.count(torch.ops.aten.convolution.default) == 5
    assert targets.count(torch.ops.aten.convolution_backward.default) == 4
