"""Recording sees the batches, hyperparameters and states of an ordinary loop, and changes nothing in it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from torch.utils.data import WeightedRandomSampler as Weighted

import leaveout as lo
from leaveout._util.trees import PARAM
from problems import mostly_full
from refusal import refused

SIZE = 22


class Numbered(Dataset):
    """Every example says its own number."""

    def __init__(self, size: int = SIZE) -> None:
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, 4, generator=draw)
        self.y = torch.randint(3, (size,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[i], self.y[i], torch.as_tensor(i)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def numbers_only(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The number of an example is not for the model."""
    return model(batch[0]), batch[1]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def ids_of(run: lo.Run) -> list[list[int]]:
    return [run.record(i).ids.tolist() for i in range(len(run))]


def flat(batches: list[list[int]]) -> list[int]:
    return sorted(i for ids in batches for i in ids)


def epochs_of(run: lo.Run) -> list[int]:
    return [run.record(i).epoch for i in range(len(run))]


# Which examples


class Backwards:
    """A batch sampler of the user's own: batches of different lengths, as tuples."""

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        yield from [(21, 20, 19), (5,), (4, 3, 2, 1), (0, 7)]

    def __len__(self) -> int:
        return 4


class Arrays(Backwards):
    """The same as NumPy arrays, which a loader takes too."""

    def __iter__(self) -> Iterator[Any]:
        yield from (np.array(batch) for batch in super().__iter__())


class Tensors(Backwards):
    """The same as tensors."""

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor(batch) for batch in super().__iter__())


