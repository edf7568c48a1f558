"""The pure optimizer steps follow torch.optim to the last bit, alone and in a stack."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from leaveout._util.trees import PARAM, State, expand
from leaveout.optim import Rule, hypers_of, rule_of

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "plain": (SGD, {}),
    "decay": (SGD, {"weight_decay": 0.1}),
    "momentum": (SGD, {"momentum": 0.9}),
    "dampening": (SGD, {"momentum": 0.8, "dampening": 0.3}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (ADAM, {}),
    "adam, betas and eps": (ADAM, {"betas": (0.5, 0.7), "eps": 1e-3}),
    "adam, decay": (ADAM, {"weight_decay": 0.1}),
    "adamw": (ADAMW, {}),
    "adamw, decay": (ADAMW, {"weight_decay": 0.3}),
}


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def two_groups(model: nn.Sequential, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """The first layer by the given options, the second with a learning rate and a weight decay of its own."""
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.003, "weight_decay": 0.05}]
    return kind(groups, lr=0.02, **options)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, rule: Rule) -> State:
    """What torch holds, with zeros where a buffer does not exist yet."""

    def held(param: Tensor, slot: str) -> Tensor:
        buffer = param if slot == PARAM else optimizer.state.get(param, {}).get(slot)
        return torch.zeros_like(param) if buffer is None else buffer.detach().clone()

    return {slot: {name: held(param, slot) for name, param in model.named_parameters()} for slot in rule.slots}


def follow(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler, steps: int = 100) -> tuple:
    """Both states after as many steps of the same gradients, ours never corrected by torch's."""
    rule = rule_of(optimizer, model)
    params = dict(model.named_parameters())
    state = state_of(model, optimizer, rule)
    draw = torch.Generator().manual_seed(1)
    dtype = next(iter(params.values())).dtype
    for _ in range(steps):
        x, y = torch.randn(6, 5, generator=draw, dtype=dtype), torch.randint(3, (6,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        gradient = {name: param.grad.clone() for name, param in params.items()}
        state = rule.step(state, gradient, hypers_of(optimizer, rule, params))
        optimizer.step()
        schedule.step()
    return state, state_of(model, optimizer, rule)


def assert_same(ours: State, theirs: State) -> None:
    for slot, params in theirs.items():
        for name, tensor in params.items():
            assert torch.equal(ours[slot][name], tensor), f"{slot} of {name}: {ours[slot][name]} is not {tensor}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_scheduled_steps_of_two_groups_are_torchs_own(name: str, dtype: torch.dtype) -> None:
    kind, options = OPTIMIZERS[name]
    model = network(dtype)
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = two_groups(model, kind, **options)
    ours, theirs = follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t))
    assert_same(ours, theirs)
    assert all((p - q).norm() > 1e-3 for p, q in zip(start, model.parameters(), strict=True)), "nothing was trained"


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw, decay"])
def test_a_one_cycle_schedule_that_moves_momentum_too(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    model = network(torch.float32)
    optimizer = two_groups(model, kind, **options)
    ours, theirs = follow(model, optimizer, OneCycleLR(optimizer, max_lr=[0.05, 0.01], total_steps=101))
    assert_same(ours, theirs)


def test_momentum_that_a_schedule_takes_to_zero_and_back() -> None:
    model = network(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5)
    schedule = CyclicLR(optimizer, 0.01, 0.1, step_size_up=4, base_momentum=0.0, max_momentum=0.9)
    assert_same(*follow(model, optimizer, schedule, steps=40))


@pytest.mark.parametrize("variant", ["foreach", "fused"])
@pytest.mark.parametrize("name", ["momentum", "adam", "adamw, decay"])
def test_torchs_faster_implementations_differ_only_by_rounding(name: str, variant: str) -> None:
    kind, options = OPTIMIZERS[name]
    model = network(torch.float64)
    optimizer = two_groups(model, kind, **options, **{variant: True})
    ours, theirs = follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t))
    for slot, params in theirs.items():
        for parameter, tensor in params.items():
            torch.testing.assert_close(ours[slot][parameter], tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumed_from_its_state_goes_on_as_torch_does(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    model = network(torch.float32)
    first = two_groups(model, kind, **options)
    follow(model, first, LambdaLR(first, lambda t: 1.0), steps=7)
    second = two_groups(model, kind, **options)
    second.load_state_dict(first.state_dict())
    assert_same(*follow(model, second, LambdaLR(second, lambda t: 0.9**t), steps=20))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_of_models_takes_the_steps_of_each(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    model = network(torch.float32)
    optimizer = two_groups(model, kind, **options)
    follow(model, optimizer, LambdaLR(optimizer, lambda t: 1.0), steps=3)
    rule, params = rule_of(optimizer, model), dict(model.named_parameters())
    state, hypers = state_of(model, optimizer, rule), hypers_of(optimizer, rule, params)
    torch.manual_seed(0)
    gradients = {parameter: torch.randn(4, *tensor.shape) for parameter, tensor in params.items()}
    together = rule.steps(expand(state, 4), gradients, hypers)
    for row in range(4):
        alone = rule.step(state, {parameter: tensor[row] for parameter, tensor in gradients.items()}, hypers)
        assert_same({slot: {n: t[row] for n, t in tensors.items()} for slot, tensors in together.items()}, alone)


def test_adam_with_decoupled_weight_decay_is_adamw() -> None:
    model = network(torch.float32)
    optimizer = two_groups(model, ADAM, weight_decay=0.3, decoupled_weight_decay=True)
    assert_same(*follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rule_names_its_parameters_groups_and_slots(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    model = network(torch.float32)
    model[0].bias.requires_grad_(False)
    rule = rule_of(two_groups(model, kind, **options), model)
    assert rule.kind == kind.__name__
    assert rule.groups == {"0.weight": 0, "2.weight": 1, "2.bias": 1}
    buffers = {SGD: ("momentum_buffer",) if options.get("momentum") else (), ADAM: ("exp_avg", "exp_avg_sq")}
    assert rule.slots == (PARAM, *buffers.get(kind, ("exp_avg", "exp_avg_sq")))
