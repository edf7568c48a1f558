"""What cannot be done exactly is refused: the right exception, code and culprit, and nothing is written.

The wording itself is held by ``test_every_layer_that_mixes_or_draws_is_listed_at_once`` and by those tests where one
code covers several causes.
"""

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import leaveout as lo
from leaveout._util.files import tensor_checksum
from leaveout._util.trees import PARAM
from leaveout.task.batches import fingerprint, fingerprints, leaves, noted
from refusal import contents, refused

SIZE = 18


def examples(seed: int = 0, size: int = SIZE, dtype: torch.dtype = torch.float32) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, 4, generator=draw, dtype=dtype), torch.randint(3, (size,), generator=draw))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def recorded(
    path: Path, data: Dataset, *, model: nn.Module | None = None, spoil: Callable | None = None, batch_size: int = 6
) -> tuple[lo.Run, nn.Module]:
    """Two epochs in an ordinary loop; ``spoil`` does something to the model between gradient and step."""
    model = model or network()
    optimizer = sgd(model, lr=0.5)
    recorder = lo.Recorder(path, model, optimizer)
    for _ in range(2):
        for number, batch in enumerate(recorder.watch(DataLoader(data, batch_size=batch_size, shuffle=True))):
            backward(model, optimizer, batch)
            if spoil is not None:
                spoil(model, number)
            optimizer.step()
    return recorder.finish(), model


def task_of(model: nn.Module, data: Dataset, **options: Any) -> lo.Task:
    return lo.Task(model, nn.CrossEntropyLoss(), data, **options)


METHODS = [lo.TracIn(), lo.SGDIE(), lo.ACC(transport="exact"), lo.Replay((0, 1))]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


# Models


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.125, batch_first=True)
        self.memory = nn.GRU(4, 4, num_layers=2, dropout=0.375, batch_first=True)
        self.slope = nn.RReLU()
        self.instance = nn.InstanceNorm1d(1, track_running_stats=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(x)).unsqueeze(1)
        return self.head(self.slope(self.instance(self.memory(self.attention(x, x, x)[0])[0])).squeeze(1))


def test_buffers_of_one_kind_are_one_line() -> None:
    model = nn.Sequential(*(nn.Sequential(Odd("count"), nn.Linear(3, 4)) for _ in range(3)), nn.Linear(4, 3))
    with refused(lo.UnsupportedError, "task-not-supported", "changes 3 buffers ('0.0.calls', ...)") as error:
        task_of(model, examples())
    assert str(error.value).count("\n") == 1
    assert all(float(buffer) == 0 for buffer in model.buffers())


@every_method
def test_layers_that_draw_are_followed_in_training_mode(method: lo.Estimator, tmp_path: Path) -> None:
    data = examples()
    run, model = recorded(tmp_path / "run", data, model=Attentive())
    assert method.score(run, task_of(model, data), data).values.abs().max() > 0


def test_the_same_layers_in_evaluation_mode_are_fine(tmp_path: Path) -> None:
    data = examples()
    run, model = recorded(tmp_path / "run", data, model=Attentive().eval())
    assert lo.TracIn().score(run, task_of(model, data), data).values.abs().max() > 0


def test_batchnorm_without_running_statistics_mixes_in_any_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).eval()
    with refused(lo.UnsupportedError, "model-not-supported", "'0' is BatchNorm1d", unchanged=tmp_path):
        lo.Recorder(tmp_path / "run", model, sgd(model))


