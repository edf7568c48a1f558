"""Predictions from counted operations: against the operations that are really done, and against the page."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import leaveout as lo
from leaveout.cli.app import console
from leaveout.cli.commands import app
from leaveout.estimators.question import Question
from leaveout.evaluate.scale import Described, Planned, needs, size_of
from leaveout.task.trace import tracer as tracing
from problems import mostly_full
from refusal import refused

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
BLOCK = re.compile(r"^```text\n\$ leaveout (.*)\n([^`]*)```$", re.MULTILINE)
BLOCKS = BLOCK.findall(PAGE.read_text())

METHODS = {
    "TracIn": lo.TracIn(),
    "SGD-IE": lo.SGDIE(),
    "ACC(free)": lo.ACC(),
    "ACC(sketch=256)": lo.ACC(sketch=256),
    "ACC(exact)": lo.ACC("exact"),
    "Replay": lo.Replay(),
}


def network() -> tuple[nn.Module, torch.Tensor]:
    layers = (
        nn.Linear(20, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 3),
    )
    return nn.Sequential(*layers), torch.randn(24, 20)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 16, 3))
    return nn.Sequential(*layers), torch.randn(24, 1, 8, 8)


@pytest.mark.parametrize(
    ("made", "methods"),
    # The counter has no right number for the convolutions of many models that vmap joins into one with groups.
    [pytest.param(network, METHODS, marks=pytest.mark.full), (convolutions, ["TracIn", "SGD-IE"])],
)
def test_counted_work_is_what_is_really_done(tmp_path, monkeypatch, made, methods):
    """Within a fifth: checks of steps, the queries and padding come on top."""
    monkeypatch.setattr(tracing, "MOST", 0)  # the making of traces would be counted as well
    model, x = made()
    y = torch.randint(3, (24,))
    task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, y))
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 8, 6, 0, tmp_path / "run")
    shape = Described(made()[0].to("meta"), x[:1].to("meta"), y[:1].to("meta"), nn.functional.cross_entropy)
    planned = needs(size_of(shape), Planned(24, 8, 6), rate=1e9, memory=10**9)
    for method in methods:
        fresh = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, y))  # without traces, which are counted as well
        query = TensorDataset(x[:1], y[:1])
        METHODS[method].request(
            Question(run, fresh, query)
        )  # derivatives are compared before the work, once per task and run
        with FlopCounterMode(display=False) as counter:
            METHODS[method].score(run, fresh, query)
        assert counter.get_total_flops() == pytest.approx(planned.loc[method, "work"], rel=0.2), method


def test_shards_are_shared_out(tmp_path):
    size = size_of(language())
    one, eight = (needs(size, Planned(1000, 2, 10, queries=64, workers=w), 1e9, 10**9) for w in (1, 8))
    sped = (one["seconds"] / eight["seconds"]).round(2)
    assert sped["training, recorded"] == sped["TracIn"] == 1
    assert sped["SGD-IE"] == 4  # four shards of 16 vectors
    assert 7 < sped["Replay"] <= 8


def language() -> Described:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to("meta")
    return Described(model, torch.empty(1, 8, device="meta"), torch.empty(1, 2, device="meta"), nn.functional.mse_loss)


@pytest.mark.parametrize(("command", "expected"), mostly_full(BLOCKS, BLOCKS[-1]))
def test_the_page_says_what_the_command_says(command, expected):
    assert printed(command) == expected


def printed(command: str) -> str:
    console.width = 100
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    return "".join(line.rstrip() + "\n" for line in done.stdout.splitlines())


def test_what_describes_nothing_is_refused():
    with refused(lo.InputError, "planned-run-impossible"):
        Planned(0, 1, 1)
    with refused(lo.InputError, "layers-match-nothing", "0.weight, 0.bias"):
        size_of(Described(**{**language().__dict__, "layers": ("head.*",)}))
    done = CliRunner().invoke(app, ["plan", "--model", "leaveout.builtin.large:resnet50"])
    assert done.exit_code == 2
    assert "Described" in done.output


if __name__ == "__main__":  # writes what the commands print into the page
    text = PAGE.read_text()
    PAGE.write_text(BLOCK.sub(lambda found: f"```text\n$ leaveout {found[1]}\n{printed(found[1])}```", text))
