"""The pure optimizer steps follow torch.optim to the last bit, alone and in a stack."""

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from leaveout._util.trees import PARAM, State, expand
from leaveout.errors import UnsupportedError
from leaveout.optim import HyperReader, Rule, buffers, optimizers, registry, rule_of, unwrapped
from optimizer_cases import CASES, make_of
from refusal import refused

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, rule: Rule) -> State:
    """What torch holds, with zeros where a buffer does not exist yet."""
    state: State = {slot: {} for slot in rule.slots}
    for name, param in model.named_parameters():
        if param.requires_grad:
            for slot, tensor in {PARAM: param, **buffers(optimizer, rule, param)}.items():
                state[slot][name] = tensor.detach().clone()
    return state


def follow(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler, steps: int = 100) -> tuple:
    """Both states after as many steps of the same gradients, ours never corrected by torch's."""
    rule = rule_of(optimizer, model)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    state = state_of(model, optimizer, rule)
    draw = torch.Generator().manual_seed(1)
    dtype = next(iter(params.values())).dtype
    for _ in range(steps):
        x, y = torch.randn(6, 5, generator=draw, dtype=dtype), torch.randint(3, (6,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        gradient = {name: param.grad.clone() for name, param in params.items()}
        state = rule.step(state, gradient, HyperReader(optimizer, rule, params).next().hypers)
        optimizer.step()
        schedule.step()
    return state, state_of(model, optimizer, rule)


def assert_same(ours: State, theirs: State) -> None:
    for slot, params in theirs.items():
        for name, tensor in params.items():
            assert torch.equal(ours[slot][name], tensor), f"{slot} of {name}: {ours[slot][name]} is not {tensor}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_scheduled_steps_of_two_groups_are_torchs_own(case: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = make_of(case)(model)
    ours, theirs = follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t))
    assert_same(ours, theirs)
    pairs = [(p, q) for p, q in zip(start, model.parameters(), strict=True) if q.requires_grad]
    assert all((p - q).norm() > 1e-3 for p, q in pairs), "nothing was trained"


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith(", plain")])
def test_a_learning_rate_that_is_a_tensor_is_rounded_as_torch_rounds_it(case: str) -> None:
    for dtype, given in ((torch.float64, torch.tensor(0.02)), (torch.float32, torch.tensor(0.02))):
        model = network(dtype)
        optimizer = make_of(case, lr=given)(model)
        ours, theirs = follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t))
        assert_same(ours, theirs)


def test_a_tensor_learning_rate_makes_another_run_than_its_number() -> None:
    ends = []
    for given in (torch.tensor(0.02), float(torch.tensor(0.02))):
        model = network(torch.float64)
        optimizer = ADAM(model.parameters(), lr=given)
        ends.append(follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t))[1][PARAM]["0.weight"])
    assert (ends[0] - ends[1]).abs().max() > 1e-10


@pytest.mark.parametrize("case", ["SGD, momentum", "Adam, plain", "AdamW, decay"])
def test_a_one_cycle_schedule_that_moves_momentum_too(case: str) -> None:
    model = network(torch.float32)
    optimizer = make_of(case)(model)
    ours, theirs = follow(model, optimizer, OneCycleLR(optimizer, max_lr=[0.05, 0.01], total_steps=101))
    assert_same(ours, theirs)


def test_momentum_that_a_schedule_takes_to_zero_and_back() -> None:
    model = network(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5)
    schedule = CyclicLR(optimizer, 0.01, 0.1, step_size_up=4, base_momentum=0.0, max_momentum=0.9)
    assert_same(*follow(model, optimizer, schedule, steps=40))


def _variants() -> list[tuple[str, str]]:
    """Each case with each of torch's faster implementations that its class takes."""
    flags = ("foreach", "fused")
    few = [case for case in CASES if case.split(", ")[1] in ("plain", "nesterov", "amsgrad", "maximize", "centered")]
    return [(case, flag) for case in few for flag in flags if flag in signature(CASES[case][0]).parameters]


