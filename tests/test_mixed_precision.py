"""Training under ``torch.autocast``: followed to the rounding, derivatives in the parameters' own type."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import leaveout as lo

IDS = [1, 6]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def data() -> torch.utils.data.TensorDataset:
    order = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(24, 6, generator=order), torch.randint(3, (24,), generator=order))


def train(model, dtype, watch=lambda loader, _: loader, out=None, cast=True):
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
    loader = torch.utils.data.DataLoader(range(24), 6, shuffle=True, generator=torch.Generator().manual_seed(2))
    rows = data() if out is None else None
    if rows is not None:
        loader = torch.utils.data.DataLoader(rows, 6, shuffle=True, generator=torch.Generator().manual_seed(2))
    source = watch(loader, optimizer)
    torch.manual_seed(4)
    for _ in range(2):
        for batch in source:
            x, y = batch if out is None else data()[batch]
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=cast):
                losses = F.cross_entropy(model(x), y, reduction="none")
            weights = torch.ones(len(y)) if out is None else (batch != out).float()
            (weights * losses).mean().backward()
            optimizer.step()
    return model


def recorded(tmp_path, dtype, keep):
    recorders = []

    def watch(loader, optimizer):
        recorders.append(lo.Recorder(tmp_path / "run", model, optimizer, keep=keep))
        return recorders[0].watch(loader)

    model = net()
    train(model, dtype, watch)
    return recorders[0].finish(), lo.Task(model, nn.CrossEntropyLoss(), data())


@pytest.mark.parametrize("keep", ["all", 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_under_autocast_are_followed(tmp_path, dtype, keep) -> None:
    run, task = recorded(tmp_path, dtype, keep)
    assert run.manifest.autocast == str(dtype).removeprefix("torch.")
    plain = train(net(), dtype)
    assert all(torch.equal(a, b) for a, b in zip(task.model.parameters(), plain.parameters(), strict=True))

    def loss(model) -> float:
        model.eval()
        with torch.no_grad():
            return float(F.cross_entropy(model(data().tensors[0]), data().tensors[1]))

    base = loss(plain)
    truth = torch.tensor([loss(train(net(), dtype, out=k)) - base for k in IDS])
    replay = lo.Replay().score(run, task, data(), ids=IDS).values.flatten()
    assert torch.allclose(replay, truth, atol=2e-6, rtol=0.02)
    # Derivatives are those of the training without casts, which rounds differently and goes nearly the same way.
    scores = lo.SGDIE().score(run, task, data()).values.flatten()
    wide = recorded_wide(tmp_path)
    assert float(torch.corrcoef(torch.stack([scores, wide]))[0, 1]) > 0.99


def recorded_wide(tmp_path):
    recorders = []

    def watch(loader, optimizer):
        recorders.append(lo.Recorder(tmp_path / "wide", model, optimizer))
        return recorders[0].watch(loader)

    model = net()
    train(model, torch.bfloat16, watch, cast=False)
    task = lo.Task(model, nn.CrossEntropyLoss(), data())
    return lo.SGDIE().score(recorders[0].finish(), task, data()).values.flatten()


def test_another_precision_than_the_recorded_one_is_noticed(tmp_path) -> None:
    run, task = recorded(tmp_path, torch.bfloat16, "all")
    object.__setattr__(run.manifest, "autocast", None)
    with pytest.raises(lo.MismatchError) as error:
        lo.SGDIE().score(run, task, data())
    assert error.value.code == "step-does-not-follow"


Scales = list[float | None]
"""The scale of each step's loss; None where the step was skipped."""


