"""Random draws of a forward pass: noted once in eager mode, and replayed under any transform.

A forward pass is a function of parameters, inputs and draws ξ. From the generator's state before the pass (recorded;
5,056 bytes on a CPU) one eager pass draws the same ξ as training did, bit for bit. ``torch.func`` does not: from the
same state it silently draws other masks for permuted tensors. So ξ is noted in eager mode, and inside a transform it is
an *input* like the batch:

    draws = note(lambda: model(x), state)

    def loss(params, x, draws):
        with replay(draws):
            return criterion(functional_call(model, params, (x,)), y)

``grad``, ``vjp``, ``jvp`` and traces use it directly; ``vmap`` over models shares it (``in_dims=None``); ``vmap`` over
examples gives each example its part (``in_dims=0``, after ``example_draws.by_example``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from leaveout._util.generators import RandomState, is_same, random_state, set_random_state
from leaveout.errors import InputError, MismatchError, UnsupportedError
from leaveout.task.rewrites.drawn_layers import LAYERS
from leaveout.task.rewrites.function_mode import FunctionMode

Draws: TypeAlias = dict[str, Tensor]
"""Drawn values in order; each name is the draw's number and the operation that drew it, such as ``"0 bernoulli_"``."""

IN_PLACE = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
"""Methods that fill a tensor."""

NEW = ("bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like",
       "randn", "randn_like", "randperm")  # fmt: skip
"""Functions that return a new tensor."""


def has_randomness(function: Callable[[], Any], *devices: str | torch.device) -> bool:
    """Say whether a call draws random numbers; the generators are left as they were."""
    before = random_state(*devices)
    try:
        function()
        return not is_same(random_state(*devices), before)
    finally:
        set_random_state(before)


def note(function: Callable[[], Any], state: RandomState | None = None) -> Draws:
    """Call ``function()``, an eager forward pass, from this state of the generators, and return what it drew.

    Without a state it starts from the CPU generator's current one. The generators are left as they were. Bernoulli
    draws are kept as booleans. Draws from other generators than PyTorch's (``random``, numpy) are not noticed.

    >>> state = {"cpu": torch.Generator().manual_seed(0).get_state()}
    >>> note(lambda: torch.nn.functional.dropout(torch.ones(4), 0.5), state)
    {'0 bernoulli_': tensor([False, False,  True, False])}
    """
    before = random_state(*(state or ()))
    try:
        if state is not None:
            set_random_state(state)
        with _Noting(list(before)) as noting:
            function()
        noting.finish()
        return noting.draws
    finally:
        set_random_state(before)


@contextmanager
def replay(draws: Draws) -> Iterator[None]:
    """Replay these draws, in order, in the forward pass inside this context, under any transform.

    Raises a ``MismatchError`` if the pass asks for different, more or fewer draws than were noted, or draws itself.
    """
    mode = _Handing(draws)
    devices = {str(value.device) for value in draws.values()}
    with _outside():
        before = random_state(*devices)
    with mode:
        yield
    mode.finish()
    with _outside():
        untouched = is_same(random_state(*devices), before)
    if not untouched:
        raise MismatchError(
            "A random draw went past those that were noted: the forward pass calls an operation that draws numbers in "
            "a way that cannot be replayed.",
            code="draw-not-replayed",
        )


class _Noting(TorchDispatchMode):
    """Notes the values of every operation that PyTorch tags as random, below autograd."""

    def __init__(self, devices: Sequence[str]) -> None:
        super().__init__()
        self.draws: Draws = {}
        self._devices = devices
        self._state = random_state(*devices)

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        self._check_state()
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        _check_generator(name, (*args, *kwargs.values()))
        values = _values(name, result, args)
        if values is not None:
            if str(values.device) not in self._devices:
                raise InputError(
                    f"The forward pass draws on {values.device}: give the state of its generator as well, which is "
                    f"random_state({str(values.device)!r}) before the pass.",
                    code="generator-state-missing",
                )
            self.draws[f"{len(self.draws)} {name}"] = values
            self._state = random_state(*self._devices)
        elif not is_same(random_state(*self._devices), self._state):
            raise UnsupportedError(_unknown(name), code="draw-not-known")
        return result

    def finish(self) -> None:
        self._check_state()

    def _check_state(self) -> None:
        if not is_same(random_state(*self._devices), self._state):
            raise UnsupportedError(
                "The forward pass draws random numbers by an operation that does not say so (a custom kernel?): "
                "write it with PyTorch's random functions, or set it to evaluation mode.",
                code="draw-not-declared",
            )


def _values(name: str, result: Any, args: tuple) -> Tensor | None:
    """Return what an operation drew; None if it drew nothing, or if what it drew is not known."""
    if name.startswith("bernoulli"):
        return result.detach().bool()
    if name in IN_PLACE or name in NEW:
        return result.detach().clone()
    if name == "native_dropout" and args[2] is not False:
        return result[1].detach().bool()
    if name.startswith("rrelu_with_noise") and len(args) > 4 and args[4]:
        # A slope was drawn where the input was not positive. If leaving an example out makes another input negative,
        # its slope is that of evaluation mode.
        noise, lower, upper = args[1], args[2], args[3]
        return torch.where(noise == 1, (lower + upper) / 2, noise)
    return None


