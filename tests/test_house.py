"""The house stays walkable: a file imports only from floors below it."""

import ast
from pathlib import Path

import leaveout

ROOT = Path(leaveout.__file__).parent

FLOORS = [
    "errors",
    "pictures",
    "disk",
    "memory",
    "hashing",
    "vectors",
    "batches",
    "members",
    "engine",
    "resources",
    "data",
    "models",
    "optim",
    "validate",
    "folding",
    "simplify",
    "layout",
    "tracing",
    "task",
    "products",
    "remote",
    "beside",
    "manifest",
    "store",
    "marks",
    "shards",
    "writer",
    "loaders",
    "matching",
    "resume",
    "recorder",
    "moment",
    "trajectory",
    "growth",
    "train",
    "config",
    "occasions",
    "curvature",
    "step",
    "transport",
    "coasting",
    "subspace",
    "carriers",
    "corrected",
    "readout",
    "scores",
    "timeline",
    "solvers",
    "estimators",
    "metrics",
    "rounding",
    "verify",
    "refine",
    "cleanse",
    "plan",
    "scale",
    "bench",
    "experiments",
    "report",
    "demo",
    "cli",
    "__init__",
]


def floor_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(tree: ast.Module) -> set[str]:
    """The floors that a file imports from, except for type hints alone."""
    hints = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if node in hints:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("leaveout.")}


def test_every_file_has_a_floor():
    assert {floor_of(path) for path in ROOT.rglob("*.py")} == set(FLOORS)


def test_imports_go_down():
    for path in ROOT.rglob("*.py"):
        floor = floor_of(path)
        for name in imported(ast.parse(path.read_text())) - {floor}:
            assert FLOORS.index(name) < FLOORS.index(floor), f"{path.relative_to(ROOT)} imports {name} from above"


def test_files_stay_small():
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
