"""The jump of steps that are not linear in the gradient, against dense matrices in float64."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout._util import blocks
from leaveout._util.blocks import Block, Joined, Touched
from leaveout.diff.hessian import Hessian
from leaveout.optim import adam, adamw
from leaveout.sweep import checkpoint, linear_step
from oracle import Oracle
from problems import Problem, shared
from refusal import refused
from test_estimators import BATCHES, close
from test_sweep_checkpoints import StoppedError, stop_after

NONLINEAR = ["adam", "adamw"]


@pytest.fixture(scope="module", params=[(model, rule) for model in ("mlp", "conv") for rule in NONLINEAR])
def problem(request, tmp_path_factory) -> Problem:
    model, optimizer = request.param
    return shared(model, optimizer, batches=BATCHES)


def query_gradients(oracle: Oracle, query) -> torch.Tensor:
    theta = oracle.flat(oracle.run.final())[: oracle.p].requires_grad_()
    losses = oracle.query_losses(theta, *query.tensors)
    return torch.stack([torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in losses])


def scored(problem: Problem, estimator=None, **asked) -> torch.Tensor:
    return (estimator or lo.ACC()).score(problem.run, problem.task, problem.query, **asked).values


def test_jumps_equal_dense_products_for_the_mean_and_for_each_query(problem):
    rows = [[k] for k in range(problem.n)]
    gradients = query_gradients(problem.oracle, problem.query)
    expected = torch.stack([problem.oracle.jumps(g, rows) for g in gradients], dim=1)
    close(scored(problem, queries="each"), expected)
    close(scored(problem), expected.mean(1, keepdim=True))
    plain = scored(problem, lo.SGDIE())
    assert (scored(problem) - plain).norm() > 1e-3 * plain.norm()  # one cannot pass for the other


@pytest.mark.parametrize("optimizer", NONLINEAR)
def test_gradients_that_come_with_the_product_give_the_same(optimizer):
    """A task whose derivatives were compared takes both in one pass."""
    problem = shared("mlp", optimizer, batches=BATCHES)
    task = lo.Task(problem.task.model, problem.task.loss, problem.task.train_set, l2=problem.task.objective.l2)
    assert task.objective.abilities.together
    together = lo.ACC().score(problem.run, task, problem.query).values
    close(together, scored(problem))
    few = lo.ACC().score(problem.run, task, problem.query, ids=[1]).values  # whose gradient is taken by itself
    close(few, scored(problem)[1:2])


def test_blocks_of_coordinates_change_nothing(problem, monkeypatch):
    expected = scored(problem)
    monkeypatch.setattr(linear_step, "BLOCK", 7)
    close(scored(problem), expected, tolerance=1e-12)


def test_small_parameters_are_joined_with_those_of_their_group(tmp_path, monkeypatch):
    """Groups with different rates: joined parameters give what each gives on its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    train, query = (TensorDataset(torch.randn(n, 3).double(), torch.arange(n) % 2) for n in (12, 3))
    weights, biases = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.1, "weight_decay": 0.5}], lr=0.01)
    task = lo.Task(model, nn.CrossEntropyLoss(), train)
    run = lo.train(task, optimizer, 3, 4, 0, tmp_path / "run")
    seen = set()
    monkeypatch.setattr(blocks, "Joined", lambda names: seen.add(names) or Joined(names))
    together = lo.ACC().score(run, task, query, queries="each").values
    assert seen == {("0.weight", "2.weight", "4.weight"), ("0.bias", "2.bias", "4.bias")}
    monkeypatch.setattr(linear_step, "BLOCK", 7)
    seen.clear()
    close(together, lo.ACC().score(run, task, query, queries="each").values, tolerance=1e-12)
    assert not seen


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"maximize": 1.0}])
@pytest.mark.parametrize("optimizer", [adam.OPTIMIZER, adamw.OPTIMIZER])
def test_a_jump_in_closed_form_is_the_difference_of_two_steps(optimizer, settings):
    draw = torch.Generator().manual_seed(0)
    hyper = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "step": 3.0, **settings}
    slots = {slot: torch.randn(5, generator=draw, dtype=torch.float64).square() for slot in optimizer.slots}
    gradient, leaving = (torch.randn(*size, 5, generator=draw, dtype=torch.float64) for size in ((), (3,)))
    leaving[0] = 0
    found = optimizer.jumped(slots, optimizer.step(slots, gradient, hyper), gradient, leaving, hyper)
    for row in range(3):
        with_it, without = (optimizer.step(slots, g, hyper) for g in (gradient, gradient - leaving[row]))
        for slot in slots:
            torch.testing.assert_close(found[slot][row], without[slot] - with_it[slot], rtol=1e-9, atol=1e-14)
    assert not any(moved[0].any() for moved in found.values())  # who leaves nothing moves nothing


