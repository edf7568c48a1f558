"""Packed sequences: PyTorch's own packing, and scores of an LSTM over them compared with plain training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import leaveout as lo
from leaveout.task.rewrites.packing import packed, unpacked


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("total", [-1, 7])
def test_packing_is_pytorchs(batch_first: bool, total: int) -> None:
    lengths = torch.tensor([5, 3, 3, 1])
    x = torch.randn(4, 5, 2) if batch_first else torch.randn(5, 4, 2)
    own, theirs = packed(x, lengths, batch_first), torch._pack_padded_sequence(x, lengths, batch_first)
    assert all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
    own, theirs = (f(*theirs, batch_first, -1.5, total) for f in (unpacked, torch._pad_packed_sequence))
    assert all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True))


class Reader(nn.Module):
    """An LSTM with dropout over packed words, read at the last word and at the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.word = nn.Embedding(9, 3)
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 2)
        self.double()

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        sequence = pack_padded_sequence(self.word(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(sequence)[0], batch_first=True)
        return self.head(out.sum(1) / lengths[:, None])


def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    words = [words for words, _ in pairs]
    lengths = torch.tensor([len(one) for one in words])
    return pad_sequence(words, batch_first=True), lengths, torch.stack([label for _, label in pairs])


def texts(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    order = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (count,), generator=order).tolist()
    return [(torch.randint(9, (n,), generator=order), torch.randint(2, (), generator=order)) for n in lengths]


def trained(model: nn.Module, train_set: list, record=None, out: int = -1, weight: float = 0.0) -> nn.Module:
    """Train two epochs, with one example's weight at another value than 1."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
    generator = torch.Generator().manual_seed(4)
    torch.manual_seed(5)
    watch = record(model, optimizer).watch if record else lambda loader: loader
    # The same ids again, to know whose loss to weigh.
    numbered = [(*one, torch.tensor(i)) for i, one in enumerate(train_set)]

    def with_ids(pairs: list) -> tuple[Tensor, ...]:
        return *collate([one[:2] for one in pairs]), torch.stack([number for *_, number in pairs])

    data, join = (train_set, collate) if record else (numbered, with_ids)
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=generator, collate_fn=join)
    for _ in range(2):
        for words, lengths, y, *ids in watch(loader):
            optimizer.zero_grad()
            losses = F.cross_entropy(model(words, lengths), y, reduction="none")
            if ids:
                losses = losses * (1 + (weight - 1) * (ids[0] == out).double())
            losses.mean().backward()
            optimizer.step()
    return model


def test_an_lstm_over_packed_sequences_is_scored_as_plain_training_says(tmp_path) -> None:
    train_set, query = texts(12, 0), texts(5, 1)
    recorders = []

    def record(model, optimizer):
        recorders.append(lo.Recorder(tmp_path / "run", model, optimizer))
        return recorders[-1]

    model = trained(Reader(), train_set, record)
    run = recorders[0].finish()
    task = lo.Task(model, nn.CrossEntropyLoss(), train_set, collate=collate)

    def loss(out: int = -1, weight: float = 0.0) -> float:
        model = trained(Reader(), train_set, None, out, weight).eval()
        words, lengths, y = collate(query)
        return float(F.cross_entropy(model(words, lengths), y).detach())

    assert torch.equal(model.head.weight, trained(Reader(), train_set).head.weight)
    ids = [0, 7]
    truth = [loss(k) - loss() for k in ids]
    assert lo.Replay().score(run, task, query, ids=ids).values.flatten().tolist() == pytest.approx(truth, rel=1e-9)
    sgdie = lo.SGDIE().score(run, task, query, ids=ids).values.flatten().tolist()
    h = 1e-5
    slopes = [-(loss(k, 1 + h) - loss(k, 1 - h)) / (2 * h) for k in ids]
    assert sgdie == pytest.approx(slopes, rel=1e-6)
    forward = lo.SGDIE(direction="forward").score(run, task, query, ids=ids).values.flatten().tolist()
    assert forward == pytest.approx(sgdie, rel=1e-9)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 1, 3)])
def test_draws_are_those_of_training_in_float32(lengths: tuple[int, ...], tmp_path) -> None:
    """PyTorch computes packed sequences of equal lengths as a padded batch, with draws of another shape."""
    order = torch.Generator().manual_seed(0)
    train_set = [(torch.randint(9, (n,), generator=order), torch.tensor(n % 2)) for n in lengths]
    recorders = []

    def record(model, optimizer):
        recorders.append(lo.Recorder(tmp_path / "run", model, optimizer))
        return recorders[-1]

    model = trained(Reader().float(), train_set, record)
    run = recorders[0].finish()
    task = lo.Task(model, nn.CrossEntropyLoss(), train_set, collate=collate)
    assert lo.ACC().resolved(run, task).transport == "jump"
    for method in (lo.TracIn(), lo.ACC()):  # each step is compared with the recorded one
        assert method.score(run, task, train_set).values.abs().max() > 0
