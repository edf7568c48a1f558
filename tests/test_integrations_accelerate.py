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


def data(count: int = 20, seed: int = 0, dtype: torch.dtype = torch.float64):
    order = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, dtype=torch.float64, generator=order).to(dtype)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (count,), generator=order))


def train(path=None, left_out: int | None = None, precision: str = "no"):
    """Train with what accelerate prepares; five batches make a window of three and one of two in every epoch."""
    dtype = torch.float64 if precision == "no" else torch.float32  # doubles are never cast
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS, mixed_precision=precision)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = torch.utils.data.DataLoader(data(dtype=dtype), 4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    recorder = None if path is None else lo.Recorder(path, model, optimizer, keep="all")
    batches = loader if recorder is None else recorder.watch(loader)
    gone = None if left_out is None else data(dtype=dtype)[left_out][0]
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                losses = F.cross_entropy(model(x), y, reduction="none")
                weights = torch.ones_like(losses) if gone is None else (~(x == gone).all(1)).to(dtype)
                accelerator.backward((losses * weights).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return model, None if recorder is None else recorder.finish()


def query_loss(model) -> float:
    fresh = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).eval()  # without casts
    fresh = fresh.to(next(model.parameters()).dtype)
    fresh.load_state_dict(model.state_dict())
    x, y = data(6, 9, next(model.parameters()).dtype).tensors
    with torch.no_grad():
        return float(F.cross_entropy(fresh(x), y))


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


def test_a_loop_in_mixed_precision(tmp_path) -> None:
    """Steps and replays are cast as training was; derivatives are not, though accelerate casts within the model."""
    model, run = train(tmp_path / "run", precision="bf16")
    plain, _ = train(precision="bf16")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert run.manifest.autocast == "bfloat16"
    rows, query = data(dtype=torch.float32), data(6, 9, torch.float32)
    task = lo.Task(model, nn.CrossEntropyLoss(), rows, clip_norm=CLIP, accumulation=STEPS)
    lo.SGDIE().score(run, task, query)
    scores = lo.Replay().score(run, task, query, ids=[0, 7]).values.flatten()
    truth = [query_loss(train(left_out=left_out, precision="bf16")[0]) - query_loss(plain) for left_out in (0, 7)]
    assert scores.tolist() == pytest.approx(truth, abs=1e-3 * max(map(abs, truth)))


def test_the_example(tmp_path) -> None:
    main = runpy.run_path(str(Path(__file__).parents[1] / "examples/accelerate_loop.py"))["main"]
    assert main(tmp_path, epochs=1).values.abs().max() > 0
