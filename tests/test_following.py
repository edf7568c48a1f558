"""States that are kept as gradients are those of the training, bit for bit, whatever the loop does to gradients."""

import itertools
import random

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from leaveout._util.files import checksum
from leaveout._util.tensor_files import write_tensors_checked
from leaveout._util.trees import PARAM
from leaveout.run import gradient_states
from leaveout.run.gradient_states import EVERY
from leaveout.run.kept_states import WHOLE, whole

TURNS = itertools.count()

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),  # rounds in its own way
}


def no_gradients(optimizer, _model):
    optimizer.zero_grad()


def zeros(optimizer, _model):
    optimizer.zero_grad(set_to_none=False)


def zeros_behind_the_count(_optimizer, model):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.zero_()


def halves(_optimizer, model):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def sometimes_zeros(optimizer, _model):
    optimizer.zero_grad(set_to_none=next(TURNS) % 3 > 0)


def trained(path, make, begin=no_gradients, steps=30, stop=None, **options):
    """An ordinary loop with BatchNorm and clipping; with it, copies of everything after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(model.parameters())
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(60, 6, generator=draw), torch.randint(3, (60,), generator=draw))
    loader = DataLoader(data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(1))
    states = []
    with lo.Recorder(path, model, optimizer, keep="all", **options) as recorder:
        loader = recorder.watch(loader)
        while recorder.done < steps:
            for x, y in loader:
                begin(optimizer, model)
                nn.functional.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if stop == recorder.done:
                    raise KeyboardInterrupt
                optimizer.step()
                states.append(
                    {n: t.detach().clone().float() for n, t in model.state_dict().items()}
                    | {
                        f"{slot} {i}": t.detach().clone()
                        for i, held in optimizer.state_dict()["state"].items()
                        for slot, t in held.items()
                        if slot != "step" and t is not None
                    }
                )
        return recorder.finish(), states


def same(run, states, index):
    """Whether the run has the state after step ``index`` to the last bit."""
    state, live = run.state(index + 1), states[index]
    for name, tensor in state[PARAM].items():
        assert torch.equal(tensor, live[name]), (index, name)
    for slot in run.rule.slots[1:]:
        for place, name in enumerate(run.rule.groups):
            key = f"{slot} {place}"
            assert torch.equal(state[slot][name], live.get(key, torch.zeros_like(state[slot][name]))), (index, slot)


def whole_states(run):
    return [i for number in range(len(run.manifest.shards)) for i in whole(run._shard(number)).tolist()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_state_is_there_to_the_last_bit_in_any_order(tmp_path, name):
    run, states = trained(tmp_path / "run", OPTIMIZERS[name])
    assert run.kept == list(range(31))
    order = [*range(30), *reversed(range(30)), *random.Random(0).sample(range(30), 30)]
    for index in order:
        same(run, states, index)
    few = len(whole_states(run)) < 10
    assert few == (name != "Adagrad, fused"), "only what follows bit for bit may be left out"


def test_states_that_are_too_large_to_keep_are_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_states, "CACHE", 0)
    run, states = trained(tmp_path / "run", OPTIMIZERS["AdamW"])
    for index in [*range(30), *reversed(range(30)), *random.Random(0).sample(range(30), 30)]:
        same(run, states, index)
        assert len(run._recomputed._states) <= 2


@pytest.mark.parametrize("begin", [zeros, zeros_behind_the_count, halves, sometimes_zeros])
def test_gradients_that_are_written_to_do_not_reach_the_record(tmp_path, begin):
    run, states = trained(tmp_path / "run", OPTIMIZERS["AdamW"], begin)
    for index in range(30):
        same(run, states, index)
    assert WHOLE in run._shard(0)
    assert len(whole_states(run)) < 12  # copies from the second time on


def test_a_state_that_its_caller_changes_stays_as_it_was_in_the_run(tmp_path):
    run, states = trained(tmp_path / "run", OPTIMIZERS["AdamW"])
    for index in (10, 11, 12, 11, 10):
        given = run.state(index + 1)
        for params in given.values():
            for tensor in params.values():
                tensor.zero_()
        same(run, states, index)


def test_the_last_state_is_whole_and_there_are_few_others(tmp_path):
    run, _ = trained(tmp_path / "run", OPTIMIZERS["AdamW"], steps=30)
    known = whole_states(run)
    assert known[-1] == 30
    assert max(b - a for a, b in itertools.pairwise(known)) <= EVERY
    size = sum(tensor.numel() for params in run.final().values() for tensor in params.values())
    kept = sum(t.numel() for s in range(len(run.manifest.shards)) for k, t in run._shard(s).items() if "/" in k)
    assert kept < 30 * size * 0.6


@pytest.mark.parametrize("begin", [no_gradients, zeros])
@pytest.mark.parametrize("stop", [3, 13, 24])
def test_a_run_that_is_cut_short_goes_on_to_the_same_bits(tmp_path, begin, stop):
    _, states = trained(tmp_path / "undisturbed", OPTIMIZERS["AdamW"], begin)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", OPTIMIZERS["AdamW"], begin, stop=stop)
    assert len(lo.open_run(tmp_path / "run", partial=True)) == stop
    run, _ = trained(tmp_path / "run", OPTIMIZERS["AdamW"], begin, resume=True)
    for index in range(30):
        same(run, states, index)


def test_a_model_that_is_overwritten_before_the_end_has_its_last_state_all_the_same(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer, keep="all")
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        recorder.step([0, 1])
        optimizer.step()
    last = model.weight.detach().clone()
    optimizer.zero_grad()
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(recorder.finish().final()[PARAM]["weight"], last)


def test_a_file_is_written_as_the_format_says_and_its_checksum_is_that_of_the_file(tmp_path):
    tensors = {
        "a": torch.randn(3, 4).T,
        "rows": [torch.randn(2, 3), torch.randn(3, 2).T, torch.zeros(2, 3)],
        "b": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
        "number": torch.tensor(3),
        "half": torch.randn(5).bfloat16(),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    crc = write_tensors_checked(tmp_path / "file", tensors)
    assert crc == checksum(tmp_path / "file")
    read = load_file(tmp_path / "file")
    expected = {n: torch.stack(t) if isinstance(t, list) else t for n, t in tensors.items()}
    assert set(read) == set(expected)
    assert all(torch.equal(read[name], expected[name]) for name in read)
