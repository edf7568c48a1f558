"""All of MNIST: every one of 50,000 images scored along 20 epochs, and what exact replays say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leaveout import data, models
from leaveout.bench.problems import folder, plain_training, seconds
from leaveout.data import Examples
from leaveout.estimators import ACC, SGDIE, score
from leaveout.pictures import pixels, png
from leaveout.resources import Resources
from leaveout.task import Task
from leaveout.train import train
from leaveout.verify import verify

SHEET = 40


def measure(n: int, flipped: float, replays: int, out: Path, *, epochs: int = 20) -> dict[str, Any]:
    """Trains, scores and verifies; writes the most harmful images as one sheet, and the figures as JSON."""
    found = data.load("mnist", n_train=n, n_val=10_000)
    noisy = data.flip(found.train, flipped, seed=0)
    model = models.build("mnist-cnn", seed=0)
    task = Task(model, nn.CrossEntropyLoss(), noisy.examples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    resources = Resources(memory="6GB")
    recorded, run = seconds(lambda: train(task, optimizer, epochs, 64, 0, folder(), resources=resources))
    plain = plain_training(task, run, models.build("mnist-cnn", seed=0), nn.CrossEntropyLoss())
    sgdie, acc = score([SGDIE(), ACC()], run, task, found.val, resources=resources)
    harmful = [int(i) for i in acc.harmful(SHEET)]
    name = f"mnist-{n}" + ("-flipped" if flipped else "")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.png").write_bytes(png(pixels(sheet(noisy.examples, harmful).numpy(), side=4096)))
    told: dict[str, Any] = {
        "images": n,
        "flipped": int(noisy.touched.sum()),
        "steps": len(run),
        "seconds": {"plain training": plain, "recorded training": recorded, "SGD-IE and ACC": acc.cost.seconds},
        "scoring / plain training": acc.cost.seconds / plain,
        "peak memory, GB": acc.cost.peak_memory / 1e9,
        "run on disk, GB": sum(file.stat().st_size for file in run.path.iterdir()) / 1e9,
        "harmful": [{"id": i, "label": int(noisy.examples.y[i]), "flipped": bool(noisy.touched[i])} for i in harmful],
    }
    for scores in (sgdie, acc):
        worst = [int(i) for i in scores.harmful(int(noisy.touched.sum()))]
        told[f"flipped found by {scores.method}"] = int(noisy.touched[worst].sum())
    write_json(out / f"{name}.json", told)
    check = verify(acc, run, task, found.val, replays=replays, resources=resources)
    told["verify"] = {
        "sentence": check.sentence,
        "seconds": check.cost.seconds,
        "replays": check.table.reset_index().to_dict("records"),
    }
    write_json(out / f"{name}.json", told)
    return told


def sheet(examples: Examples, ids: list[int], columns: int = 10, zoom: int = 3) -> Float[Tensor, "height width"]:
    """Images side by side, with a thin frame around each."""
    tiles = [torch.nn.functional.pad(examples.x[i, 0], (1, 1, 1, 1), value=0.5) for i in ids]
    rows = [torch.cat(tiles[start : start + columns], dim=1) for start in range(0, len(tiles), columns)]
    return torch.cat(rows).repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """The figures, for the page that shows them."""
    file.write_text(json.dumps(content, indent=1) + "\n")