class Odd(nn.Module):
    """A linear model whose forward pass does something on the side."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.what = what
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "dropout":
            x = nn.functional.dropout(x, 0.5)
        if self.what == "noise":
            x = x + 0.1 * torch.randn_like(x)
        if self.what == "random":
            x = x * (1 + random.random())
        if self.what == "count":
            self.calls += 1
        if self.what == "assign":
            self.calls = self.calls + 1
        if self.what == "centre":
            x = x - x.mean(0)
        if self.what == "crash":
            raise ZeroDivisionError("a bug of the user's own")
        return self.layer(x)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("dropout", ["task-not-supported", "draws random numbers in evaluation mode", "function of its inputs"]),
        ("noise", ["task-not-supported", "draws random numbers"]),
        ("random", ["task-not-supported", "another loss each time", "Python's random"]),
        ("count", ["task-not-supported", "changes the buffer 'calls' in evaluation mode"]),
        ("assign", ["task-not-supported", "changes the buffer 'calls' in evaluation mode"]),
        ("centre", ["task-not-supported", "depends on the other examples in its batch", "within single examples"]),
        (
            "crash",
            [
                "task-not-supported",
                "fails on training examples",
                "ZeroDivisionError: a bug of the user's own",
            ],
        ),
    ],
)
def test_what_only_a_trial_shows(what: str, words: list[str]) -> None:
    model = Odd(what)
    state = torch.get_rng_state()
    with refused(lo.UnsupportedError, *words):
        task_of(model, examples())
    assert torch.equal(torch.get_rng_state(), state), "the trial used up random numbers"
    assert float(model.calls) == 0, "the trial left its traces in the model"


@every_method
def test_randomness_that_was_on_only_while_training(method: lo.Estimator, tmp_path: Path) -> None:
    data = examples()
    run, model = recorded(tmp_path / "run", data, model=Odd("dropout"))
    model.what = ""
    with refused(
        lo.MismatchError,
        "step-does-not-follow",
        "does not follow from its batch and this task",
        "clip_norm=",
        unchanged=tmp_path,
    ):
        method.score(run, task_of(model, data), data)


def test_a_model_without_trained_parameters() -> None:
    with refused(
        lo.UnsupportedError, "task-not-supported", "no parameter of the model is trained", "requires_grad=True"
    ):
        task_of(network().requires_grad_(False), examples())


def test_a_model_without_any_parameters() -> None:
    with refused(lo.UnsupportedError, "task-not-supported", "no parameter of the model is trained"):
        task_of(nn.Flatten(), examples())


# Losses


class Wrapped(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (Wrapped(), ["task-not-supported", "3 examples has shape [] instead of [3]", "reduction='none'"]),
        (
            lambda outputs, targets: outputs - targets[:, None],
            ["task-not-supported", "has shape [3, 3] instead of [3]"],
        ),
        (nn.L1Loss(), ["task-not-supported", "the model or the loss fails", "size of tensor"]),
        (
            lambda outputs, targets: nn.functional.cross_entropy(outputs - outputs.mean(0), targets, reduction="none"),
            ["task-not-supported", "depends on the other examples in its batch"],
        ),
    ],
)
def test_losses_that_are_not_a_mean_over_examples(loss: Any, words: list[str]) -> None:
    data = TensorDataset(*examples().tensors)
    if isinstance(loss, nn.L1Loss):
        data = TensorDataset(data.tensors[0], torch.randn(SIZE, 5))
    with refused(lo.UnsupportedError, *words):
        lo.Task(network(), loss, data)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_and_targets_that_broadcast() -> None:
    data = TensorDataset(torch.randn(SIZE, 4), torch.randn(SIZE))
    with refused(
        lo.UnsupportedError,
        "task-not-supported",
        "depends on the other examples",
        "outputs and targets have the same shape",
    ):
        lo.Task(nn.Linear(4, 1), nn.MSELoss(), data)


@every_method
def test_another_loss_or_l2_than_the_one_trained_with(method: lo.Estimator, tmp_path: Path) -> None:
    data = examples()
    run, model = recorded(tmp_path / "run", data)
    words = ("does not follow from its batch and this task", "the loss, l2 and model")
    with refused(lo.MismatchError, "step-does-not-follow", *words, unchanged=tmp_path):
        method.score(run, task_of(model, data, l2=0.1), data)
    with refused(lo.MismatchError, "step-does-not-follow", *words):
        method.score(run, lo.Task(model, nn.CrossEntropyLoss(label_smoothing=0.1), data), data)


def test_the_l2_that_was_trained_with_left_out(tmp_path: Path) -> None:
    data, model = examples(), network()
    task = task_of(model, data, l2=0.1)
    run = lo.train(task, sgd(model), 1, 6, seed=0, out=tmp_path / "run")
    assert lo.ACC(transport="exact").score(run, task, data).values.abs().max() > 0
    with refused(lo.MismatchError, "step-does-not-follow", "does not follow", "l2"):
        lo.ACC(transport="exact").score(run, task_of(model, data), data)


# Data


class Augmented(Dataset):
    """Random while ``random`` is set."""

    def __init__(self, random: bool) -> None:
        self.tensors, self.random = examples().tensors, random

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = self.tensors[0][i]
        return x + 0.1 * torch.randn(4) if self.random else x, self.tensors[1][i]


AGAIN = ("gives something else each time it is read", "random augmentation", "the same example for the same number")


@every_method
def test_random_augmentation_that_shows_later(method: lo.Estimator, tmp_path: Path) -> None:
    data = Augmented(random=False)
    run, model = recorded(tmp_path / "run", data)
    task = task_of(model, data)
    data.random = True
    with refused(lo.MismatchError, "batch-differs", "The batch of step", *AGAIN, unchanged=tmp_path):
        method.score(run, task, examples())


class FromFile(Dataset):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.load(self.path)[i]), i % 3


@every_method
def test_a_data_file_that_changed(method: lo.Estimator, tmp_path: Path) -> None:
    x = examples().tensors[0].numpy()
    np.save(tmp_path / "x.npy", x)
    data = FromFile(tmp_path / "x.npy")
    run, model = recorded(tmp_path / "run", data)
    task = task_of(model, data)
    x[7, 2] = np.nextafter(x[7, 2], np.float32(np.inf))  # the last bit of one value of one example
    np.save(tmp_path / "x.npy", x)
    words = ("The batch of step", "tensor 0", "other values", "give the data set that was trained on")
    with refused(lo.MismatchError, "batch-differs", *words, unchanged=tmp_path):
        method.score(run, task, examples())


@every_method
def test_data_in_another_order(method: lo.Estimator, tmp_path: Path) -> None:
    data = examples()
    whole, model = recorded(tmp_path / "whole", data, batch_size=SIZE)
    run, other = recorded(tmp_path / "run", data)
    turned = Subset(data, list(reversed(range(SIZE))))
    with refused(lo.MismatchError, "batch-differs", "The batch of step", "in another order", "order it was trained on"):
        method.score(whole, task_of(model, turned), data)
    with refused(lo.MismatchError, "batch-differs", "The batch of step", "give the data set that was trained on"):
        method.score(run, task_of(other, turned), data)


def test_labels_that_were_corrected_since(tmp_path: Path) -> None:
    data = examples()
    run, model = recorded(tmp_path / "run", data)
    x, y = data.tensors
    with refused(lo.MismatchError, "batch-differs", "The batch of step", "tensor 1 (now int64 [6])"):
        lo.ACC(transport="exact").score(run, task_of(model, TensorDataset(x, (y + 1) % 3)), data)


def test_data_of_another_type_or_with_more_parts(tmp_path: Path) -> None:
    data = examples()
    run, model = recorded(tmp_path / "run", data)
    x, y = data.tensors
    narrow = TensorDataset(x, y.int())
    task = lo.Task(model, lambda o, t: nn.functional.cross_entropy(o, t.long(), reduction="none"), narrow)
    with refused(lo.MismatchError, "batch-differs", "The batch of step", "tensor 1 (now int32 [6])", "another type"):
        lo.ACC(transport="exact").score(run, task, narrow)
    third = TensorDataset(x, y, torch.zeros(SIZE))
    with refused(lo.MismatchError, "batch-differs", "held 2 tensors when it was trained on and holds 3 now"):
        lo.ACC(transport="exact").score(run, task_of(model, third, forward=lambda m, b: (m(b[0]), b[1])), third)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_data_set_of_another_length(size: int, tmp_path: Path) -> None:
    data = examples()
    run, model = recorded(tmp_path / "run", data)
    with refused(
        lo.MismatchError, "train-size-differs", f"trained on {SIZE} examples", f"has {size}", "that was trained on"
    ):
        lo.ACC(transport="exact").score(run, task_of(model, examples(size=size)), data)


@every_method
def test_a_shorter_data_set_when_only_ids_were_told(method: lo.Estimator, tmp_path: Path) -> None:
    data, model = examples(), network()
    optimizer = sgd(model)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    backward(model, optimizer, data[torch.tensor([2, 17])])
    recorder.step([2, 17])
    optimizer.step()
    run = recorder.finish()
    with refused(lo.MismatchError, "train-size-differs", "Step 0", "example 17"):
        method.score(run, task_of(model, Subset(data, range(10))), data)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*examples().tensors, strict=True)


class CountedStream(Stream):
    def __len__(self) -> int:
        return SIZE


@pytest.mark.parametrize("kind", [Stream, CountedStream])
def test_data_without_numbers(kind: type[Stream], tmp_path: Path) -> None:
    model = network()
    recorder = lo.Recorder(tmp_path / "run", model, sgd(model))
    with refused(
        lo.UnsupportedError, "examples-without-numbers", "IterableDataset", "recorder.step(ids)", unchanged=tmp_path
    ):
        next(iter(recorder.watch(DataLoader(kind(), batch_size=6))))
    with refused(lo.InputError, "examples-without-numbers", kind.__name__, "map-style Dataset"):
        task_of(model, kind())


def test_loaders_that_are_none(tmp_path: Path) -> None:
    model = network()
    recorder = lo.Recorder(tmp_path / "run", model, sgd(model))
    with refused(lo.UnsupportedError, "loader-out-of-order", "in_order=True"):
        next(iter(recorder.watch(DataLoader(examples(), num_workers=1, in_order=False))))


def test_an_empty_training_set() -> None:
    with refused(lo.InputError, "train-set-empty"):
        task_of(network(), Subset(examples(), []))


@pytest.mark.parametrize("l2", [-0.1, float("nan"), float("inf")])
def test_a_strength_that_is_none(l2: Any) -> None:
    with refused(lo.InputError, "l2-out-of-range", f"l2={l2!r}", "finite number, 0 or more"):
        task_of(network(), examples(), l2=l2)


class Listed(Dataset):
    def __init__(self, found: list) -> None:
        self.found = found

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, i: int) -> Any:
        return self.found[i]


def test_examples_that_cannot_be_joined_or_read() -> None:
    fine = (torch.zeros(4), torch.tensor(1))
    for odd in ((torch.zeros(3), torch.tensor(1)), (torch.zeros(4), None), (torch.zeros(4),), {"x": torch.zeros(4)}):
        with refused(lo.InputError, "examples-do-not-join", "[0, 1]", "collate="):
            task_of(network(), Listed([fine, odd]))
        late = task_of(network(), Listed([fine] * 30 + [odd]))
        with refused(lo.InputError, "examples-do-not-join", "[29, 30]", "collate="):
            late.read([29, 30])

    def broken(rows: list) -> Any:
        raise KeyError("labels")

    with refused(lo.UnsupportedError, "task-not-supported", "training examples cannot be read: KeyError: 'labels'"):
        task_of(network(), examples(), collate=broken)


def test_batches_that_the_task_cannot_take_apart() -> None:
    x, y = examples().tensors
    with refused(lo.InputError, "batch-not-understood", "forward=lambda"):
        task_of(network(), TensorDataset(x))

    class Texts(Dataset):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor, str]:
            return x[i], y[i], f"text {i}"

    with refused(lo.UnsupportedError, "task-not-supported", "item 2 of a batch is a str", "collate="):
        task_of(network(), Texts())

    def packed(rows: list) -> tuple[Tensor, Tensor]:
        return torch.cat([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    with refused(
        lo.UnsupportedError, "task-not-supported", "tensor 0 of a batch of 3 examples has shape [12]", "collate="
    ):
        task_of(network(), examples(), collate=packed)


def test_a_collate_function_that_drops_examples(tmp_path: Path) -> None:
    """Batches with fewer rows than ids would put scores on the wrong examples."""
    data, model = examples(), network()

    def collate(rows: list) -> list[Tensor]:
        kept = [row for row in rows if not torch.equal(row[0], data.tensors[0][7])]
        return [torch.stack(part) for part in zip(*kept, strict=True)]

    optimizer = sgd(model)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)

    def loop() -> None:
        for batch in recorder.watch(DataLoader(data, batch_size=6, collate_fn=collate)):
            backward(model, optimizer, batch)
            optimizer.step()
        lo.ACC(transport="exact").score(recorder.finish(), task_of(model, data, collate=collate), data)

    with refused(lo.MismatchError, "rows-differ", "6 examples"):
        loop()


# Loops


@every_method
def test_clipped_gradients(method: lo.Estimator, tmp_path: Path) -> None:
    data = examples()

    def clip(model: nn.Module, number: int) -> None:
        if number == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    run, model = recorded(tmp_path / "run", data, spoil=clip)
    where = "Step 1" if isinstance(method, lo.Replay) else "Step "
    with refused(
        lo.MismatchError,
        "step-does-not-follow",
        where,
        "does not follow",
        "clip_norm= or clip_value= where gradients were clipped",
        unchanged=tmp_path,
    ):
        method.score(run, task_of(model, data), data)


@every_method
def test_weights_changed_behind_the_optimizers_back(method: lo.Estimator, tmp_path: Path) -> None:
    data = examples()

    def clamp(model: nn.Sequential, number: int) -> None:
        if number == 1:
            model[0].weight.data.clamp_(-0.1, 0.1)

    run, model = recorded(tmp_path / "run", data, spoil=clamp)
    with refused(lo.MismatchError, "step-does-not-follow", "Step ", "does not follow from its batch"):
        method.score(run, task_of(model, data), data)


class Loop:
    """A recorder at work, for loops that go wrong."""

    def __init__(self, path: Path, model: nn.Module | None = None, **options: Any) -> None:
        self.path = path
        self.model = model or network()
        self.optimizer = sgd(self.model, **options)
        self.recorder = lo.Recorder(path / "run", self.model, self.optimizer)
        self.batches = iter(self.recorder.watch(DataLoader(examples(), batch_size=3)))

    def backward(self) -> None:
        batch = next(self.batches)
        backward(self.model, self.optimizer, batch)

    def good(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()


def test_two_steps_for_one_batch(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.good()
    with refused(lo.RunError, "batch-missing", "step 1", "recorder.watch(loader)", "recorder.step(ids)"):
        loop.optimizer.step()


def test_a_step_without_any_batch(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    backward(loop.model, loop.optimizer, examples()[:3])
    with refused(lo.RunError, "batch-missing", "step 0", "recorder.watch(loader)", unchanged=tmp_path):
        loop.optimizer.step()


def untyped(function: Callable) -> Callable:
    """The function as users have it, without the type checker of the tests, which would refuse first."""
    return inspect.unwrap(function)


def test_a_run_of_no_steps(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with refused(lo.RunError, "nothing-recorded", "optimizer.step()"):
        loop.recorder.finish()
    assert contents(tmp_path) == {str(tmp_path / "run"): None}  # the lock is let go of
    with refused(lo.RunError, "run-not-found"):
        lo.open_run(tmp_path / "run", partial=True)


def test_a_parameter_without_a_gradient(tmp_path: Path) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    loop = Loop(tmp_path, Unused())
    loop.backward()
    loop.optimizer.step()  # one is passed over, as the optimizer does
    loop.optimizer.zero_grad()
    loop.recorder.step([0])
    with refused(lo.UnsupportedError, "gradient-missing", "step 1", "backward()", unchanged=tmp_path):
        loop.optimizer.step()


def test_a_sparse_embedding(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    optimizer = sgd(model)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    recorder.step([0, 1])
    nn.functional.cross_entropy(model(torch.tensor([[0, 1], [2, 3]])), torch.tensor([0, 1])).backward()
    with refused(lo.UnsupportedError, "gradient-sparse", "step 0", "'0.weight'", "sparse=False", unchanged=tmp_path):
        optimizer.step()


def test_training_that_diverges_keeps_the_steps_before(tmp_path: Path) -> None:
    data = examples()
    loop = Loop(tmp_path)
    loop.good(3)
    weights = loop.model[0].weight.detach().clone()
    loop.backward()
    loop.model[0].weight.grad[0, 0] = float("nan")
    with refused(lo.RunError, "step-not-finite", "Step 3", "'0.weight'", "NaN"):
        loop.optimizer.step()
    with refused(lo.RunError, "run-cut-short", "step 2", "partial=True", unchanged=tmp_path):
        lo.open_run(tmp_path / "run")
    run = lo.open_run(tmp_path / "run", partial=True)
    assert [run.record(i).ids.tolist() for i in range(len(run))] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert torch.equal(run.final()[PARAM]["0.weight"], weights)
    assert lo.ACC(transport="exact").score(run, task_of(network(), data), data).values.abs().max() > 0


def test_a_run_that_diverged_cannot_be_finished(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.good(3)
    loop.backward()
    loop.model[0].weight.grad[0, 0] = float("inf")
    with refused(lo.RunError, "step-not-finite", "Step 3", "'0.weight'", "NaN"):
        loop.optimizer.step()
    with refused(lo.RunError, "run-cut-short", "partial=True", unchanged=tmp_path):
        loop.recorder.finish()


def test_training_that_diverges_on_its_own(tmp_path: Path) -> None:
    data, model = TensorDataset(1e15 * torch.randn(SIZE, 4), torch.randn(SIZE, 1)), nn.Linear(4, 1)
    task = lo.Task(model, nn.MSELoss(), data)
    with refused(lo.RunError, "step-not-finite", "NaN"):
        lo.train(task, sgd(model, lr=1.0), 5, 6, seed=0, out=tmp_path / "run")
    assert len(lo.open_run(tmp_path / "run", partial=True)) >= 1


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], ["ids-not-a-batch", "[0]"]),
        ([0, -3], ["id-negative", "Example number -3"]),
        (torch.zeros(2, 2, dtype=torch.int64), ["ids-not-a-batch", "[2, 2]"]),
        (torch.tensor(3), ["ids-not-a-batch", "[]"]),
        (torch.tensor([True, False, True]), ["ids-not-a-batch", "bool"]),
        (torch.tensor([0.5, 1.5]), ["ids-not-a-batch", "float32"]),
        (torch.tensor([1 + 0j]), ["ids-not-a-batch", "complex64"]),
        (["a", "b"], ["ids-not-a-batch"]),
        ([[0], [1, 2]], ["ids-not-a-batch"]),
        ({0, 1}, ["ids-not-a-batch"]),
        (None, ["ids-not-a-batch"]),
        ([2**63], ["ids-not-a-batch"]),
    ],
)
def test_ids_that_name_no_batch(ids: Any, words: list[str], tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with refused(lo.InputError, *words, unchanged=tmp_path):
        untyped(lo.Recorder.step)(loop.recorder, ids)


@pytest.mark.parametrize(
    "cut",
    [lambda x: x[:, 0], lambda x: x[0, :1].expand(4), lambda x: x[:1, 1], lambda x: x[:1, 1::3], lambda x: x.T[:2]],
)
def test_tensors_cut_out_of_others_have_the_fingerprints_of_their_values(cut: Callable) -> None:
    x = torch.randn(4, 4)
    assert fingerprint(cut(x)) == fingerprint(torch.tensor(cut(x).tolist()))
    assert tensor_checksum(cut(x)) == tensor_checksum(torch.tensor(cut(x).tolist()))


def test_fingerprints_taken_later_and_together_are_those_of_each_batch() -> None:
    """Whatever becomes of the tensors meanwhile, and whether they are small, large, empty, strange or words."""
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool]
    given = [{"x": (torch.randn(n, w) * 9).to(kind), "w": "word"} for kind in kinds for n, w in ((3, 5), (8, 2000))]
    given += [torch.randn(4, 3).T, torch.randn(8, 4000)[:, ::2], torch.tensor(2.0), torch.zeros(3, 0), torch.ones(7)]
    given += [(torch.randn(3, 5), torch.arange(3)), (torch.randn(3, 5), torch.arange(3)), []]
    alone = [fingerprint(batch) for batch in given]
    later = [noted(batch) for batch in given]
    for batch in given:
        for leaf in leaves(batch):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
    assert fingerprints(later) == alone
    assert len({str(one) for one in alone}) == len(alone)


@pytest.mark.parametrize("epoch", [0.33, None, "first", -1, 2**63, [0]], ids=str)
def test_epochs_that_count_nothing(epoch: Any, tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with refused(lo.InputError, "epoch-not-a-count", f"epoch={epoch!r}", "whole number from 0 on", unchanged=tmp_path):
        untyped(lo.Recorder.step)(loop.recorder, [0], epoch=epoch)


@pytest.mark.parametrize("sampler", [[[0, -1]], [["a"]], [[0.5]], [[]]], ids=str)
@pytest.mark.parametrize("single", [False, True])
def test_samplers_that_draw_no_example_numbers(sampler: list, single: bool, tmp_path: Path) -> None:
    loader = DataLoader(examples(), batch_sampler=sampler)
    if single:
        loader = DataLoader(examples(), batch_size=None, sampler=sampler[0] or [[]])
    recorder = Loop(tmp_path).recorder
    with refused(lo.InputError, "id-negative" if -1 in sampler[0] else "ids-not-a-batch", unchanged=tmp_path):
        list(recorder.watch(loader))


def test_a_loop_of_no_epochs(tmp_path: Path) -> None:
    model = network()
    task = task_of(model, examples())
    for seed in (2**64, -(2**63) - 1):
        with refused(lo.InputError, "seed-not-a-number", f"seed={seed!r}", "whole number from", unchanged=tmp_path):
            lo.train(task, sgd(model), 1, 6, seed=seed, out=tmp_path / "run")
    for epochs, size in ((0, 6), (2, 0), (-1, 6), (True, 6)):
        with refused(
            lo.InputError,
            "epochs-not-a-count",
            f"epochs={epochs} and batch_size={size}",
            "at least 1",
            unchanged=tmp_path,
        ):
            lo.train(task, sgd(model), epochs, size, seed=0, out=tmp_path / "run")


TYPES = """
import sys, torch, leaveout as lo
from leaveout.builtin import models
x = torch.randn(12, 2)
data = torch.utils.data.TensorDataset(x, x[:, :1])
model = torch.nn.Linear(2, 1)
task = lo.Task(model, torch.nn.MSELoss(), data)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
run = lo.train(task, sgd, 1, 6, 0, sys.argv[1] + "/run")
scores = lo.TracIn().score(run, task, data)
asked = {
    "l2='0.1'": lambda: lo.Task(model, torch.nn.MSELoss(), data, l2="0.1"),
    "l2=1000": lambda: lo.Task(model, torch.nn.MSELoss(), data, l2=10**400),
    "l2=None": lambda: lo.Task(model, torch.nn.MSELoss(), data, l2=None),
    "epochs=1.5": lambda: lo.train(task, sgd, 1.5, 6, 0, sys.argv[1] + "/other"),
    "batch_size=2.5": lambda: lo.train(task, sgd, 1, 2.5, 0, sys.argv[1] + "/other"),
    "seed='0'": lambda: lo.train(task, sgd, 1, 6, "0", sys.argv[1] + "/other"),
    "n_train=10.5": lambda: lo.data.load("digits", 10.5),
    "n_val=5": lambda: lo.data.load("digits", 10, "5"),
    "seed=0.5": lambda: lo.data.load("digits", 10, 5, seed=0.5),
    "seed=None": lambda: lo.verify(scores, run, task, data, replays=8, seed=None),
    "at least 8": lambda: lo.verify(scores, run, task, data, replays=8.5),
    "hidden": lambda: models.build("mlp", features=3, hidden=(1.5,)),
}
for words, ask in asked.items():
    try:
        ask()
    except lo.InputError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
