"""TRL's SFTTrainer: which texts taught a small language model its sums? Some of them are wrong.

The model is built from a small config and the texts are made up, so nothing is downloaded. What recording needs are the
lines marked with ``<-``.

    python examples/trl_sft.py [directory]
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import leaveout as lo  # <-
from leaveout.integrations.transformers import RecorderCallback  # <-

WRONG = [3, 11, 27, 42]


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[EOS]", "[UNK]", "plus", "is", *map(str, range(9))]
    fast = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"  # noqa: S106
    )  # fmt: skip


def sums(count: int) -> Dataset:
    """Make up prompts and completions; the answer of some is one more than it should be."""
    draw = random.Random(0)
    terms = [(draw.randrange(4), draw.randrange(4)) for _ in range(count)]
    answers = [left + right + (row in WRONG) for row, (left, right) in enumerate(terms)]
    prompts = [f"{left} plus {right} is" for left, right in terms]
    return Dataset.from_dict({"prompt": prompts, "completion": [f" {answer}" for answer in answers]})


def main(folder: Path, epochs: int = 30) -> list[int]:
    set_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=14, max_position_embeddings=16, **sizes))
    args = SFTConfig(
        str(folder / "trainer"), num_train_epochs=epochs, learning_rate=3e-3, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    recorder = RecorderCallback(folder / "run")  # <-
    given = {"train_dataset": sums(64), "processing_class": tokenizer()}
    trainer = SFTTrainer(model, args=args, callbacks=[recorder], **given)  # <-
    trainer.train()

    right = [row for row in range(64) if row not in WRONG]
    query = trainer.train_dataset.select(right)  # as tokens; what should be known in the end
    scores = lo.SGDIE().score(recorder.run, recorder.task(), query)  # <-
    harmful = [int(i) for i in scores.harmful(10)]
    print(f"{len(set(harmful) & set(WRONG))} of {len(WRONG)} wrong sums are among the 10 most harmful texts")
    return harmful


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