class Derivative(lo.ACC):
    """Reads jumps of moments by their derivative."""

    def choice(self):
        return replace(super().choice(), saturated=False)


class OneByOne(lo.ACC):
    """Adds the jumps of a group's examples."""

    def choice(self):
        return replace(super().choice(), together=False)


def test_without_saturation_jumps_are_the_inner_products(problem):
    gradient = query_gradients(problem.oracle, problem.query).mean(0)
    rows = [[k] for k in range(problem.n)]
    expected = problem.oracle.jumps(gradient, rows, saturated=False)
    close(scored(problem, Derivative("jump"))[:, 0], expected)
    assert (scored(problem)[:, 0] - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("queries", ["mean", "each"])
@pytest.mark.parametrize("estimator", [lo.ACC("jump"), Derivative("jump")], ids=["saturated", "derivative"])
def test_words_that_an_example_does_not_have_are_passed_over(tmp_path, monkeypatch, queries, estimator):
    """Of an embedding only the rows of an example's own words have a gradient: the others change nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 3), nn.Flatten(), nn.Tanh(), nn.Linear(6, 2)).double()
    train, query = (TensorDataset(torch.randint(0, 40, (n, 2)), torch.arange(n) % 2) for n in (12, 3))
    task = lo.Task(model, nn.CrossEntropyLoss(), train)
    run = lo.train(task, torch.optim.AdamW(model.parameters(), lr=0.01), 2, 4, 0, tmp_path / "run")
    seen = []
    monkeypatch.setattr(blocks, "Touched", lambda *given: seen.append(1) or Touched(*given))
    sparse = estimator.score(run, task, query, queries=queries).values
    assert len(seen) == len(run)
    monkeypatch.setattr(blocks, "SPARSE", -1.0)
    close(sparse, estimator.score(run, task, query, queries=queries).values, tolerance=1e-12)
    assert len(seen) == len(run)


def test_gradients_that_come_with_the_product_are_those_of_their_own_pass(tmp_path, monkeypatch):
    """Layers over sequences have them transposed; read in blocks, they give what gradients by themselves give."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Flatten(), nn.Linear(16, 2)).double()
    train, query = (TensorDataset(torch.randn(n, 4, 3).double(), torch.arange(n) % 2) for n in (12, 3))
    task = lo.Task(model, nn.CrossEntropyLoss(), train)
    run = lo.train(task, torch.optim.AdamW(model.parameters(), lr=0.01), 3, 4, 0, tmp_path / "run")
    monkeypatch.setattr(linear_step, "BLOCK", 30)
    seen = []
    monkeypatch.setattr(blocks, "Block", lambda *given: seen.append(given) or Block(*given))
    together = lo.ACC().score(run, task, query).values
    assert len([name for name, _ in seen if name == "0.weight"]) > len(run)  # in more than one block
    monkeypatch.setattr("leaveout.sweep.jump.HessianByExample", Hessian)
    close(together, lo.ACC().score(run, task, query).values, tolerance=1e-12)


def test_a_group_leaves_each_batch_in_one_jump(problem):
    groups = {"ann": [0, 2], "bob": [1, 2, 5]}
    expected = problem.oracle.jumps(query_gradients(problem.oracle, problem.query).mean(0), list(groups.values()))
    close(scored(problem, groups=groups)[:, 0], expected)
    assert (scored(problem, OneByOne("jump"), groups=groups)[:, 0] - expected).norm() > 1e-3 * expected.norm()


ADAPTIVE = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.95)),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.002),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@pytest.mark.filterwarnings("ignore:.*the linearised run is unstable there:leaveout.LeaveoutWarning")
@pytest.mark.parametrize("name", ADAPTIVE)
def test_examples_that_cancel_are_read_as_far_as_a_step_can_go(tmp_path, name):
    """Two examples alone have a feature, and their gradients cancel but for a millionth: v is next to nothing."""
    torch.manual_seed(0)
    x = torch.randn(24, 4, dtype=torch.float64)
    x[:, 3] = 0
    x[:2, 3] = torch.tensor([1.0, 1.000001])
    y = (x[:, 0] + 0.3 * torch.randn(24, dtype=torch.float64) > 0).double()
    x[1, :3], y[:2] = x[0, :3], torch.tensor([0.0, 1.0])
    train, query = TensorDataset(x, y), TensorDataset(x[:2], torch.ones(2, dtype=torch.float64))
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.zero_()
    optimizer, loss = ADAPTIVE[name](model.parameters()), nn.BCEWithLogitsLoss()
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for ids in torch.arange(24).split(8):
        optimizer.zero_grad()
        loss(model(x[ids]), y[ids]).backward()
        recorder.step(ids, [x[ids], y[ids]])
        optimizer.step()
    run, task = recorder.finish(), lo.Task(model, loss, train)
    truth = lo.Replay().score(run, task, query, ids=[0, 1]).values[:, 0]
    saturated, derivative = (
        one.score(run, task, query, ids=[0, 1]).values[:, 0] for one in (lo.ACC(), Derivative("jump"))
    )
    assert ((saturated - truth).abs() < 0.15 * truth.abs()).all()
    if name != "Adagrad" and name != "RMSprop":  # whose gradient comes without the moment, and is zero later
        assert ((derivative - truth).abs() > 10 * truth.abs()).any()


