"""What recording costs in a widely used trainer, and for adapters of a fairly large model."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from experiments.bench.problems import QUIET, folder, quickest, seconds
from experiments.bench.table import Row
from leaveout.estimators import SGDIE

WORDS = 200


def trainer_recording() -> list[Row]:
    """Measure what recording with its defaults adds to a Hugging Face ``Trainer`` on a tiny BERT."""

    def train(path: Path | None) -> None:
        tiny_bert(512, path, epochs=2)

    train(folder())  # imports and allocations that happen only once
    plain, recorded, on_disk = quickest(
        6, lambda: train(None), lambda: train(folder(memory=True)), lambda: train(folder())
    )
    how = f"128 steps of 8, AdamW, keep='auto', {plain:.2f} s and {recorded:.2f} s, with the files in memory; on this "
    how += f"machine's disk {on_disk:.2f} s; the quickest of six each"
    return [Row("recorded / unrecorded Trainer, tiny BERT", recorded / plain, "<=", 1.15, how)]


def tiny_bert(count: int, path: Path | None, epochs: int = 1) -> Any:
    """Train a tiny BERT to tell sentences apart with a Hugging Face ``Trainer``; return its recorder, if it has one."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    data = _sentences(count, 32, lambda words: int(words[0] % 2))
    return _trained(BertForSequenceClassification(config), data, path, epochs)


def adapters() -> list[Row]:
    """Measure the disk space and time of recording LoRA adapters, a million parameters on a hundred million."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20_000, n_positions=32, n_embd=768, n_layer=12, n_head=12)
    data = _sentences(8, 16, None)

    torch.manual_seed(0)
    lora = LoraConfig(r=28, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), lora)
    plain, _ = seconds(lambda: _trained(model, data, None, batch=2))
    elapsed, recorder = seconds(lambda: _trained(model, data, folder(), batch=2))
    run = recorder.run
    shapes = run.manifest.shapes.values()
    count = sum(int(torch.tensor(shape).prod()) for shape in shapes)
    disk = sum(file.stat().st_size for file in Path(run.path).iterdir())
    own = 3 * 4 * count * (len(run) + 1)
    whole = sum(param.numel() for param in model.parameters())
    how = (
        f"{count:,} of {whole:,} parameters, {len(run)} steps, every state with both moments: {disk / 1e6:.0f} MB; "
        f"{plain:.1f} s unrecorded, {elapsed:.1f} s recorded, once each; names such as "
        f"{next(iter(run.manifest.shapes))}"
    )
    made, task = seconds(recorder.task)
    (first, cost), (again, _) = (
        seconds(lambda: SGDIE().score(run, task, data, resources=QUIET).cost) for _ in range(2)
    )
    what = f"the same run and 8 texts asked about: making the task {made:.1f} s, SGD-IE with checks and tracing "
    what += f"of the first time {first:.1f} s, once more {again:.1f} s; a process of {cost.peak_memory / 1e9:.1f} GB"
    return [
        Row("disk of a run of LoRA adapters / the adapters' own states", disk / own, "<=", 1.1, how),
        Row("task and first SGD-IE / second, the same adapters", (made + first) / again, "<=", 5.0, what),
    ]


def _sentences(count: int, length: int, label: Any) -> Any:
    """Make up sentences; without a rule for labels, each sentence is its own."""
    order = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (count, length), generator=order)
    return [{"input_ids": row, "labels": row if label is None else label(row)} for row in words]


def _trained(model: Any, data: Any, path: Path | None, epochs: int = 1, batch: int = 8) -> Any:
    from transformers import Trainer, TrainingArguments

    from leaveout.integrations.transformers import RecorderCallback

    recorder = RecorderCallback(path) if path else None
    args = TrainingArguments(
        tempfile.mkdtemp(prefix="leaveout-bench-"),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(model, args, train_dataset=data, callbacks=[] if recorder is None else [recorder]).train()
    return recorder
