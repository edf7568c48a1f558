"""What imports cost, and that lazily imported names are those that type checkers see."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import leaveout
from leaveout.cli.commands import COMMANDS, load

HEAVY = ("torch", "pandas", "numpy", "sklearn", "scipy")


def test_every_name_for_type_checkers_is_there_at_run_time_and_the_other_way_round():
    tree = ast.parse(Path(leaveout.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: f"leaveout.{home}" for name, home in leaveout._HOME_OF.items()}
    assert set(leaveout.__all__) == {*seen, "__version__"} == set(dir(leaveout))
    for name in leaveout.__all__:
        assert getattr(leaveout, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        leaveout.nothing  # noqa: B018 - the access is what is tested


@pytest.mark.parametrize(
    "code",
    [
        "import leaveout; leaveout.__version__",
        "import sys; sys.argv[1:] = ['--version']; from leaveout.cli import entry; entry()",
        "import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('leaveout', run_name='__main__')",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code):
    check = f"import atexit, sys; atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules])); {code}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_answer_from_disk_loads_no_more_than_it_reads_with():
    check = "import sys, leaveout.cli.score; print([m for m in ('sklearn', 'scipy.stats') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_screen_has_each_command_s_own_first_line(name):
    own = (load(name).help or "").strip().split("\n\n")[0]
    assert " ".join(own.split()) == COMMANDS[name].summary
