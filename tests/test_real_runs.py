"""Runs as people have them: dropout, BatchNorm, clipping, accumulation, denominators, compared with plain training."""

from __future__ import annotations

import copy
import warnings
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import leaveout as lo
from plain_training import Case
from problems import mostly_full
from refusal import refused

INF = float("inf")
LEFT_OUT = [0, 3, 11]


def net(*middle, width: int = 6, outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, width), *middle, nn.Linear(width, outputs)).double()


class LayerDrop(nn.Module):
    """Leaves its middle layer out at random, so that its parameters have no gradient then; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.middle, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if not self.training or float(torch.rand(())) < 0.5:
            x = x + torch.tanh(self.middle(x))
        return self.last(x)


def freeze(start: int, stop: int = 1000):
    """Freeze the first layer between two steps."""

    def turn(model, step: int) -> None:
        for param in next(iter(model.children())).parameters():
            param.requires_grad_(not start <= step < stop)

    return turn


def evaluating(start: int):
    """Put everything but linear layers into evaluation mode from a step on."""

    def turn(model, step: int) -> None:
        for module in model.children():
            module.train(isinstance(module, nn.Linear) or step < start)

    return turn


def warmed_up(start: int):
    """Train the last layer alone until a step, with the first one frozen and BatchNorm at rest; then everything."""

    def turn(model, step: int) -> None:
        freeze(0, start)(model, step)
        list(model.children())[1].train(step >= start)

    return turn


def decayed(params):
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.05)


def adamw(params):
    return torch.optim.AdamW(params, 0.02, eps=1e-3)


def data(classes: int = 3):
    order = torch.Generator().manual_seed(0)
    x = torch.randn(20, 5, dtype=torch.float64, generator=order)
    return [x, torch.randint(classes, (20,), generator=order)]


class Tokens(nn.Module):
    """A language model in the small: a class for each of four places, some of which are masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 12)).double()

    def forward(self, x):
        return self.inner(x).unflatten(1, (4, 3))


def token_data():
    x, _ = data()
    order = torch.Generator().manual_seed(3)
    y = torch.randint(3, (20, 4), generator=order)
    y[torch.rand(20, 4, generator=order) < 0.4] = -100
    y[:, 0] = 1
    return [x, y]


def token_sums(out, y):
    return F.cross_entropy(out.transpose(1, 2), y, reduction="none").sum(1)


def token_counts(y):
    return (y != -100).sum(1).double()


WEIGHT = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)


def class_sums(out, y):
    return F.cross_entropy(out, y, weight=WEIGHT, reduction="none", label_smoothing=0.1)


def sums_and_counts(out, y):
    return token_sums(out, y), token_counts(y)


