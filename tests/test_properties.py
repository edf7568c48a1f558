"""Whatever the batches are, the estimators' limits hold."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from problems import OPTIMIZERS, flat, recorded

KINDS = sorted(OPTIMIZERS)


@st.composite
def batch_plans(draw):
    """n examples and some batches of them: ragged, repeating, of one example, of all, leaving some out."""
    n = draw(st.integers(1, 7))
    ids = st.integers(0, n - 1)
    plan = draw(st.lists(st.lists(ids, min_size=1, max_size=n + 1), min_size=1, max_size=6))
    return n, plan


def quadratic(folder: str, n: int, plan: list[list[int]], kind: str):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 2, dtype=torch.float64, generator=generator)
    train = TensorDataset(x, x.sum(1) + 1)
    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)).double()
    task = lo.Task(model, nn.MSELoss(), train, l2=0.1)
    optimizer = OPTIMIZERS[kind](model)
    recorder = lo.Recorder(Path(folder) / "run", model, optimizer)
    for ids in plan:
        optimizer.zero_grad()
        task.objective.losses(task.parameters(), task.read(ids)).mean().backward()
        recorder.step(ids)
        optimizer.step()
    return recorder.finish(), task, TensorDataset(x + 1, x[:, 0])


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    # The floor is what rounding leaves where Adam's first step cancels almost all of the gradient's effect.
    return bool((a - b).abs().max() <= 1e-9 * b.abs().max() + 1e-13)


@given(batch_plans(), st.sampled_from([kind for kind in KINDS if not kind.startswith("adam")]))
def test_acc_is_exact_on_quadratics(case, kind):
    n, plan = case
    with tempfile.TemporaryDirectory() as folder:
        run, task, query = quadratic(folder, n, plan, kind)
        truth = lo.Replay().score(run, task, query, queries="each")
        acc = lo.ACC("exact", readout="exact").score(run, task, query, queries="each")
        assert agree(acc.values, truth.values)
        absent = [k for k in range(n) if all(k not in ids for ids in plan)]
        assert (truth.values[absent] == 0).all()
        assert (acc.values[absent] == 0).all()


@given(batch_plans(), st.sampled_from(KINDS))
def test_methods_agree_where_no_example_recurs(case, kind):
    n, plan = case
    seen: set[int] = set()
    once = []
    for ids in plan:
        fresh = [k for k in dict.fromkeys(ids) if k not in seen]
        seen |= set(fresh)
        once += [fresh] if fresh else []
    with tempfile.TemporaryDirectory() as folder:
        run, task, query = quadratic(folder, n, once, kind)
        sgdie, acc = (
            method().score(run, task, query, displacements=True) for method in (lo.SGDIE, partial(lo.ACC, "exact"))
        )
        if not kind.startswith("adam"):
            assert agree(acc.values, sgdie.values)
        # The last step's examples have only their own jump, whatever the optimizer: there ACC is the truth itself.
        truth = lo.Replay().score(run, task, query, displacements=True)
        names = list(run.rule.groups)
        assert agree(flat(acc, names)[once[-1]], flat(truth, names)[once[-1]])


@given(batch_plans(), st.sampled_from(KINDS), st.sampled_from(["logistic", "mlp"]))
def test_forward_equals_backward_on_any_plan(case, kind, model):
    n, plan = case
    with tempfile.TemporaryDirectory() as folder:
        problem = recorded(Path(folder) / "run", model, kind, n=n, batches=plan)
        for method in (lo.SGDIE, partial(lo.ACC, "exact"), lo.TracIn):
            forward, backward = (
                method(direction=direction).score(problem.run, problem.task, problem.query)
                for direction in ("forward", "backward")
            )
            assert agree(forward.values, backward.values)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3), st.sampled_from(KINDS))
def test_the_built_in_loop_replays_itself(n, size, epochs, kind):
    with tempfile.TemporaryDirectory() as folder:
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(n, 2, dtype=torch.float64, generator=generator)
        task = lo.Task(nn.Linear(2, 1).double(), nn.MSELoss(), TensorDataset(x, x[:, :1]))
        run = lo.train(task, OPTIMIZERS[kind](task.model), epochs, size, 0, Path(folder) / "run")
        assert len(run) == epochs * -(-n // size)
        for epoch in range(epochs):
            ids = [k for i in range(len(run)) if run.record(i).epoch == epoch for k in run.record(i).ids.tolist()]
            assert sorted(ids) == list(range(n))
        scores = lo.Replay(weight=1.0).score(run, task, task.train_set)
        assert (scores.values == 0).all()
