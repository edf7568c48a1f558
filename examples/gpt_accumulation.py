"""A small GPT trained as they are: gradients accumulated over micro-batches, the mean over the window's tokens.

Texts have several lengths, so a mean over micro-batches is not the mean over tokens: the loop divides by the number of
tokens in the whole window, as current trainers do. The loss given to Task returns each text's sum and count of tokens,
and Task(accumulation="window") says what they were divided by. The denominator stays when a text is left out.

    python examples/gpt_accumulation.py [directory]    # texts made up here; 20News where LEAVEOUT_DATA has it
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo

MASKED = -100
LENGTH = 48
PARTS = ("a cat,the dog,my cow,an owl", "eats,sees,likes,wants", "fish,milk,hay,mice")


def texts(count: int) -> list[str]:
    """Beginnings of messages about hardware, of several lengths; made up sentences without the files."""
    draw = random.Random(0)
    if os.environ.get("LEAVEOUT_DATA"):
        messages = [" ".join(text.split()) for text in lo.data.load("20news", n_train=800, n_val=1).train.raw]
        return [text[: draw.randint(20, LENGTH)].lower() for text in messages if len(text) >= LENGTH][:count]
    return [" ".join(draw.choice(part.split(",")) for part in PARTS) + "." for _ in range(count)]


def next_characters(texts: list[str]) -> tuple[Tensor, Tensor, int]:
    """Return characters, the characters that follow them (masked beyond the end), and how many there are."""
    known = {character: 1 + i for i, character in enumerate(sorted(set("".join(texts))))}
    rows = torch.zeros(len(texts), LENGTH + 1, dtype=torch.int64)
    for row, text in zip(rows, texts, strict=True):
        row[1 : 1 + len(text)] = torch.tensor([known[character] for character in text])
    follow = rows[:, 1:].clone()
    follow[follow == 0] = MASKED
    return rows[:, :-1], follow, 1 + len(known)


def token_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each text's summed loss, and how many tokens it has."""
    return cross_entropy(outputs, targets, reduction="none").sum(1), (targets != MASKED).sum(1)


def main(folder: Path, examples: int = 240, epochs: int = 4, replays: int = 16) -> dict[str, float]:
    written = texts(examples + 40)
    x, y, characters = next_characters(written)
    train_set, val_set = TensorDataset(x[:examples], y[:examples]), TensorDataset(x[examples:], y[examples:])

    # 1. Train as always, with a recorder: the batches drawn before a step are its micro-batches.
    torch.manual_seed(0)
    model = lo.models.build("gpt", seed=0, words=characters, positions=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(train_set, batch_size=8, shuffle=True)
    with lo.Recorder(folder / "run", model, optimizer, overwrite=True) as recorder:
        for _ in range(epochs):
            batches = iter(recorder.watch(loader))
            while window := list(islice(batches, 4)):
                tokens = sum(int((targets != MASKED).sum()) for _, targets in window)
                optimizer.zero_grad()
                for inputs, targets in window:
                    (cross_entropy(model(inputs), targets, reduction="sum") / tokens).backward()
                optimizer.step()
    run = lo.open_run(folder / "run")
    source = "20News" if os.environ.get("LEAVEOUT_DATA") else "made up"
    print(f"GPT, {examples} texts ({source}), {len(run)} steps of up to 4 micro-batches")

    # 2. Score every text, and compare a sample of the scores with exact replays.
    task = lo.Task(model, token_losses, train_set, accumulation="window")
    scores = lo.ACC().score(run, task, val_set)
    print(f"{scores.method}: {scores.cost.hvps} Hessian-vector products, {scores.cost.gradients} gradients")
    for i in scores.helpful(3) + scores.harmful(3):
        print(f"  {float(scores.mean()[i]):+.5f} {written[i]}")
    check = lo.verify(scores, run, task, val_set, replays=replays)
    print(check)

    show = lo.Show(train=written[:examples], query=written[examples:], title="Texts, a small GPT")
    shown = {"task": task, "query": val_set, "show": show}
    print("the report:", lo.report(folder / "report.html", run, scores, check, **shown, overwrite=True))
    return {"tau": check.extreme.kendall.value, "steps": len(run)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="leaveout-")))