BN = nn.BatchNorm1d
CASES = {
    "dropout": (lambda: Case(net(nn.Tanh(), nn.Dropout(0.3)), data()), nn.CrossEntropyLoss(), {}),
    "dropout, AdamW": (
        lambda: Case(net(nn.Tanh(), nn.Dropout(0.3)), data(), optimizer=adamw),
        nn.CrossEntropyLoss(),
        {},
    ),
    "BatchNorm": (lambda: Case(net(BN(6), nn.Tanh()), data()), nn.CrossEntropyLoss(), {}),
    "BatchNorm, stay": (
        lambda: Case(net(BN(6), nn.Tanh()), data(), leave="stay"),
        nn.CrossEntropyLoss(),
        {"statistics": "stay"},
    ),
    "BatchNorm, cumulative, without affine": (
        lambda: Case(net(BN(6, momentum=None, affine=False), nn.Tanh()), data()),
        nn.CrossEntropyLoss(),
        {},
    ),
    "clipped by norm": (
        lambda: Case(net(nn.Tanh()), data(), clip_norm=(0.3,)),
        nn.CrossEntropyLoss(),
        {"clip_norm": 0.3},
    ),
    "clipped by the largest entry": (
        lambda: Case(net(nn.Tanh()), data(), clip_norm=(0.1, INF)),
        nn.CrossEntropyLoss(),
        {"clip_norm": (0.1, INF)},
    ),
    "clipped by value, AdamW": (
        lambda: Case(net(nn.Tanh()), data(), clip_value=0.05, optimizer=adamw),
        nn.CrossEntropyLoss(),
        {"clip_value": 0.05},
    ),
    "accumulated": (lambda: Case(net(nn.Tanh()), data(), window=3), nn.CrossEntropyLoss(), {}),
    "accumulated, added": (
        lambda: Case(net(nn.Tanh()), data(), window=3, divide="sum"),
        nn.CrossEntropyLoss(),
        {"accumulation": "sum"},
    ),
    "accumulated, a short last window divided as the others": (
        lambda: Case(net(nn.Tanh()), data(), window=3, divide="fixed"),
        nn.CrossEntropyLoss(),
        {"accumulation": 3},
    ),
    "masked tokens": (
        lambda: Case(Tokens(), token_data(), total=token_sums, counts=token_counts),
        nn.CrossEntropyLoss(),
        {},
    ),
    "masked tokens of a window, own loss": (
        lambda: Case(Tokens(), token_data(), total=token_sums, counts=token_counts, window=2, divide="window"),
        sums_and_counts,
        {"accumulation": "window"},
    ),
    "class weights, smoothed labels": (
        lambda: Case(net(nn.Tanh()), data(), total=class_sums, counts=lambda y: WEIGHT[y]),
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        {},
    ),
    "summed loss": (
        lambda: Case(
            net(nn.Tanh()), data(), divide="one", optimizer=lambda params: torch.optim.SGD(params, 0.02, momentum=0.9)
        ),
        nn.CrossEntropyLoss(reduction="sum"),
        {},
    ),
    "frozen midway": (
        lambda: Case(net(nn.Tanh()), data(), turn=freeze(4, 7), optimizer=decayed, clip_norm=(0.3,)),
        nn.CrossEntropyLoss(),
        {"clip_norm": 0.3},
    ),
    "frozen midway, gradients zeroed, not removed": (
        lambda: Case(net(nn.Tanh()), data(), turn=freeze(4), optimizer=decayed, to_none=False),
        nn.CrossEntropyLoss(),
        {},
    ),
    "frozen midway, AdamW": (
        lambda: Case(net(nn.Tanh()), data(), turn=freeze(3, 6), optimizer=adamw),
        nn.CrossEntropyLoss(),
        {},
    ),
    "layers left out at random, NAdam": (
        lambda: Case(LayerDrop(), data(), optimizer=lambda params: torch.optim.NAdam(params, 0.02, eps=1e-3)),
        nn.CrossEntropyLoss(),
        {},
    ),
    "layers left out at random": (
        lambda: Case(LayerDrop(), data(), optimizer=decayed),
        nn.CrossEntropyLoss(),
        {},
    ),
    "BatchNorm frozen midway, dropout off": (
        lambda: Case(net(BN(6), nn.Tanh(), nn.Dropout(0.3)), data(), turn=evaluating(4)),
        nn.CrossEntropyLoss(),
        {},
    ),
    "BatchNorm, frozen midway to the end": (
        lambda: Case(net(BN(6), nn.Tanh()), data(), turn=freeze(4), optimizer=decayed),
        nn.CrossEntropyLoss(),
        {},
    ),
    "BatchNorm that rests until midway": (
        lambda: Case(net(BN(6), nn.Tanh()), data(), turn=warmed_up(4)),
        nn.CrossEntropyLoss(),
        {},
    ),
    "BatchNorm that rests until midway, cumulative, AdamW": (
        lambda: Case(net(BN(6, momentum=None), nn.Tanh()), data(), turn=warmed_up(3), optimizer=adamw),
        nn.CrossEntropyLoss(),
        {},
    ),
    "everything": (
        lambda: Case(
            net(BN(6), nn.Tanh(), nn.Dropout(0.3)), data(), window=3, clip_norm=(0.3,), clip_value=0.2, optimizer=adamw
        ),
        nn.CrossEntropyLoss(),
        {"clip_norm": 0.3, "clip_value": 0.2},
    ),
}


@lru_cache
def recorded(name: str):
    """A case's run, its task, the plain case with the model as it was before training, and whether it was disturbed."""
    import tempfile

    build, loss, options = CASES[name]
    case = build()
    before = copy.deepcopy(case.model)
    run, train_set = case.record(f"{tempfile.mkdtemp()}/run", keep=2 if "AdamW" in name else "all")
    trained, case.model = case.model, before
    return run, lo.Task(trained, loss, train_set, **options), case


def query(case: Case):
    order = torch.Generator().manual_seed(9)
    x = torch.randn(6, 5, dtype=torch.float64, generator=order)
    shape = (6, *case.data[1].shape[1:])
    return torch.utils.data.TensorDataset(x, torch.randint(3, shape, generator=order))


