"""Training dynamics, against a plain loop over the states, and against trainings that leave a fold out."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.evaluate.dynamics import chosen_states, dynamics, parts
from problems import recorded
from refusal import refused

BATCHES = [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5], [5, 1, 3, 0]] * 5


def written_out(problem, step: int) -> list[dict]:
    """What one state makes of each example, one number at a time."""
    params = problem.run.state(step)["param"]
    rows = []
    for x, y in problem.train:
        output = torch.func.functional_call(problem.task.model, params, (x[None],))[0]
        logits = output.tolist() if output.ndim else [0.0, float(output)]
        label = int(y)
        total = sum(math.exp(z) for z in logits)
        rows.append(
            {
                "margin": logits[label] - max(z for c, z in enumerate(logits) if c != label),
                "loss": -math.log(math.exp(logits[label]) / total),
                "probability": math.exp(logits[label]) / total,
                "predicted": max(range(len(logits)), key=lambda c: logits[c]),
                "distribution": [math.exp(z) / total for z in logits],
            }
        )
    return rows


@pytest.mark.parametrize("model", ["conv", "mlp"])
def test_every_number_is_that_of_a_plain_loop(tmp_path, model):
    problem = recorded(tmp_path / "run", model, "sgd", batches=BATCHES, epochs=[i // 2 for i in range(20)])
    seen = dynamics(problem.run, problem.task, states=8)
    assert seen.steps == tuple(chosen_states(range(21), 8))
    assert seen.epochs == tuple((step - 1) // 2 for step in seen.steps)
    loops = [written_out(problem, step) for step in seen.steps]
    columns = {"margin": "margins", "loss": "losses", "probability": "probabilities", "predicted": "predicted"}
    for key, name in columns.items():
        expected = torch.tensor([[row[key] for row in rows] for rows in loops])
        torch.testing.assert_close(getattr(seen, name).double(), expected.double(), rtol=1e-5, atol=1e-6)
    hits = [sum(row["predicted"] == int(y) for row, (_, y) in zip(rows, problem.train, strict=True)) for rows in loops]
    weights = [count**16 / sum(other**16 for other in hits) for count in hits]
    assert len(set(hits)) > 1  # weights that matter
    for k in range(problem.n):
        label = int(problem.train[k][1])
        own = [rows[k]["probability"] for rows in loops]
        fitted = [rows[k]["predicted"] == label for rows in loops]
        mean = sum(own) / 8
        assert float(seen.margin[k]) == pytest.approx(sum(rows[k]["margin"] for rows in loops) / 8, abs=1e-6)
        assert float(seen.loss[k]) == pytest.approx(sum(rows[k]["loss"] for rows in loops) / 8, abs=1e-6)
        assert float(seen.probability[k]) == pytest.approx(mean, abs=1e-6)
        assert float(seen.variability[k]) == pytest.approx(math.sqrt(sum((p - mean) ** 2 for p in own) / 8), abs=1e-6)
        shares = [1 / (1 + math.exp(-rows[k]["margin"])) for rows in loops]
        confidence = math.prod((p * s) ** (w / 2) for p, s, w in zip(own, shares, weights, strict=True))
        assert float(seen.confidence[k]) == pytest.approx(confidence, abs=1e-6)
        assert int(seen.forgotten[k]) == sum(a and not b for a, b in pairwise(fitted))
        assert int(seen.learned[k]) == next(t for t in range(9) if all(fitted[t:]))
        opinion = [sum(rows[k]["distribution"][c] for rows in loops) / 8 for c in range(seen.opinions.shape[1])]
        assert seen.opinions[k].tolist() == pytest.approx(opinion, abs=1e-6)
    assert seen.labels.tolist() == [int(y) for _, y in problem.train]
    wrong = [row["predicted"] != int(y) for row, (_, y) in zip(loops[-1], problem.train, strict=True)]
    assert seen.misfit == pytest.approx(sum(wrong) / 6)


def test_little_memory_and_sparse_states_give_the_same(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.arange(40) % 3
    runs = []
    for keep in ("all", 4):
        torch.manual_seed(1)
        model = nn.Linear(3, 3)
        task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, y))
        run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.3), 4, 10, 0, tmp_path / f"{keep}", keep=keep)
        runs.append((run, task))
    whole = dynamics(*runs[0], states=4)
    assert whole.steps == (4, 8, 12, 16)
    assert dynamics(*runs[0], states=4, resources=lo.Resources(memory=100)) == whole
    sparse = dynamics(*runs[1], states=20)  # there are not more
    assert sparse.steps == (4, 8, 12, 16)
    torch.testing.assert_close(sparse.margins, whole.margins)


def test_folds_are_judged_by_trainings_that_did_not_see_them(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 2
    model = nn.Linear(3, 2).double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, y))
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.5), 4, 5, 0, tmp_path / "run")
    seen = dynamics(run, task, states=2, folds=3, seed=7)
    assert seen.steps == (6, 12)
    folds = parts(12, 3, 7)
    assert sorted(i for fold in folds for i in fold) == list(range(12))
    for fold in folds:
        again = nn.Linear(3, 2).double()
        again.load_state_dict(start)
        for step in range(12):
            ids = run.record(step).ids
            kept = torch.tensor([0.0 if int(i) in fold else 1.0 for i in ids], dtype=torch.float64)
            losses = nn.functional.cross_entropy(again(x[ids]), y[ids], reduction="none")
            again.zero_grad()
            ((kept * losses).sum() / len(ids)).backward()
            with torch.no_grad():
                for p in again.parameters():
                    p -= 0.5 * p.grad
            if step + 1 in seen.steps:
                logits = again(x[fold]).detach()
                gap = logits.gather(1, y[fold][:, None])[:, 0] - logits.gather(1, 1 - y[fold][:, None])[:, 0]
                row = seen.steps.index(step + 1)
                torch.testing.assert_close(seen.margins[row, fold].double(), gap, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"states": 0}, "states-not-a-count", "states=0"),
        ({"folds": 1}, "folds-not-a-count", "folds=1"),
        ({"folds": 2.5}, "folds-not-a-count", "folds=2.5"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path, options, code, named, untyped):
    problem = recorded(tmp_path / "run", "mlp")
    with refused(lo.InputError, code, named):
        dynamics(problem.run, problem.task, **options)


def test_another_data_set_is_refused(tmp_path):
    problem = recorded(tmp_path / "run", "mlp")
    x, y = problem.train.tensors
    other = lo.Task(problem.task.model, nn.BCEWithLogitsLoss(), TensorDataset(x.flip(0), y.flip(0)))
    with refused(lo.MismatchError, "batch-differs"):
        dynamics(problem.run, other)


def test_states_of_a_memorised_run_count_alike(tmp_path):
    torch.manual_seed(0)
    x, y = torch.eye(12), torch.arange(12) % 2
    task = lo.Task(nn.Linear(12, 2), nn.CrossEntropyLoss(), TensorDataset(x, y))
    optimizer = torch.optim.SGD(task.model.parameters(), lr=2.0)
    run = lo.train(task, optimizer, epochs=30, batch_size=4, seed=0, out=tmp_path / "run")
    seen = dynamics(run, task, states=8)
    assert seen.misfit == 0
    assert seen.weights.tolist() == pytest.approx([1 / len(seen.steps)] * len(seen.steps))
    unseen = dynamics(run, task, states=8, folds=3)  # there is nothing to memorise out of sample
    shares = unseen.fitted.double().mean(1) ** 16
    assert unseen.weights.tolist() == pytest.approx((shares / shares.sum()).tolist() if shares.sum() else [1 / 8] * 8)


def test_an_example_without_a_label_is_left_out_by_name(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    y[5] = -100
    model, data = nn.Linear(4, 3), TensorDataset(x, y)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for x, y in recorder.watch(torch.utils.data.DataLoader(data, 4)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    run, task = lo.open_run(tmp_path / "run"), lo.Task(model, nn.CrossEntropyLoss(), data)
    with pytest.warns(lo.LeaveoutWarning, match="left out of the search: 5"):
        seen = dynamics(run, task)
    assert bool((seen.margins[:, 5] >= 0).all())
    assert bool((seen.losses[:, 5] == 0).all())
    kept = torch.arange(12) != 5
    assert torch.equal(seen.labels[kept], data.tensors[1][kept])


def test_outputs_that_are_a_tuple_are_refused_by_name(tmp_path):
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    torch.manual_seed(0)
    model, data = Two(4, 3), TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs[0], targets, reduction="none")

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for x, y in recorder.watch(torch.utils.data.DataLoader(data, 4)):
            optimizer.zero_grad()
            loss(model(x), y).mean().backward()
            optimizer.step()
    run, task = lo.open_run(tmp_path / "run"), lo.Task(model, loss, data)
    with refused(lo.UnsupportedError, "labels-not-classes", "tuple"):
        dynamics(run, task)
