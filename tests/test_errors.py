"""Errors: each has a code, every code is in the table of docs/errors.md, and codes travel between processes."""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

import leaveout as lo

ROOT = Path(__file__).parent.parent
KINDS = (lo.InputError, lo.UnsupportedError, lo.RunError, lo.MismatchError, lo.EngineError)
NAMES = {kind.__name__ for kind in (*KINDS, lo.LeaveoutError)}


def made() -> list[tuple[str, str | None]]:
    """(place, code) of every error that the source makes; None where the code is neither written out nor passed on."""
    sites = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
                given = [word.value for word in node.keywords if word.arg == "code"]
                if given and ast.unparse(given[0]) == "error.code":
                    continue
                code = given[0].value if given and isinstance(given[0], ast.Constant) else None
                sites.append((f"{file.relative_to(ROOT)}:{node.lineno}", code))
    return sites


def named() -> set[str]:
    """Every string that stands alone somewhere in the other tests."""
    files = [file for file in Path(__file__).parent.glob("*.py") if file != Path(__file__)]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def listed() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_error_has_a_code():
    sites = made()
    assert len(sites) > 200, "the search finds nothing any more"
    assert [place for place, code in sites if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", code or "")] == []


def test_the_table_lists_every_code_once_and_no_other():
    assert listed() == sorted({code for _, code in made() if code})


def test_every_code_is_asked_for_by_a_test():
    assert {code for _, code in made() if code} - named() == set()


def refusals() -> list[list[str]]:
    """The codes of each row of the refusals in the guarantees."""
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    part = page.split("## Refused, with the remedy")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [re.findall("`([^`]+)`", row[1]) for row in rows if row[0] not in ("| what", "| ---")]


def test_every_refusal_of_the_guarantees_has_a_code_that_a_test_asks_for():
    rows, asked = refusals(), named()
    assert len(rows) > 20
    assert [row for row in rows if not row] == []
    assert {code for row in rows for code in row} - asked == set()
    assert {code for row in rows for code in row} <= {code for _, code in made()}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_survive_pickling_and_copying(kind):
    error = kind("It is so: do this.", code="some-code")
    error.add_note("a note")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - made above
        assert (type(again), str(again), again.code, again.__notes__) == (kind, str(error), "some-code", ["a note"])


def test_input_errors_are_value_errors():
    with pytest.raises(ValueError, match="no-such-engine") as caught:
        lo.Resources(engine="no-such-engine")
    assert caught.value.code == "engine-unknown"
