"""Hugging Face accelerate: a loop of one's own; what recording needs are the lines marked with ``<-``.

python examples/accelerate_loop.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo


def main(folder: Path, epochs: int = 5) -> lo.Scores:
    x, y = load_iris(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, val = (TensorDataset(torch.tensor(x[part]).float(), torch.tensor(y[part])) for part in order.split(100))
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(train, 10, shuffle=True))
    loss = nn.CrossEntropyLoss()

    recorder = lo.Recorder(folder / "run", model, optimizer)  # <-
    for _ in range(epochs):
        for inputs, targets in recorder.watch(loader):  # <-
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    run = recorder.finish()  # <-

    task = lo.Task(model, loss, train, clip_norm=1.0, accumulation=4)  # <-
    scores = lo.SGDIE().score(run, task, val)  # <-
    print(scores.top(5))
    return scores


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
