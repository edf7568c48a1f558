"""Batches are read for their fingerprints later, and what the loop does to them meanwhile is noticed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from leaveout.run.recording import noting
from leaveout.run.recording.noting import Noting, read
from leaveout.task import batches

SIZE = 8


def fingerprints(noted: list[list]) -> list:
    return batches.fingerprints([read(one) for one in noted])


def drawn(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(SIZE, 3, 300, generator=generator), torch.arange(SIZE) + i) for i in range(steps)]


def many() -> int:
    """More batches than are held, so that all ways are taken."""
    return 3 * noting.HELD


def test_later_fingerprints_are_those_of_now():
    given = drawn(many())
    note = Noting()
    assert fingerprints([note(batch) for batch in given]) == [batches.fingerprint(batch) for batch in given]


def test_held_tensors_are_let_go():
    note = Noting()
    for batch in drawn(many()):
        noted = note(batch)
    assert len(note._held) < noting.HELD
    assert sum(isinstance(leaf, noting.Held) for leaf in noted) == 2


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "through data": lambda x: x.data.add_(1),
    "through numpy": lambda x: np.add(x.numpy(), 1, out=x.numpy()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_loop_that_writes_to_its_batches_has_them_read_at_once(write):
    note, noted, expected = Noting(), [], []
    for batch in drawn(many()):
        expected.append(batches.fingerprint(batch))
        noted.append(note(batch))
        write(batch[0])
    assert fingerprints(noted) == expected
    assert not any(isinstance(leaf, noting.Held) for leaf in noted[-1])


def test_a_loader_that_fills_one_buffer_again_and_again_has_it_read_at_once():
    note, noted, expected = Noting(), [], []
    buffer = np.zeros((SIZE, 3, 300), np.float32)
    for x, y in drawn(many()):
        buffer[:] = x.numpy()
        batch = torch.from_numpy(buffer), y
        expected.append(batches.fingerprint(batch))
        noted.append(note(batch))
    assert fingerprints(noted) == expected


def test_batches_written_to_only_later_have_no_fingerprint_rather_than_a_wrong_one():
    note, noted, expected = Noting(), [], []
    for number, batch in enumerate(drawn(2 * many())):
        expected.append(batches.fingerprint(batch))
        noted.append(note(batch))
        if number >= many():
            batch[0].add_(1)
    found = fingerprints(noted)
    lost = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert lost
    assert len(lost) <= noting.HELD
    assert min(lost) >= many()
    assert all(found[number] == [] for number in lost)


def test_large_tensors_and_those_without_versions_are_read_at_once():
    large = torch.zeros(noting.LARGEST // 4 + 1)
    with torch.inference_mode():
        frozen = torch.ones(5)
    assert not any(isinstance(leaf, noting.Held) for leaf in Noting()([large, frozen, "words", None]))
    assert fingerprints([Noting()([frozen, None])]) == [batches.fingerprint([frozen, None])]


@pytest.mark.parametrize("begin", [0, 40], ids=["always", "from the second epoch"])
def test_a_run_whose_loop_writes_to_its_batches_is_scored(begin, tmp_path):
    data = TensorDataset(torch.randn(240, 5, generator=torch.Generator().manual_seed(0)), torch.arange(240) % 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for epoch in range(2):
        for number, (x, y) in enumerate(recorder.watch(DataLoader(data, 6))):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if 40 * epoch + number >= begin:
                x.mul_(0)
    run = recorder.finish()
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    assert lo.SGDIE().score(run, task, data).values.isfinite().all()
    known = [bool(run.record(index).fingerprint) for index in range(len(run))]
    assert all(known[: begin or None])
    assert known.count(False) <= noting.HELD
    assert known[-1] is True
