"""What is published: the package and nothing else, neither the experiments nor their results."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def source() -> set[str]:
    files = [path for path in (ROOT / "src/leaveout").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(ROOT / "src").as_posix() for path in files}


@pytest.mark.full
def test_the_wheel_holds_the_package_alone(built):
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = set(wheel.namelist())
    assert {name for name in names if ".dist-info/" not in name} == source()
    assert "leaveout/py.typed" in names


@pytest.mark.full
def test_the_source_distribution_holds_what_builds_the_package(built):
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    besides = {"CHANGELOG.md", "LICENSE", "README.md", "PKG-INFO", "pyproject.toml", ".gitignore"}
    assert names == {f"src/{name}" for name in source()} | besides
    assert file.stat().st_size < 1_000_000
