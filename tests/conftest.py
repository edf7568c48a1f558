"""Shared settings of the tests."""

import gc
import os

import jaxtyping
import pytest
import torch
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start: see _one_thread
os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray's workers give way to everything else that runs
settings.register_profile("leaveout", deadline=None, max_examples=8, derandomize=True)
settings.register_profile("full", deadline=None, max_examples=30, derandomize=True)  # `make test-rest` chooses it
settings.load_profile("leaveout")


LONGEST = """
commands family report engine estimators real_runs integrations_transformers optimizers kinks experiments recorder
refusals transports store docs numbers tracing trajectory shards next_commands resume end_to_end examples optim
step_check damage sweep_checkpoints which_weights layers memory plan models_work truth_experiments
"""
"""Files that begin first, so that all processes end at about the same time; the others follow in any order."""

LONGEST_REST = """
random_programs
memory soak engine layers plan integrations_transformers estimators transports examples docs tracing family reproduce
layout data shards commands every_kind resume models_work integrations_trl scaling end_to_end recorder trajectory
real_runs truth_experiments optimizers
"""
"""The same for `make test-rest`."""


def pytest_collection_modifyitems(config, items):
    """Order the tests by file: whole files are handed out, in this order."""
    order = LONGEST if "not full" in config.option.markexpr else LONGEST_REST
    place = {f"test_{name}": at for at, name in enumerate(order.split())}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(autouse=True)
def _one_thread():
    """Two test processes share two cores; tiny tensors gain nothing from threads."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _traced_early(monkeypatch):
    """Tests take few steps: their derivatives are traced all the same, as they are in long runs."""
    monkeypatch.setattr("leaveout.task.trace.tracer.PAYS", 0)


@pytest.fixture(autouse=True)
def _own_precision(monkeypatch):
    """Forget the precision of earlier trainings, which transformers 4 leaves for all later ones of the process."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Compare derivatives once per structure and process, except where the comparison is what is tested."""
    from comparisons import share  # not above: leaveout is imported after its types are hooked in

    share(item.get_closest_marker("compared_anew") is None)


@pytest.fixture
def untyped():
    """Without the checks of types that the tests add: what is refused here is refused for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_configure(config):
    """Make leaveout's own warnings errors; not in pyproject.toml, which would import it before types are hooked in."""
    config.addinivalue_line("filterwarnings", "error::leaveout.LeaveoutWarning")
    config.addinivalue_line("filterwarnings", "ignore:The test set is the query set")  # small problems have no third


def pytest_collection_finish():
    """Spare the garbage collector what was imported: it would look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_report_header():
    data = os.environ.get("LEAVEOUT_DATA")
    return f"real data: {data}" if data else "real data: LEAVEOUT_DATA is not set, tests on real data are skipped"
