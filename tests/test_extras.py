"""What an install without extras can do, and that every package is declared where it is needed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import leaveout
from leaveout._util.extras import _EXTRA_OF, _EXTRAS

HOME = Path(__file__).parents[1]
OTHER_NAMES = {"sklearn": "scikit-learn", "zlib_ng": "zlib-ng", "mlflow": "mlflow-skinny"}
OF_TRAINERS = {"transformers", "peft", "datasets", "IPython"}
"""Packages that are there where they are imported: their own objects were given, or their program runs."""


def imported() -> set[str]:
    """The packages that the library imports anywhere."""
    found: set[str] = set()
    for file in Path(leaveout.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - {"leaveout"} - set(sys.stdlib_module_names)


def test_every_package_is_in_the_core_or_names_its_extra():
    text = (HOME / "pyproject.toml").read_text()
    core = {OTHER_NAMES.get(name, name) for name in imported() - set(_EXTRA_OF) - OF_TRAINERS}
    (declared,) = re.findall(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert core == set(re.findall(r'"([a-z0-9-]+)>', declared))
    for extra, packages in _EXTRAS.items():
        (line,) = re.findall(rf"^{extra} = \[.*$", text, re.MULTILINE)
        assert {OTHER_NAMES.get(name, name) for name in packages} <= set(re.findall(r'"([a-z0-9-]+)>', line))


def test_without_extras_runs_are_recorded_scored_and_replayed():
    done = subprocess.run([sys.executable, HOME / "tests/core_alone.py", "--hide"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("package", "extra"), [("typer", "cli"), ("jinja2", "report"), ("sklearn", "data")])
def test_commands_say_what_to_install(package, extra):
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['demo']; "
        "from leaveout.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f'pip install "leaveout[{extra}]"' in " ".join(done.stderr.split())
