"""Loops written with Hugging Face accelerate, compared with the same loops without the example's loss."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import leaveout as lo

accelerate = pytest.importorskip("accelerate")
STEPS = 3
CLIP = 0.3


def data(count: int = 20, seed: int = 0):
    order = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, dtype=torch.float64, generator=order)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (count,), generator=order))


def train(path=None, left_out: int | None = None):
    """Train with what accelerate prepares; five batches make a window of three and one of two in every epoch."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = torch.utils.data.DataLoader(data(), 4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    recorder = None if path is None else lo.Recorder(path, model, optimizer, keep="all")
    batches = loader if recorder is None else recorder.watch(loader)
    gone = None if left_out is None else data()[left_out][0]
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                losses = F.cross_entropy(model(x), y, reduction="none")
                weights = torch.ones_like(losses) if gone is None else (~(x == gone).all(1)).double()
                accelerator.backward((losses * weights).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return model, None if recorder is None else recorder.finish()


def query_loss(model) -> float:
    model.eval()
    x, y = data(6, 9).tensors
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


def test_a_loop_with_accelerate(tmp_path) -> None:
    model, run = train(tmp_path / "run")
    plain, _ = train()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert [[part.length for part in run.record(i).parts] for i in range(len(run))] == [[4, 4, 4], [4, 4]] * 2
    task = lo.Task(model, nn.CrossEntropyLoss(), data(), clip_norm=CLIP, accumulation=STEPS)
    lo.SGDIE().score(run, task, data(6, 9))
    scores = lo.Replay().score(run, task, data(6, 9), ids=[0, 7]).values.flatten()
    truth = [query_loss(train(left_out=left_out)[0]) - query_loss(plain) for left_out in (0, 7)]
    assert scores.tolist() == pytest.approx(truth, rel=1e-8, abs=1e-12)


def test_the_example(tmp_path) -> None:
    main = runpy.run_path(str(Path(__file__).parents[1] / "examples/accelerate_loop.py"))["main"]
    assert main(tmp_path, epochs=1).values.abs().max() > 0
