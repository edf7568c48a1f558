"""A ResNet-18 trained as ResNets are: BatchNorm, random crops and flips, momentum, a cosine schedule.

Nothing in the loop is changed for the recording. The data set gives another crop each time it is read, which the
recorder notices at the first batch: the batches themselves are kept with the run. An image that is left out leaves
the statistics of its batches too, Task(statistics="leave"), as if it had never been in them.

    python examples/resnet_batchnorm.py [directory]    # 8 x 8 digits, offline; CIFAR-10 where LEAVEOUT_DATA has it
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu
from torch.utils.data import DataLoader, Dataset, TensorDataset

import leaveout as lo


class Block(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, added to their input."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs."""
        out = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(out + self.shortcut(x))


def resnet18(inputs: int, width: int) -> nn.Module:
    """Build the network of the original paper for small images, whose width is 64 there."""
    layers: list[nn.Module] = [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(Block(before, width << stage, stride))
            before = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class Augmented(Dataset):
    """Give each image randomly cropped and flipped, otherwise each time it is read."""

    def __init__(self, x: Tensor, y: Tensor, margin: int) -> None:
        self.x, self.y, self.margin = pad(x, (margin,) * 4), y, margin
        self.side = x.shape[-1]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        top, left = torch.randint(2 * self.margin + 1, (2,)).tolist()
        crop = self.x[i, :, top : top + self.side, left : left + self.side]
        return (crop.flip(-1) if torch.rand(()) < 0.5 else crop), self.y[i]


def main(folder: Path, examples: int = 120, epochs: int = 4, width: int = 4, replays: int = 12) -> dict[str, float]:
    name = "cifar10" if os.environ.get("LEAVEOUT_DATA") else "digits"
    data = lo.data.load(name, n_train=examples, n_val=60)
    shape = (3, 32, 32) if name == "cifar10" else (1, 8, 8)
    train_set = Augmented(data.train.x.reshape(-1, *shape), data.train.y, margin=shape[-1] // 8)
    val_set = TensorDataset(data.val.x.reshape(-1, *shape), data.val.y)

    # 1. Train as always, with a recorder.
    torch.manual_seed(0)
    model, loss_fn = resnet18(shape[0], width), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(train_set, batch_size=40, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    with lo.Recorder(folder / "run", model, optimizer, overwrite=True) as recorder:
        for _ in range(epochs):
            for x, y in recorder.watch(loader):
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                schedule.step()
    run = lo.open_run(folder / "run")
    print(f"ResNet-18 of width {width}, {examples} images of {name}, {len(run)} steps")

    # 2. Score every image, and compare a sample of the scores with exact replays.
    task = lo.Task(model, loss_fn, train_set, statistics="leave")
    # SGD-IE costs one product per step. ACC() would take one gradient per image and step here: BatchNorm ties an
    # image's gradient to the rest of its batch.
    scores = lo.SGDIE().score(run, task, val_set)
    print(f"{scores.method}: {scores.cost.hvps} Hessian-vector products, {scores.cost.gradients} gradients")
    for i in scores.helpful(3) + scores.harmful(3):
        print(f"  image {i:3}, class {int(data.train.y[i])}: {float(scores.mean()[i]):+.5f}")
    check = lo.verify(scores, run, task, val_set, replays=replays)
    print(check)

    side = shape[-1]
    show = lo.Show(example=lambda example: example[0].reshape(-1, side, side)[0], title=f"{name}, ResNet-18")
    shown = {"task": task, "query": val_set, "show": show}
    print("the report:", lo.report(folder / "report.html", run, scores, check, **shown, overwrite=True))
    return {"tau": check.extreme.kendall.value, "steps": len(run)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="leaveout-")))
