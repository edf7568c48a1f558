"""Runs the tests that matter most with the newest and the lowest versions that pyproject.toml allows.

    python tests/versions.py [ENVIRONMENT ...] [--processes N]

Builds one environment after the other in a directory that is removed again, and writes docs/versions.md; environments
that were not asked for keep their rows. PyTorch comes with CUDA, 5 GB; `UV_TORCH_BACKEND=cpu` takes the smaller one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs/versions.md"
TOOLS = ("pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "beartype>=0.18")
SHOWN = ("torch", "numpy", "pandas", "scikit-learn", "typer", "transformers", "accelerate", "peft", "lightning", "trl")

CORE = ["batch_norm", "cli", "data", "estimators", "extras", "following", "guard", "kinks", "labels", "layers"]
CORE += ["mixed_precision", "old_files", "optimizers", "own_functions", "packing", "recorder", "report_content"]
CORE += ["resume", "scores", "store", "study", "verify"]
TRAINERS = [f"integrations_{name}" for name in ("accelerate", "datasets", "lightning", "peft", "transformers")]
TRAINERS += ["integrations_transformers_resume"]
WITH_TRAINERS = ("all", "accelerate", "lightning", "peft", "transformers")


@dataclass(frozen=True)
class Environment:
    """A Python, the versions that are taken, and what runs: test files, or the script of the core if there are none."""

    python: str
    resolution: str
    extras: tuple[str, ...] = ()
    tests: list[str] = field(default_factory=list)


ENVIRONMENTS = {
    "newest": Environment("3.13", "highest", (*WITH_TRAINERS, "trl"), CORE + TRAINERS + ["integrations_trl"]),
    "lowest": Environment("3.10", "lowest-direct", WITH_TRAINERS, CORE + TRAINERS),
    "lowest with TRL": Environment("3.10", "lowest-direct", ("all", "trl"), ["integrations_trl"]),
    "newest, no extras": Environment("3.13", "highest"),
    "lowest, no extras": Environment("3.10", "lowest-direct"),
}


@dataclass
class Row:
    """What an environment was and what came out, as the page shows it."""

    name: str
    python: str
    versions: str
    ran: str
    result: str
    minutes: float
    day: str
    failed: list[str] = field(default_factory=list)


def main() -> int:
    """Build the environments, run the tests, write the page; return 1 if anything failed or was not to be had."""
    parser = argparse.ArgumentParser()
    parser.add_argument("environments", nargs="*", choices=[[], *ENVIRONMENTS])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    rows = read()
    for name in given.environments or ENVIRONMENTS:
        with tempfile.TemporaryDirectory(prefix="leaveout-versions-") as folder:
            began = time.monotonic()
            rows[name] = tried(name, ENVIRONMENTS[name], Path(folder) / "venv", given.processes)
            rows[name].minutes = round((time.monotonic() - began) / 60, 1)
        print(f"{name}: {rows[name].result}", *rows[name].failed, sep="\n  ", flush=True)
        write(rows)
    return int(any(not re.fullmatch(r"\d+ passed(, \d+ skipped)?|fine", row.result) for row in rows.values()))


def tried(name: str, environment: Environment, venv: Path, processes: int) -> Row:
    """Build one environment and run its tests."""
    ran = f"{len(environment.tests)} test files" if environment.tests else "`tests/core_alone.py`"
    row = Row(name, environment.python, "", ran, "", 0.0, date.today().isoformat())
    python = venv / "bin/python"
    extras = [word for extra in environment.extras for word in ("--extra", extra)]
    install = ["pip", "install", "--python", str(python)]
    for command in (
        ["venv", "--python", interpreter(environment.python), str(venv)],
        [*install, "--resolution", environment.resolution, "-r", "pyproject.toml", *extras, *TOOLS],
        [*install, "--no-deps", "."],
    ):
        done = subprocess.run([sys.executable, "-m", "uv", *command], cwd=HOME, capture_output=True, text=True)
        if done.returncode:
            row.result = "could not be had: " + " ".join(done.stderr.split())[-300:].replace("|", "/")
            return row
    code = "import platform, sys; from importlib import metadata as m; print(platform.python_version());"
    code += "have = {d.name.lower(): d.version for d in m.distributions()};"
    code += "print(*(f'{n} {have[n]}' for n in sys.argv[1:] if n in have), sep=', ')"
    done = subprocess.run([python, "-c", code, *SHOWN], capture_output=True, text=True, check=True)
    row.python, row.versions = done.stdout.splitlines()
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    if not environment.tests:
        done = subprocess.run([python, "tests/core_alone.py"], cwd=HOME, env=clean, capture_output=True, text=True)
        row.result = "fine" if done.returncode == 0 else done.stderr.splitlines()[-1].replace("|", "/")
        return row
    files = [f"tests/test_{test}.py" for test in environment.tests]
    options = ["-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-m", "not full", "-q"]
    options += ["-n", str(processes), "--dist", "loadfile"] if processes > 1 else []
    done = subprocess.run(
        [python, "-m", "pytest", *options, *files], cwd=HOME, env=clean, capture_output=True, text=True
    )
    row.failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, re.MULTILINE)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", done.stdout.splitlines()[-1] if done.stdout else "")
    row.result = ", ".join(sorted(counts, key=lambda count: count.split()[1] == "skipped")) or "pytest could not start"
    return row


def interpreter(version: str) -> str:
    """Return where this Python is: on the path, with pyenv, or for uv to find or fetch."""
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}") or version


HEAD = """# Versions

`make test-versions` builds these environments one after the other and runs the tests that matter most in each:
recording, every optimizer and estimator, guards, checks, the page, the command line and the trainers. *Lowest* takes
the lowest version that `pyproject.toml` allows of every direct dependency, on the lowest Python; *newest* what `pip
install` takes on that day. `make test` runs everything, with the torch of `constraints.txt`. The command wrote this
page; minutes are of the machine that it ran on.

| environment | Python | versions | ran | result | minutes | on |
| --- | --- | --- | --- | --- | --- | --- |
"""


def write(rows: dict[str, Row]) -> None:
    """Write the page."""
    shown = [rows[name] for name in ENVIRONMENTS if name in rows]
    lines = [f"| {r.name} | {r.python} | {r.versions} | {r.ran} | {r.result} | {r.minutes} | {r.day} |" for r in shown]
    lines += ["", *(f"- {row.name}: `{test}` failed" for row in shown for test in row.failed)]
    kept = json.dumps([asdict(row) for row in shown])
    PAGE.write_text(HEAD + "\n".join(lines).rstrip() + f"\n\n<!-- {kept} -->\n", encoding="utf-8")


def read() -> dict[str, Row]:
    """Read the rows of the page, which holds them in a comment."""
    kept = re.search(r"<!-- (.*) -->", PAGE.read_text(encoding="utf-8")) if PAGE.exists() else None
    return {row["name"]: Row(**row) for row in json.loads(kept[1])} if kept else {}


if __name__ == "__main__":
    raise SystemExit(main())
