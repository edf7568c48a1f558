"""Programs drawn at random, compared with plain loops that really leave examples out: right, or refused with a code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import leaveout as lo
from problems import mostly_full
from random_programs import LOSSES, TOKENS, Program

SEEDS = range(200)
SHORT = (1, 2, 9, 11, 12, 23, 24, 27, 30, 31, 32, 34, 38, 115, 118)
LEFT_OUT = [1, 2, 8]
STEPS = (1e-4, 1e-3, 1e-5, 1e-2)
"""Steps of the differences: smooth functions agree at one of the first, and those with kinks at some."""

REFUSED = (
    "gradient-not-a-derivative",
    "derivative-not-available",
    "derivatives-do-not-add-up",
    "task-not-supported: under BatchNorm",
)
"""What may be said of a program whose gradient has a derivative that cannot be taken; Replay is never refused."""

UNDER_NORM = ("cannot be differentiated rightly", "Task(statistics='stay')")
"""Words of the two refusals of a batch whose examples depend on each other."""

SAID: Counter[str] = Counter()
"""How often each method gave scores, and how often it was refused, by code."""


def distance(computed: list[float], wanted: list[float]) -> float:
    """The largest difference, relative to the largest number."""
    one, other = torch.tensor(computed), torch.tensor(wanted)
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


def values(method: lo.Estimator, run: lo.Run, task: lo.Task, program: Program, ids: list[int]) -> list[float] | None:
    """The scores; None if the derivative that the method needs is refused."""
    found, said = None, "computed"
    try:
        found = method.score(run, task, program.query, ids=ids).values.flatten().tolist()
    except lo.LeaveoutError as error:
        coupled = error.code == "task-not-supported" and any(words in str(error) for words in UNDER_NORM)
        said = f"{error.code}: under BatchNorm" if coupled else error.code
    SAID[f"{type(method).__name__}: {said}"] += 1
    assert said in ("computed", *REFUSED), f"{type(method).__name__}: {said}"
    return found


@pytest.mark.filterwarnings("ignore:From step")  # a run whose linearisation grows is said to
@pytest.mark.parametrize("seed", mostly_full(SEEDS, *SHORT))
def test_a_random_program_is_right_or_refused(seed: int, tmp_path) -> None:
    compare(Program(seed), tmp_path)


WORDS = {"front": "tokens", "is_tokens": True, "loss": TOKENS["tokens"]}
TOGETHER = {
    "BatchNorm, whose statistics an example leaves, beside detach": {"body": ["BatchNorm1d", "detach"]},
    "BatchNorm beside an own function": {"body": ["BatchNorm1d", "own function"]},
    "one embedding for inputs and outputs, with padding": {**WORDS, "layers": ["LSTM"], "body": ["dense"], "choice": 1},
    "EmbeddingBag beside dropout, accumulated": {"front": "bag", "body": ["Dropout"], "window": 2},
}


@pytest.mark.parametrize("given", TOGETHER.values(), ids=TOGETHER)
def test_what_meets_in_a_program_is_right(given, tmp_path) -> None:
    plain = {"front": "numbers", "layers": [], "loss": LOSSES["CE"], "l2": 0.0, "turn": None, "average": None}
    assert compare(Program(9, **plain | given), tmp_path), "refused"


def compare(program: Program, tmp_path: Path) -> bool:
    """Compare every method with plain loops; return whether SGD-IE could be computed."""
    plain, before = program.train()[0].state_dict(), program.effect(0, 1.0)
    model, run = program.train(path=tmp_path / "run")
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items()), "recording changed it"
    task = program.task(program.model() if program.average else model)
    end = run.average() if program.average else run

    replayed = lo.Replay().score(end, task, program.query, ids=LEFT_OUT).values.flatten().tolist()
    truth = [program.effect(k, 0.0) - before for k in LEFT_OUT]
    assert distance(replayed, truth) < 1e-7, f"Replay {replayed}, removal {truth}: {program}"

    scores = values(lo.SGDIE(), end, task, program, LEFT_OUT)
    if scores is not None:
        apart = [distance(scores, slopes(program.effect, step)) for step in STEPS[:2]]
        apart += [distance(scores, slopes(program.effect, step)) for step in STEPS[2:] if min(apart) >= 1e-5]
        assert min(apart) < 1e-5, f"SGD-IE {scores} is {apart} from finite differences: {program}"

    first = list(dict.fromkeys(run.record(0).ids.tolist()))[:2]
    corrected = values(lo.ACC("exact", readout="exact"), run.head(1), task, program, first)
    if corrected is not None:  # over one step, there is nothing to linearise
        replayed = lo.Replay().score(run.head(1), task, program.query, ids=first).values.flatten().tolist()
        assert distance(corrected, replayed) < 1e-8, f"ACC {corrected}, Replay {replayed}: {program}"

    ways = [values(lo.TracIn(direction=way), end, task, program, LEFT_OUT) for way in ("backward", "forward")]
    if None not in ways:
        assert distance(*ways) < 1e-8, f"TracIn backward {ways[0]}, forward {ways[1]}: {program}"
    return scores is not None


@pytest.mark.full
def test_few_programs_are_refused(capsys) -> None:
    """What was said of the programs above, by method and code; most gradients with a form of their own are drawn."""
    with capsys.disabled():
        sys.stdout.write("\n" + "".join(f"  {said}: {count}\n" for said, count in sorted(SAID.items())))
    asked = sum(count for said, count in SAID.items() if said.startswith("SGDIE: "))
    if asked < 100:
        pytest.skip("not enough programs were run in this process")
    for method in ("SGDIE", "ACC", "TracIn"):
        said = {key: count for key, count in SAID.items() if key.startswith(f"{method}: ")}
        refused = 1 - said[f"{method}: computed"] / sum(said.values())
        assert refused < 0.2, f"{method} refuses {refused:.0%}: {said}"
    under_norm = SAID["SGDIE: task-not-supported: under BatchNorm"]
    assert under_norm < 0.03 * asked, f"{under_norm} of {asked}"


def slopes(effect: Callable[[int, float], float], step: float) -> list[float]:
    """The derivative of the effect in the weight, by differences."""
    return [(effect(k, 1 - step) - effect(k, 1 + step)) / (2 * step) for k in LEFT_OUT]
