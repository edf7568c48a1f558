"""A step that does not follow is refused, in whatever slot it shows, with its true distance and the likely cause."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.evaluate.dynamics import dynamics
from leaveout.trajectory.diagnosis import consumed_gradient
from leaveout.trajectory.step_check import StepCheck
from leaveout.trajectory.trajectory import Trajectory
from refusal import refused

SIZE = 24
METHODS = (lo.SGDIE(), lo.ACC("exact"), lo.TracIn(), lo.Replay((0, 1)))
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.01),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
}


def trained(
    path: Path,
    optimizer: str,
    *,
    change: Callable[[int, nn.Module], None] = lambda step, model: None,
    scale: Callable[[int], float] = lambda step: 1.0,
    unseen: int = 0,
    keep: str | int = "all",
    dtype: torch.dtype = torch.float64,
    steps: int = 20,
) -> tuple[lo.Run, lo.Task, list[dict[str, Tensor]]]:
    """A run whose loop does what the record does not say; and the gradients that it used."""
    order = torch.Generator().manual_seed(0)
    x, y = torch.randn(SIZE, 4, generator=order).to(dtype), torch.randn(SIZE, 1, generator=order).to(dtype)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)
    made = OPTIMIZERS[optimizer](model)
    gradients = []
    with lo.Recorder(path, model, made, keep=keep) as recorder:
        for step in range(steps):
            ids = torch.randperm(SIZE, generator=order)[: 6 + unseen]
            made.zero_grad()
            (scale(step) * nn.functional.mse_loss(model(x[ids]), y[ids])).backward()
            change(step, model)
            gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
            recorder.step(ids[:6], [x[ids[:6]], y[ids[:6]]])
            made.step()
        return recorder.finish(), lo.Task(model, nn.MSELoss(), TensorDataset(x, y)), gradients


def clipped(step: int, model: nn.Module, norm: float = 0.05) -> None:
    if step == 0:
        nn.utils.clip_grad_norm_(model.parameters(), norm)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_gradient_that_was_used_is_read_off_the_state(optimizer: str, tmp_path: Path) -> None:
    run, task, gradients = trained(tmp_path / "run", optimizer)
    for index in (0, 1, 7, 19):
        step = Trajectory(run, task).recorded_step(index)
        used = consumed_gradient(run.rule, step.before, step.after, step.record.hypers)
        for name, expected in gradients[index].items():
            assert (used[name] - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("keep", ["all", 5])
def test_a_clipped_first_step_of_adam_is_refused(method: lo.Estimator, keep: str | int, tmp_path: Path) -> None:
    """The parameters hardly show it: Adam's first step is the gradient's sign, whatever its length."""
    run, task, _ = trained(tmp_path / "run", "adam", change=clipped, keep=keep)
    words = r"Step 0 does not follow.*exp_avg.*cosine 1\.0000.*was it clipped\? Its norm is 0\.05: give clip_norm=0\.05"
    with pytest.raises(lo.MismatchError, match=words if keep == "all" else r"Step 4 does not follow.*exp_avg"):
        method.score(run, task, task.train_set)


def test_clipping_that_the_loop_did_not_do_is_named(tmp_path: Path) -> None:
    run, task, _ = trained(tmp_path / "run", "adam")
    clipping = lo.Task(task.model, task.loss, task.train_set, clip_norm=0.05)
    with pytest.raises(lo.MismatchError, match=r"the loop did not clip it\. Give the Task no clip_norm"):
        lo.SGDIE().score(run, clipping, task.train_set)


def test_a_check_does_not_call_it_rounding(tmp_path: Path) -> None:
    run, task, _ = trained(tmp_path / "run", "adamw", change=clipped, dtype=torch.float32)
    honest, same, _ = trained(tmp_path / "honest", "adamw", dtype=torch.float32)
    scores = replace(lo.TracIn().score(honest, same, same.train_set), run_fingerprint=None)
    with refused(lo.MismatchError, "step-does-not-follow", "Step 0"):
        lo.verify(scores, run, task, task.train_set)


CAUSES: dict[str, tuple[dict, str]] = {
    "divided": (
        {"scale": lambda _: 0.25},
        r"its length is 0\.25 times: were 4 micro-batches averaged.*Give accumulation=4\.",
    ),
    "averaged": (
        {"scale": lambda _: 1 / 6},
        r"was the loss averaged over the 6 examples of the batch.*reduction='mean'.*accumulation=6",
    ),
    "summed": ({"scale": lambda _: 6.0}, r"was the loss summed over the 6 examples of the batch, reduction='sum'"),
    "multiplied": (
        {"scale": lambda _: 3.0},
        r"were 3 micro-batches summed, accumulation='sum'.*sums, counts",
    ),
    "scaled": ({"scale": lambda _: 2.4}, r"2\.4 times: was the loss multiplied"),
    "other examples": ({"unseen": 6}, r"only partly the direction.*if other examples were part of it"),
    "maximised": ({"scale": lambda _: -1.0}, r"points the other way"),
}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("cause", CAUSES)
def test_the_likely_cause_is_named(cause: str, optimizer: str, tmp_path: Path) -> None:
    options, words = CAUSES[cause]
    run, task, _ = trained(tmp_path / "run", optimizer, **options)
    with pytest.raises(lo.MismatchError, match=words):
        lo.SGDIE().score(run, task, task.train_set)


def test_the_advice_of_a_divided_loss_is_right(tmp_path: Path) -> None:
    run, task, _ = trained(tmp_path / "run", "adam", scale=lambda _: 0.25)
    told = lo.Task(task.model, task.loss, task.train_set, l2=task.objective.l2, accumulation=4)
    assert lo.SGDIE().score(run, told, task.train_set).values.abs().max() > 0


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_parameters_changed_beside_the_optimizer_are_told_from_another_gradient(optimizer: str, tmp_path: Path) -> None:
    def clamped(step: int, model: nn.Module) -> None:
        model[0].weight.data.clamp_(-0.2, 0.2)

    with pytest.warns(lo.LeaveoutWarning, match="parameters were changed between the pass and the step"):
        run, task, _ = trained(tmp_path / "run", optimizer, change=clamped)
    with refused(lo.MismatchError, "step-does-not-follow", "No gradient leads there"):
        lo.SGDIE().score(run, task, task.train_set)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_the_distance_is_the_whole_one_and_not_along_the_query(optimizer: str, tmp_path: Path) -> None:
    run, task, _ = trained(tmp_path / "run", optimizer, unseen=6, dtype=torch.float32)
    step = Trajectory(run, task).recorded_step(len(run) - 1)
    x, y = step.batch.batch
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    model.load_state_dict(step.before["param"])
    made = OPTIMIZERS[optimizer](model)
    for name, param in model.named_parameters():
        if optimizer == "momentum":
            made.state[param]["momentum_buffer"] = step.before["momentum_buffer"][name].clone()
    nn.functional.mse_loss(model(x), y).backward()
    made.step()
    after, before = (torch.cat([t.flatten() for t in s["param"].values()]) for s in (step.after, step.before))
    expected = float((nn.utils.parameters_to_vector(model.parameters()) - after).norm() / (after - before).norm())
    with refused(lo.MismatchError, "step-does-not-follow", "Step 19") as refusal:
        lo.SGDIE().score(run, task, task.train_set)
    told = float(re.search(r"the parameters ([\d.e-]+) step lengths away", str(refusal.value)).group(1))
    assert told == pytest.approx(expected, rel=0.06)
    assert expected > 0.02


def test_a_step_that_only_the_query_does_not_see_is_found(tmp_path: Path) -> None:
    """The last step moved the parameters across the query's gradient: no projection on it shows that."""
    run, task, _ = trained(tmp_path / "run", "sgd")
    trajectory = Trajectory(run, task)
    step = trajectory.recorded_step(len(run) - 1)
    vector = {"param": {name: torch.zeros_like(t)[None] for name, t in step.after["param"].items()}}
    vector["param"]["0.weight"][0, 0, 0] = 1.0
    step.after["param"]["2.bias"].add_(1.0)
    carried = {"param": {name: t * (1 - 0.1 * 0.01) for name, t in vector["param"].items()}}
    batch = step.batch.batch
    grad = torch.func.grad(
        lambda p: nn.functional.mse_loss(torch.func.functional_call(task.model, p, batch[0]), batch[1])
    )
    slope = -0.1 * float(grad(step.params)["0.weight"][0, 0])
    check = StepCheck(run.rule)
    check.along(step, vector, carried, slope)  # what it cannot see, the whole check sees
    with refused(lo.MismatchError, "step-does-not-follow", "Step 19"):
        check.step(step, run.rule.step(step.before, grad(step.params), step.record.hypers))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_honest_runs_follow_in_every_slot(optimizer: str, tmp_path: Path) -> None:
    run, task, _ = trained(tmp_path / "run", optimizer, dtype=torch.float32, steps=60, keep=23)
    for method in (lo.SGDIE(), lo.Replay((0, 1))):
        assert torch.isfinite(method.score(run, task, task.train_set).values).all()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_gradients_that_are_rounding_noise_follow(optimizer: str, tmp_path: Path) -> None:
    """At the optimum of the whole batch the gradient is noise: no two ways to compute it agree."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 3), torch.randn(64, 1)
    model, data = nn.Linear(3, 1), TensorDataset(x, y)
    made = OPTIMIZERS[optimizer](model)
    for group in made.param_groups:
        group["weight_decay"] = 0.0
    for _ in range(800):
        made.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        made.step()
    for keep in ("all", 3):
        with lo.Recorder(tmp_path / str(keep), model, made, keep=keep) as recorder:
            for _ in range(6):
                made.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                recorder.step(range(64), [x, y])
                made.step()
            run = recorder.finish()
        task = lo.Task(model, nn.MSELoss(), data)
        for method in (lo.SGDIE(), lo.Replay((0, 1))):
            assert torch.isfinite(method.score(run, task, data).values).all()


def with_classes(path: Path, optimizer: str, keep: str | int) -> tuple[lo.Run, lo.Task, nn.Module, TensorDataset]:
    order = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(SIZE, 4, generator=order), torch.randint(3, (SIZE,), generator=order))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    run = lo.train(task, OPTIMIZERS[optimizer](model), 6, 6, 0, path / "run", keep=keep)
    return run, task, model, data


@pytest.mark.parametrize("keep", ["all", 5])
@pytest.mark.parametrize(
    "ask",
    [
        lambda run, task, data: lo.AdamIE().score(run, task, data),
        lambda run, task, data: lo.InfluenceFunction(damping=1.0).score(run, task, data),
        lambda run, task, data: lo.TracIn(checkpoints="epochs").score(run, task, data),
        lambda run, task, data: lo.TracIn(learning_rate=False).score(run, task, data),
        lambda run, task, data: lo.labels(run, task, folds=None),
        lambda run, task, data: dynamics(run, task),
    ],
    ids=["AdamIE", "InfluenceFunction", "TracIn at epochs", "TracIn without rate", "labels", "dynamics"],
)
def test_methods_that_pass_no_steps_check_some(tmp_path, ask, keep):
    """A wrong loss and a wrong activation are refused by every method, even where it takes only the last state."""
    run, task, model, data = with_classes(tmp_path, "adam", keep)
    ask(run, task, data)
    smoothed = lo.Task(model, nn.CrossEntropyLoss(label_smoothing=0.2), data)
    with refused(lo.MismatchError, "step-does-not-follow"):
        ask(run, smoothed, data)
    other = nn.Sequential(model[0], nn.ReLU(), model[2])
    with refused(lo.MismatchError, "step-does-not-follow"):
        ask(run, lo.Task(other, nn.CrossEntropyLoss(), data), data)
