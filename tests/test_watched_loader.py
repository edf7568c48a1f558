"""A watched loader is the loader: iterated over as often as one likes, with its length, whoever made it."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from refusal import refused
from test_recorder import LOADERS, SIZE, Numbered, epochs_of, ids_of, learn, network


@pytest.mark.parametrize("name", ["shuffled", "workers", "persistent workers"])
def test_a_loader_watched_once_serves_every_epoch(name: str, tmp_path: Path) -> None:
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    loader = recorder.watch(LOADERS[name]())
    for _ in range(3):
        for batch in loader:
            seen.append(batch[2].tolist())
            learn(model, optimizer, batch)
    run = recorder.finish()
    assert len(seen) == 3 * len(loader)
    assert ids_of(run) == seen
    assert epochs_of(run) == [epoch for epoch in range(3) for _ in range(len(loader))]


def test_a_watched_loader_answers_as_the_loader_does(tmp_path: Path) -> None:
    model, loader = network(), DataLoader(Numbered(), batch_size=5)
    recorder = lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))
    watched = recorder.watch(loader)
    assert len(watched) == len(loader) == 5
    assert watched.dataset is loader.dataset
    assert watched.batch_size == 5
    assert len(list(recorder.watch(watched))) == 5
    with pytest.raises(AttributeError, match="nothing"):
        _ = watched.nothing


def test_what_cannot_be_watched_is_refused_before_the_loop(tmp_path: Path) -> None:
    model = network()
    recorder = lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))
    with refused(lo.UnsupportedError, "loader-out-of-order", "in_order=True"):
        recorder.watch(DataLoader(Numbered(), num_workers=2, in_order=False))


class Elsewhere(DataLoader):
    """A loader whose batches have nothing to do with its sampler."""

    def __iter__(self):
        yield from super().__iter__() if self.batch_size == 1 else [(torch.zeros(2, 4), torch.zeros(2).long())]


def test_batches_from_elsewhere_are_refused(tmp_path: Path) -> None:
    model = network()
    recorder = lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))
    with refused(lo.UnsupportedError, "loader-ids-unknown", "recorder.step"):
        next(iter(recorder.watch(Elsewhere(Numbered(), batch_size=2))))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("seedable", [True, False])
def test_loaders_of_accelerate(workers: int, seedable: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(path: Path | None) -> tuple[list[list[int]], nn.Module]:
        accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=seedable)
        )
        torch.manual_seed(0)
        model, seen = network(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = accelerator.prepare(DataLoader(Numbered(), batch_size=5, shuffle=True, num_workers=workers))
        recorder = None if path is None else lo.Recorder(path, model, optimizer)
        for epoch in range(4):
            if epoch == 2:
                loader.set_epoch(7)
            for number, batch in enumerate(loader if recorder is None else recorder.watch(loader)):
                seen.append(batch[2].tolist())
                learn(model, optimizer, batch)
                if epoch == 1 and number == 2:
                    break
        if recorder is not None:
            assert ids_of(recorder.finish()) == seen
        return seen, model

    batches, model = train(tmp_path / "run")
    expected, plain = train(None)
    assert batches == expected
    assert sorted(i for ids in batches[:5] for i in ids) == list(range(SIZE))
    assert batches[:5] != batches[8:13], "the epochs should be shuffled anew"
    assert torch.equal(model[0].weight, plain[0].weight)


def test_workers_that_stay_end_with_the_recording(tmp_path):
    model, before = nn.Linear(2, 2), set(multiprocessing.active_children())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 2), torch.zeros(8).long())
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for x, y in recorder.watch(DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    recorder.finish()
    assert not set(multiprocessing.active_children()) & workers
