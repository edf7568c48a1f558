"""Whole scores of models whose second derivatives PyTorch has trouble with, compared with dense matrices.

The matrices are central differences of the gradient of plain autograd, so that stop-gradients count as training saw
them; the recurrences are written out. Nothing is shared with what is tested.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from problems import mostly_full
from refusal import refused

pytestmark = pytest.mark.compared_anew

WIDTH, N = 4, 6
BATCHES = [[0, 1, 2], [3, 4, 5], [2, 0, 4], [1, 5, 3]]
LR, MOMENTUM = 0.1, 0.5


class Attentive(nn.Module):
    """A transformer layer on two tokens of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, dim_feedforward=3, dropout=0.0, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.reshape(-1, 2, 2)).flatten(1))


class Stopped(nn.Module):
    """A gate that no gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h.tanh() * h.detach().sigmoid())


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def focal(out: Tensor, y: Tensor) -> Tensor:
    losses = cross_entropy(out, y)
    return (1 - (-losses).exp()).square().detach() * losses


MODELS = {
    "LayerNorm": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)),
        cross_entropy,
    ),
    "TransformerEncoderLayer": (Attentive, cross_entropy),
    "detach": (Stopped, cross_entropy),
    "detached focal weights": (lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 2)), focal),
}
SMOOTH = ["LayerNorm", "TransformerEncoderLayer"]


@pytest.fixture(scope="module")
def dense_of(tmp_path_factory):
    """The dense run of a model by its name, made once."""
    return functools.cache(lambda name: Dense(name, tmp_path_factory.mktemp("dense") / "run"))


class Dense:
    """A run with momentum written out on flat vectors, with J(z) = ∂g(z)/∂θ by differences."""

    def __init__(self, name: str, path) -> None:
        torch.manual_seed(0)
        make, self.loss = MODELS[name]
        self.model = make().double()
        self.x = torch.randn(N, WIDTH, dtype=torch.float64)
        self.y = torch.randint(2, (N,))
        self.query = TensorDataset(self.x[:3] + 0.3, self.y[:3])
        self.task = lo.Task(self.model, self.loss, TensorDataset(self.x, self.y))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        with lo.Recorder(path, self.model, optimizer) as recorder:
            for ids in map(torch.tensor, BATCHES):
                optimizer.zero_grad()
                self.loss(self.model(self.x[ids]), self.y[ids]).mean().backward()
                recorder.step(ids, [self.x[ids], self.y[ids]])
                optimizer.step()
        self.run = lo.open_run(path)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.states = [self.flat(self.run.state(i)["param"]) for i in range(len(BATCHES) + 1)]
        self.p = len(self.states[0])
        self.model = copy.deepcopy(self.model)  # the task's keeps its weights

    def flat(self, params: dict) -> Tensor:
        return torch.cat([params[name].flatten() for name in self.names])

    def at(self, theta: Tensor) -> None:
        nn.utils.vector_to_parameters(theta, self.model.parameters())

    def gradient(self, theta: Tensor, k: int) -> Tensor:
        self.at(theta)
        self.model.zero_grad()
        self.loss(self.model(self.x[k : k + 1]), self.y[k : k + 1]).sum().backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    @functools.cache  # noqa: B019 - a few runs, until the tests end
    def jacobian_at(self, i: int, k: int) -> Tensor:
        return self.jacobian(self.states[i], k)

    def jacobian(self, theta: Tensor, k: int, step: float = 1e-5) -> Tensor:
        sides = torch.eye(self.p, dtype=torch.float64) * step
        columns = [(self.gradient(theta + s, k) - self.gradient(theta - s, k)) / (2 * step) for s in sides]
        return torch.stack(columns, dim=1)

    @functools.cache  # noqa: B019
    def slope(self) -> Tensor:
        """∂L/∂θ of every query by differences of the loss itself: a row each."""
        rows, step = [], 1e-6
        for side in torch.eye(self.p, dtype=torch.float64) * step:
            values = []
            for theta in (self.states[-1] + side, self.states[-1] - side):
                self.at(theta)
                with torch.no_grad():
                    values.append(self.loss(self.model(self.query.tensors[0]), self.query.tensors[1]))
            rows.append((values[0] - values[1]) / (2 * step))
        return torch.stack(rows, dim=1)

    def displacements(self, corrected: bool, basis: Tensor | None = None) -> Tensor:
        """δ_N of every example: SGD-IE's, exact ACC's, or with a basis ACC's with subspace transport.

        With a basis, δ = d + Qᵀ(z − Q·d) corrects the gradient, d travels without curvature and z within the span.
        """
        zero = torch.zeros(N, self.p, dtype=torch.float64)
        moved, speed, free, free_speed = zero, zero, zero, zero
        rank = 0 if basis is None else len(basis)
        inside, inside_speed = zero[:, :rank], zero[:, :rank]
        for i, ids in enumerate(BATCHES):
            slopes = {k: self.gradient(self.states[i], k) for k in ids}
            bends = {k: self.jacobian_at(i, k) for k in ids}
            mean = sum(bends.values()) / len(ids)
            pushed, apart, within = moved @ mean.T, torch.zeros_like(zero), None
            if basis is not None:
                within = inside @ (basis @ mean @ basis.T).T
            for k in ids:
                pushed[k] -= slopes[k] / len(ids)
                apart[k] -= slopes[k] / len(ids)
                if basis is not None:
                    own = free[k] + (inside[k] - free[k] @ basis.T) @ basis
                    pushed[k] -= bends[k] @ own / len(ids)
                    within[k] -= basis @ (slopes[k] + bends[k] @ (inside[k] @ basis)) / len(ids)
                elif corrected:
                    pushed[k] -= bends[k] @ moved[k] / len(ids)
            speed, free_speed = MOMENTUM * speed + pushed, MOMENTUM * free_speed + apart
            moved, free = moved - LR * speed, free - LR * free_speed
            if within is not None:
                inside_speed = MOMENTUM * inside_speed + within
                inside = inside - LR * inside_speed
        return moved

    def top_directions(self, rank: int) -> Tensor:
        """The eigenvectors of the mean of the batch Hessians with the largest eigenvalues, a row each."""
        pairs = [(i, k) for i, ids in enumerate(BATCHES) for k in ids]
        values, vectors = torch.linalg.eigh(sum(self.jacobian_at(*pair) for pair in pairs) / len(pairs))
        return vectors[:, values.abs().argsort(descending=True)[:rank]].T


def assert_near(found: Tensor, known: Tensor, tolerance: float = 1e-6) -> None:
    assert known.abs().max() > 1e-5
    assert float((found - known).abs().max() / known.abs().max()) < tolerance


@pytest.mark.parametrize("name", mostly_full(MODELS, "LayerNorm", "detach"))
def test_sgd_ie_all_ways(dense_of, name):
    dense = dense_of(name)
    known = dense.displacements(corrected=False) @ dense.slope().T
    run, task, query = dense.run, dense.task, dense.query
    for direction in ("backward", "forward"):
        assert_near(lo.SGDIE(direction=direction).score(run, task, query).values[:, 0], known.mean(1))
        assert_near(lo.SGDIE(direction=direction).score(run, task, query, queries="each").values, known)
    assert_near(lo.timeline(run, task, query).values.sum(1), known.mean(1))


@pytest.mark.parametrize("name", mostly_full(SMOOTH, "LayerNorm"))
def test_acc_with_a_subspace(dense_of, name):
    dense = dense_of(name)
    known = dense.displacements(corrected=True, basis=dense.top_directions(dense.p)) @ dense.slope().T
    plain = dense.displacements(corrected=False) @ dense.slope().T
    assert float((known - plain).abs().max() / known.abs().max()) > 1e-3  # or the correction is not seen
    # In the whole space nothing depends on how well the directions were found, but everything else is at work.
    estimator = lo.ACC(lo.Subspace(dense.p))
    assert_near(estimator.score(dense.run, dense.task, dense.query).values[:, 0], known.mean(1))
    assert_near(estimator.score(dense.run, dense.task, dense.query, queries="each").values, known)


@pytest.mark.full
def test_acc_with_a_subspace_of_one_direction(dense_of):
    """The largest direction stands apart, so that a few rounds find it."""
    dense = dense_of("TransformerEncoderLayer")
    known = dense.displacements(corrected=True, basis=dense.top_directions(1)) @ dense.slope().T
    found = lo.ACC(lo.Subspace(1)).score(dense.run, dense.task, dense.query, queries="each").values
    free = lo.ACC("free").score(dense.run, dense.task, dense.query, queries="each").values
    assert float((free - known).abs().max() / known.abs().max()) > 1e-5
    assert_near(found, known, 1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_exact_acc(dense_of, name):
    dense = dense_of(name)
    known = dense.displacements(corrected=True) @ dense.slope().T
    plain = dense.displacements(corrected=False) @ dense.slope().T
    assert float((known - plain).abs().max() / known.abs().max()) > 1e-3
    run, task, query = dense.run, dense.task, dense.query
    for direction in ("forward", "backward"):
        estimator = lo.ACC("exact", direction=direction)
        if direction == "backward" and name == "detach":  # focal weights depend on the loss alone: symmetric
            with refused(lo.UnsupportedError, "curvature-not-symmetric"):
                estimator.score(run, task, query)
            continue
        assert_near(estimator.score(run, task, query).values[:, 0], known.mean(1))
        assert_near(estimator.score(run, task, query, queries="each").values, known)
    moved = lo.ACC("exact").score(run, task, query, displacements=True).displacements
    assert_near(torch.cat([moved[name].flatten(1) for name in dense.names], 1), dense.displacements(corrected=True))
