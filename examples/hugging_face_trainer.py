"""Hugging Face Trainer: which sentences made a small BERT what it is? Some of them have the wrong label.

The model is built from a small config and the sentences are made up, so nothing is downloaded. What recording needs are
the lines marked with ``<-``.

    python examples/hugging_face_trainer.py [directory]
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import leaveout as lo
from leaveout.integrations.transformers import RecorderCallback  # <-

WRONG = [3, 11, 27, 42]


def sentences(count: int, seed: int) -> Dataset:
    """Make up sentences of words 10 to 19; most words of a sentence are even where its label is 1."""
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(count)]
    words = [
        [2 * draw.randrange(5, 10) + (draw.random() < (0.1 if label else 0.9)) for _ in range(draw.randrange(5, 9))]
        for label in labels
    ]
    return Dataset.from_dict({"input_ids": words, "label": labels})


def padded(examples: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)
    ids = torch.tensor([example["input_ids"] + [0] * (longest - len(example["input_ids"])) for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def main(folder: Path, epochs: int = 8) -> list[int]:
    train, val = sentences(64, 0), sentences(32, 1)
    train = train.map(lambda row, i: {"label": 1 - row["label"]} if i in WRONG else row, with_indices=True)
    set_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes))
    recorder = RecorderCallback(folder / "run")  # <-
    args = TrainingArguments(
        str(folder / "trainer"), num_train_epochs=epochs, learning_rate=3e-3, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=train, data_collator=padded, callbacks=[recorder])  # <-
    trainer.train()

    scores = lo.SGDIE().score(recorder.run, recorder.task(), val)  # <-
    harmful = [int(i) for i in scores.harmful(10)]
    print(scores.to_frame(train, columns=["label"]).sort_values("mean").head(10))
    print(f"{len(set(harmful) & set(WRONG))} of {len(WRONG)} wrong labels are among the 10 most harmful sentences")
    return harmful


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
