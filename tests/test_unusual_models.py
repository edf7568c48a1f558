"""Models that do in their forward pass what few models do: sparse graphs, transforms, parameters of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from refusal import refused

pytestmark = pytest.mark.compared_anew

METHODS = (lo.SGDIE(), lo.ACC("exact"), lo.TracIn(), lo.Replay())


class Graph(nn.Module):
    """Classifies the nodes of a graph, which is kept as a buffer or outside of the module's buffers."""

    def __init__(self, kind: str, buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        edges = (torch.rand(12, 12) < 0.3).double() + torch.eye(12)
        edges = edges / edges.sum(1, keepdim=True)
        graph = {"dense": edges, "coo": edges.to_sparse(), "csr": edges.to_sparse_csr()}[kind]
        if buffer:
            self.register_buffer("graph", graph)
        else:
            self.graph = graph
        self.register_buffer("x", torch.randn(12, 5))
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(torch.sparse.mm(self.graph, self.first(self.x)))
        return torch.sparse.mm(self.graph, self.last(hidden))[ids]


class Steep(nn.Module):
    """Adds the slope of its outputs in its inputs, by a transform or written out."""

    def __init__(self, transform: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transform, self.first, self.last = transform, nn.Linear(4, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.transform:
            slope = torch.func.grad(lambda z: self.last(torch.tanh(self.first(z))).sum())(x)
        else:
            slope = (self.last.weight.sum(0) * (1 - hidden**2)) @ self.first.weight
        return self.last(hidden) + slope.square().sum(1, keepdim=True) * x.new_tensor([1.0, 0.0, -1.0])


def scored(path, model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """The scores of a short run by several methods."""
    data = TensorDataset(inputs, torch.arange(len(inputs)) % 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
    with lo.Recorder(path, model, optimizer) as recorder:
        for x, y in recorder.watch(DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(0))):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    task, queries = lo.Task(model, nn.CrossEntropyLoss(), data), TensorDataset(*data[:3])
    return [method.score(lo.open_run(path), task, queries, ids=[0, 5]).values for method in METHODS]


@pytest.mark.parametrize("buffer", [True, False])
def test_a_sparse_graph_scores_as_the_same_graph_when_dense(buffer: bool, tmp_path) -> None:
    sparse, dense = (scored(tmp_path / one, Graph(one, buffer), torch.arange(12)) for one in ("coo", "dense"))
    for one, other in zip(sparse, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


def test_a_graph_in_rows_has_no_derivative_in_pytorch() -> None:
    with refused(lo.UnsupportedError, "task-not-supported", "Sparse CSR"):
        lo.Task(Graph("csr", True), nn.CrossEntropyLoss(), TensorDataset(torch.arange(12), torch.arange(12) % 3))


def test_a_transform_in_the_forward_pass_scores_as_what_it_computes(tmp_path) -> None:
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    by_transform, by_hand = (scored(tmp_path / str(one), Steep(one), x) for one in (True, False))
    for one, other in zip(by_transform, by_hand, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


class Kept(nn.Module):
    """Reads its weight from its layer, or computes with a tensor that was made of it before."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.table = [self.layer.weight.T] if kept else None

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.layer.weight.T if self.table is None else self.table[0]) + self.layer.bias


def test_outputs_that_do_not_move_with_the_parameters() -> None:
    """Labels would come from the final weights at every state."""
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    lo.Task(Kept(False), nn.CrossEntropyLoss(), data)
    with refused(lo.UnsupportedError, "task-not-supported", "'layer.weight'", "functional_call"):
        lo.Task(Kept(True), nn.CrossEntropyLoss(), data)