def scaled(
    model, watch=lambda loader, _: loader, out=-1, as_recorded: Scales | None = None, weight: float = 0.0
) -> tuple[nn.Module, Scales]:
    """Train in float16 with a gradient scaler whose first steps overflow, and are skipped; or with these scales."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    rows = torch.utils.data.TensorDataset(*data().tensors, torch.arange(24))
    order = torch.Generator().manual_seed(2)
    source = watch(torch.utils.data.DataLoader(rows, 6, shuffle=True, generator=order), optimizer)
    torch.manual_seed(4)
    scales: Scales = []
    for _ in range(4):
        for x, y, ids in source:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                losses = F.cross_entropy(model(x), y, reduction="none")
            loss = (torch.where(ids == out, weight, 1.0) * losses).mean()
            if as_recorded is not None:
                scales.append(as_recorded[len(scales)])
                fixed_step(model, optimizer, loss, scales[-1])
                continue
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scales[-1]:  # it overflowed
                scales[-1] = None
    return model, scales


def fixed_step(model, optimizer, loss, scale: float | None) -> None:
    if scale is not None:
        (loss * scale).backward()
        for param in model.parameters():
            param.grad.div_(scale)
        optimizer.step()


def test_scaled_gradients_and_skipped_steps_are_followed(tmp_path) -> None:
    """Replays are real float16 trainings with the recorded scales; a scaler of its own may skip other steps."""
    recorders = []

    def watch(loader, optimizer):
        recorders.append(lo.Recorder(tmp_path / "run", model, optimizer))
        return recorders[0].watch(loader)

    model = net()
    _, scales = scaled(model, watch)
    run = recorders[0].finish()
    plain, _ = scaled(net())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert len(run) == sum(scale is not None for scale in scales) < 16  # some were skipped
    assert all(len(run.record(i).ids) == 6 for i in range(len(run)))
    assert {run.record(i).scale for i in range(len(run))} == {2.0**17}  # twice that overflows each time
    rows = torch.utils.data.TensorDataset(*data().tensors, torch.arange(24))
    task = lo.Task(model, nn.CrossEntropyLoss(), rows, forward=lambda m, batch: (m(batch[0]), batch[1]))
    replays = lo.Replay().score(run, task, rows).values.flatten()

    def loss(trained: nn.Module) -> float:
        with torch.no_grad():
            return float(F.cross_entropy(trained.eval()(data().tensors[0]), data().tensors[1]))

    base = loss(plain)
    truth = torch.tensor([loss(scaled(net(), out=k, as_recorded=scales)[0]) - base for k in range(24)])
    assert torch.allclose(replays, truth, atol=1e-6, rtol=1e-3)
    alike = 0
    for k in range(24):
        again, own = scaled(net(), out=k)
        close = abs(loss(again) - base - float(replays[k])) < 1e-6
        assert close == (own == scales), k  # the scale that was adapted anew is all that makes a difference
        alike += close
    assert alike == 18
    # With this weight the recorded scale overflows; any that does not gives the same numbers.
    heavy = lo.Replay(weight=20.0).score(run, task, rows, ids=IDS).values.flatten()
    lower = [scale and 2.0**12 for scale in scales]
    truth = torch.tensor([loss(scaled(net(), out=k, as_recorded=lower, weight=20.0)[0]) - base for k in IDS])
    assert not torch.isfinite(torch.tensor(loss(scaled(net(), out=IDS[0], as_recorded=scales, weight=20.0)[0])))
    assert torch.allclose(heavy, truth, atol=1e-6, rtol=1e-3)
    lo.SGDIE().score(run, task, rows)


def test_the_precision_is_said(tmp_path) -> None:
    run, task = recorded(tmp_path, torch.bfloat16, "all")
    scores = lo.SGDIE().score(run, task, data())
    assert scores.precision == "float32 around bfloat16"
    assert "trained in bfloat16 (autocast), derivatives in float32" in repr(scores)
    assert lo.Scores.load(scores.save(tmp_path / "scores.safetensors")).precision == scores.precision
    assert "replayed alike" in repr(lo.Replay().score(run, task, data(), ids=[0]))
    page = lo.report(tmp_path / "page.html", run, scores, task=task, query=data())
    assert "trained in bfloat16 (autocast)" in page.read_text()
