"""A small BERT-like classifier trained as they are: dropout, AdamW, warm-up, gradients clipped at norm 1.

Nothing in the loop is changed for the recording. The state of the random generator before each forward pass is kept,
so that the same units are dropped again wherever a step is repeated; Task(clip_norm=1.0) says that gradients were
clipped. A message that is left out keeps its draws to itself: those of the others stay as they were.

    python examples/bert_dropout.py [directory]    # messages made up here; 20News where LEAVEOUT_DATA has it
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo

TOPICS = (
    "oven butter onion simmer flour pan garlic roast sauce whisk dough salt boil spoon recipe crust",
    "soil seedling prune compost mulch weeds shovel sow hedge roots trellis bulbs lawn rake frost pot",
)
BOTH = "tomato basil water fresh leaves cut season pepper green sun warm week small add thyme potato"
PAD, START, OTHER = 0, 1, 2


class Bert(nn.Module):
    """A transformer encoder over words; the class is read at the first position."""

    def __init__(self, words: int, length: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, width, padding_idx=PAD), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Return the classes' logits."""
        x = self.dropout(self.word(words) + self.place.weight[: words.shape[1]])
        x = self.encoder(x, src_key_padding_mask=words == PAD)
        return self.head(self.dropout(x[:, 0]))


def texts(count: int, val: int) -> tuple[list[str], Tensor]:
    """Messages about PC or Macintosh hardware; made up ones about cooking or gardening without the files."""
    if os.environ.get("LEAVEOUT_DATA"):
        data = lo.data.load("20news", n_train=count, n_val=val)
        return [*data.train.raw, *data.val.raw], torch.cat([data.train.y, data.val.y]).long()
    draw = random.Random(0)
    labels = [draw.randrange(2) for _ in range(count + val)]
    made = [" ".join(draw.choices(TOPICS[label].split(), k=3) + draw.choices(BOTH.split(), k=6)) for label in labels]
    return made, torch.tensor(labels)


def numbered(messages: list[str], known: int, words: int = 1000, length: int = 32) -> tuple[Tensor, int]:
    """Return the messages as numbers of words, the most common of the first ``known`` messages, cut at a length."""
    split = [re.findall(r"[a-z]+", message.lower())[: length - 1] for message in messages]
    counts = Counter(word for message in split[:known] for word in message)
    number = {word: OTHER + 1 + i for i, (word, _) in enumerate(counts.most_common(words))}
    rows = [[START, *(number.get(word, OTHER) for word in message)] for message in split]
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows]), OTHER + 1 + len(number)


def main(folder: Path, examples: int = 200, epochs: int = 5, replays: int = 32) -> dict[str, float]:
    messages, y = texts(examples, 100)
    x, words = numbered(messages, examples)
    train_set, val_set = TensorDataset(x[:examples], y[:examples]), TensorDataset(x[examples:], y[examples:])

    # 1. Train as always, with a recorder.
    torch.manual_seed(0)
    model, loss_fn = Bert(words, x.shape[1]), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    loader = DataLoader(train_set, batch_size=25, shuffle=True)
    steps, warmup = epochs * len(loader), len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    with lo.Recorder(folder / "run", model, optimizer, overwrite=True) as recorder:
        for _ in range(epochs):
            for tokens, labels in recorder.watch(loader):
                optimizer.zero_grad()
                loss_fn(model(tokens), labels).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
    run = lo.open_run(folder / "run")
    source = "20News" if os.environ.get("LEAVEOUT_DATA") else "made up"
    print(f"BERT-like classifier, {examples} messages ({source}), {len(run)} steps")

    # 2. Score every message, and compare a sample of the scores with exact replays.
    task = lo.Task(model, loss_fn, train_set, clip_norm=1.0)
    scores = lo.ACC().score(run, task, val_set)
    print(f"{scores.method}: {scores.cost.hvps} Hessian-vector products, {scores.cost.gradients} gradients")
    for i in scores.helpful(3) + scores.harmful(3):
        print(f"  {float(scores.mean()[i]):+.5f} class {int(y[i])}: {' '.join(messages[i].split())[:60]}")
    check = lo.verify(scores, run, task, val_set, replays=replays)
    print(check)

    show = lo.Show(train=messages[:examples], query=messages[examples:], title="Messages, a BERT-like classifier")
    shown = {"task": task, "query": val_set, "show": show}
    print("the report:", lo.report(folder / "report.html", run, scores, check, **shown, overwrite=True))
    return {"tau": check.extreme.kendall.value, "steps": len(run)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="leaveout-")))
