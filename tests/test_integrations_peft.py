"""Adapters of the peft library, trained by the Hugging Face Trainer: only what trains is recorded and scored."""

from __future__ import annotations

import copy

import pytest
import torch

import leaveout as lo

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from leaveout.integrations.transformers import RecorderCallback  # noqa: E402
from test_integrations_transformers import gpt2, padded, rows  # noqa: E402

LORA = peft.LoraConfig(r=2, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
PROMPTS = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def train(path=None, left_out: int | None = None, config=LORA, dtype=torch.float32):
    transformers.set_seed(1)
    model = peft.get_peft_model(gpt2().to(dtype), config)
    data = rows("causal")
    gone = None if left_out is None else torch.tensor(data[left_out]["input_ids"])

    class Weighted(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if gone is not None:
                width = min(len(gone), inputs["input_ids"].shape[1])
                row = (inputs["input_ids"][:, :width] == gone[:width]).all(1)
                row &= inputs["attention_mask"].sum(1) == len(gone)
                inputs = {**inputs, "labels": inputs["labels"].masked_fill(row[:, None], -100)}
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    args = transformers.TrainingArguments(
        "unused",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=5e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    recorder = None if path is None else RecorderCallback(path, keep="all")
    callbacks = [] if recorder is None else [recorder]
    trainer = Weighted(model, args, train_dataset=data, data_collator=padded, callbacks=callbacks)
    trainer.train()
    return trainer.model, recorder


def query_loss(model) -> float:
    model = copy.deepcopy(model).float().eval()
    with torch.no_grad():
        losses = [model(**padded([example])).loss for example in rows("causal", 4, seed=9)]
    return float(torch.stack(losses).double().mean())


@pytest.mark.filterwarnings("ignore")
def test_adapters_alone_are_recorded_and_scored(tmp_path) -> None:
    model, recorder = train(tmp_path / "run")
    plain, _ = train()
    both = model.state_dict(), plain.state_dict()
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])
    names = list(recorder.run.manifest.shapes)
    assert len(names) == 2
    assert all("c_attn.lora_" in name for name in names)
    assert set(recorder.run.final()["param"]) == set(names)
    task = recorder.task()
    scores = lo.SGDIE().score(recorder.run, task, rows("causal", 4, seed=9))
    assert scores.values.abs().max() > 0
    replays = lo.Replay().score(recorder.run, task, rows("causal", 4, seed=9), ids=[0, 5]).values.flatten()
    base = query_loss(plain)
    truth = torch.tensor([query_loss(train(left_out=left_out)[0]) - base for left_out in (0, 5)])
    assert truth.abs().max() > 1e-3
    assert torch.allclose(replays.float(), truth, rtol=0, atol=1e-3 * float(truth.abs().max()))


@pytest.mark.filterwarnings("ignore")
def test_adapters_in_float32_of_weights_in_bfloat16(tmp_path) -> None:
    """What peft makes of weights that were loaded in bfloat16: steps are those of its rounding, queries in float32."""
    model, recorder = train(tmp_path / "run", dtype=torch.bfloat16)
    assert set(recorder.run.manifest.dtypes.values()) == {"float32"}
    query = rows("causal", 4, seed=9)
    scores = lo.Replay().score(recorder.run, recorder.task(), query, ids=[0, 5]).values.flatten()
    base = query_loss(model)
    truth = torch.tensor([query_loss(train(left_out=k, dtype=torch.bfloat16)[0]) - base for k in (0, 5)])
    assert (scores - truth).norm() < 0.3 * truth.norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PROMPTS)
def test_learned_prompts(kind: str, tmp_path) -> None:
    """They stand before the tokens, which have labels."""
    config = PROMPTS[kind]
    model, recorder = train(tmp_path / "run", config=config)
    assert list(recorder.run.manifest.shapes) == ["prompt_encoder.default.embedding.weight"]
    task, query = recorder.task(), rows("causal", 4, seed=9)
    assert lo.SGDIE().score(recorder.run, task, query).values.abs().max() > 0
    replays = lo.Replay().score(recorder.run, task, query, ids=[0, 5]).values.flatten()
    base = query_loss(model)
    truth = torch.tensor([query_loss(train(left_out=left_out, config=config)[0]) - base for left_out in (0, 5)])
    assert torch.allclose(replays.float(), truth, rtol=0, atol=max(2e-7, 1e-3 * float(truth.abs().max())))
    assert truth.abs().max() > 1e-5
