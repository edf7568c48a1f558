"""Data that differ each time they are read: the batches are kept with the run, and scores come from those."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import leaveout as lo
from leaveout.run import kept_batches


class Augmented(torch.utils.data.Dataset):
    """Examples with noise from torch and a flip from numpy, drawn anew each time."""

    def __init__(self) -> None:
        order = torch.Generator().manual_seed(0)
        self.x = torch.randn(16, 4, dtype=torch.float64, generator=order)
        self.y = torch.randint(3, (16,), generator=order)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int):
        flip = -1.0 if np.random.rand() < 0.5 else 1.0
        return {"input": flip * self.x[i] + 0.1 * torch.randn(4, dtype=torch.float64), "labels": self.y[i]}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)).double()


def forward(model, batch):
    return model(batch["input"]), batch["labels"]


def train(model, seen=None, out=None, recorder=None):
    """Two epochs; ``seen`` collects the batches, or gives them where there are some already."""
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)
    torch.manual_seed(3)
    np.random.seed(3)
    loader = torch.utils.data.DataLoader(Augmented(), 5, shuffle=True, generator=torch.Generator().manual_seed(4))
    again = iter(list(seen)) if seen else None
    source = loader if recorder is None else recorder(model, optimizer).watch(loader)
    for _ in range(2):
        for batch in source:
            if again is not None:
                batch, keep, state = next(again)
                torch.set_rng_state(state)
            elif seen is not None:
                keep = torch.ones(len(batch["labels"]), dtype=torch.float64)
                seen.append((batch, keep, torch.get_rng_state()))
            optimizer.zero_grad()
            losses = F.cross_entropy(*forward(model, batch), reduction="none")
            weight = torch.ones_like(losses) if again is None or out is None else (keep != out).double()
            (weight * losses).mean().backward()
            optimizer.step()
    return model


def test_recording_random_data_changes_no_bit(tmp_path) -> None:
    recorders = []

    def record(model, optimizer):
        recorders.append(lo.Recorder(tmp_path / "run", model, optimizer))
        return recorders[-1]

    recorded = train(net(), recorder=record)
    run = recorders[0].finish()
    plain = train(net())
    assert all(torch.equal(a, b) for a, b in zip(recorded.parameters(), plain.parameters(), strict=True))
    assert run.manifest.structure == {"dict": {"input": 0, "labels": 1}}
    assert lo.check_run(tmp_path / "run") == []


def test_replay_and_sgdie_follow_the_kept_batches(tmp_path) -> None:
    recorders = []

    def record(model, optimizer):
        recorders.append(lo.Recorder(tmp_path / "run", model, optimizer, keep=3))
        return recorders[-1]

    model = train(net(), recorder=record)
    run = recorders[0].finish()
    task = lo.Task(model, nn.CrossEntropyLoss(), Augmented(), forward=forward)
    assert task.random_data
    fixed = Augmented()
    query = [{"input": fixed.x[i], "labels": fixed.y[i]} for i in range(6)]
    scores = lo.Replay().score(run, task, query, ids=[2, 7])
    sgdie = lo.SGDIE().score(run, task, query, ids=[2, 7])

    seen: list = []
    train(net(), seen=seen)
    numbers = [run.record(i).ids for i in range(len(run))]
    seen = [(batch, ids.double(), state) for (batch, _, state), ids in zip(seen, numbers, strict=True)]

    def loss(trained) -> float:
        trained.eval()
        x, y = fixed.x[:6], fixed.y[:6]
        with torch.no_grad():
            return float(F.cross_entropy(trained(x), y))

    base = loss(train(net(), seen=seen))
    truth = [loss(train(net(), seen=seen, out=k)) - base for k in (2, 7)]
    assert scores.values.flatten().tolist() == pytest.approx(truth, rel=1e-9)
    assert sgdie.values.flatten().tolist() == pytest.approx(truth, rel=0.5)


def test_a_budget_that_is_too_small_is_said(tmp_path) -> None:
    def record(model, optimizer):
        return lo.Recorder(tmp_path / "run", model, optimizer, disk=600)

    with pytest.raises(lo.LeaveoutError) as error:
        train(net(), recorder=record)
    assert error.value.code == "batches-over-budget"


@pytest.mark.parametrize("dtype", kept_batches.DTYPES)
def test_every_type_comes_back(dtype: torch.dtype) -> None:
    batch = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "b": [torch.ones(2, 0, dtype=dtype), torch.tensor(1).to(dtype)],
        "c": torch.arange(4).to(dtype).reshape(2, 2)[:1, 1],  # a batch of one, from a collator that takes a column
    }
    again = kept_batches.unpacked(kept_batches.packed(batch, "k/"), "k/", kept_batches.structure(batch))
    assert torch.equal(again["a"], batch["a"])
    assert [t.shape for t in again["b"]] == [(2, 0), ()]
    assert torch.equal(again["b"][1], batch["b"][1])
    assert torch.equal(again["c"], batch["c"])
    assert again["a"].dtype == dtype