def _check_generator(name: str, given: tuple) -> None:
    if any(isinstance(each, torch.Generator) and each is not torch.default_generator for each in given):
        raise UnsupportedError(
            f"The forward pass draws by {name} from a generator of its own, whose state is not recorded: "
            "leave out generator= in the model, and seed with torch.manual_seed.",
            code="draw-from-private-generator",
        )


def _unknown(name: str) -> str:
    remedy = "use bernoulli, rand, randn, normal and the like instead, or set it to evaluation mode"
    if "attention" in name:
        remedy = "train within torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or set its dropout to 0"
    elif "rnn" in name or "lstm" in name or "cudnn" in name:
        remedy = "train within torch.backends.cudnn.flags(enabled=False), or set its dropout to 0"
    return f"The forward pass draws random numbers inside {name}, where they cannot be read: {remedy}."


class _Handing(FunctionMode):
    """Makes every function that draws return the noted draws."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._names = list(draws)
        self._taken = 0
        handlers: dict[Any, Callable] = {function: _bound(layer, self._take) for function, layer in LAYERS.items()}
        for name in (*IN_PLACE, *NEW):
            fill = self._filled if name in IN_PLACE else self._new
            for owner in (torch, torch.Tensor):
                if hasattr(owner, name):
                    handlers[getattr(owner, name)] = _bound(fill, name)
        if draws:
            handlers[torch.empty] = self._empty
        super().__init__(handlers)

    def finish(self) -> None:
        if self._taken < len(self._names):
            raise MismatchError(
                f"The forward pass took another path than the one that was noted: {self._taken} random draws instead "
                f"of {len(self._names)}.",
                code="draws-too-few-taken",
            )

    def _take(self, kinds: Sequence[str], shape: Sequence[int]) -> Tensor:
        """Return the next draw, if it is of one of these kinds and of this shape."""
        wanted = f"{kinds[0]} of shape {list(shape)}"
        if self._taken == len(self._names):
            raise MismatchError(
                f"The forward pass took another path than the one that was noted: after all of its {len(self._names)} "
                f"random draws it asks for {wanted}.",
                code="draws-too-many-asked",
            )
        name = self._names[self._taken]
        value = self._draws[name]
        if name.split()[1] not in kinds or value.shape != tuple(shape):
            raise MismatchError(
                f"The forward pass took another path than the one that was noted: it asks for {wanted} where random "
                f"draw {name} of shape {list(value.shape)} was taken.",
                code="draws-of-other-kind",
            )
        self._taken += 1
        return value

    def _filled(self, name: str, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        value = self._take([name], tensor.shape)
        try:
            return tensor.copy_(value)
        except RuntimeError as error:
            raise UnsupportedError(
                f"The forward pass draws by {name} into a tensor that all examples share, where each example has "
                f"draws of its own: draw into torch.empty(...) or torch.empty_like(...) instead. ({error})",
                code="draw-into-shared-tensor",
            ) from None

    def _new(self, name: str, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        if out is not None:
            raise UnsupportedError(
                f"The forward pass draws by torch.{name}(out=...): leave out= out.", code="draw-into-out"
            )
        value = self._take([name], _size(name, args, kwargs))
        return value.to(args[0].dtype, copy=True) if name == "bernoulli" else value.clone()

    def _empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """Do what ``torch.empty`` does, with room for every example's draw if draws differ by example."""
        if not kwargs.keys() <= {"size", "dtype", "device"}:
            return torch.empty(*args, **kwargs)
        size = _size("rand", args, kwargs)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        device = kwargs.get("device") or torch.get_default_device()
        return self._draws[self._names[0]].new_empty(size, dtype=dtype, device=device)


def _size(name: str, args: tuple, kwargs: dict[str, Any]) -> Sequence[int]:
    """Return the shape of the result of a function that draws a new tensor."""
    if "size" in kwargs:
        return kwargs["size"]
    if name in ("rand", "randn"):
        return args[0] if isinstance(args[0], Sequence) else args
    if name == "randint":
        return args[-1]
    if name == "randperm":
        return (args[0] if args else kwargs["n"],)
    shapes = [each.shape for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if name == "multinomial":
        return (*shapes[0][:-1], args[1] if len(args) > 1 else kwargs["num_samples"])
    if name == "normal":
        return torch.broadcast_shapes(*shapes) if shapes else args[2]
    return shapes[0]


def _bound(function: Callable, first: Any) -> Callable:
    return lambda *args, **kwargs: function(first, *args, **kwargs)


@contextmanager
def _outside() -> Iterator[None]:
    """Step out of the caller's transform or trace: a generator's state is not part of it."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield
