"""The examples do what they say, on the data that they carry and on the real ones where those are."""

import importlib.util
import os
from pathlib import Path

import pytest

from problems import mostly_full

FOLDER = Path(__file__).parent.parent / "examples"
PLACES = [
    "embedded",
    pytest.param(
        "real",
        marks=[pytest.mark.full, pytest.mark.skipif("LEAVEOUT_DATA" not in os.environ, reason="no data")],
    ),
]


@pytest.fixture(params=PLACES)
def load(request, monkeypatch):
    if request.param == "embedded":
        monkeypatch.delenv("LEAVEOUT_DATA", raising=False)

    def loaded(name: str):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(__import__("sys").modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return loaded


def test_images(load, tmp_path):
    told = load("images_noisy_labels").main(tmp_path, examples=150, epochs=15)
    assert told["found"] > 0.5  # a fifth by chance
    assert told["after"] < min(told["before"], told["random"])


def test_text(load, tmp_path, capsys):
    told = load("text_classification").main(tmp_path, examples=150, epochs=10)
    assert told["found"] > 0.2  # a tenth by chance
    assert told["accuracy"] > 0.6
    assert "pushed it there" in capsys.readouterr().out


def test_tables(load, tmp_path):
    told = load("tabular_groups").main(tmp_path, epochs=6)
    assert told["worst is bad"] == 1.0
    assert told["error ACC"] < 0.02


RUNS = {  # as small as they can be: that they go through, and that replays follow the run, is what is shown
    "resnet_batchnorm": {"examples": 12, "epochs": 1, "width": 2, "replays": 8},
    "bert_dropout": {"examples": 16, "epochs": 1, "replays": 8},
    "gpt_accumulation": {"examples": 20, "epochs": 1, "replays": 8},
    "lstm_packed": {"examples": 16, "epochs": 1, "replays": 8},
    "bf16_ema": {"examples": 24, "epochs": 1, "replays": 8},
}


@pytest.mark.parametrize("name", mostly_full(RUNS, "gpt_accumulation"))
def test_runs_as_they_are(name, load, tmp_path, capsys):
    if name in ("resnet_batchnorm", "bf16_ema") and "LEAVEOUT_DATA" in os.environ:
        pytest.skip("the files of CIFAR-10 alone take ten seconds to read")
    result = load(name).main(tmp_path, **RUNS[name])
    assert result["steps"] >= 1
    assert "exact replays" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def reported(tmp_path, request):
    yield
    if "load" in request.fixturenames and (tmp_path / "run").exists():
        assert "<html" in (tmp_path / "report.html").read_text()[:1000]


def test_each_is_one_short_file():
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) == 12
    assert all(len(file.read_text().splitlines()) <= 120 for file in files)


@pytest.mark.parametrize("name", ["hugging_face_trainer", "lightning_trainer", "accelerate_loop", "trl_sft"])
def test_recording_takes_few_lines(name):
    """From a script that trains to scores: the lines marked in it, imports included."""
    marked = [line for line in (FOLDER / f"{name}.py").read_text().splitlines() if line.endswith("# <-")]
    assert 3 <= len(marked) < 10
