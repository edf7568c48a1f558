"""Attention masks that transformers leaves out of some batches: derivatives and replays against a plain loop."""

import copy

import pytest
import torch
from torch import nn

import leaveout as lo

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 2, 4, 6]]
"""The first has no padding, so that training leaves its mask out."""


class Texts(torch.utils.data.Dataset):
    def __init__(self) -> None:
        order = torch.Generator().manual_seed(0)
        words = torch.randint(3, 20, (8, 6), generator=order)
        mask = torch.ones_like(words)
        mask[4:, 4:] = 0
        mask[6] = 0  # an empty text
        self.columns = {"input_ids": words * mask, "attention_mask": mask, "labels": torch.arange(8) % 2}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {name: column[place] for name, column in self.columns.items()}


def trained(model: nn.Module, weights: torch.Tensor, recorder=None) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if recorder is None else recorder[1]
    columns = Texts().columns
    for ids in BATCHES:
        optimizer.zero_grad()
        batch = {name: column[ids] for name, column in columns.items()}
        if recorder:
            recorder[0].step(ids, batch)
        outputs = model(batch["input_ids"], batch["attention_mask"]).logits
        losses = nn.functional.cross_entropy(outputs, batch["labels"], reduction="none")
        (weights[ids] * losses).mean().backward()
        optimizer.step()
    return model


def called(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"]


def queried(model: nn.Module) -> float:
    columns = Texts().columns
    with torch.no_grad():
        outputs = model(columns["input_ids"], columns["attention_mask"]).logits
        return float(nn.functional.cross_entropy(outputs, columns["labels"]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_that_hide_nothing_do_not_stop_transforms(tmp_path, attention):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, attn_implementation=attention, **sizes)
    model = transformers.BertForSequenceClassification(config).double().eval()
    start, asked = copy.deepcopy(model), masking_utils.is_tracing
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    trained(model, torch.ones(8), (recorder, optimizer))
    run = recorder.finish()
    task = lo.Task(model, nn.CrossEntropyLoss(), Texts(), forward=called)
    assert task.objective.abilities.vmap
    removed, slopes = [], []
    for k in range(8):
        ends = []
        for weight in (0.0, 1 + 1e-4, 1 - 1e-4):
            weights = torch.ones(8, dtype=torch.float64)
            weights[k] = weight
            ends.append(queried(trained(copy.deepcopy(start), weights)))
        removed.append(ends[0] - queried(model))
        slopes.append((ends[2] - ends[1]) / 2e-4)
    replayed, scores = (one.score(run, task, Texts()).values[:, 0].double() for one in (lo.Replay(), lo.SGDIE()))
    assert torch.allclose(replayed, torch.tensor(removed, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    assert torch.allclose(scores, torch.tensor(slopes, dtype=torch.float64), rtol=1e-4, atol=1e-8)
    assert masking_utils.is_tracing is asked