@pytest.mark.parametrize(("case", "flag"), _variants())
def test_torchs_faster_implementations_differ_only_by_rounding(case: str, flag: str) -> None:
    model = network(torch.float64)
    optimizer = make_of(case, **{flag: True})(model)
    ours, theirs = follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t), steps=40)
    for slot, params in theirs.items():
        for parameter, tensor in params.items():
            torch.testing.assert_close(ours[slot][parameter], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["Adam, plain", "AdamW, decay", "SGD, momentum"])
def test_a_fused_step_with_a_tensor_learning_rate(case: str) -> None:
    model = network(torch.float64)
    optimizer = make_of(case, fused=True, lr=torch.tensor(0.02))(model)
    ours, theirs = follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t), steps=40)
    for slot, params in theirs.items():
        for parameter, tensor in params.items():
            torch.testing.assert_close(ours[slot][parameter], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("Adam,", "AdamW,"))])
def test_a_fused_step_is_taken_again_to_the_last_bit(case: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = make_of(case, fused=True)(model)
    rule, params = rule_of(optimizer, model), {n: p for n, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    for _ in range(4):
        before, hypers = state_of(model, optimizer, rule), HyperReader(optimizer, rule, params).next().hypers
        gradient = {name: torch.randn_like(param) for name, param in params.items()}
        for name, param in params.items():
            param.grad = gradient[name].clone()
        optimizer.step()
        assert_same(rule.repeat(before, gradient, hypers), state_of(model, optimizer, rule))


@pytest.mark.parametrize("case", CASES)
def test_a_stack_of_models_takes_the_steps_of_each(case: str) -> None:
    model = network(torch.float64)
    optimizer = make_of(case)(model)
    follow(model, optimizer, LambdaLR(optimizer, lambda t: 1.0), steps=3)
    rule, params = rule_of(optimizer, model), {n: p for n, p in model.named_parameters() if p.requires_grad}
    state, hypers = state_of(model, optimizer, rule), HyperReader(optimizer, rule, params).next().hypers
    torch.manual_seed(0)
    gradients = {parameter: torch.randn(4, *tensor.shape).double() for parameter, tensor in params.items()}
    together = rule.steps(expand(state, 4), gradients, hypers)
    copies = {slot: {n: t.clone() for n, t in tensors.items()} for slot, tensors in expand(state, 4).items()}
    used_up = rule.steps_(copies, {name: tensor.clone() for name, tensor in gradients.items()}, hypers)
    for row in range(4):
        alone = rule.step(state, {parameter: tensor[row] for parameter, tensor in gradients.items()}, hypers)
        for stack in (together, used_up):
            for slot, tensors in stack.items():
                for name, tensor in tensors.items():
                    torch.testing.assert_close(tensor[row], alone[slot][name], rtol=1e-14, atol=1e-15)


def test_adam_with_decoupled_weight_decay_is_adamw() -> None:
    model = network(torch.float32)
    optimizer = make_of("Adam, decoupled")(model)
    assert rule_of(optimizer, model).kind == "AdamW"
    assert_same(*follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t)))


def test_groups_with_and_without_an_option() -> None:
    model = network(torch.float32)
    groups = [{"params": model[0].parameters(), "amsgrad": True}, {"params": model[2].parameters(), "maximize": True}]
    optimizer = ADAM(groups, lr=0.02, betas=(0.5, 0.6))
    rule = rule_of(optimizer, model)
    assert rule.slots == (PARAM, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert rule.extras == ("amsgrad", "maximize")
    assert_same(*follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t)))


@pytest.mark.parametrize("case", CASES)
def test_the_rule_names_its_parameters_groups_and_slots(case: str) -> None:
    kind, options = CASES[case]
    model = network(torch.float32)
    model[0].bias.requires_grad_(False)
    optimizer = make_of(case)(model)
    rule = rule_of(optimizer, model)
    assert rule.kind == ("AdamW" if "decoupled" in case and kind is ADAM else kind.__name__)
    assert list(rule.groups) == [name for name, param in model.named_parameters() if param.requires_grad]
    follow(model, optimizer, LambdaLR(optimizer, lambda t: 1.0), steps=1)
    held = {
        key for state in optimizer.state.values() for key, value in state.items() if value is not None and value.ndim
    }
    assert set(rule.slots) == {PARAM, *held}
    assert rule.extras == tuple(name for name in ("amsgrad", "maximize") if options.get(name))


