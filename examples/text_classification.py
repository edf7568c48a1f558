"""Text: which training messages make the model say what it says about a new one?

Short messages are about cooking or about gardening. A logistic regression on tf-idf features is trained, and some
training messages have the wrong label. For the validation message that the model does worst on, the training messages
that pushed it there are printed: the wrong labels among them are the ones to correct.

    python examples/text_classification.py [directory]    # messages made up here; 20News where LEAVEOUT_DATA has it
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn

import leaveout as lo

TOPICS = {
    "cooking": "oven,butter,onion,simmer,flour,pan,garlic,roast,sauce,whisk,dough,salt,boil,spoon,recipe,crust",
    "gardening": "soil,seedling,prune,compost,mulch,weeds,shovel,sow,hedge,roots,trellis,bulbs,lawn,rake,frost,pot",
}
BOTH = "tomato,basil,water,fresh,leaves,cut,season,pepper,green,sun,warm,week,small,add,thyme,potato,cover,turn"


@dataclass(frozen=True)
class Messages:
    """Hold tf-idf features, labels, and the words to print for each message."""

    train: lo.data.Examples
    val: lo.data.Examples
    words: tuple[str, ...]
    classes: tuple[str, ...]

    def excerpt(self, x: Tensor) -> str:
        """Return the words of largest weight in a message."""
        order = x.argsort(descending=True)[:6]
        return " ".join(self.words[i] for i in order if x[i] > 0)


def made_up(count: int, seed: int = 0) -> Messages:
    """Make up messages of eight words: a few from their topic, most from both."""
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(count + 100)]
    names = tuple(TOPICS)
    own = [draw.choices(TOPICS[names[label]].split(","), k=draw.choice((1, 2, 3))) for label in labels]
    texts = [" ".join(words + draw.choices(BOTH.split(","), k=8 - len(words))) for words in own]
    weights = TfidfVectorizer().fit(texts[:count])
    x = torch.tensor(weights.transform(texts).toarray(), dtype=torch.float32)
    y = torch.tensor(labels, dtype=torch.float32)
    ids = torch.arange(len(y))
    train = lo.data.Examples(x[:count], y[:count], ids[:count])
    val = lo.data.Examples(x[count:], y[count:], ids[count:])
    return Messages(train, val, tuple(weights.get_feature_names_out()), names)


def loaded(count: int) -> Messages:
    if "LEAVEOUT_DATA" not in os.environ:
        return made_up(count)
    data = lo.data.load("20news", n_train=count, n_val=100)
    return Messages(data.train, data.val, data.features, data.classes)


def main(folder: Path, examples: int = 400, epochs: int = 30) -> dict[str, float]:
    messages = loaded(examples)
    noisy = lo.data.flip(messages.train, 0.1, seed=1)
    train, val = noisy.examples, messages.val
    print(f"{examples} messages about {' or '.join(messages.classes)}, {int(noisy.touched.sum())} with a wrong label")

    model = lo.models.build("logistic", seed=0, features=train.x.shape[1])
    task = lo.Task(model, nn.BCEWithLogitsLoss(), train, l2=1e-3)
    lr = 0.5 if len(messages.words) < 1000 else 0.05  # 20News has thousands of words, each scaled to variance one
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    run = lo.train(task, optimizer, epochs, batch_size=50, seed=0, out=folder / "run")

    # One column per validation message; "outputs" because the loss is far from linear over such displacements.
    # ACC is accumulative SGD-influence estimation.
    scores = lo.ACC(readout="outputs").score(run, task, val, queries="each")
    check = lo.verify(scores, run, task, val, replays=32)
    print(check)

    wrong = set(noisy.touched.nonzero().flatten().tolist())
    suspects = scores.harmful(min(len(wrong), scores.harmful_count))
    found = len(wrong & set(suspects)) / len(wrong)
    print(f"{found:.0%} of the wrong labels are among the {len(suspects)} most harmful messages")

    with torch.no_grad():
        losses = task.objective.query_losses(task.parameters(), [val.x, val.y])
    query = int(losses.argmax())
    print(f"\nThe model does worst on {messages.excerpt(val.x[query])!r} ({messages.classes[int(val.y[query])]}).")
    print("Training messages that pushed it there, and what their labels say:")
    drivers = scores.to_frame()[query].sort_values().index[:8].tolist()
    for i in drivers:
        mark = "  (the label is wrong)" if i in wrong else ""
        print(f"  {i:4} {messages.classes[int(train.y[i])]:10} {messages.excerpt(train.x[i])}{mark}")

    show = lo.Show(example=lambda example: messages.excerpt(example[0]), classes=messages.classes, title="Messages")
    page = lo.report(folder / "report.html", run, scores, check, task=task, query=val, show=show)
    print(f"the report: {page}")
    return {"found": found, "accuracy": float(((model(val.x) > 0) == (val.y > 0.5)).float().mean())}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="leaveout-")))
