"""What the recorder notes of real loops: micro-batches, skipped steps, closures, modes; and runs that were resumed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import leaveout as lo


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def data() -> torch.utils.data.TensorDataset:
    order = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, dtype=torch.float64, generator=order)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (24,), generator=order))


def loader():
    return torch.utils.data.DataLoader(data(), 4, shuffle=True, generator=torch.Generator().manual_seed(2))


def parts(run) -> list[list[int]]:
    return [[part.length for part in run.record(i).parts] for i in range(len(run))]


def follows(run, model) -> None:
    """Every step follows from its record."""
    task = lo.Task(model, nn.CrossEntropyLoss(), data())
    lo.SGDIE().score(run, task, data())


def accumulate(model, optimizer, recorder, window: int = 4, skip=()) -> None:
    torch.manual_seed(5)
    for _ in range(2):
        batches = list(range(6))
        for number, (x, y) in zip(batches, recorder.watch(loader()), strict=True):
            if number in skip:
                continue
            last = number == 5
            size = window if number < window else 6 - window
            (F.cross_entropy(model(x), y) / size).backward()
            if (number + 1) % window == 0 or last:
                optimizer.step()
                optimizer.zero_grad()


def test_several_batches_before_a_step_are_its_micro_batches(tmp_path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        accumulate(model, optimizer, recorder)
        run = recorder.finish()
    assert parts(run) == [[4, 4, 4, 4], [4, 4]] * 2
    assert all(part.random is not None for part in run.record(0).parts)
    follows(run, model)


def test_batches_that_the_loop_passes_over_are_left_out(tmp_path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        torch.manual_seed(5)
        for number, (x, y) in enumerate(recorder.watch(loader())):
            if number % 2:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        run = recorder.finish()
    assert parts(run) == [[4], [4], [4]]
    follows(run, model)


@pytest.mark.parametrize("normalised", [True, False])
def test_of_a_step_that_a_scaler_skips_only_the_statistics_remain(tmp_path, normalised) -> None:
    model = net()
    if not normalised:
        model = nn.Sequential(*(part for part in model if not isinstance(part, nn.BatchNorm1d)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        torch.manual_seed(5)
        for number, (x, y) in enumerate(recorder.watch(loader())):
            F.cross_entropy(model(x), y).backward()
            if number not in (0, 2, 3):  # where a gradient is infinite, GradScaler.step does not call the optimizer
                optimizer.step()
            optimizer.zero_grad()
        run = recorder.finish()
    if normalised:
        assert parts(run) == [[4, 4], [4, 4, 4], [4]]
        assert [part.denominator for part in run.record(1).parts] == [float("inf"), float("inf"), None]
    else:
        assert parts(run) == [[4], [4], [4]]
    follows(run, model)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_closures(tmp_path, kind) -> None:
    def train(model, source, optimizer) -> None:
        torch.manual_seed(5)
        for x, y in source:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    model, plain = net(), net()
    optimizer = kind(model.parameters(), 0.01)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        train(model, recorder.watch(loader()), optimizer)
        run = recorder.finish()
    train(plain, loader(), kind(plain.parameters(), 0.01))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    follows(run, model)


def test_a_model_that_is_not_called_as_a_whole(tmp_path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        torch.manual_seed(5)
        for x, y in recorder.watch(loader()):
            optimizer.zero_grad()
            hidden = x
            for layer in model:
                hidden = layer(hidden)
            F.cross_entropy(hidden, y).backward()
            optimizer.step()
        run = recorder.finish()
    follows(run, model)


def test_ids_told_to_the_recorder_of_a_model_that_is_not_called_as_a_whole(tmp_path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        torch.manual_seed(5)
        for ids in torch.arange(24).split(4):
            optimizer.zero_grad()
            hidden, y = data()[ids]
            recorder.step(ids)
            for layer in model:
                hidden = layer(hidden)
            F.cross_entropy(hidden, y).backward()
            optimizer.step()
        run = recorder.finish()
    assert run.record(0).parts[0].random is not None
    follows(run, model)


def test_a_window_that_ends_in_a_closure(tmp_path) -> None:
    """The first micro-batch has moved the running statistics when the optimizer is called with the second."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        torch.manual_seed(5)
        for number, (x, y) in enumerate(recorder.watch(loader())):

            def closure(x=x, y=y):
                (F.cross_entropy(model(x), y) / 2).backward()

            if number % 2:
                optimizer.step(closure)
                optimizer.zero_grad()
            else:
                closure()
        run = recorder.finish()
    assert not run.state(0)["param"]["1.running_mean"].any()
    assert parts(run) == [[4, 4]] * 3
    follows(run, model)