"""


@pytest.mark.usefixtures("untyped")
def test_numbers_of_another_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["types", str(tmp_path)])
    exec(TYPES, {})  # noqa: S102 - the text above
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_second_data_set_in_the_same_run(tmp_path: Path) -> None:
    """The numbers of two data sets would be mixed up; a data set built again for each epoch is fine."""
    model = network()
    optimizer = sgd(model)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for _ in range(2):
        for batch in recorder.watch(DataLoader(examples(), batch_size=6)):
            backward(model, optimizer, batch)
            optimizer.step()
    with refused(lo.UnsupportedError, "loaders-differ", "12 examples", "ConcatDataset", unchanged=tmp_path):
        next(iter(recorder.watch(DataLoader(examples(1, 12), batch_size=6))))


def test_a_group_added_while_training(tmp_path: Path) -> None:
    model = network()
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    batches = iter(recorder.watch(DataLoader(examples(), batch_size=6)))
    backward(model, optimizer, next(batches))
    optimizer.step()
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": model[2].parameters()})
    backward(model, optimizer, next(batches))
    with refused(lo.UnsupportedError, "unfrozen-late", "step 1", "'2.weight'", unchanged=tmp_path):
        optimizer.step()
    assert len(recorder.finish()) == 1, "the step before is lost"


def test_a_frozen_parameter_that_moves_by_a_gradient_from_before(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    batches = iter(recorder.watch(DataLoader(examples(), batch_size=6)))
    for freezing in (False, True):
        x, y = next(batches)
        if freezing:
            model[2].requires_grad_(False)  # after the gradients of the step before, which are still there
        else:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if freezing:
            with refused(lo.UnsupportedError, "gradient-left-over", "step 1", "'2.weight'", "zero_grad()"):
                optimizer.step()
        else:
            optimizer.step()


def test_a_parameter_added_while_training(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    batches = iter(recorder.watch(DataLoader(examples(), batch_size=6)))
    backward(model, optimizer, next(batches))
    optimizer.step()
    model[0].extra = nn.Parameter(torch.zeros(3))
    backward(model, optimizer, next(batches))
    with refused(lo.UnsupportedError, "unfrozen-late", "step 1", "'0.extra'", unchanged=tmp_path):
        optimizer.step()


# Optimizers


class Own(torch.optim.SGD):
    def step(self, closure: Callable | None = None) -> None:
        super().step(closure)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda m: torch.optim.Rprop(m.parameters()),
            ["optimizer-not-supported", "Rprop", "Adafactor"],
        ),
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            ["optimizer-not-supported", "LBFGS", "Adafactor"],
        ),
        (
            lambda m: Own(m.parameters(), lr=0.1),
            ["optimizer-not-supported", "Own", "overrides the step of SGD"],
        ),
        (
            lambda m: sgd(m, differentiable=True),
            ["optimizer-setting-not-supported", "differentiable=True", "differentiable=False"],
        ),
        (
            lambda m: sgd(network()),
            ["optimizer-setting-not-supported", "4 tensors"],
        ),
        (
            lambda m: torch.optim.Adam(m[0].parameters(), differentiable=True),
            ["optimizer-setting-not-supported", "differentiable=True", "'2.bias'"],
        ),
    ],
)
def test_optimizers_that_cannot_be_replayed(build: Callable, words: list[str], tmp_path: Path) -> None:
    model = network()
    optimizer = build(model)
    with refused(lo.UnsupportedError, *words, unchanged=tmp_path):
        lo.Recorder(tmp_path / "run", model, optimizer)
    optimizer.zero_grad()
    assert not optimizer._optimizer_step_pre_hooks, "the refused recorder left its hooks behind"


def test_flags_turned_on_while_training(tmp_path: Path) -> None:
    for flag, value, words in (
        ("maximize", True, ["optimizer-changed", "group 0", "maximize"]),
        ("lr", torch.tensor(0.1), ["optimizer-changed", "group 0", "lr"]),
        ("momentum", 0.9, ["optimizer-changed", "group 0", "momentum"]),
    ):
        loop = Loop(tmp_path / flag)
        loop.good()
        loop.optimizer.param_groups[0][flag] = value
        loop.backward()
        with refused(lo.UnsupportedError, *words, unchanged=tmp_path):
            loop.optimizer.step()


def test_amsgrad_turned_on_while_training(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    backward(model, optimizer, next(iter(DataLoader(examples(), batch_size=6))))
    recorder.step(range(6))
    with refused(lo.UnsupportedError, "optimizer-changed", "group 0", "amsgrad", unchanged=tmp_path):
        optimizer.step()


# Another model


def test_another_model_than_the_recorded_one(tmp_path: Path) -> None:
    data = examples()
    run, _ = recorded(tmp_path / "run", data)
    wider = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with refused(lo.MismatchError, "shapes-differ", "'0.weight'", "[6, 4]", "[5, 4]", unchanged=tmp_path):
        lo.ACC(transport="exact").score(run, task_of(wider, data), data)
    deeper = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3))
    with refused(lo.MismatchError, "parameters-differ", "'4.bias'"):
        lo.ACC(transport="exact").score(run, task_of(deeper, data), data)
    frozen = network()
    frozen[0].bias.requires_grad_(False)
    with refused(lo.MismatchError, "parameters-differ", "'0.bias'"):
        lo.ACC(transport="exact").score(run, task_of(frozen, data), data)
    doubles = examples(dtype=torch.float64)
    with refused(lo.MismatchError, "dtypes-differ", "'0.weight'", "float64", "float32"):
        lo.ACC(transport="exact").score(run, task_of(network().double(), doubles), doubles)


@every_method
def test_another_activation(method: lo.Estimator, tmp_path: Path) -> None:
    data = examples()
    run, _ = recorded(tmp_path / "run", data)
    other = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with refused(
        lo.MismatchError,
        "step-does-not-follow",
        "does not follow from its batch and this task",
        "model that were trained",
    ):
        method.score(run, task_of(other, data), data)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x)) * self.scale


@pytest.mark.parametrize("name", ["base.weight", "scale"])
def test_frozen_values_that_changed(name: str, tmp_path: Path) -> None:
    data = examples()
    run, model = recorded(tmp_path / "run", data, model=Scaled())
    assert lo.ACC(transport="exact").score(run, task_of(model, data), data).values.abs().max() > 0
    with torch.no_grad():
        model.state_dict()[name].mul_(1.001)
    with refused(
        lo.MismatchError, "frozen-values-differ", "Frozen", repr(name), "same frozen values", unchanged=tmp_path
    ):
        lo.ACC(transport="exact").score(run, task_of(model, data), data)


# Questions


@pytest.fixture
def scored(tmp_path: Path) -> tuple[lo.Run, lo.Task]:
    model = network()
    task = task_of(model, examples())
    return lo.train(task, sgd(model), 2, 6, seed=0, out=tmp_path / "run"), task


def queries() -> dict[str, tuple[Dataset, list[str]]]:
    x, y = examples(3, 5).tensors
    return {
        "empty": (TensorDataset(x[:0], y[:0]), ["query-empty", "query"]),
        "more features": (
            TensorDataset(torch.randn(5, 6), y),
            ["query-does-not-fit", "float32[4], int64[]", "float32[6]", "the same way"],
        ),
        "doubles": (TensorDataset(x.double(), y), ["query-does-not-fit", "a query example float64[4]", "the same way"]),
        "another label type": (
            TensorDataset(x, y.float()),
            ["query-does-not-fit", "a query example float32[4], float32[]"],
        ),
        "another dimension": (TensorDataset(x[:, None], y), ["query-does-not-fit", "a query example float32[1, 4]"]),
        "one-hot labels": (TensorDataset(x, torch.eye(3)[y]), ["query-does-not-fit", "float32[3]", "the same way"]),
        "no labels": (TensorDataset(x), ["query-does-not-fit", "do not fit the model", "a query example float32[4];"]),
        "an impossible label": (
            TensorDataset(x, y + 3),
            ["query-does-not-fit", "do not fit the model", "out of bounds"],
        ),
        "a stream": (Stream(), ["examples-without-numbers", "Stream"]),
    }


@pytest.mark.parametrize("name", queries())
def test_query_sets_that_do_not_fit(name: str, scored: tuple[lo.Run, lo.Task]) -> None:
    run, task = scored
    query, words = queries()[name]
    for method in METHODS:
        with refused(lo.InputError, *words, unchanged=run.path):
            method.score(run, task, query)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((0, SIZE), ["id-out-of-range", f"Example {SIZE}", f"0 to {SIZE - 1}"]),
        ((-1,), ["id-out-of-range", "Example -1"]),
        ((2, 5, 2), ["ids-repeated", "Example 2"]),
        ((), ["ids-empty", "ids"]),
        ((1.7,), ["id-not-a-number", "1.7"]),
        ((True, False), ["id-not-a-number", "ids", "True"]),
        (("a",), ["id-not-a-number", "'a'"]),
        ("12", ["id-not-a-number", "'1'"]),
        (5, ["list-expected", "ids", "5"]),
        (torch.tensor(5), ["list-expected", "ids", "5"]),
        (torch.tensor([[1, 2]]), ["id-not-a-number", "[1, 2]"]),
    ],
)
def test_ids_of_examples_that_are_not_there(
    ids: tuple[int, ...], words: list[str], scored: tuple[lo.Run, lo.Task]
) -> None:
    with refused(lo.InputError, *words):
        lo.Replay(ids).score(*scored, examples(3))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, ["groups-empty"]),
        ([], ["groups-empty"]),
        ({"ann": [0], "bob": []}, ["ids-empty", "'bob'"]),
        ([[0], []], ["ids-empty", "'1'"]),
        ({"ann": [0, SIZE]}, ["id-out-of-range", f"Example {SIZE}", "'ann'", f"0 to {SIZE - 1}"]),
        ({"ann": [-2]}, ["id-out-of-range", "Example -2", "'ann'"]),
        ({"ann": [True, False, True]}, ["id-not-a-number", "'ann'", "True"]),
        ({"ann": 5}, ["list-expected", "'ann'", "5"]),
        ({"ann": ["x"]}, ["id-not-a-number", "'ann'", "'x'"]),
        ({"ann": "12"}, ["id-not-a-number", "'ann'", "'1'"]),
        ({"ann": [float("nan")]}, ["id-not-a-number", "'ann'", "nan"]),
        ({"ann": [float("inf")]}, ["id-not-a-number", "'ann'", "inf"]),
        ({"ann": [1j]}, ["id-not-a-number", "'ann'", "1j"]),
        (5, ["list-expected", "groups", "5"]),
        ({1: [0], "1": [1]}, ["group-names-repeated", "'1'"]),
    ],
)
def test_groups_of_examples_that_are_not_there(groups: Any, words: list[str], scored: tuple[lo.Run, lo.Task]) -> None:
    for method in (lo.ACC(transport="exact"), lo.Replay()):
        with refused(lo.InputError, *words):
            method.score(*scored, examples(3), groups=groups)


def test_ids_and_groups_at_once(scored: tuple[lo.Run, lo.Task]) -> None:
    with refused(lo.InputError, "ids-given-twice", "ids=", "groups="):
        lo.Replay((0,)).score(*scored, examples(3), groups=[[1]])


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda run, task, q: lo.ACC(transport="teleport"), ["transport-unknown", "transport='teleport'", "'exact'"]),
        (
            lambda run, task, q: lo.ACC(transport="exact", readout="loud").score(run, task, q),
            ["readout-unknown", "readout='loud'", "'linear'", "'outputs'"],
        ),
        (
            lambda run, task, q: lo.SGDIE(readout="loud").score(run, task, q),
            ["readout-unknown", "readout='loud'", "'exact'"],
        ),
        (
            lambda run, task, q: lo.TracIn(readout="loud").score(run, task, q),
            ["readout-unknown", "readout='loud'", "'linear'"],
        ),
        (
            lambda run, task, q: lo.ACC(transport="exact", direction="up").score(run, task, q),
            ["direction-unknown", "direction='up'", "'forward'"],
        ),
        (
            lambda run, task, q: lo.SGDIE(direction="up").score(run, task, q),
            ["direction-unknown", "direction='up'", "'backward'"],
        ),
        (
            lambda run, task, q: lo.ACC(transport="exact").score(run, task, q, queries="some"),
            ["queries-unknown", "queries='some'", "'mean'", "'each'"],
        ),
        (
            lambda run, task, q: lo.SGDIE("exact", "backward").score(run, task, q),
            ["direction-fixed", "'auto'"],
        ),
        (
            lambda run, task, q: lo.SGDIE(direction="backward").score(run, task, q, displacements=True),
            ["direction-fixed", "'auto'"],
        ),
        (lambda run, task, q: lo.Resources(memory="lots"), ["bytes-unreadable", "memory='lots'", "'2GB'"]),
        (lambda run, task, q: lo.Resources(memory="0 GB"), ["bytes-unreadable", "memory='0 GB'"]),
        (lambda run, task, q: lo.Resources(memory=-5), ["bytes-unreadable", "memory=-5"]),
    ],
)
def test_words_that_mean_nothing(ask: Callable, words: list[str], scored: tuple[lo.Run, lo.Task]) -> None:
    with refused(lo.InputError, *words):
        ask(*scored, examples(3))


def test_verification_of_what_cannot_be_verified(scored: tuple[lo.Run, lo.Task]) -> None:
    query = examples(3, 5)
    grouped = lo.SGDIE().score(*scored, query, groups=[[0, 1], [2]])
    with refused(lo.InputError, "too-few-to-compare"):
        lo.verify(grouped, *scored, query)
    scores = lo.SGDIE().score(*scored, query, queries="each")
    with refused(lo.InputError, "too-few-to-compare"):
        lo.verify(scores, *scored, query, replays=3)
    with refused(lo.InputError, "seed-not-a-number", f"seed={2**64}"):
        lo.verify(scores, *scored, query, replays=8, seed=2**64)
    with refused(lo.InputError, "seed-not-a-number", f"seed={2**44}"):
        lo.cleanse(scores, *scored, query, [1], seed=2**44)
    with refused(lo.InputError, "seed-not-a-number", f"seed={2**64}"):
        lo.InfluenceFunction("lissa", seed=2**64)
    with refused(lo.InputError, "seed-not-a-number", "seed=-1"):
        lo.metrics.bootstrap(lo.metrics.rmse, [0.0, 1.0], [0.0, 1.0], seed=-1)
    with refused(lo.InputError, "queries-differ"):
        lo.verify(scores, *scored, Subset(query, range(4)), replays=8)


def test_a_learning_rate_at_which_the_recurrence_overflows(tmp_path: Path) -> None:
    x = 30 * torch.randn(SIZE, 1, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, 0 * x)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    task = lo.Task(model, nn.MSELoss(), TensorDataset(x, x * 0 + 1e-3))
    run = lo.train(task, sgd(model, lr=1e-3), 1, 6, seed=0, out=tmp_path / "fine")
    assert torch.isfinite(lo.ACC(transport="exact").score(run, task, data).values).all()
    with refused(lo.RunError, "step-not-finite", "NaN"):
        lo.train(task, sgd(model, lr=1e3), 40, 6, seed=0, out=tmp_path / "wild")


def test_an_optimizer_is_recorded_once_at_a_time(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lo.Recorder(tmp_path / "first", model, optimizer):
        with refused(lo.RunError, "already-recording", "finish()"):
            lo.Recorder(tmp_path / "second", model, optimizer)
        assert not (tmp_path / "second").exists()
    lo.Recorder(tmp_path / "third", model, optimizer)


def test_an_optimizer_of_another_model_is_one_sentence(tmp_path):
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with refused(lo.UnsupportedError, "optimizer-setting-not-supported", "4 tensors") as caught:
        lo.Recorder(tmp_path / "run", nn.Linear(2, 1), torch.optim.SGD(other.parameters(), lr=0.1))
    assert len(str(caught.value)) < 300


def test_scores_of_other_queries_are_not_compared(tmp_path):
    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    x = torch.randn(12, 2)
    data = TensorDataset(x, x[:, 0])
    task = lo.Task(model, nn.MSELoss(), data)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 2, 4, 0, tmp_path / "run", keep=2)
    scores = lo.SGDIE().score(run, task, data)
    other = TensorDataset(x + 1, x[:, 0])
    for call in (lambda: lo.verify(scores, run, task, other, replays=8), lambda: lo.refine(scores, run, task, other)):
        with refused(lo.InputError, "queries-differ"):
            call()
    loaded = lo.Scores.load(scores.save(tmp_path / "scores"))
    assert loaded.query_fingerprint == scores.query_fingerprint is not None
    assert lo.verify(loaded, run, task, data, replays=8).random.count == 4


def test_disk_budgets_are_named_by_their_argument(tmp_path):
    model = nn.Linear(2, 1)
    with refused(lo.InputError, "bytes-unreadable", "disk='lots'"):
        lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), disk="lots")
