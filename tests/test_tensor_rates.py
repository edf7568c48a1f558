"""A learning rate that is a tensor is applied as torch applies it, in the tensor's own precision."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1), momentum=0.9, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.05)),
    "adam, one element": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor([0.05]), weight_decay=0.1),
    "adam, betas": lambda m: torch.optim.Adam(
        m.parameters(), lr=torch.tensor(0.05), betas=(torch.tensor(0.9), torch.tensor(0.99)), eps=1e-3
    ),
    "adam, bfloat16": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.05, dtype=torch.bfloat16)),
    "adam, fused": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.05), fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.05), weight_decay=0.2),
}
LEFT_OUT = 3


def trained(optimizer: str, path: Path | None, weight: float) -> tuple[nn.Module, TensorDataset]:
    """A plain loop in float64 with one example weighted; recorded where a path is given."""
    order = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=order).double(), torch.randn(12, 1, generator=order).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    made = OPTIMIZERS[optimizer](model)
    recorder = None if path is None else lo.Recorder(path, model, made)
    for step in range(40):
        ids = torch.randperm(12, generator=order)[:5]
        weights = torch.where(ids == LEFT_OUT, weight, 1.0)
        made.zero_grad()
        ((model(x[ids]) - y[ids]).square().squeeze(1) * weights).mean().backward()
        if recorder is not None:
            recorder.step(ids, [x[ids], y[ids]], epoch=step // 4)
        made.step()
    if recorder is not None:
        recorder.finish()
    return model, TensorDataset(x, y)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_replay_is_plain_retraining_with_the_same_tensor(optimizer: str, tmp_path: Path) -> None:
    model, data = trained(optimizer, tmp_path / "run", 1.0)
    without, _ = trained(optimizer, None, 0.0)
    task = lo.Task(model, nn.MSELoss(), data)
    scores = lo.Replay([LEFT_OUT]).score(lo.open_run(tmp_path / "run"), task, data, displacements=True)
    for (name, left), (_, param) in zip(without.named_parameters(), model.named_parameters(), strict=True):
        moved = (left - param).detach()
        assert (scores.displacements[name][0] - moved).norm() <= 1e-9 * moved.norm()


def test_a_run_with_a_tensor_for_its_rate_is_resumed(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(8, 2, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64))

    def train(path: Path, *, cut: bool = False, resume: bool = False) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05))
        if cut:
            optimizer.register_step_post_hook(lambda *_: stop() if recorded[0] == 5 else None)
        recorded = [0]

        def stop() -> None:
            raise KeyboardInterrupt

        optimizer.register_step_pre_hook(lambda *_: recorded.__setitem__(0, recorded[0] + 1))
        lo.train(lo.Task(model, nn.MSELoss(), data), optimizer, 4, 4, 0, path, resume=resume)
        return model

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", cut=True)
    assert not lo.open_run(tmp_path / "run", partial=True).manifest.finished
    resumed, undisturbed = train(tmp_path / "run", resume=True), train(tmp_path / "whole")
    assert torch.equal(resumed.weight, undisturbed.weight)
