"""All of MNIST: all 50,000 images scored along 20 epochs, and what exact replays say about the scores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from experiments.bench.problems import folder, plain_training, seconds
from leaveout._util.files import write_text, write_whole
from leaveout._util.png import pixels, png
from leaveout.builtin import data, models
from leaveout.builtin.data import Examples, Noisy
from leaveout.compute.resources import Resources
from leaveout.estimators import ACC, SGDIE, score
from leaveout.evaluate.verify import verify
from leaveout.run.reader import open_run
from leaveout.run.train import train
from leaveout.scores import Scores
from leaveout.task.task import Task

SHEET = 40
EPOCHS = 20
SCORES = "acc.safetensors"
CHECKS = ("verify", "verify with moves")
"""The names, among the figures, of a check from the recorded start alone and of one with moved starts."""


def measure(
    n: int, flipped: float, replays: int, out: Path, work: Path | None = None, moves: int = 0, groups: bool = True
) -> dict[str, Any]:
    """Train, score and verify; write the most harmful images as one sheet, and the figures as JSON.

    With ``work``, the run, the scores and finished replays stay there, and the same call continues from them. With
    ``moves``, the images are also replayed from moved starts, and that check is stored next to the other one; with
    ``groups``, so are groups of growing size if single images have no reproducible effect.
    """
    work = work or folder()
    dataset = data.load("mnist", n_train=n, n_val=10_000)
    noisy = data.flip(dataset.train, flipped, seed=0)
    task = Task(models.build("mnist-cnn", seed=0), nn.CrossEntropyLoss(), noisy.examples)
    file = out / (f"mnist-{n}" + ("-flipped" if flipped else "") + ".json")
    if not (work / SCORES).exists() or not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        figures, acc = _scored(task, noisy, dataset.val, work)
        harmful = [row["id"] for row in figures["harmful"]]
        picture = png(pixels(sheet(noisy.examples, harmful).numpy(), side=4096))
        write_whole(file.with_suffix(".png"), lambda aside: aside.write_bytes(picture))
        write_text(file, json.dumps(figures, indent=1) + "\n")
        acc.save(work / SCORES, overwrite=True)
    figures, acc, run = json.loads(file.read_text()), Scores.load(work / SCORES), open_run(work / "run")
    resources = Resources(memory="6GB", work=work / "shards")
    check = verify(
        acc, run, task, dataset.val, replays=replays, moves=moves, groups=groups, budget=math.inf, resources=resources
    )
    figures[CHECKS[moves > 0]] = {
        "sentence": check.sentence,
        "seconds": check.cost.seconds,
        **({} if check.ceiling is None else {"ceiling": check.ceiling.to_json()}),
        "replays": check.table.reset_index().to_dict("records"),
    }
    write_text(file, json.dumps(figures, indent=1) + "\n")
    return figures


def _scored(task: Task, noisy: Noisy, val: Examples, work: Path) -> tuple[dict[str, Any], Scores]:
    """Train and score; return figures for both, and ACC's scores."""
    resources, there = Resources(memory="6GB"), (work / "run").exists()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05)
    recorded, run = seconds(
        lambda: train(task, optimizer, EPOCHS, 64, 0, work / "run", resume=there, resources=resources)
    )
    plain = plain_training(task, run, models.build("mnist-cnn", seed=0), nn.CrossEntropyLoss())
    sgdie, acc = score([SGDIE(), ACC()], run, task, val, resources=resources)
    harmful = [int(i) for i in acc.harmful(SHEET)]
    flipped = int(noisy.touched.sum())
    figures: dict[str, Any] = {
        "images": task.size,
        "flipped": flipped,
        "steps": len(run),
        "seconds": {
            "plain training": plain,
            "recorded training": None if there else recorded,  # only the rest of it was timed
            "SGD-IE and ACC": acc.cost.seconds,
        },
        "scoring / plain training": acc.cost.seconds / plain,
        "peak memory, GB": acc.cost.peak_memory / 1e9,
        "run on disk, GB": sum(file.stat().st_size for file in run.path.iterdir()) / 1e9,
        "harmful": [{"id": i, "label": int(noisy.examples.y[i]), "flipped": bool(noisy.touched[i])} for i in harmful],
    }
    for scores in (sgdie, acc):
        worst = [int(i) for i in scores.harmful(flipped)]
        figures[f"flipped found by {scores.method}"] = int(noisy.touched[worst].sum())
    return figures, acc


def sheet(examples: Examples, ids: list[int], columns: int = 10, zoom: int = 3) -> Float[Tensor, "height width"]:
    """Put images side by side, with a thin frame around each."""
    tiles = [torch.nn.functional.pad(examples.x[i, 0], (1, 1, 1, 1), value=0.5) for i in ids]
    rows = [torch.cat(tiles[start : start + columns], dim=1) for start in range(0, len(tiles), columns)]
    return torch.cat(rows).repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
