"""The watch over memory sees what grows, and the long and the wide run go through."""

import json
import math
import subprocess
import sys

import pytest

from experiments.bench import table
from experiments.bench.load import Resident, long_run, wide_run, write

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")


def test_growth_is_the_slope_of_the_second_half():
    resident = Resident()
    resident.samples = [(float(t), 1000 * min(t, 50) + 7 * max(0, t - 50)) for t in range(101)]
    assert resident.growth(steps=10) == pytest.approx(7 * 100 / 10)
    assert resident.peak == 50_350
    resident.samples = resident.samples[:1]
    assert math.isnan(resident.growth(steps=10))


ALONE = """
import json, time
from experiments.bench.load import watched

def leaking():
    held = []
    for _ in range(40):
        held.append(bytearray(b"x" * 1_000_000))
        time.sleep(0.03)

def still():
    began = time.monotonic()
    held = bytearray(40_000_000)
    held[::4096] = b"x" * len(range(0, len(held), 4096))  # every page, without a second block that is freed again
    time.sleep(1.2 + 3 * (time.monotonic() - began))  # on a busy machine the block takes its time
    assert held

print(json.dumps([watched("leak", 40, leaking)[0], watched("rest", 40, still)[0]]))
"""


def test_a_leak_is_seen_and_a_large_block_is_not():
    """In a process of its own: in this one, what earlier tests left is freed at times of its own."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    leak, rest = json.loads(done.stdout)
    assert leak["growth"] > 500_000
    assert abs(rest["growth"]) < 100_000
    assert rest["processor"] < rest["seconds"]


def test_the_page_has_a_row_for_each(tmp_path):
    rows = [*long_run(400), *wide_run(2000, size=500)]
    write(rows, tmp_path)
    page = (tmp_path / "load.md").read_text()
    assert len(rows) == 4
    for words in (
        "400 steps recorded",
        "scored by SGD-IE",
        "2,000 examples recorded",
        "ACC(sketch=64), one pass, 2,000",
    ):
        assert words in page


def test_a_benchmark_that_is_measured_again_replaces_its_row_and_no_other(tmp_path):
    table.write([table.Row("a", 1.0, "<=", 2.0), table.Row("b", 3.0, ">=", 4.0, "slow")], tmp_path)
    table.write([table.Row("a", 5.0, "<=", 2.0)], tmp_path)
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| a | 5 | <= 2 | **no** |  |\n| b | 3 | >= 4 | **no** | slow |" in page
