"""Whoever scores with a model that holds other trained weights is told which weights are scored."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from refusal import refused


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Trained:
    """A run of twenty steps, with what a loop might keep of it beside."""

    def __init__(self, path: Path, keep: str | int = "all", *, averages: bool = False) -> None:
        order = torch.Generator().manual_seed(0)
        x, y = torch.randn(10, 4, generator=order).double(), torch.randn(10, 1, generator=order).double()
        self.model = network(0)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        average = self.average if averages else None
        with lo.Recorder(path, self.model, optimizer, keep=keep, average=average) as recorder:
            for step in range(20):
                ids = torch.randperm(10, generator=order)[:5]
                optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x[ids]), y[ids]).backward()
                recorder.step(ids, [x[ids], y[ids]])
                optimizer.step()
                self.average.update_parameters(self.model)
                if step == 11:
                    self.best = copy.deepcopy(self.model)
            self.run = recorder.finish()
        self.data = TensorDataset(x, y)

    def loss(self, steps: int, without: int = -1) -> float:
        """The loss of a plain training of so many steps, with an example's weight at zero."""
        order = torch.Generator().manual_seed(0)
        x, y = torch.randn(10, 4, generator=order).double(), torch.randn(10, 1, generator=order).double()
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(steps):
            ids = torch.randperm(10, generator=order)[:5]
            optimizer.zero_grad()
            losses = (model(x[ids]) - y[ids]).square().flatten()
            (losses * (ids != without)).mean().backward()
            optimizer.step()
        return float(nn.functional.mse_loss(model(x), y).detach())

    def score(self, model: nn.Module, run: lo.Run | None = None) -> lo.Scores:
        return lo.TracIn().score(run or self.run, lo.Task(model, nn.MSELoss(), self.data), self.data)


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path / "run")


def test_an_average_of_weights_is_said_not_to_be_scored(trained: Trained) -> None:
    with pytest.raises(lo.MismatchError) as error:
        trained.score(trained.average.module)
    assert error.value.code == "weights-not-of-the-run"
    some = Trained(trained.run.path.parent / "some", keep=7)
    with pytest.warns(lo.LeaveoutWarning, match=r"trained weights that are not the run's last"):
        some.score(some.average.module)  # which may be one that was not kept


def test_an_average_that_was_recorded_is_named(tmp_path: Path) -> None:
    averaged = Trained(tmp_path / "run", averages=True)
    with pytest.warns(lo.LeaveoutWarning, match="at='average'"):
        averaged.score(averaged.average.module)
    task = lo.Task(averaged.average.module, nn.MSELoss(), averaged.data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lo.TracIn().score(averaged.run, task, averaged.data, at="average")


def test_labels_are_not_judged_by_an_average_of_weights(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, generator=generator)
    data, model = TensorDataset(x, (x[:, 0] > 0).long()), nn.Linear(4, 2)
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.5), 3, 5, 0, tmp_path / "labels")
    lo.labels(run, task)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.97)
    with pytest.raises(lo.MismatchError) as error:
        lo.labels(run, lo.Task(other, nn.CrossEntropyLoss(), data))
    assert error.value.code == "weights-not-of-the-run"


def test_a_best_checkpoint_is_told_by_its_step(trained: Trained) -> None:
    with pytest.warns(lo.LeaveoutWarning, match=r"but those after step 11.*score run\.head\(12\)"):
        trained.score(trained.best)


def test_usual_models_are_not_spoken_of(trained: Trained, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained.score(trained.model)
        trained.score(trained.model, trained.run.head(12))
        trained.score(trained.best, trained.run.head(12))
        trained.score(network(0))
        for seed in range(1, 4):
            trained.score(network(seed))
        some = Trained(tmp_path / "some", keep=7)
        some.score(some.best, some.run.head(12))


def test_running_statistics_do_not_make_a_new_model_look_trained(tmp_path: Path) -> None:
    """The run's batches are counted in a buffer, which by its end is further from 0 than the weights ever move."""

    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data, trained = TensorDataset(x, (x[:, 0] > 0).long()), built(0)
    task, loss = lo.Task(trained, nn.CrossEntropyLoss(), data), nn.CrossEntropyLoss()
    run = lo.train(task, torch.optim.AdamW(trained.parameters(), 0.02), 20, 10, 0, tmp_path / "run")
    expected = lo.TracIn().score(run, task, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            assert torch.equal(lo.TracIn().score(run, lo.Task(built(seed), loss, data), data).values, expected.values)
    with torch.no_grad():
        for param in trained.parameters():
            param.mul_(1.02)  # as if trained further
    with refused(lo.MismatchError, "weights-not-of-the-run"):
        lo.TracIn().score(run, lo.Task(trained, loss, data), data)


@pytest.mark.parametrize("keep", ["all", 7])
@pytest.mark.parametrize("method", [lo.SGDIE(), lo.ACC(), lo.Replay()], ids=lambda m: m.name)
def test_at_scores_the_state_after_so_many_steps(method: lo.Estimator, keep: str | int, tmp_path: Path) -> None:
    """As retraining says that stops there: with every example, and without one of them."""
    trained = Trained(tmp_path / "run", keep)
    task = lo.Task(trained.model, nn.MSELoss(), trained.data)
    scores = method.score(trained.run, task, trained.data, at=12)
    head = trained.run.head(12)
    others = (method.score(head, task, trained.data), *lo.score(method, trained.run, task, trained.data, at=12))
    assert all(torch.equal(scores.values, other.values) for other in others)
    assert scores.run_fingerprint == head.fingerprint
    if isinstance(method, lo.Replay):
        truth = trained.loss(12, without=3) - trained.loss(12)
        assert float(scores.mean()[3]) == pytest.approx(truth, rel=1e-9)
        assert abs(truth - trained.loss(20, without=3) + trained.loss(20)) > 1e-3 * abs(truth)


@pytest.mark.parametrize("at", [0, 21, -1, 2.5, "best"])
def test_a_state_that_the_run_does_not_have_is_refused(at: object, trained: Trained) -> None:
    task = lo.Task(trained.model, nn.MSELoss(), trained.data)
    with refused(lo.InputError, "at-out-of-range", "20 steps"):
        lo.SGDIE().score(trained.run, task, trained.data, at=at)
