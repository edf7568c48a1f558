"""Why a recorded step does not follow: the gradient that training used, compared with the recomputed one.

Most optimizers have a slot that is affine in the gradient, ``O(s, g)_b = O(s, 0)_b + a·g``: Adam's m, a momentum
buffer, the parameters under plain SGD. The gradient that was used can be read off it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from leaveout._util.trees import PARAM, Params, State, distance, each, norm
from leaveout.optim import IDLE, STILL, Hyper, Rule
from leaveout.run.seen import GIVEN, causes
from leaveout.trajectory.recorded_step import RecordedStep

CLIPS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Norms at which gradients are often clipped."""

REMEDY = (
    "Give the Task what the loop did: the loss, l2 and model that were trained; penalty= where something was added to "
    "the loss; clip_norm= or clip_value= where gradients were clipped; accumulation= where a step had several "
    "micro-batches; a loss that returns (sums, counts) where the mean was over tokens or weights."
)


def consumed_gradient(rule: Rule, before: State, after: State, hypers: list[Hyper]) -> Params | None:
    """Return the gradient that led from one state to the next, or None if no slot determines it.

    ``g = (b' − O(s, 0)_b) / a`` with ``a = O(s, 1)_b − O(s, 0)_b``, for a slot b that is affine in g with a ≠ 0.
    """
    params = {name: before[PARAM][name] for name in rule.groups}
    zero, one = (each(lambda t, v=value: torch.full_like(t, v), params) for value in (0.0, 1.0))
    order = torch.Generator().manual_seed(0)
    probe = each(lambda t: torch.randn(t.shape, generator=order, dtype=t.dtype).to(t.device), zero)
    at_zero, at_one, at_probe = (rule.step(before, gradient, hypers) for gradient in (zero, one, probe))
    for slot in (*(slot for slot in after if slot != PARAM), PARAM):
        if any(after[slot][name].shape != zero[name].shape for name in zero):
            continue
        slope = each(torch.sub, at_one[slot], at_zero[slot])
        expected = each(lambda base, a, g: base + a * g, at_zero[slot], slope, probe)
        size = norm(each(torch.mul, slope, probe))
        affine = distance(at_probe[slot], expected) <= 1e-3 * size
        if affine and all(bool((tensor != 0).all()) for tensor in slope.values()):
            return each(lambda base, a, new: (new - base) / a, at_zero[slot], slope, after[slot])
    return None


def diagnosis(rule: Rule, recorded: RecordedStep, recomputed: Params) -> str:
    """Describe the difference, with likely causes in order, and what to do.

    What was seen of the loop comes first if it alone explains the difference, and else before what remains to be asked.
    """
    hypers, buffers, clip = recorded.record.hypers, rule.assigned, rule.clip
    received = rule.received(rule.penalised(recorded.before, recomputed, hypers), hypers)
    clipped = rule.clipped(received)
    moving = [n for n, g in rule.groups.items() if not hypers[g].get(STILL) and not hypers[g].get(IDLE)]
    rule = rule.extended(None, ()).restricted(moving)  # the optimizer alone: the gradient it received is compared
    received, clipped = ({name: gradient[name] for name in moving} for gradient in (received, clipped))
    used = consumed_gradient(rule, recorded.before, recorded.after, recorded.record.hypers)
    if used is None or not all(bool(torch.isfinite(tensor).all()) for tensor in used.values()):
        return REMEDY
    again = rule.step(recorded.before, used, recorded.record.hypers)
    recorded = replace(recorded, before=_only(rule, recorded.before), after=_only(rule, recorded.after))
    off = [s for s in again if distance(again[s], recorded.after[s]) > 1e-2 * _moved(recorded, again, s)]
    if off:
        return (
            f"No gradient leads there: {' and '.join(map(called, off))} and the rest of the state do not agree with "
            "one. The state was changed by something other than optimizer.step(): were weights or buffers loaded, "
            "clamped, averaged or decayed between steps?"
        )
    if buffers and distance(used, clipped) <= 1e-3 * norm(clipped):
        return (
            f"The gradient that was used is the recomputed one, but buffers that training moves ({buffers[0]!r}) are "
            "elsewhere: was the model called in training mode for something other than a step? Call model.eval() "
            "before it is evaluated, or record up to there as a run of its own."
        )
    if clip is not None and distance(used, received) <= 1e-3 * norm(received):
        return (
            "The gradient that was used is the recomputed one before clipping: the loop did not clip it. Give the Task "
            "no clip_norm or clip_value, or the ones of the loop."
        )
    return _compared(used, clipped, recorded) + _hooks(recorded.trained.model)


def _hooks(model: nn.Module) -> str:
    """Name what has hooks on its gradients, in a sentence; an empty string if nothing has."""
    named = [name for name, param in model.named_parameters() if param._backward_hooks]
    named += [name or "model" for name, module in model.named_modules() if module._backward_hooks]
    return f" Hooks on gradients are not followed: {named[0]!r} has one." if named else ""