def test_sgdie_comes_from_the_same_sweep(problem):
    acc, sgdie = lo.score([lo.ACC(), lo.SGDIE()], problem.run, problem.task, problem.query)
    assert (acc.method, sgdie.method) == ("ACC(jump)", "SGD-IE")
    assert acc.cost == sgdie.cost
    close(sgdie.values, scored(problem, lo.SGDIE()))
    close(acc.values, scored(problem))


def test_jumps_of_a_groups_examples_can_be_added(problem):
    """An example twice in a batch leaves once; groups may overlap."""
    groups = {"ann": [0, 2], "bob": [1, 2, 5], "all but one": [0, 1, 2, 3, 4]}
    gradient = query_gradients(problem.oracle, problem.query).mean(0)
    single = problem.oracle.jumps(gradient, [[k] for k in range(problem.n)])
    expected = torch.stack([single[members].sum() for members in groups.values()])
    close(scored(problem, OneByOne("jump"), groups=groups)[:, 0], expected)


def test_a_small_budget_changes_nothing(problem):
    close(scored(problem, resources=lo.Resources(shard=2)), scored(problem), tolerance=1e-12)


def test_a_sweep_that_was_stopped_ends_with_the_same_bits(tmp_path, monkeypatch):
    problem = shared("mlp", "adamw", batches=BATCHES)
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", 0)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(StoppedError):
            scored(problem, resources=lo.Resources(work=tmp_path))
    assert scored(problem, resources=lo.Resources(work=tmp_path)).equal(scored(problem))


def test_only_chosen_occurrences_jump(problem):
    rows = [[k] for k in range(problem.n)]
    gradient = query_gradients(problem.oracle, problem.query).mean(0)
    early = problem.oracle.jumps(gradient, rows, where=lambda i, _row: problem.run.record(i).epoch < 1)
    close(scored(problem, lo.ACC(epochs=1))[:, 0], early)
    close(scored(problem, lo.ACC("jump", probability=0.0)), scored(problem, lo.SGDIE()))


def test_for_sgd_the_jump_is_sgdie(tmp_path):
    problem = shared("mlp", "nesterov", batches=BATCHES)
    close(scored(problem, lo.ACC("jump")), scored(problem, lo.SGDIE()))


def test_the_jump_goes_backward_only(problem):
    with refused(lo.InputError, "direction-fixed", "direction"):
        scored(problem, lo.ACC("jump", direction="forward"))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(400, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)).mean(1))


def sparse(kind: str) -> tuple[nn.Module, TensorDataset]:
    """Examples most of whose words, or of whose features that are not zero, no other example has."""
    order = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    y = torch.randint(3, (12,), generator=order)
    if kind == "words":
        return Words(), TensorDataset(torch.randint(400, (12, 4), generator=order), y)
    x = torch.randn(12, 40, generator=order) * (torch.rand(12, 40, generator=order) < 0.1)
    return nn.Sequential(nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 3)), TensorDataset(x, y)


@pytest.mark.parametrize("kind", ["words", "features"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_what_only_the_left_out_examples_use_does_not_move_by_rounding(tmp_path, kind, name):
    """In float32, and where moments are still zero: over one step both readings are the step without the examples."""
    batch, groups = [1, 5, 7, 9, 5], [[1], [5], [1, 5], [1, 5, 7, 9], [7, 11]]

    def trained(weights: torch.Tensor, path=None):
        model, data = sparse(kind)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        recorder = lo.Recorder(path, model, optimizer) if path else None
        x, y = (part[batch] for part in data.tensors)
        if recorder:
            recorder.step(batch, [x, y])
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        (weights[batch] * losses).sum().div(len(batch)).backward()
        optimizer.step()
        return (model, recorder.finish()) if recorder else [param.detach() for param in model.parameters()]

    model, run = trained(torch.ones(12), tmp_path / "run")
    data = sparse(kind)[1]
    loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1])
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    before, truth = trained(torch.ones(12)), []
    for group in groups:
        weights = torch.ones(12)
        weights[group] = 0
        after = trained(weights)
        truth.append(sum(float(((b - a) * g).sum()) for a, b, g in zip(before, after, slopes, strict=True)))
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    for method in (lo.ACC("jump"), lo.ACC("exact")):
        close(method.score(run, task, data, groups=groups).values[:, 0], torch.tensor(truth), 1e-4)
        everyone = method.score(run, task, data).values[:, 0]
        close(everyone[[1, 5]], torch.tensor(truth[:2]), 1e-4)
