"""When influence arose: each epoch's part against dense products, and their sum against the score."""

import pytest
import torch

import leaveout as lo
from leaveout.estimators.timeline import timeline
from problems import OPTIMIZERS, shared
from refusal import refused

EPOCHS = [0, 0, 1, 1, 2, 2]
BATCHES = [[0, 1, 2, 3], [4, 5], [1, 4, 0, 1], [2, 3, 5], [0, 5, 3, 2], [4, 1]]
"""Ragged; example 1 twice in one batch."""


def dense(problem, rows, epochs) -> torch.Tensor:
    """⟨∇L, (product of the later steps' Jacobians) · (−∂F/∂w_k)⟩ for each row and epoch, each occurrence by itself."""
    oracle = problem.oracle
    size = oracle.p * len(problem.run.rule.slots)
    theta = oracle.flat(problem.run.final())[: oracle.p].requires_grad_()
    loss = oracle.query_losses(theta, *problem.query.tensors).mean()
    toward = torch.zeros(size).double()
    toward[: oracle.p] = torch.autograd.grad(loss, theta)[0]
    ones = torch.ones(problem.n).double()
    later = torch.eye(size).double()
    parts = torch.zeros(len(rows), max(epochs) + 1).double()
    for i in reversed(range(len(problem.run))):
        state = oracle.flat(problem.run.state(i)).requires_grad_()
        in_weights = torch.autograd.functional.jacobian(lambda w, s=state, i=i: oracle.step(i, s, w), ones)
        for r, row in enumerate(rows):
            parts[r, epochs[i]] -= toward @ later @ in_weights[:, row].sum(1)
        later = later @ oracle.jacobian(i, state, ones)
    return parts


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_epochs_equal_dense_products_and_sum_to_the_score(tmp_path, optimizer):
    problem = shared("mlp", optimizer, batches=BATCHES, epochs=EPOCHS)
    found = timeline(problem.run, problem.task, problem.query)
    expected = dense(problem, [[k] for k in range(problem.n)], EPOCHS)
    assert found.spans == ("epoch 1", "epoch 2", "epoch 3")
    torch.testing.assert_close(found.values, expected, rtol=1e-8, atol=1e-10 * float(expected.abs().max()))
    score = lo.SGDIE().score(problem.run, problem.task, problem.query)
    torch.testing.assert_close(found.values.sum(1), score.mean(), rtol=1e-12, atol=1e-14)
    assert found.train_ids == score.train_ids
    assert (found.values.abs() > 1e-6).any(0).all(), "every epoch has a part of its own"


def test_chosen_examples_and_groups(tmp_path):
    problem = shared(batches=BATCHES, epochs=EPOCHS)
    whole = timeline(problem.run, problem.task, problem.query)
    some = timeline(problem.run, problem.task, problem.query, ids=[4, 1])
    torch.testing.assert_close(some.values, whole.values[[4, 1]])
    groups = timeline(problem.run, problem.task, problem.query, groups={"ann": [0, 3], "bob": [5]})
    assert groups.train_ids == ("ann", "bob")
    torch.testing.assert_close(groups.values, torch.stack([whole.values[[0, 3]].sum(0), whole.values[5]]))


def test_without_epochs_the_steps_are_told_apart(tmp_path):
    problem = shared(batches=BATCHES, epochs=[0] * 6)
    found = timeline(problem.run, problem.task, problem.query)
    assert found.spans == tuple(f"step {i}" for i in range(1, 7))
    expected = dense(problem, [[k] for k in range(problem.n)], list(range(6)))
    torch.testing.assert_close(found.values, expected, rtol=1e-8, atol=1e-12)
    absent = torch.tensor([[k not in batch for batch in BATCHES] for k in range(problem.n)])
    assert (found.values[absent] == 0).all()


def test_other_queries_are_refused(tmp_path):
    problem = shared(batches=BATCHES)
    found = timeline(problem.run, problem.task, problem.query)
    found.check_same_queries(lo.SGDIE().score(problem.run, problem.task, problem.query))
    with refused(lo.InputError, "queries-differ"):
        found.check_same_queries(lo.SGDIE().score(problem.run, problem.task, problem.train))