def test_a_buffer_that_moves_only_later_is_refused(tmp_path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.eval()
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for number, (x, y) in enumerate(recorder.watch(loader())):
        model.train(number == 2)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if number == 2:
            with pytest.raises(lo.LeaveoutError) as error:
                optimizer.step()
            break
        optimizer.step()
    assert error.value.code == "buffer-moved-late"


@pytest.mark.parametrize("cut", [1, 3])
def test_a_resumed_recording_is_the_undisturbed_one(tmp_path, cut: int) -> None:
    def train(path, stop=None, resume=False):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        with lo.Recorder(path, model, optimizer, resume=resume, keep="all") as recorder:
            torch.manual_seed(5)
            source = recorder.watch(loader())
            for _ in range(2):
                for number, (x, y) in enumerate(source):
                    (F.cross_entropy(model(x), y) / 2).backward()
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                        if recorder.done == stop:
                            raise KeyboardInterrupt
            return recorder.finish()

    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", stop=cut)
    again = train(tmp_path / "cut", resume=True)
    assert len(again) == len(whole)
    for index in range(len(whole)):
        left, right = whole.record(index), again.record(index)
        assert torch.equal(left.ids, right.ids)
        assert all(torch.equal(a.random["cpu"], b.random["cpu"]) for a, b in zip(left.parts, right.parts, strict=True))
    first, second = whole.final(), again.final()
    assert all(torch.equal(first[slot][n], second[slot][n]) for slot in first for n in first[slot])
    assert lo.check_run(tmp_path / "cut") == []


def test_a_compiled_model_has_the_names_and_the_record_of_the_plain_one(tmp_path) -> None:
    def train(model, called, path):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with lo.Recorder(path, called, optimizer) as recorder:
            torch.manual_seed(5)
            for x, y in recorder.watch(loader()):
                optimizer.zero_grad()
                F.cross_entropy(called(x), y).backward()
                optimizer.step()
            return recorder.finish()

    plain, model = net(), net()
    compiled = torch.compile(model, backend="eager")
    first, second = train(plain, plain, tmp_path / "plain"), train(model, compiled, tmp_path / "compiled")
    assert first.manifest.shapes == second.manifest.shapes
    assert first.manifest.buffers == second.manifest.buffers
    assert all(torch.equal(first.final()["param"][n], t) for n, t in second.final()["param"].items())
    scores = [
        lo.SGDIE().score(run, lo.Task(of, nn.CrossEntropyLoss(), data()), data()).values
        for run, of in ((first, plain), (second, compiled))
    ]
    assert torch.equal(*scores)


def test_models_spread_over_devices_are_refused(tmp_path) -> None:
    model = net()
    with pytest.raises(lo.UnsupportedError) as error:
        lo.Recorder(tmp_path / "run", nn.DataParallel(model), torch.optim.SGD(model.parameters(), 0.1))
    assert error.value.code == "distributed-not-supported"


@pytest.mark.parametrize("told", [False, True])
def test_forward_passes_before_the_loop_are_not_its_first_steps(tmp_path, told: bool) -> None:
    """A task that is made first, a summary of the model: neither moves what the first step drew and started from."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer, on_problem="stop") as recorder:
        task = lo.Task(model, nn.CrossEntropyLoss(), data())
        torch.manual_seed(5)
        if not told:
            model(torch.randn(7, 4, dtype=torch.float64))
        for batch in torch.arange(24).split(4) if told else recorder.watch(loader()):
            x, y = data()[batch] if told else batch
            if told:
                recorder.step(batch, (x, y))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        run = recorder.finish()
    assert run.manifest.seen == {"given": "as yielded"}
    lo.SGDIE().score(run, task, data())
