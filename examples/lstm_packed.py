"""An LSTM over packed sequences of several lengths, with dropout between its layers and clipped gradients.

Is a message about the first topic or the second? Words are packed (pack_padded_sequence), as is usual where lengths
differ. Examples of several lengths cannot be computed side by side then, but one after the other, which is slower.

    python examples/lstm_packed.py [directory]    # messages made up here; 20News where LEAVEOUT_DATA has it
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
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

import leaveout as lo

TOPICS = (
    "oven butter onion simmer flour pan garlic roast sauce whisk dough salt boil spoon recipe crust",
    "soil seedling prune compost mulch weeds shovel sow hedge roots trellis bulbs lawn rake frost pot",
)
BOTH = "tomato basil water fresh leaves cut season pepper green sun warm week small add thyme potato"
Pair = tuple[Tensor, Tensor]


class Reader(nn.Module):
    """Two layers of LSTM over the words; the class is read off the last state."""

    def __init__(self, words: int, width: int = 24) -> None:
        super().__init__()
        self.word = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Return the classes' logits."""
        packed = pack_padded_sequence(self.word(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


def collate(pairs: list[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """Put texts of several lengths into one batch: padded words, lengths, labels."""
    texts = [words for words, _ in pairs]
    lengths, labels = torch.tensor([len(words) for words in texts]), torch.stack([label for _, label in pairs])
    return pad_sequence(texts, batch_first=True), lengths, labels


def texts(count: int, val: int) -> tuple[list[str], list[int]]:
    """Messages about PC or Macintosh hardware; made up ones about cooking or gardening without the files."""
    if os.environ.get("LEAVEOUT_DATA"):
        data = lo.data.load("20news", n_train=count, n_val=val)
        return [*data.train.raw, *data.val.raw], torch.cat([data.train.y, data.val.y]).int().tolist()
    draw = random.Random(0)
    labels = [draw.randrange(2) for _ in range(count + val)]
    own, both = [topic.split() for topic in TOPICS], BOTH.split()
    made = [draw.choices(own[label], k=2) + draw.choices(both, k=draw.randint(2, 8)) for label in labels]
    return [" ".join(draw.sample(words, len(words))) for words in made], labels


def numbered(messages: list[str], labels: list[int], known: int) -> tuple[list[Pair], int]:
    """Return the messages as numbers of words, 0 for those that are rare, and how many there are."""
    split = [re.findall(r"[a-z]+", message.lower())[:20] for message in messages]
    common = Counter(word for message in split[:known] for word in message).most_common(600)
    number = {word: 1 + i for i, (word, _) in enumerate(common)}
    rows = [torch.tensor([number.get(word, 0) for word in message] or [0]) for message in split]
    return [(row, torch.tensor(label)) for row, label in zip(rows, labels, strict=True)], 1 + len(number)


def trained(folder: Path, pairs: list[Pair], words: int, epochs: int, eps: float = 1e-6, clip: float = 0.5) -> Reader:
    """Train as always, with a recorder, in PyTorch's default type."""
    torch.manual_seed(0)
    model, loss_fn = Reader(words), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=eps)
    loader = DataLoader(pairs, batch_size=16, shuffle=True, collate_fn=collate)
    with lo.Recorder(folder, model, optimizer, overwrite=True) as recorder:
        for _ in range(epochs):
            for tokens, lengths, y in recorder.watch(loader):
                optimizer.zero_grad()
                loss_fn(model(tokens, lengths), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
    return model


def main(folder: Path, examples: int = 160, epochs: int = 5, replays: int = 16) -> dict[str, float]:
    messages, labels = texts(examples, 60)
    pairs, words = numbered(messages, labels, examples)
    train_set, val_set = pairs[:examples], pairs[examples:]

    # 1. Train as always, with a recorder.
    model = trained(folder / "run", train_set, words, epochs)
    run = lo.open_run(folder / "run")
    source = "20News" if os.environ.get("LEAVEOUT_DATA") else "made up"
    print(f"LSTM, {examples} messages ({source}), {len(run)} steps")

    # 2. Score every message, and compare a sample of the scores with exact replays.
    task = lo.Task(model, nn.CrossEntropyLoss(), train_set, collate=collate, clip_norm=0.5)
    scores = lo.ACC().score(run, task, val_set)
    print(f"{scores.method}: {scores.cost.hvps} Hessian-vector products, {scores.cost.gradients} gradients")
    for i in scores.helpful(3) + scores.harmful(3):
        print(f"  {float(scores.mean()[i]):+.5f} class {labels[i]}: {' '.join(messages[i].split())[:60]}")
    check = lo.verify(scores, run, task, val_set, replays=replays)
    print(check)

    show = lo.Show(train=messages[:examples], query=messages[examples:], title="Messages, an LSTM")
    shown = {"task": task, "query": val_set, "show": show}
    print("the report:", lo.report(folder / "report.html", run, scores, check, **shown, overwrite=True))
    return {"tau": check.extreme.kendall.value, "steps": len(run)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="leaveout-")))
