"""TRL's SFTTrainer with its defaults: bf16, gradient checkpointing, a last layer that returns losses without logits."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path

import pytest
import torch

import leaveout as lo

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from leaveout.integrations.model_loss import ClassLoss  # noqa: E402
from leaveout.integrations.transformers import RecorderCallback  # noqa: E402
from refusal import refused  # noqa: E402
from test_integrations_transformers import VOCABULARY, llama, tokenizer  # noqa: E402

LEFT_OUT = [0, 5]
ACCUMULATED = {"gradient_accumulation_steps": 2, "learning_rate": 5e-3}
pytestmark = pytest.mark.filterwarnings("ignore")


def texts(count: int = 20):
    order = torch.Generator().manual_seed(0)
    words = [torch.randint(VOCABULARY - 4, (4 + i % 3,), generator=order).tolist() for i in range(count)]
    return datasets.Dataset.from_dict({"text": [" ".join(map(str, sentence)) for sentence in words]})


def train(path=None, left_out=None, peft_config=None, on_problem="warn", **options):
    """Train on twenty sentences; with ``left_out``, the tokens of one, its loss weighs nothing."""
    transformers.set_seed(1)
    recorder = None if path is None else RecorderCallback(path, keep="all", on_problem=on_problem)

    class Weighted(trl.SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if left_out is not None:
                width = min(len(left_out), inputs["input_ids"].shape[1])
                row = (inputs["input_ids"][:, :width] == left_out[:width]).all(1)
                row &= inputs["attention_mask"].sum(1) == len(left_out)
                inputs["labels"] = inputs["labels"].masked_fill(row[:, None], -100)
            return super().compute_loss(model, inputs, *args, **kwargs)

    args = trl.SFTConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )
    callbacks = [] if recorder is None else [recorder]
    given = {"train_dataset": texts(), "processing_class": tokenizer(), "peft_config": peft_config}
    trainer = Weighted(llama(), args=args, callbacks=callbacks, **given)
    trainer.train()
    return trainer, recorder


def query_loss(model, query, peft_config=None) -> float:
    """The mean loss by a new model with these weights, without casts."""
    fresh = llama() if peft_config is None else peft.get_peft_model(llama(), peft_config)
    fresh.load_state_dict(model.state_dict())
    fresh.eval()
    with torch.no_grad():
        losses = [fresh(input_ids=ids, labels=ids).loss for ids in (torch.tensor([row["input_ids"]]) for row in query)]
    return float(torch.stack(losses).double().mean())


def lora():
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    "adapters", [pytest.param(False, marks=pytest.mark.full), True], ids=["all weights", "adapters"]
)
def test_every_step_follows_and_replays_are_training_again(tmp_path, adapters: bool) -> None:
    options = {"peft_config": lora(), "learning_rate": 5e-2} if adapters else ACCUMULATED
    trainer, recorder = train(tmp_path / "run", **options)
    plain, _ = train(**options)
    both = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    assert recorder.run.manifest.autocast == "bfloat16"
    assert all("lora_" in name for name in recorder.run.manifest.shapes) == adapters
    task, query = recorder.task(), trainer.train_dataset.select(range(4))
    assert lo.SGDIE().score(recorder.run, task, query).values.abs().max() > 0
    replays = lo.Replay().score(recorder.run, task, query, ids=LEFT_OUT).values.flatten().tolist()
    base = query_loss(plain.model, query, options.get("peft_config"))
    rows = [torch.tensor(trainer.train_dataset[i]["input_ids"]) for i in LEFT_OUT]
    again = [train(left_out=row, **options)[0].model for row in rows]
    truth = [query_loss(model, query, options.get("peft_config")) - base for model in again]
    assert max(map(abs, truth)) > 1e-2
    assert replays == pytest.approx(truth, abs=0.01 * max(map(abs, truth)))  # the rounding of 16 bits
    with pytest.raises(lo.LeaveoutError) as error:
        lo.TracIn().score(recorder.run, recorder.task(loss=ClassLoss(shift=True, smoothing=0.3)), query)
    assert error.value.code == "step-does-not-follow"


def test_packed_rows_are_refused_at_the_first_step(tmp_path) -> None:
    with refused(lo.UnsupportedError, "training-not-supported", "packing=False"):
        train(tmp_path / "run", packing=True, max_length=16, on_problem="stop")


def test_another_loss_has_to_be_given(tmp_path) -> None:
    with pytest.warns(lo.LeaveoutWarning, match="dft"):
        _, recorder = train(tmp_path / "run", loss_type="dft", max_steps=2)
    with pytest.raises(lo.LeaveoutError) as error:
        recorder.task()
    assert error.value.code == "model-loss-unknown"
    assert "dft" in str(error.value)


@pytest.mark.full
def test_the_example(tmp_path) -> None:
    main = runpy.run_path(str(Path(__file__).parents[1] / "examples/trl_sft.py"))["main"]
    assert len(set(main(tmp_path)) & {3, 11, 27, 42}) >= 2
