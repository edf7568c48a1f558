"""CSV files, from the page and from Python: no spreadsheet takes a cell for a formula."""

import csv
import io
import json
import re
import shutil
import subprocess
from importlib.resources import files

import pandas as pd
import pytest
import torch

import leaveout as lo
from leaveout._util.files import csv_text
from leaveout.evaluate.label_issues import COLUMNS, Question, table_of
from leaveout.evaluate.labels import Labels

FORMULAS = [
    "=1+1",
    "+1",
    "-1",
    "@a",
    "\t=1",
    "\r=1",
    "\n=1",
    " =1",
    "\u00a0=1",
    "\uff1d1+1",
    "\uff0b1",
    "\uff0d1",
    "\uff20a",
]
PLAIN = ["cat", "a, b", 'say "hi"', "two\nlines", " space", "1-2", "", "\u00e9"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_no_cell_is_a_formula():
    script = (files("leaveout.reporting") / "assets" / "dom.js").read_text(encoding="utf-8")
    function = re.search(r"^function csvCell.*?^}", script, re.DOTALL | re.MULTILINE)[0]
    asked = f"{function}\nconsole.log(JSON.stringify({json.dumps(FORMULAS + PLAIN)}.map(csvCell)) + csvCell(-0.5))"
    done = subprocess.run(["node", "-e", asked], capture_output=True, text=True, check=True)
    cells, number = json.loads(done.stdout[: done.stdout.rindex("]") + 1]), done.stdout.strip()[-4:]
    assert number == "-0.5"  # scores are numbers, and stay so
    read = [next(csv.reader(io.StringIO(cell, newline="")), [""])[0] for cell in cells]
    assert read == [f"'{cell}" for cell in FORMULAS] + PLAIN
    for cell, text in zip(cells, FORMULAS + PLAIN, strict=True):
        assert cell.startswith('"') == bool(re.search(r'[",\n\r]|^\s|\s$', ("'" if text in FORMULAS else "") + text))


@pytest.mark.parametrize("text", FORMULAS)
def test_python_writes_none_either(text):
    cells = list(csv.reader(io.StringIO(csv_text(pd.DataFrame({"why": [text], "score": [-0.5]})), newline="")))
    assert cells == [["", "why", "score"], ["0", f"'{text}", "-0.5"]]


def test_other_texts_and_numbers_are_written_as_they_are():
    table = pd.DataFrame({"text": PLAIN, "count": pd.array([*range(len(PLAIN) - 1), None], dtype="Int64")})
    assert csv_text(table) == table.to_csv(lineterminator="\r\n")


def test_exports_of_names_that_would_be_formulas(tmp_path):
    evil = "=cmd|' /C calc'!A0"
    columns = {name: [0.5, 0.5] for name in COLUMNS} | {
        "is_label_issue": [True, False],
        "given_label": [evil, "b"],
        "predicted_label": ["b", evil],
        "learned_epoch": [1, None],
        "conflicts_with": [None, 0],
    }
    Labels(table_of(columns), Question(), 0.0, 0.1).to_csv(tmp_path / "labels.csv")
    lo.Scores(torch.tensor([[-0.5]]), (evil,), ("mean",), "ACC").to_csv(tmp_path / "scores.csv")
    for file in (tmp_path / "labels.csv", tmp_path / "scores.csv"):
        cells = [cell for row in csv.reader(file.open(newline="")) for cell in row]
        assert evil not in cells
        assert f"'{evil}" in cells
        assert pd.read_csv(file).shape[0] in (1, 2)
