"""The cells of the report's CSV export, by the page's own function: no spreadsheet takes one for a formula."""

import csv
import io
import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

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
