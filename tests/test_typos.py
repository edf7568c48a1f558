"""Every argument of the commands, mistyped: exit code 2, the option by its name, and what was probably meant."""

import re
import shutil
from pathlib import Path

import pytest

from commands import SMALL, Shell

TYPOS = {
    "trian": ["No such command 'trian' (did you mean train?)"],
    "train --dta digits": ["No such option: --dta", "--data"],
    "train --data digts": ["--data", "did you mean digits?"],
    "train --model mpl": ["--model", "did you mean mlp?"],
    "train --optimizer sdg": ["--optimizer", "did you mean sgd?"],
    "train --activation tahn": ["--activation", "did you mean tanh?"],
    "train --flip 10%": ["'--flip'", "valid number"],
    "train --keep al --out runs/new": ["--keep 'al'"],
    "train --batch-size 0 --out runs/new": ["--batch-size 0"],
    "train --hidden 0": ["--hidden [0]"],
    "train --lr 0.3 --weight-decay -1": ["--weight-decay: ", "-1.0"],
    "train --n-val 0": ["--n-val 0"],
    "score runs/y": ["did you mean runs/x?"],
    "score runs/x --method agd-ie": ["--method: ", "did you mean sgd-ie?"],
    "score runs/x --method acc(transprt=exact)": ["--method: ", "did you mean transport?"],
    "score runs/x --method acc(transport=exat)": ["--method: ", "'free'", "'exact'"],
    "score runs/x --queries eahc": ["--queries", "neither mean nor each"],
    "score runs/x --budget -1": ["'--budget'"],
    "score runs/x --method tracin --memory 2XB": ["--memory '2XB'"],
    "score runs/x --method tracin --processes 0": ["'--processes'"],
    "score runs/x --groups nofile": ["--groups: "],
    "score runs/x --method tracin --task foo": ["--task", "package.module:function"],
    "verify runs/x --replays 3": ["'--replays'"],
    "verify runs/x --method sqd-ie": ["--method: ", "did you mean sgd-ie?"],
    "verify runs/x --replays 8 --moves -1": ["--moves -1"],
    "refine runs/x --top 0": ["--top 0"],
    "labels runs/x --folds x": ["--folds 'x'"],
    "labels runs/x --states 0": ["--states 0"],
    "labels runs/x --top -1": ["'--top'"],
    "cleanse runs/x --remove 0": ["--remove [0]"],
    "cleanse runs/x --random -1": ["--random -1"],
    "cleanse runs/x --metod acc": ["No such option: --metod", "--method"],
    "report runs/x --method foo": ["--method: ", "there are sgd-ie"],
    "report runs/x --show nomod:x": ["--show", "no module 'nomod'"],
    "export runs/x --out x.xml": ["--out", ".csv"],
    "plan": ["--task"],
    "plan runs/x --memory 1": ["--memory '1'"],
    "show runs/y": ["did you mean runs/x?"],
    "data fetch digts": ["did you mean digits?"],
    "data lst": ["Did you mean 'list'?"],
}


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    """One small run with scores, to be copied."""
    folder = tmp_path_factory.mktemp("typos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (["train", *SMALL, "--out", "runs/x"], ["score", "runs/x", "--method", "sgd-ie"]):
            assert Shell.quietly(words) == 0
    return folder / "runs"


@pytest.fixture
def shell(scored, tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(scored, tmp_path / "runs")
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("line", TYPOS)
def test_a_typo_is_named_and_answered(shell, line):
    before = sorted(file for file in Path("runs/x").rglob("*"))
    done = shell(*line.split())
    assert done.code == 2, (done.out, done.err)
    for words in TYPOS[line]:
        assert words in done.refusal
    inner = re.findall(r"(?<![\w('])[a-z]\w+=", done.refusal)
    assert not inner or "(trans" in line, "arguments of functions are no words of the command line"
    assert before == sorted(file for file in Path("runs/x").rglob("*")), "nothing was written"
