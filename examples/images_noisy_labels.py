"""Images with wrong labels: find them, and see that the model gets better without them.

Flips a fifth of the labels of handwritten digits. Most of the flipped ones are among the examples that do the most harm
to the validation loss, and a model retrained without those makes fewer errors.

    python examples/images_noisy_labels.py [directory]    # 8 x 8 digits, offline; MNIST where LEAVEOUT_DATA has it
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import leaveout as lo


def main(folder: Path, examples: int = 500, epochs: int = 30) -> dict[str, float]:
    name, lr = ("mnist", 0.05) if os.environ.get("LEAVEOUT_DATA") else ("digits", 0.2)
    data = lo.data.load(name, n_train=examples, n_val=400)
    noisy = lo.data.flip(data.train, 0.2, seed=1)
    train_set, wrong = noisy.examples, set(noisy.touched.nonzero().flatten().tolist())
    print(f"{examples} images of {name}, {len(wrong)} of them with a wrong label")

    # 1. Train as always, with a recorder.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(train_set.x[0].numel(), 32), nn.Tanh(), nn.Linear(32, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(train_set, batch_size=50, shuffle=True)
    with lo.Recorder(folder / "run", model, optimizer) as recorder:
        for _ in range(epochs):
            for x, y in recorder.watch(loader):
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
    run = lo.open_run(folder / "run")

    # 2. Score every training image by how the validation loss would change without it, and check the scores.
    #    SGD-IE is SGD-influence estimation: the derivative of training in the image's weight.
    task = lo.Task(model, loss_fn, train_set)
    scores = lo.SGDIE().score(run, task, data.val)
    check = lo.verify(scores, run, task, data.val, replays=32)
    print(check)

    # 3. The wrong labels are among the most harmful.
    suspects = scores.harmful(min(len(wrong), scores.harmful_count))
    found = len(wrong & set(suspects)) / len(wrong)
    share = len(wrong) / examples
    print(f"{found:.0%} of the wrong labels are among the {len(suspects)} most harmful images ({share:.0%} by chance)")
    for i in suspects[:5]:
        print(f"  image {i}: labelled {int(train_set.y[i])}, really {int(data.train.y[i])}")

    # 4. Retrain without the suspects; as a control, without as many images drawn at random.
    count = len(suspects)
    curve = lo.cleanse(scores, run, task, data.test, remove=[count // 4, count // 2, count])
    print(curve)

    # 5. Write the report: open it in a browser.
    side = round(train_set.x[0].numel() ** 0.5)
    show = lo.Show(example=lambda example: example[0].reshape(side, side), title=f"{name}, a fifth of the labels wrong")
    page = lo.report(folder / "report.html", run, scores, check, curve, task=task, query=data.val, show=show)
    print(f"the report: {page}")
    table = curve.to_frame().set_index(["choice", "removed"])["error"]
    removed = max(table[scores.method].index)
    return {
        "found": found,
        "before": table["nothing", 0],
        "after": table[scores.method, removed],
        "random": table["random", removed],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="leaveout-")))
