"""The house stays walkable: packages are floors, imports go down, and within a floor they form no circle."""

import ast
from dataclasses import FrozenInstanceError
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout

ROOT = Path(leaveout.__file__).parent

FLOORS = [
    "errors",
    "_util",
    "compute",
    "optim",
    "task",
    "run",
    "trajectory",
    "integrations",
    "sweep",
    "scores",
    "estimators",
    "evaluate",
    "builtin",
    "reporting",
    "study",
    "tracking",
    "demo",
    "cli",
    "__init__",
    "__main__",
]
"""From the ground up, as docs/architecture.md draws them."""

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
"""Every module by its name within the package."""


def floor_of(module: str) -> str:
    floor = module.split(".")[0]
    return "task" if floor == "diff" else floor  # one floor, for now


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, for type hints alone too."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("leaveout.") for name in names if name.startswith("leaveout.")}
    return {name if name in FILES else name.rpartition(".")[0] or "__init__" for name in inside}


IMPORTS = {module: imports_of(path) for module, path in FILES.items()}


def test_every_file_has_a_floor():
    assert {floor_of(module) for module in FILES} <= set(FLOORS)


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_go_down(module):
    floor = FLOORS.index(floor_of(module))
    above = [name for name in IMPORTS[module] if FLOORS.index(floor_of(name)) > floor]
    assert not above, f"{module} imports {above} from above"


def test_imports_form_no_circle():
    TopologicalSorter(IMPORTS).prepare()


@pytest.mark.parametrize("module", sorted(FILES))
def test_files_stay_small(module):
    assert len(FILES[module].read_text().splitlines()) <= 400


FROZEN = {"objective", "mode", "execution", "abilities", "chunks"}
"""What an objective and the values in it are called wherever they are used."""


@pytest.mark.parametrize("module", sorted(FILES))
def test_nothing_is_assigned_to_an_objective(module):
    """Objective, Mode and Execution are frozen: nobody goes around that, or replaces what another object holds."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute | ast.Name):
                owner = target.value.attr if isinstance(target.value, ast.Attribute) else target.value.id
                assert owner not in FROZEN, f"{module} assigns to {ast.unparse(target)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            assert ast.unparse(node.args[0]) == "self", f"{module} sets an attribute of a frozen value"


def test_an_objective_is_frozen():
    task = leaveout.Task(nn.Linear(2, 2), nn.CrossEntropyLoss(), TensorDataset(torch.ones(4, 2), torch.zeros(4).long()))
    for value, name in ((task.objective, "l2"), (task.objective.mode, "kinks"), (task.objective.execution, "chunks")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)
