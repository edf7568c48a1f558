"""Lightning: which rows of a table made a network what it is? What recording needs are the lines marked with ``<-``.

python examples/lightning_trainer.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_iris
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from leaveout.integrations.lightning import RecorderCallback  # <-


class Flowers(lightning.LightningModule):
    """A small network for Fisher's irises."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        """Return the mean loss of a batch."""
        x, y = batch
        loss = F.cross_entropy(self.body(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with AdamW."""
        return torch.optim.AdamW(self.parameters(), 0.01)


def main(folder: Path, epochs: int = 5) -> lo.Scores:
    x, y = load_iris(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    data = [TensorDataset(torch.tensor(x[part]).float(), torch.tensor(y[part])) for part in order.split(100)]
    lightning.seed_everything(0, verbose=False)
    recorder = RecorderCallback(folder / "run")  # <-
    trainer = lightning.Trainer(
        max_epochs=epochs, gradient_clip_val=1.0, accumulate_grad_batches=2, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(Flowers(), DataLoader(data[0], 10, shuffle=True))

    scores = lo.SGDIE().score(recorder.run, recorder.task(), data[1])  # <-
    print(scores.top(5))
    return scores


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