class Rows(Numbered):
    """Takes a list of numbers at once, for loaders that do not batch themselves."""

    def __getitem__(self, i: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[i], self.y[i], torch.tensor(i)


def weighted() -> Weighted:
    return Weighted(torch.arange(1.0, SIZE + 1), 60, replacement=True)


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in order": lambda: DataLoader(Numbered(), batch_size=5),
    "shuffled": lambda: DataLoader(Numbered(), batch_size=5, shuffle=True),
    "own generator": lambda: DataLoader(Numbered(), 5, shuffle=True, generator=torch.Generator().manual_seed(9)),
    "drop_last": lambda: DataLoader(Numbered(), batch_size=5, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(Numbered(), batch_size=3, shuffle=True, num_workers=2, prefetch_factor=3),
    "persistent workers": lambda: DataLoader(
        Numbered(), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "batch sampler": lambda: DataLoader(Numbered(), batch_sampler=Backwards()),
    "batch sampler of arrays": lambda: DataLoader(Numbered(), batch_sampler=Arrays()),
    "batch sampler of tensors": lambda: DataLoader(Numbered(), batch_sampler=Tensors()),
    "list of batches": lambda: DataLoader(Numbered(), batch_sampler=[[3, 1], [2]]),
    "batched by the sampler": lambda: DataLoader(
        Rows(), batch_size=None, sampler=BatchSampler(RandomSampler(range(SIZE)), 4, drop_last=False)
    ),
    "weighted": lambda: DataLoader(Numbered(), batch_size=8, sampler=weighted()),
    "weighted, workers": lambda: DataLoader(Numbered(), batch_size=8, sampler=weighted(), num_workers=2),
}


@pytest.mark.parametrize("name", LOADERS)
def test_ids_are_those_of_the_batches_that_were_given(name: str, tmp_path: Path) -> None:
    model, loader, seen = network(), LOADERS[name](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for _ in range(3):
        for batch in recorder.watch(loader):
            seen.append(batch[2].tolist())
            learn(model, optimizer, batch)
    run = recorder.finish()
    assert ids_of(run) == seen
    assert epochs_of(run) == [epoch for epoch in range(3) for _ in range(len(loader))]
    if name in ("shuffled", "workers", "persistent workers"):
        third = len(seen) // 3
        assert flat(seen[:third]) == list(range(SIZE))
        assert seen[:third] != seen[third : 2 * third], "the epochs should be shuffled anew"
    if name.startswith("weighted"):
        assert any(len(set(ids)) < len(ids) for ids in seen), "no example came twice; the test would show nothing"


def test_a_subset_is_numbered_by_its_own_positions(tmp_path: Path) -> None:
    chosen = [20, 3, 17, 8, 5, 11]
    subset = Subset(Numbered(), chosen)
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for batch in recorder.watch(DataLoader(subset, batch_size=4, shuffle=True)):
        seen.append(batch[2].tolist())
        learn(model, optimizer, batch)
    run = recorder.finish()
    assert [[chosen[i] for i in ids] for ids in ids_of(run)] == seen
    assert run.manifest.train_size == len(chosen)
    task = lo.Task(model, nn.CrossEntropyLoss(), subset, forward=numbers_only)
    assert lo.SGDIE().score(run, task, subset).train_ids == tuple(range(len(chosen)))


@pytest.mark.parametrize("name", ["shuffled", "workers", "persistent workers"])
@pytest.mark.parametrize("stepped", [True, False], ids=["after the step", "before the step"])
def test_an_epoch_left_early_does_not_shift_the_next(name: str, stepped: bool, tmp_path: Path) -> None:
    model, loader, seen = network(), LOADERS[name](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for epoch in range(3):
        for position, batch in enumerate(recorder.watch(loader)):
            if epoch < 2 and position == 2 and not stepped:
                break
            seen.append(batch[2].tolist())
            learn(model, optimizer, batch)
            if epoch < 2 and position == 2 and stepped:
                break
    run = recorder.finish()
    assert ids_of(run) == seen
    short = 3 if stepped else 2
    assert epochs_of(run) == [0] * short + [1] * short + [2] * len(loader)


def test_an_iterator_begun_anew_in_mid_epoch(tmp_path: Path) -> None:
    model, loader, seen = network(), LOADERS["workers"](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for _ in range(2):
        batches = iter(recorder.watch(loader))
        for _ in range(3):
            batch = next(batches)
            seen.append(batch[2].tolist())
            learn(model, optimizer, batch)
    assert ids_of(recorder.finish()) == seen


def test_two_loaders_of_one_data_set_in_turn(tmp_path: Path) -> None:
    data, model, seen = Numbered(), network(), []
    loaders = [DataLoader(data, batch_size=6, shuffle=True), DataLoader(data, batch_size=11, shuffle=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for loader in (*loaders, *loaders):
        for batch in recorder.watch(loader):
            seen.append(batch[2].tolist())
            learn(model, optimizer, batch)
    assert ids_of(recorder.finish()) == seen


def test_the_batches_are_handed_on_as_they_are(tmp_path: Path) -> None:
    loader = DataLoader(Numbered(), batch_size=5)
    model = network()
    recorder = lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))
    given, plain = list(recorder.watch(loader)), list(loader)
    assert type(given[0]) is type(plain[0])
    for a, b in zip(given, plain, strict=True):
        assert all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(a, b, strict=True))


# The user's training is left alone


def fit(name: str, kind: type[torch.optim.Optimizer], path: Path | None, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Final parameters and random state of an ordinary loop, recorded or not."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kind(model.parameters(), lr=0.05, **options)
    schedule = StepLR(optimizer, step_size=2, gamma=0.5)
    loader = LOADERS[name]()
    recorder = None if path is None else lo.Recorder(path, model, optimizer)
    for _ in range(3):
        for batch in loader if recorder is None else recorder.watch(loader):
            learn(model, optimizer, batch)
        schedule.step()
    if recorder is not None:
        recorder.finish()
    return [param.detach().clone() for param in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("name", ["shuffled", "own generator", "persistent workers", "weighted"])
def test_recording_changes_no_bit_of_the_training(name: str, tmp_path: Path) -> None:
    for number, (kind, options) in enumerate([(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})]):
        plain, random = fit(name, kind, None, **options)
        recorded, after = fit(name, kind, tmp_path / str(number), **options)
        assert all(torch.equal(p, q) for p, q in zip(plain, recorded, strict=True))
        assert torch.equal(random, after), "the global random numbers were touched"


def test_a_finished_recorder_lets_the_optimizer_go(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    batch = next(iter(DataLoader(Numbered(), batch_size=5)))
    recorder.step([0, 1, 2, 3, 4], batch)
    learn(model, optimizer, batch)
    run = recorder.finish()
    learn(model, optimizer, batch)  # would be refused: it is not known which batch
    assert len(lo.open_run(tmp_path / "run")) == len(run) == 1
    assert not torch.equal(run.final()[PARAM]["0.weight"], model[0].weight)


# Hyperparameters and states


def optimizers(model: nn.Sequential) -> dict[str, tuple[torch.optim.Optimizer, Any]]:
    """Optimizers with a schedule each, all with two groups."""

    def groups(lr: float) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": lr, "weight_decay": 0.1}]

    def scheduled(optimizer: torch.optim.Optimizer, schedule: Callable) -> tuple[torch.optim.Optimizer, Any]:
        return optimizer, schedule(optimizer)

    sgd, adam, adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
    return {
        "sgd, LambdaLR": scheduled(
            sgd(groups(0.3), lr=0.1), lambda o: LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)])
        ),
        "nesterov, StepLR": scheduled(
            sgd(groups(0.3), lr=0.1, momentum=0.9, nesterov=True), lambda o: StepLR(o, step_size=3, gamma=0.1)
        ),
        "momentum, OneCycleLR": scheduled(
            sgd(groups(0.3), lr=0.1, momentum=0.9, dampening=0.1), lambda o: OneCycleLR(o, [0.1, 0.4], total_steps=20)
        ),
        "adam, OneCycleLR": scheduled(
            adam(groups(0.01), lr=0.02, betas=(0.8, 0.95)), lambda o: OneCycleLR(o, [0.02, 0.04], total_steps=20)
        ),
        "adamw, LambdaLR": scheduled(
            adamw(groups(0.01), lr=0.02, betas=(0.8, 0.95), eps=1e-6), lambda o: LambdaLR(o, lambda t: 0.9**t)
        ),
    }


OPTIMIZERS = list(optimizers(network()))


def told(group: dict[str, Any], kind: str) -> dict[str, float]:
    """The hyperparameters that torch's group holds right now, by the names that a record uses."""
    if kind == "SGD":
        return {name: float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")}
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "beta1": beta1,
        "beta2": beta2,
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hyperparameters_and_states_are_torchs_own_at_every_step(name: str, tmp_path: Path) -> None:
    model = network()
    optimizer, schedule = optimizers(model)[name]
    kind = type(optimizer).__name__
    names = {param: parameter for parameter, param in model.named_parameters()}
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    hypers, states = [], [{PARAM: {n: p.detach().clone() for p, n in names.items()}}]
    for _ in range(4):
        for batch in recorder.watch(DataLoader(Numbered(), batch_size=5, shuffle=True)):
            hypers.append([told(group, kind) for group in optimizer.param_groups])
            learn(model, optimizer, batch)
            state = {PARAM: {n: p.detach().clone() for p, n in names.items()}}
            for slot in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                if slot in optimizer.state[model[0].weight]:
                    state[slot] = {n: optimizer.state[p][slot].clone() for p, n in names.items()}
            states.append(state)
            schedule.step()
    run = recorder.finish()
    assert len(run) == len(hypers) == 20
    for index, expected in enumerate(hypers):
        recorded = [dict(hyper) for hyper in run.record(index).hypers]
        for hyper in recorded:
            counted = hyper.pop("started" if kind == "SGD" else "step")
            momentum = "momentum_buffer" in run.rule.slots and index > 0
            assert counted == (float(momentum) if kind == "SGD" else index + 1)
        assert recorded == expected, f"step {index}"
    assert hypers[0] != hypers[10], "the schedule did nothing; the test would show nothing"
    for index, expected in enumerate(states):
        state = run.state(index)
        for slot, params in state.items():
            for parameter, tensor in params.items():
                held = expected[slot][parameter] if index or slot == PARAM else torch.zeros_like(tensor)
                assert torch.equal(tensor, held), f"{slot} of {parameter} before step {index}"
    assert set(run.rule.slots) == set(states[-1])


def test_a_one_cycle_schedule_really_moves_momentum_and_betas(tmp_path: Path) -> None:
    for name, key in (("momentum, OneCycleLR", "momentum"), ("adam, OneCycleLR", "beta1")):
        model = network()
        optimizer, schedule = optimizers(model)[name]
        recorder = lo.Recorder(tmp_path / key, model, optimizer)
        for batch in recorder.watch(DataLoader(Numbered(), batch_size=2)):
            learn(model, optimizer, batch)
            schedule.step()
        run = recorder.finish()
        assert len({run.record(i).hypers[0][key] for i in range(len(run))}) > 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_any_schedule_can_be_scored_and_replayed(name: str, tmp_path: Path) -> None:
    model, data = network().double(), TensorDataset(Numbered().x.double(), Numbered().y)
    optimizer, schedule = optimizers(model)[name]
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for batch in recorder.watch(DataLoader(data, batch_size=4, shuffle=True)):
        learn(model, optimizer, batch)
        schedule.step()
    run = recorder.finish()
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    truth = lo.Replay().score(run, task, data)
    scores = lo.ACC(transport="exact", readout="exact").score(run, task, data)
    assert truth.values.abs().max() > 0
    assert lo.metrics.kendall(scores.mean(), truth.mean()) > 0.8


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_resumed_from_its_state_dict(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    model, data = network(), Numbered()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    first = kind(model.parameters(), lr=0.05, **options)
    for batch in DataLoader(data, batch_size=8):
        learn(model, first, batch)
    optimizer = kind(model.parameters(), lr=0.05, **options)
    optimizer.load_state_dict(first.state_dict())
    slots = ["momentum_buffer"] if kind is torch.optim.SGD else ["exp_avg", "exp_avg_sq"]
    held = {slot: optimizer.state[model[0].weight][slot].clone() for slot in slots}
    start = model[0].weight.detach().clone()
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for batch in recorder.watch(DataLoader(data, batch_size=8)):
        learn(model, optimizer, batch)
    run = recorder.finish()
    hyper = run.record(0).hypers[0]
    assert hyper["started"] == 1 if kind is torch.optim.SGD else hyper["step"] == 4
    assert torch.equal(run.state(0)[PARAM]["0.weight"], start)
    assert all(torch.equal(run.state(0)[slot]["0.weight"], held[slot]) for slot in slots)
    task = lo.Task(model, nn.CrossEntropyLoss(), data, forward=numbers_only)
    assert (
        lo.ACC(transport="exact").score(run, task, data).values.abs().max() > 0
    )  # every step is computed again and compared
    assert lo.Replay((0, 1)).score(run, task, data).values.abs().max() > 0


def test_a_state_dict_loaded_after_the_recorder_was_made(tmp_path: Path) -> None:
    model, data = network(), Numbered()
    first = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in DataLoader(data, batch_size=8):
        learn(model, first, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    optimizer.load_state_dict(first.state_dict())
    for batch in recorder.watch(DataLoader(data, batch_size=8)):
        learn(model, optimizer, batch)
    run = recorder.finish()
    assert run.record(0).hypers[0]["lr"] == 0.05
    assert run.record(0).hypers[0]["started"] == 1


# Three ways to the same run


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none").mean()


@pytest.mark.parametrize("kind", mostly_full([torch.optim.SGD, torch.optim.Adam], torch.optim.SGD))
def test_watching_telling_and_training_record_the_same_run(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    data = TensorDataset(Numbered().x, Numbered().y)
    query = TensorDataset(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))

    trained = network()
    task = lo.Task(trained, nn.CrossEntropyLoss(), data)
    runs = {"trained": lo.train(task, kind(trained.parameters(), lr=0.1), 2, 5, seed=4, out=tmp_path / "trained")}
    plan = ids_of(runs["trained"])
    tasks = {"trained": task}

    for way in ("watched", "told"):
        model = network()
        optimizer = kind(model.parameters(), lr=0.1)
        recorder = lo.Recorder(tmp_path / way, model, optimizer)
        for epoch in range(2):
            ids = plan[epoch * 5 : epoch * 5 + 5]
            loader = DataLoader(data, batch_sampler=ids)
            for number, (x, y) in enumerate(recorder.watch(loader) if way == "watched" else loader):
                optimizer.zero_grad()
                mean_loss(model, x, y).backward()
                if way == "told":
                    recorder.step(ids[number], (x, y), epoch=epoch)
                optimizer.step()
        runs[way], tasks[way] = recorder.finish(), lo.Task(model, nn.CrossEntropyLoss(), data)

    for estimator in (lo.TracIn(), lo.SGDIE(), lo.ACC(transport="exact"), lo.ACC(transport="exact", readout="outputs")):
        scores = {way: estimator.score(runs[way], tasks[way], query, queries="each") for way in runs}
        assert torch.equal(scores["watched"].values, scores["trained"].values)
        assert torch.equal(scores["told"].values, scores["trained"].values)
        assert scores["told"].values.abs().max() > 0
    for way in ("watched", "told"):
        assert ids_of(runs[way]) == plan
        assert epochs_of(runs[way]) == epochs_of(runs["trained"])
        for index in range(len(plan)):
            one, other = runs[way].record(index), runs["trained"].record(index)
            assert (one.hypers, one.fingerprint) == (other.hypers, other.fingerprint)


def test_training_sees_every_example_once_an_epoch_in_an_order_of_its_seed(tmp_path: Path) -> None:
    data, orders = TensorDataset(Numbered().x, Numbered().y), []
    for number, seed in enumerate((4, 4, 5)):
        model = network()
        task = lo.Task(model, nn.CrossEntropyLoss(), data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = lo.train(task, optimizer, 2, 5, seed=seed, out=tmp_path / str(number))
        orders.append(ids_of(run))
        assert [len(ids) for ids in orders[-1]] == [5, 5, 5, 5, 2] * 2
        assert flat(orders[-1][:5]) == flat(orders[-1][5:]) == list(range(SIZE))
    assert orders[0] == orders[1] != orders[2]


def test_accumulated_gradients_whose_ids_are_told_together(tmp_path: Path) -> None:
    data = TensorDataset(Numbered().x.double(), Numbered().y)
    scores = {}
    for way in ("whole", "halves"):
        model = network().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = lo.Recorder(tmp_path / way, model, optimizer)
        for ids in torch.arange(20).split(10):
            optimizer.zero_grad()
            for part in ids.split(5) if way == "halves" else [ids]:
                (mean_loss(model, *data[part]) * len(part) / len(ids)).backward()
            recorder.step(ids)
            optimizer.step()
        task = lo.Task(model, nn.CrossEntropyLoss(), data)
        scores[way] = lo.ACC(transport="exact").score(recorder.finish(), task, data).values
    torch.testing.assert_close(scores["halves"], scores["whole"], rtol=1e-10, atol=1e-15)


def test_an_example_twice_in_a_batch_counts_twice(tmp_path: Path) -> None:
    data = TensorDataset(Numbered().x.double(), Numbered().y)
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for batch in recorder.watch(DataLoader(data, batch_sampler=[[1, 1, 2], [3, 1, 3], [2, 2, 2]])):
        learn(model, optimizer, batch)
    run, task = recorder.finish(), lo.Task(model, nn.CrossEntropyLoss(), data)
    assert ids_of(run) == [[1, 1, 2], [3, 1, 3], [2, 2, 2]]
    forward = lo.SGDIE(direction="forward").score(run, task, data).values
    torch.testing.assert_close(lo.SGDIE(direction="backward").score(run, task, data).values, forward)
    assert (forward[[1, 2, 3]] != 0).all()
    assert (forward[[0, *range(4, SIZE)]] == 0).all()
    # A weight of 1 - h moves the loss by h times the derivative that SGD-IE is.
    nearly = lo.Replay((1, 2, 3), weight=1 - 1e-6).score(run, task, data).values
    torch.testing.assert_close(nearly / 1e-6, forward[[1, 2, 3]], rtol=1e-4, atol=1e-9)


# Opening and closing


def test_a_run_opened_later_is_the_run_that_was_written(tmp_path: Path) -> None:
    model, data = network(), Numbered()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for batch in recorder.watch(DataLoader(data, batch_size=5, shuffle=True)):
        learn(model, optimizer, batch)
    run = recorder.finish()
    again = lo.open_run(str(tmp_path / "run"))
    assert again.manifest == run.manifest
    assert repr(again) == repr(run)
    assert "5 steps of Adam" in repr(run)
    for index in range(len(run)):
        one, other = run.record(index), again.record(index)
        assert one.ids.tolist() == other.ids.tolist()
        assert (one.epoch, one.hypers, one.fingerprint) == (other.epoch, other.hypers, other.fingerprint)
    for index in range(len(run) + 1):
        one, other = run.state(index), again.state(index)
        assert all(torch.equal(one[slot][name], other[slot][name]) for slot in one for name in one[slot])
    assert all(torch.equal(run.final()[PARAM][name], param) for name, param in model.named_parameters())
    task = lo.Task(model, nn.CrossEntropyLoss(), data, forward=numbers_only)
    assert torch.equal(
        lo.ACC(transport="exact").score(run, task, data).values,
        lo.ACC(transport="exact").score(again, task, data).values,
    )


def test_the_end_of_a_with_block_finishes_the_run(tmp_path: Path) -> None:
    model, data = network(), Numbered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for batch in recorder.watch(DataLoader(data, batch_size=5)):
            learn(model, optimizer, batch)
    assert len(lo.open_run(tmp_path / "run")) == 5
    learn(model, optimizer, batch)  # the hooks are gone
    assert len(lo.open_run(tmp_path / "run")) == 5


def test_finishing_inside_a_with_block(tmp_path: Path) -> None:
    model, data = network(), Numbered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for batch in recorder.watch(DataLoader(data, batch_size=5)):
            learn(model, optimizer, batch)
        run = recorder.finish()
    assert len(run) == 5
    assert run.manifest.finished


def test_an_error_in_a_with_block_leaves_the_run_marked_as_cut_short(tmp_path: Path) -> None:
    model, data = network(), Numbered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def crash() -> None:
        with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
            for number, batch in enumerate(recorder.watch(DataLoader(data, batch_size=5))):
                if number == 3:
                    raise KeyError("out of cheese")
                learn(model, optimizer, batch)

    with pytest.raises(KeyError, match="out of cheese"):
        crash()
    with refused(lo.RunError, "run-cut-short", "step 2", "partial=True"):
        lo.open_run(tmp_path / "run")
    run = lo.open_run(tmp_path / "run", partial=True)
    assert ids_of(run) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    task = lo.Task(model, nn.CrossEntropyLoss(), data, forward=numbers_only)
    assert lo.ACC(transport="exact").score(run, task, data).values.shape == (SIZE, 1)


def test_a_run_cut_short_cannot_be_finished_afterwards(tmp_path: Path) -> None:
    model, data = network(), Numbered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)

    def crash() -> None:
        with recorder:
            for number, batch in enumerate(recorder.watch(DataLoader(data, batch_size=5))):
                if number == 3:
                    raise KeyError("out of cheese")
                learn(model, optimizer, batch)

    with pytest.raises(KeyError):
        crash()
    with refused(lo.RunError, "run-cut-short", "partial=True"):
        recorder.finish()
    with refused(lo.RunError, "run-cut-short"):
        lo.open_run(tmp_path / "run")


# Models of all kinds


class Cached(nn.Module):
    """A linear model with constants that hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("hollow", torch.zeros(3, 0))
        self.register_buffer("scale", torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x) + self.frozen


def test_constants_of_any_shape_are_fine(tmp_path: Path) -> None:
    model, data = Cached(), TensorDataset(Numbered().x, Numbered().y)
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run = lo.train(task, optimizer, 1, 11, seed=0, out=tmp_path / "run")
    assert set(run.manifest.shapes) == {"layer.weight", "layer.bias"}
    assert lo.ACC(transport="exact").score(run, task, data).values.abs().max() > 0


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(4, 4)
            self.decode = nn.Linear(4, 4)
            self.decode.weight = self.encode.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.decode(torch.tanh(self.encode(x)))

    torch.manual_seed(0)
    model, x = Tied().double(), Numbered().x.double()
    data = TensorDataset(x, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for x, y in recorder.watch(DataLoader(data, batch_size=5)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    run, task = recorder.finish(), lo.Task(model, nn.MSELoss(), data)
    assert set(run.manifest.shapes) == {"encode.weight", "encode.bias", "decode.bias"}
    truth = lo.Replay().score(run, task, data)
    assert (
        lo.metrics.kendall(lo.ACC(transport="exact", readout="exact").score(run, task, data).mean(), truth.mean()) > 0.9
    )


def test_batches_that_are_dicts_from_a_collate_function(tmp_path: Path) -> None:
    def collate(examples: list) -> dict[str, Tensor]:
        x, y, _ = (torch.stack(part) for part in zip(*examples, strict=True))
        return {"input": x, "labels": y}

    model, data = network(), Numbered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for batch in recorder.watch(DataLoader(data, batch_size=5, shuffle=True, collate_fn=collate)):
        learn(model, optimizer, (batch["input"], batch["labels"]))
    task = lo.Task(model, nn.CrossEntropyLoss(), data, collate=collate)
    assert lo.ACC(transport="exact").score(recorder.finish(), task, data).values.abs().max() > 0


FORGOTTEN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), 4)
recorder = lo.Recorder("run", model, optimizer, resume=True)
for x, y in recorder.watch(loader):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.full
def test_a_program_that_forgets_to_finish_is_told_and_loses_nothing(tmp_path: Path) -> None:
    def program(text: str) -> str:
        return subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True).stderr

    told = program(FORGOTTEN)
    assert "was never finished" in told
    assert "recorder.finish()" in told
    with refused(lo.RunError, "run-cut-short", "step 2", "recorder.finish()"):
        lo.open_run(tmp_path / "run")
    assert len(lo.open_run(tmp_path / "run", partial=True)) == 3
    assert not program(FORGOTTEN + "recorder.finish()\n")
    assert len(lo.open_run(tmp_path / "run")) == 3
