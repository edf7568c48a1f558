"""The documents' code runs as it stands: every python block, in order, one namespace per document.

``python tests/test_docs.py docs/tutorial.md`` runs a document's blocks and prints what they print: that is where the
figures in the documents come from.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from commands import Shell
from problems import mostly_full

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
RUN = (
    "README.md",
    "docs/tutorial.md",
    "docs/guarantees.md",
    "docs/labels.md",
    "docs/report.md",
    "docs/trainers.md",
    "docs/extending.md",
)
DOCUMENTS = [
    *RUN,
    "docs/architecture.md",
    "docs/file-format.md",
    "docs/load.md",
    "docs/real-runs.md",
    "docs/scaling.md",
    "docs/contributing.md",
    "docs/results/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]


def blocks(document: Path) -> list[str]:
    """The python blocks, each padded with empty lines so that an error names the document's own line."""
    text = document.read_text()
    return [
        "\n" * (text.count("\n", 0, match.start()) + 1) + match[2]
        for match in FENCE.finditer(text)
        if match[1] == "python"
    ]


def run(document: Path, name: str) -> None:
    """Runs the blocks one after the other in the current directory; what takes long waits for ``"__main__"``."""
    namespace: dict = {"__name__": name}
    for block in blocks(document):
        exec(compile(block, str(document), "exec"), namespace)  # noqa: S102 - our own documents


@pytest.mark.parametrize("name", mostly_full(RUN, "README.md"))
def test_the_code_in_the_documents_runs(name, tmp_path, monkeypatch):
    for needed in ("trl", "peft", "lightning", "accelerate") if name == "docs/trainers.md" else ():
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTY_COMPATIBLE", "0")  # no progress bars, also under pytest -s
    assert blocks(ROOT / name), "no code was found"
    run(ROOT / name, Path(name).stem)


def test_each_trainer_takes_under_ten_further_lines():
    marked = [block.count("# <-") for block in blocks(ROOT / "docs/trainers.md")]
    assert len([count for count in marked if 3 <= count < 10]) == 5  # one script per trainer
    assert max(marked) < 10


@pytest.mark.parametrize("name", mostly_full(["README.md", "docs/command-line.md"], "README.md"))
def test_the_commands_in_the_documents_run(name, tmp_path, monkeypatch, capsys):
    shell = Shell(tmp_path, monkeypatch, capsys)
    text = (ROOT / name).read_text()
    commands = [line for match in FENCE.finditer(text) if match[1] == "console" for line in match[2].splitlines()]
    assert commands, "no command was found"
    for line in commands:
        assert line.startswith("$ leaveout "), line
        done = shell(*shlex.split(line)[2:])
        assert done.code == 0, (line, done.err)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    document = ROOT / name
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        assert (document.parent / target).exists(), target


def drawn_files(text: str, top: str) -> set[str]:
    """The files of a map in a document: names indented below their folders, whose names end with a slash."""
    tree = next(match[2] for match in FENCE.finditer(text) if match[2].startswith(top))
    folders: list[str] = []
    files = set()
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name]
        if not name.endswith("/"):
            files.add("".join(folders))
    return files


@pytest.mark.parametrize(
    ("top", "folders", "besides"),
    [
        ("src/leaveout/", ["src/leaveout"], ["src/leaveout/__init__.py"]),
        ("experiments/", ["experiments/bench", "experiments/reproduce"], ["experiments/__main__.py"]),
    ],
)
def test_every_source_file_is_on_the_map(top, folders, besides):
    drawn = drawn_files((ROOT / "docs/architecture.md").read_text(), top)
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    there = {str(path.relative_to(ROOT)) for path in files} | set(besides)
    assert there == drawn, {"not on the map": there - drawn, "only on the map": drawn - there}


if __name__ == "__main__":
    given = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(given, "__main__")
