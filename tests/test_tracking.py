"""What is logged to experiment trackers, by the real libraries on local files, and read back."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

import leaveout as lo
from leaveout import tracking
from leaveout.compute.cost import Cost
from leaveout.evaluate.check import Check
from leaveout.evaluate.metrics import compare
from leaveout.scores import Scores


def results() -> tuple[Scores, Check]:
    """Scores of eight examples, of which 3 did most harm, and a check of six of them."""
    values = torch.tensor([0.1, 0.4, -0.25, -0.5, 0.3, -0.125, 0.2, 0.6]).double()
    scores = Scores(values[:, None], tuple(range(8)), ("query",), "SGD-IE")
    agreement = compare(values[:6], values[:6] + 0.01)
    table = pd.DataFrame({"score": values[:6], "truth": values[:6] + 0.01, "sample": ["extreme"] * 3 + ["random"] * 3})
    return scores, Check(agreement, agreement, {"extreme": 1.0, "random": 1.0}, table, "SGD-IE", Cost())


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<html>the page</html>")
    return path


def test_tensorboard(tmp_path, page) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    scores, check = results()
    with SummaryWriter(tmp_path / "log") as writer:
        tracking.to_tensorboard(writer, scores, check, page, step=7, k=2)
    events = EventAccumulator(str(tmp_path / "log")).Reload()
    (tau,) = events.Scalars("leaveout/tau_extreme")
    assert (tau.step, tau.value) == (7, pytest.approx(check.extreme.kendall.value))

    def text(name: str) -> str:
        return events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()

    assert text("leaveout/verdict") == check.verdict.value
    assert text("leaveout/harmful").splitlines()[2:] == ["| 3 | -0.5 | no |", "| 2 | -0.25 | no |"]
    assert (tmp_path / "log/leaveout-page.html").read_text() == page.read_text()


def test_mlflow(tmp_path, page, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    scores, check = results()
    with pytest.raises(lo.LeaveoutError) as error:
        tracking.to_mlflow(scores)
    assert error.value.code == "tracker-missing"
    with mlflow.start_run() as run:
        tracking.to_mlflow(scores, check, page, k=2)
    read = mlflow.get_run(run.info.run_id)
    assert read.data.metrics["leaveout/tau_random"] == pytest.approx(check.random.kendall.value)
    assert read.data.tags["leaveout/verdict"] == check.verdict.value
    folder = tmp_path / "store"
    (table,) = folder.rglob("helpful.csv")
    assert pd.read_csv(table)["train"].tolist() == [7, 1]
    (copy,) = folder.rglob("page.html")
    assert copy.read_text() == page.read_text()


def test_wandb(tmp_path, page, monkeypatch) -> None:
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))
    wandb = pytest.importorskip("wandb")
    scores, check = results()
    if wandb.run is None:
        with pytest.raises(lo.LeaveoutError) as error:
            tracking.to_wandb(scores)
        assert error.value.code == "tracker-missing"
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True)) as run:
        tracking.to_wandb(scores, check, page, run=run, k=2)
        assert run.summary["leaveout/verdict"] == check.verdict.value
        assert run.summary["leaveout/tau_extreme"] == pytest.approx(check.extreme.kendall.value)
    tables = [json.loads(path.read_text())["data"] for path in tmp_path.rglob("*harmful*.table.json")]
    assert tables == [[[3, -0.5, False], [2, -0.25, False]]]
    staged = [path for path in (tmp_path / "wandb-own").rglob("*") if path.is_file()]
    assert any(path.read_bytes() == page.read_bytes() for path in staged)