def _divisor(recorded: RecordedStep) -> int:
    """Return what the task divides a micro-batch's loss by in addition to its own denominator."""
    accumulation = recorded.trained.accumulation
    if isinstance(accumulation, int):
        return accumulation
    return len(recorded.record.parts) if accumulation == "mean" else 1


def _only(rule: Rule, state: State) -> State:
    return {slot: {name: params[name] for name in rule.groups} for slot, params in state.items()}


def _compared(used: Params, recomputed: Params, recorded: RecordedStep) -> str:
    """Compare the directions and lengths of the two gradients, in words."""
    length, expected = norm(used), norm(recomputed)
    if length == 0 or expected == 0:
        which = "that was used" if length == 0 else "computed again"
        return f"The gradient {which} is zero, the other is not. {REMEDY}"
    cosine = float(sum(_dot(used[name], recomputed[name]) for name in used)) / (length * expected)
    ratio = length / expected
    start = "The gradient that was used "
    if cosine < -0.999:
        return f"{start}points the other way (cosine {cosine:.4f}): was the loss maximised? {REMEDY}"
    if cosine < 0.999:
        how = "little in common with" if cosine < 0.2 else "only partly the direction of"
        what = f"{start}has {how} the recomputed one (cosine {cosine:.3f}, {ratio:.3g} times as long)."
        return f"{what} {_asked(recorded, alike=cosine >= 0.2)}"
    start += f"has the direction of the recomputed one (cosine {cosine:.4f}), its length is {ratio:.3g} times: "
    cause = _length_cause(length, ratio, len(recorded.record.ids), _divisor(recorded))
    return f"{start}{cause} {REMEDY}"


def _asked(recorded: RecordedStep, *, alike: bool) -> str:
    """Name what was seen of the loop that leads elsewhere; if nothing was, ask what a record leaves open."""
    found = causes(recorded.seen)
    if found:
        return "While it was recorded, " + "; ".join(found) + "."
    if not alike:
        return (
            "Is it another model, other data, another order of examples, or another loss? Give the Task what was "
            "trained."
        )
    several = ", were micro-batches counted otherwise" if len(recorded.record.parts) > 1 else ""
    unseen = (
        ""
        if GIVEN in recorded.seen  # then its first forward pass was proven
        else ", were other examples part of the step (skipped batches), or did the forward pass draw by other means "
        "than PyTorch's generators"
    )
    return (
        f"Is the loss, l2 or a class weight another, was the mean taken over tokens or weights, or were gradients "
        f"clipped by value{several}{unseen}? {REMEDY}"
    )


def _length_cause(length: float, ratio: float, examples: int, divisor: int) -> str:
    """Suggest what made a gradient longer or shorter, the most telling sign first."""
    clip = next((c for c in CLIPS if abs(length / c - 1) < 1e-3), None)
    if ratio < 1 and clip is not None:
        return f"was it clipped? Its norm is {clip:g}: give clip_norm={clip:g}."
    if examples > 1 and abs(ratio * examples - 1) < 1e-2:
        return (
            f"was the loss averaged over the {examples} examples of the batch where the Task's is summed? Give the "
            f"loss with reduction='mean', or accumulation={examples * divisor} if as many micro-batches were averaged."
        )
    if _is_near_whole(1 / ratio):
        whole = round(1 / ratio)
        return (
            f"were {whole} micro-batches averaged (not all of them recorded), or the loss divided by {whole}, also in "
            f"a short last window? Give accumulation={whole * divisor}."
        )
    if abs(ratio / examples - 1) < 1e-2:
        return f"was the loss summed over the {examples} examples of the batch, reduction='sum', and not averaged?"
    if _is_near_whole(ratio):
        return (
            f"were {round(ratio)} micro-batches summed, accumulation='sum', or the loss multiplied by {round(ratio)}?"
        )
    if abs(ratio - 1) < 1e-2:
        return "is l2, a weight in the loss or the precision of the training a little different?"
    if ratio < 1:
        return "was it clipped, or the loss divided by something?"
    return "was the loss multiplied by something, or a scaled gradient never unscaled?"


def _is_near_whole(ratio: float) -> bool:
    return round(ratio) >= 2 and abs(ratio / round(ratio) - 1) < 1e-2 / round(ratio)


def _moved(recorded: RecordedStep, again: State, slot: str) -> float:
    moved = max(distance(recorded.after[slot], recorded.before[slot]), distance(again[slot], recorded.before[slot]))
    dtype = next(iter(again[slot].values())).dtype
    return moved + 1e4 * torch.finfo(dtype).eps * norm(recorded.after[slot])


def _dot(left: Tensor, right: Tensor) -> float:
    return float((left.double() * right.double()).sum())


def called(slot: str) -> str:
    """Return what a slot is called in a sentence."""
    return "the parameters" if slot == PARAM else slot