def query_loss(case: Case, task, model) -> float:
    model.eval()
    x, y = query(case).tensors
    with torch.no_grad():
        out = model(x)
        out = out.transpose(1, 2) if out.ndim == 3 else out
        if isinstance(task.loss, nn.Module) and task.loss.weight is not None:  # a query has no class weight of its own
            return float((class_sums(out, y) / WEIGHT[y]).mean())
        return float(F.cross_entropy(out, y))


@pytest.mark.parametrize("name", CASES)
def test_recording_changes_no_bit(name: str) -> None:
    _, task, case = recorded(name)
    plain = case.train().state_dict()
    own = [value for _, value in sorted(task.model.state_dict().items())]
    assert all(torch.equal(a, b) for a, b in zip(own, (plain[n] for n in sorted(plain)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_replay_is_training_without_the_example(name: str) -> None:
    run, task, case = recorded(name)
    scores = lo.Replay().score(run, task, query(case), ids=LEFT_OUT)
    base = query_loss(case, task, case.train())
    truth = torch.tensor([query_loss(case, task, case.train(k)) - base for k in LEFT_OUT], dtype=torch.float64)
    assert torch.allclose(scores.values.flatten(), truth, rtol=0, atol=1e-9 * float(truth.abs().max()) + 1e-13)


@pytest.mark.parametrize("name", CASES)
def test_sgdie_is_the_derivative_of_training(name: str) -> None:
    run, task, case = recorded(name)
    scores = lo.SGDIE().score(run, task, query(case)).values.flatten()
    h = 1e-5
    for k in LEFT_OUT:
        up, down = (query_loss(case, task, case.train(k, 1 + s)) for s in (h, -h))
        assert float(scores[k]) == pytest.approx(-(up - down) / (2 * h), rel=1e-6, abs=1e-6 * float(scores.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_forward_is_backward(name: str) -> None:
    run, task, case = recorded(name)
    forward = lo.SGDIE(direction="forward").score(run, task, query(case), ids=LEFT_OUT).values
    backward = lo.SGDIE().score(run, task, query(case), ids=LEFT_OUT).values
    assert torch.allclose(forward, backward, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_exact_acc_is_the_counterfactual_step_linearised(name: str) -> None:
    """Over one step there is nothing to linearise, and ACC's displacement is the real one."""
    run, task, case = recorded(name)
    one = run.head(1)
    ids = one.record(0).ids.tolist()[:2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = lo.ACC("exact", readout="exact").score(one, task, query(case), ids=ids).values.flatten()
    base = query_loss(case, task, case.train(steps=1))
    truth = [query_loss(case, task, case.train(k, steps=1)) - base for k in ids]
    assert scores.tolist() == pytest.approx(truth, rel=1e-9)


CHANGING = [name for name in CASES if "midway" in name or "at random" in name]


@pytest.mark.parametrize("name", CHANGING)
def test_a_run_cut_short_and_resumed_ends_at_the_same_bits(name: str, tmp_path) -> None:
    run, _, case = recorded(name)
    keep = {"keep": 2 if "AdamW" in name else "all"}
    for stop in (5, 8):
        with pytest.raises(KeyboardInterrupt):
            _fresh(case).record(tmp_path / "run", stop=stop, resume=stop == 8, **keep)
    again, _ = _fresh(case).record(tmp_path / "run", resume=True, **keep)
    for one, other in zip(run.final().values(), again.final().values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert [run.record(i).hypers for i in range(len(run))] == [again.record(i).hypers for i in range(len(run))]
    assert lo.check_run(tmp_path / "run") == []


def _fresh(case: Case) -> Case:
    """The case with a model of its own, as it was before training."""
    other = copy.copy(case)
    other.model = copy.deepcopy(case.model)
    return other


@pytest.mark.parametrize("name", ["frozen midway, AdamW", "layers left out at random", "BatchNorm frozen midway"])
def test_every_estimator_takes_a_run_whose_parameters_rest(name: str) -> None:
    run, task, case = recorded(next(full for full in CASES if full.startswith(name)))
    adam = "AdamW" in name
    for method in (lo.TracIn(), lo.TracIn(checkpoints="epochs"), lo.ACC(), *([lo.AdamIE()] if adam else [])):
        assert bool(torch.isfinite(method.score(run, task, query(case)).values).all())


@pytest.mark.parametrize("name", mostly_full(["BatchNorm", "everything", "frozen midway, AdamW"], "everything"))
def test_everything_else_works_on_such_runs(name: str, tmp_path) -> None:
    run, task, case = recorded(name)
    asked = query(case)
    study = lo.Study(run, task, asked, resources=lo.Resources(progress=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = study.score(lo.ACC())
        assert scores.method == "ACC(jump)"
        each = lo.ACC().score(run, task, asked, queries="each").mean()
        assert torch.allclose(each, scores.values.flatten(), rtol=1e-9, atol=1e-12)
        groups = lo.ACC().score(run, task, asked, groups=[[0, 3], [11]])
        assert groups.values.shape == (2, 1)
        study.verify(scores, replays=10)
        assert study.refine(scores, top=3).exact.sum() >= 3
        study.labels()
        study.cleanse(test_set=asked, remove=[2], random=1)
        assert torch.allclose(
            study.timeline().values.sum(1), lo.SGDIE().score(run, task, asked).values.flatten(), rtol=1e-9, atol=1e-12
        )
        study.report(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "method", [lo.ACC("free"), lo.ACC(lo.Subspace(2)), lo.DVEmb(), lo.InfluenceFunction()], ids=lambda m: m.name
)
def test_methods_that_need_single_examples_say_so(method: lo.Estimator) -> None:
    run, task, case = recorded("BatchNorm")
    with refused(lo.UnsupportedError, "examples-coupled", "BatchNorm", "SGDIE()", "ACC()"):
        method.score(run, task, query(case))


@pytest.mark.parametrize("learning_rate", [True, False])
def test_tracin_at_the_ends_of_epochs_leaves_running_statistics_alone(learning_rate: bool) -> None:
    """TracInCP takes examples one at a time, in evaluation mode: inner products of plain autograd's gradients."""
    run, task, case = recorded("BatchNorm")
    scores = lo.TracIn("epochs", learning_rate=learning_rate).score(run, task, query(case))
    ends = [i for i in range(1, len(run) + 1) if i == len(run) or run.record(i).epoch != run.record(i - 1).epoch]
    model = copy.deepcopy(case.model).eval()

    def gradient(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), list(model.parameters())))

    expected, first = torch.zeros(task.size, dtype=torch.float64), 0
    for end in ends:
        model.load_state_dict(run.state(end)["param"], strict=False)
        steps = [run.record(i) for i in range(first, end)]
        rate = sum(step.hypers[0]["lr"] / len(step.ids) for step in steps) / len(steps) if learning_rate else 1.0
        asked = gradient(*query(case).tensors)
        for k in range(task.size):
            own = gradient(*(part[k : k + 1] for part in case.data))
            expected[k] += rate * sum((a * b).sum() for a, b in zip(asked, own, strict=True)).item()
        first = end
    assert torch.allclose(scores.mean().double(), expected, rtol=1e-9, atol=1e-12)


COUNTED = ["accumulated", "accumulated, added", "masked tokens", "masked tokens of a window, own loss"]
RESTING = ["frozen midway, gradients zeroed, not removed"]


@pytest.mark.parametrize("name", COUNTED + RESTING)
def test_free_acc_is_the_same_in_both_orders_of_its_sum(name: str) -> None:
    run, task, case = recorded(name)
    forward, backward = (
        lo.ACC("free", direction=direction).score(run, task, query(case)).values
        for direction in ("forward", "backward")
    )
    assert torch.allclose(forward, backward, rtol=1e-9, atol=1e-12)
    assert torch.equal(backward, lo.ACC().score(run, task, query(case)).values)


@pytest.mark.parametrize("name", COUNTED)
def test_gauss_newton_of_a_linear_model_is_its_hessian(name: str, tmp_path) -> None:
    """DVEmb is SGD-IE where the outputs are linear in the parameters, also with counts and micro-batches."""
    build, loss, options = CASES[name]
    case = build()
    torch.manual_seed(3)
    tokens = case.data[1].ndim == 2
    case.model = nn.Sequential(nn.Linear(5, 12 if tokens else 3), nn.Unflatten(1, (4, 3)) if tokens else nn.Identity())
    case.model.double()
    run, train_set = case.record(tmp_path / "run")
    task = lo.Task(case.model, loss, train_set, **options)
    embedded, exact = (method.score(run, task, query(case)).values for method in (lo.DVEmb(), lo.SGDIE()))
    assert torch.allclose(embedded, exact, rtol=1e-7, atol=1e-10)


def test_exact_acc_of_an_example_that_some_clipped_batches_lack() -> None:
    run, task, case = recorded("clipped by norm")
    everyone = lo.ACC("exact").score(run, task, query(case)).values
    one = lo.ACC("exact", direction="forward").score(run, task, query(case), ids=[3]).values
    assert torch.allclose(one, everyone[3:4], rtol=1e-9, atol=1e-12)
