"""A convolutional network trained in bfloat16 (autocast), whose average of weights (EMA) is used.

The recorder is given the averaged model and notes the casts itself; the average is what is scored and verified.

    python examples/bf16_ema.py [directory]    # 8 x 8 digits; CIFAR-10 where LEAVEOUT_DATA has it
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo


def network(channels: int, side: int) -> nn.Module:
    """Two convolutions and a linear layer, with smooth activations."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (side // 4) ** 2, 10),
    )


def images(train: int, val: int) -> tuple[str, TensorDataset, TensorDataset]:
    """Images with their classes, as (count, channels, side, side)."""
    name = "cifar10" if os.environ.get("LEAVEOUT_DATA") else "digits"
    data = lo.data.load(name, n_train=train, n_val=val)
    shape = (3, 32, 32) if name == "cifar10" else (1, 8, 8)
    parts = [TensorDataset(part.x.float().reshape(-1, *shape), part.y.long()) for part in (data.train, data.val)]
    return name, parts[0], parts[1]


def main(folder: Path, examples: int = 240, epochs: int = 4, replays: int = 16) -> dict[str, float]:
    name, train_set, val_set = images(examples, 80)
    channels, side = train_set.tensors[0].shape[1:3]

    # 1. Train as always, with a recorder that is given the average.
    torch.manual_seed(0)
    model, loss_fn = network(channels, side), nn.CrossEntropyLoss()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(train_set, batch_size=min(32, examples), shuffle=True)
    with lo.Recorder(folder / "run", model, optimizer, average=averaged, overwrite=True) as recorder:
        for _ in range(epochs):
            for x, y in recorder.watch(loader):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                averaged.update_parameters(model)
    run = lo.open_run(folder / "run").average()
    print(f"CNN in bfloat16, {examples} images of {name}, {len(run)} steps, average of weights")

    # 2. Score the average, and compare a sample of the scores with exact replays.
    task = lo.Task(averaged.module, loss_fn, train_set)
    scores = lo.SGDIE().score(run, task, val_set)
    print(scores)
    check = lo.verify(scores, run, task, val_set, replays=replays)
    print(check)

    show = lo.Show(title="Images, the average of weights")
    shown = {"task": task, "query": val_set, "show": show}
    print("the report:", lo.report(folder / "report.html", run, scores, check, **shown, overwrite=True))
    return {"tau": check.extreme.kendall.value, "steps": len(run)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="leaveout-")))
