"""Large matrix products by oneDNN: the same numbers to rounding, in every layout, traced or not."""

import itertools
import platform

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.diff.hessian import Hessian
from leaveout.run.train import train
from leaveout.task.rewrites import products
from leaveout.task.trace.tracer import WARM_UP
from leaveout.trajectory.trajectory import Trajectory

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")

SHAPES = [(200, 128, 96), (2048, 8, 256), (512, 1024, 8)]


@pytest.fixture
def faster(monkeypatch):
    """Every processor counts as one whose products oneDNN computes faster."""
    monkeypatch.setattr(products, "is_faster", lambda: True)


def matrix(rows, columns, layout, seed):
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if layout == "columns":
        return drawn.t().contiguous().t()
    if layout == "expanded":
        return drawn[:1].expand(rows, columns)
    if layout == "every other":
        return torch.stack([drawn, drawn], dim=2).flatten(1)[:, ::2]
    return drawn


LAYOUTS = ("rows", "columns", "expanded", "every other")


@pytest.mark.parametrize(("left", "right"), itertools.product(LAYOUTS, LAYOUTS))
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_double_precision(shape, left, right):
    m, k, n = shape
    a, b, bias = matrix(m, k, left, 0), matrix(k, n, right, 1), torch.arange(float(n))
    stack, expanded = a.expand(3, m, k).contiguous(), b.expand(3, k, n)
    with products.FastProducts():
        results = a @ b, torch.addmm(bias, a, b), torch.bmm(stack, expanded)
        again = a @ b, torch.addmm(bias, a, b), torch.bmm(stack, expanded)
    truth = a.double() @ b.double()
    for result, repeated, exact in zip(results, again, (truth, truth + bias, truth.expand(3, m, n)), strict=True):
        assert result.is_contiguous()
        assert torch.equal(result, repeated)
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts oneDNN's products."""

    count = 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.count += function is products.product()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.ones(256, 128), torch.ones(128, 128), 1),
        (torch.ones(8, 8), torch.ones(8, 8), 0),
        (torch.ones(256, 128).double(), torch.ones(128, 128).double(), 0),
        (torch.ones(256, 128), torch.ones(1, 1).expand(128, 128), 0),  # for which oneDNN takes a thousand times as long
    ],
    ids=["large", "small", "double", "expanded"],
)
def test_only_large_dense_products_of_float32_are_replaced(a, b, expected):
    with Counted() as counted, products.FastProducts():
        a @ b
    assert counted.count == expected


def test_a_context_is_entered_for_large_arguments_alone(faster):
    assert isinstance(products.fast_products({"w": torch.zeros(512, 512)}), products.FastProducts)
    assert not isinstance(products.fast_products({"w": torch.zeros(8, 8)}), products.FastProducts)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 processors have AVX-512")
@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_onednn_is_preferred_where_mkl_does_without_avx512(monkeypatch, vendor, capability, expected):
    monkeypatch.setattr(products, "_processor", lambda: f"vendor_id : {vendor}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.is_faster.__wrapped__() is (expected and torch.backends.mkl.is_available())


def test_an_operation_that_another_version_of_pytorch_calls_otherwise_is_not_used(monkeypatch):
    assert products._works()
    monkeypatch.setattr(products, "product", lambda: torch.ops.aten.addmm.default)
    assert not products._works()


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 384), nn.LayerNorm(384), nn.GELU(), nn.Linear(384, 384), nn.Tanh())
    model.append(nn.Linear(384, 5))
    data = TensorDataset(torch.randn(96, 96), torch.randint(5, (96,)))
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    folder = tmp_path_factory.mktemp("products")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return train(task, optimizer, 5, 48, 0, folder, keep="all", resources=lo.Resources(progress=False)), task, data


def test_a_trace_keeps_every_bit_of_them(faster, problem):
    run, task, _ = problem
    trajectory = Trajectory(run, task.anew()).compared()
    recorded = trajectory.recorded_step(1)
    trajectory.objective.execution.tracer.expect(1000)
    vector = {name: torch.randn_like(tensor)[None] for name, tensor in recorded.params.items()}
    with Counted() as counted:
        first = Hessian(trajectory.objective, recorded.params, recorded.batch).pull(vector)
    assert counted.count
    for _ in range(WARM_UP + 1):
        later = Hessian(trajectory.objective, recorded.params, recorded.batch).pull(vector)
    assert any(trajectory.objective.execution.tracer._traces.values())
    assert all(torch.equal(first.curved[name], later.curved[name]) for name in vector)
    assert torch.equal(first.reads, later.reads)


@pytest.mark.parametrize("method", [lo.SGDIE(), lo.TracIn(), lo.ACC(), lo.Replay()], ids=lambda m: type(m).__name__)
def test_scores_are_the_same_to_rounding(faster, problem, monkeypatch, method):
    run, task, data = problem
    quiet = lo.Resources(progress=False)

    def score(given):
        return method.score(run, given, data, resources=quiet).values

    fast = score(task.anew())
    monkeypatch.setattr(products, "is_faster", lambda: False)
    plain = score(task.anew())
    assert abs(fast - plain).max() <= 2e-3 * abs(plain).max()
    if not isinstance(method, lo.Replay):  # whose models are small enough to go all at once
        assert (fast != plain).any()
