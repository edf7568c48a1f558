"""The run ends at the state that its last step led to, and nothing writes to the parameters between steps unnoticed."""

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from refusal import refused

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(12, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = TensorDataset(X, Y)


class Loop:
    """An ordinary loop in float64."""

    def __init__(self, path: Path, keep: str | int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.recorder = lo.Recorder(path, self.model, self.optimizer, keep=keep)

    def steps(self, count: int) -> None:
        for step in range(count):
            ids = torch.arange(step % 3, 12, 2)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(X[ids]), Y[ids]).backward()
            self.recorder.step(ids, [X[ids], Y[ids]])
            self.optimizer.step()

    def state(self) -> tuple[dict[str, Tensor], dict]:
        return copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())


def load(loop: Loop, best: tuple) -> None:
    loop.model.load_state_dict(best[0])


def load_part(loop: Loop, best: tuple) -> None:
    loop.model[2].load_state_dict({name[2:]: t for name, t in best[0].items() if name.startswith("2.")})


def load_both(loop: Loop, best: tuple) -> None:
    loop.optimizer.load_state_dict(best[1])
    loop.model.load_state_dict(best[0])


def assign(loop: Loop, best: tuple) -> None:
    loop.model.load_state_dict(best[0], assign=True)


def in_place(loop: Loop, best: tuple) -> None:
    with torch.no_grad():
        for name, param in loop.model.named_parameters():
            param.copy_(best[0][name])


def by_data(loop: Loop, best: tuple) -> None:
    for name, param in loop.model.named_parameters():
        param.data.copy_(best[0][name])


CHANGES = [load, load_part, load_both, assign, in_place, by_data]


@pytest.mark.parametrize("keep", ["all", 4])
@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_before_finish_do_not_become_the_last_state(
    change: Callable[[Loop, tuple], None], keep: str | int, tmp_path: Path
) -> None:
    loop = Loop(tmp_path / "run", keep)
    loop.steps(5)
    best = loop.state()
    loop.steps(5)
    last = loop.state()
    change(loop, best)
    if keep == 4 and change in (in_place, by_data):
        with refused(lo.RunError, "last-state-lost", "step 9", "finish()"):
            loop.recorder.finish()
        run = lo.open_run(tmp_path / "run", partial=True)
        assert len(run) == 8
    else:
        run = loop.recorder.finish()
        assert len(run) == 10
        moments = {"exp_avg": last[1]["state"], "exp_avg_sq": last[1]["state"]}
        for number, (name, tensor) in enumerate(run.final()["param"].items()):
            assert torch.equal(tensor, last[0][name])
            assert all(torch.equal(run.final()[slot][name], held[number][slot]) for slot, held in moments.items())
    task = lo.Task(Loop(tmp_path / "other", "all").model, nn.MSELoss(), DATA)
    assert torch.isfinite(lo.Replay((0,)).score(run, task, DATA).values).all()


def clamp(loop: Loop) -> None:
    with torch.no_grad():
        loop.model[0].weight.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("change", [clamp, lambda loop: loop.model.load_state_dict(Loop.start)], ids=["clamp", "load"])
def test_parameters_written_to_between_steps_are_refused_there(
    change: Callable[[Loop], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path / "run", "all")
    monkeypatch.setattr(Loop, "start", loop.state()[0], raising=False)
    loop.steps(3)
    change(loop)
    with refused(lo.UnsupportedError, "parameters-changed", "At step 3"):
        loop.steps(1)


def test_weights_swapped_and_put_back_are_no_change(tmp_path: Path) -> None:
    """As an average of weights is put in for a validation."""
    loop = Loop(tmp_path / "run", 4)
    for _ in range(3):
        loop.steps(3)
        own = loop.state()
        loop.model.load_state_dict({name: tensor * 0.9 for name, tensor in own[0].items()})
        loop.model.load_state_dict(own[0])
    loop.steps(1)
    assert len(loop.recorder.finish()) == 10


def test_a_recorded_model_can_be_copied_and_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", 4)
    loop.steps(2)
    other = copy.deepcopy(loop.model)
    other.load_state_dict({name: 0 * tensor for name, tensor in other.state_dict().items()})
    file = io.BytesIO()
    torch.save(loop.model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again.load_state_dict(other.state_dict())
    averaged = torch.optim.swa_utils.AveragedModel(loop.model)
    averaged.update_parameters(loop.model)
    loop.steps(2)
    assert len(loop.recorder.finish()) == 4
    assert not any(module._load_state_dict_pre_hooks for module in loop.model.modules())


def test_a_module_that_goes_into_training_mode_later_is_followed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(X), Y).backward()
            recorder.step(range(12))
            optimizer.step()

    steps(3)
    model[0].train()  # which changes nothing in what it computes
    steps(1)
    model.train()
    torch.manual_seed(0)
    steps(2)
    run = recorder.finish()
    data = torch.utils.data.TensorDataset(X, Y)
    task = lo.Task(model, nn.MSELoss(), data)
    assert lo.SGDIE().score(run, task, data).values.abs().max() > 0
    assert [record.training for record in map(run.record, (0, 3, 5))] == [(), ("0",), ("", "0", "1", "2")]


def test_a_model_of_a_single_tensor_is_copied_too(tmp_path):
    """Its states are those of the training, and not one tensor that goes on with it."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weights = [model.weight.item()]
    with lo.Recorder(tmp_path / "run", model, optimizer, keep="all") as recorder:
        for step in range(3):
            recorder.step([step])
            optimizer.zero_grad()
            (model(torch.ones(1, 1)) - 3).square().sum().backward()
            optimizer.step()
            weights.append(model.weight.item())
    run = lo.open_run(tmp_path / "run")
    assert [float(run.state(i)["param"]["weight"]) for i in range(4)] == weights