class Wrapper(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: one itself, with the real one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_wrappers_are_taken_off() -> None:
    model = network(torch.float32)
    optimizer = ADAMW(model.parameters())
    assert unwrapped(Wrapper(Wrapper(optimizer))) is optimizer
    assert unwrapped(optimizer) is optimizer
    assert rule_of(Wrapper(optimizer), model).kind == "AdamW"


def test_subclasses_with_torchs_step_are_the_same_optimizer_and_others_are_refused() -> None:
    class Same(torch.optim.RMSprop):
        pass

    class Other(ADAMW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

    model = network(torch.float32)
    assert rule_of(Same(model.parameters()), model).kind == "RMSprop"
    with refused(UnsupportedError, "optimizer-not-supported", "Other", "overrides the step of AdamW"):
        rule_of(Other(model.parameters()), model)


def test_another_optimizer_of_the_same_name_is_told_apart() -> None:
    other = type("Adafactor", (torch.optim.Optimizer,), {"__module__": "elsewhere.optimization"})
    model = nn.Linear(2, 1)
    with refused(UnsupportedError, "optimizer-not-supported", "elsewhere's Adafactor") as error:
        rule_of(other(model.parameters(), {}), model)
    assert "overrides" not in str(error.value)


def test_capturable_is_for_accelerators_as_torch_has_it() -> None:
    model = network(torch.float32)
    optimizer = ADAM(model.parameters(), capturable=True)
    assert rule_of(optimizer, model).kind == "Adam"
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(AssertionError, match="capturable"):
        optimizer.step()


CAPTURABLE = [
    case
    for case, (kind, _) in CASES.items()
    if "capturable" in signature(kind).parameters and case.split(", ")[1] in ("plain", "amsgrad", "decoupled")
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("case", CAPTURABLE)
def test_capturable_counters_are_rounded_as_tensors(case: str, foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic that torch has for accelerators, on a CPU; 1 − β₂ᵗ in float32 is off by 5e-5 at first."""
    module = import_module(torch.optim.Adam.__module__ if CASES[case][0] is ADAMW else CASES[case][0].__module__)
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    model = network(torch.float64)
    optimizer = make_of(case, capturable=True, foreach=foreach)(model)
    ours, theirs = follow(model, optimizer, LambdaLR(optimizer, lambda t: 0.98**t), steps=20)
    for slot, params in theirs.items():
        for parameter, tensor in params.items():
            torch.testing.assert_close(ours[slot][parameter], tensor, rtol=1e-6, atol=1e-7)


def test_every_file_that_names_an_optimizer_is_registered() -> None:
    files = Path(registry.__file__).parent.glob("*.py")
    assert len(optimizers()) == sum("\nOPTIMIZER = " in file.read_text() for file in files) >= 10
    for name, definition in optimizers().items():
        assert definition.name == name
        assert set(definition.counters) <= set(definition.hypers)
        assert "lr" in definition.hypers
        assert "weight_decay" in definition.hypers


def test_settings_that_change_between_steps_are_read_again():
    """Assigned anew, or changed in place where they are tensors or lists."""
    model = nn.Linear(2, 1)
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    reader = HyperReader(optimizer, rule_of(optimizer, model), params)

    def now(name: str) -> float:
        return reader.next().hypers[0][name]

    assert now("lr") == now("lr") == 0.1
    group["lr"] = 0.2
    assert now("lr") == 0.2
    group["betas"] = [0.5, 0.9]
    assert now("beta1") == 0.5
    group["betas"][0] = 0.6
    assert now("beta1") == 0.6

    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))
    reader = HyperReader(optimizer, rule_of(optimizer, model), params)
    assert now("lr") == 0.25
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert now("lr") == 0.5
