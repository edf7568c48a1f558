"""Trainers whose ``compute_loss`` calls the model more than once per batch, compared with training again."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn

import leaveout as lo
from refusal import refused

transformers = pytest.importorskip("transformers")

from leaveout.integrations.transformers import RecorderCallback  # noqa: E402

LEFT_OUT = [0, 5]


def pairs(count: int = 18, seed: int = 0) -> list[dict]:
    order = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, count, 5, dtype=torch.float64, generator=order)
    labels = torch.rand(count, dtype=torch.float64, generator=order)
    return [{"number": i, "a": a[i], "b": b[i], "labels": labels[i]} for i in range(count)]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4)).double()

    def forward(self, x):
        return self.body(x)


def collate(examples: list[dict]) -> dict:
    """With a word that says what the tensors are, as sentence-transformers adds one."""
    return {**transformers.default_data_collator(examples), "modality": "numbers"}


def likeness(model, batch):
    return nn.functional.cosine_similarity(model(batch["a"]), model(batch["b"])), batch["labels"]


def squares(outputs, targets):
    return (outputs - targets).square()


class Towers(transformers.Trainer):
    """Trains both towers; with ``left_out``, that example's loss weighs nothing."""

    left_out: int | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return (squares(*likeness(model, inputs)) * (inputs["number"] != self.left_out)).mean()


class Inside(Towers):
    """Never calls the model as a whole."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model.body, inputs)


def train(kind=Towers, callbacks=(), left_out=None, **options) -> nn.Module:
    transformers.set_seed(1)
    args = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        learning_rate=5e-2,
        adam_epsilon=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        **{"num_train_epochs": 2, **options},
    )
    trainer = kind(Tower(), args, train_dataset=pairs(), data_collator=collate, callbacks=list(callbacks))
    trainer.left_out = left_out
    trainer.train()
    return trainer.model


def query_loss(model: nn.Module) -> float:
    batch = transformers.default_data_collator(pairs(6, 9))
    with torch.no_grad():
        return float(squares(*likeness(model.eval(), batch)).mean())


@pytest.mark.parametrize("kind", [Towers, Inside])
@pytest.mark.parametrize("options", [{}, {"max_steps": 6}, {"gradient_accumulation_steps": 2}], ids=str)
def test_replay_is_training_without_the_pair(tmp_path, kind, options) -> None:
    recorder = RecorderCallback(tmp_path / "run", keep="all")
    with pytest.warns(lo.LeaveoutWarning, match="Tower cannot be called"):  # after the first step, and at the end
        model = train(kind, [recorder], **options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), train(kind, **options).parameters(), strict=True))
    task = recorder.task(squares, forward=likeness)
    scores = lo.Replay().score(recorder.run, task, pairs(6, 9), ids=LEFT_OUT).mean()
    truth = [query_loss(train(kind, left_out=i, **options)) - query_loss(model) for i in LEFT_OUT]
    assert scores.tolist() == pytest.approx(truth, rel=1e-7, abs=1e-12)
    assert torch.isfinite(lo.SGDIE().score(recorder.run, task, pairs(6, 9)).values).all()


class Reversing(Towers):
    """Trains on batches in another order than its loader's."""

    def get_batch_samples(self, *args):
        samples, items = super().get_batch_samples(*args)
        return samples[::-1], items


def test_batches_that_are_not_the_loaders_next_are_refused_at_the_first(tmp_path) -> None:
    with refused(lo.UnsupportedError, "loader-ids-unknown", "Reversing"):
        train(Reversing, [RecorderCallback(tmp_path / "run")], gradient_accumulation_steps=2)


def test_a_run_that_cannot_be_scored_stops_after_the_first_step_if_so_asked(tmp_path) -> None:
    with refused(lo.UnsupportedError, "model-loss-unknown", "forward="):
        train(Towers, [RecorderCallback(tmp_path / "run", on_problem="stop")])
    assert len(lo.open_run(tmp_path / "run", partial=True)) == 1
