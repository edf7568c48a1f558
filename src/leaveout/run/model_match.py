"""Checks that a model is the one that was recorded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from leaveout._util.trees import PARAM, Params, distance, norm
from leaveout.errors import LeaveoutWarning, MismatchError
from leaveout.optim import AVERAGE, Rule
from leaveout.run.manifest import Manifest
from leaveout.task import batches

if TYPE_CHECKING:
    from leaveout.run.reader import Run

NEAR = 0.5
"""Weights this close to the last state, relative to the distance from the first to the last, count as trained."""


def check_model(manifest: Manifest, model: nn.Module, params: dict[str, Tensor]) -> None:
    """Refuse a model whose trained parameters or frozen values are not those of the run, and say what differs."""
    shapes = {name: list(param.shape) for name, param in params.items()}
    if set(shapes) != set(manifest.shapes):
        name = sorted(set(shapes) ^ set(manifest.shapes))[0]
        where = "the model but not in the run" if name in shapes else "the run but not in the model"
        raise MismatchError(
            f"Parameter {name!r} is trained in {where}: give the model that was recorded.", code="parameters-differ"
        )
    for name, shape in shapes.items():
        if shape != manifest.shapes[name]:
            raise MismatchError(
                f"Parameter {name!r} has shape {shape} in the model and {manifest.shapes[name]} "
                "in the run: give the model that was recorded.",
                code="shapes-differ",
            )
        dtype = str(params[name].dtype).removeprefix("torch.")
        if dtype != manifest.dtypes[name]:
            raise MismatchError(
                f"Parameter {name!r} is {dtype} in the model and {manifest.dtypes[name]} in the "
                "run: convert the model to the run's type.",
                code="dtypes-differ",
            )
    constants = constants_of(model, manifest.rule, manifest.buffers)
    changed = [n for n in sorted({*constants, *manifest.constants}) if constants.get(n) != manifest.constants.get(n)]
    if changed:
        raise MismatchError(
            f"Frozen values of the model differ from those that were recorded ({', '.join(map(repr, changed))}):"
            " give the model that was recorded, with the same frozen values.",
            code="frozen-values-differ",
        )


def described(
    model: nn.Module, rule: Rule, params: dict[str, Tensor], moving: dict[str, list[int]], train_size: int | None
) -> Manifest:
    """Return a manifest with what it says about the model."""
    return Manifest(
        rule=rule,
        shapes={name: list(param.shape) for name, param in params.items()},
        dtypes={name: str(param.dtype).removeprefix("torch.") for name, param in params.items()},
        constants=constants_of(model, rule, moving),
        train_size=train_size,
        buffers=moving,
    )


def constants_of(model: nn.Module, rule: Rule, moving: Iterable[str] = ()) -> dict[str, int]:
    """Return a checksum of each tensor that training does not change: frozen parameters, most buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    left = {*rule.groups, *moving}
    return {name: batches.fingerprint(tensor)[0][0] for name, tensor in named if name not in left}


def warn_of_other_weights(run: Run, model: dict[str, Tensor], scored: Params) -> None:
    """Warn if a model holds trained weights other than those that are scored: an average, a best checkpoint.

    Usually the model is freshly built, or holds the run's first or last weights. So weights count as trained only if
    they are one of the run's states, or closer to its last state than half the distance from its first state to it.
    """
    weights = {name: tensor.detach().cpu() for name, tensor in model.items()}
    # Without buffers: a count of batches is far from another one.
    expected, last, first = (
        {name: state[name].cpu() for name in weights}
        for state in (scored, *(run.state(index)[PARAM] for index in (run.on_disk[-1], 0)))
    )
    if any(_are_near(weights, end) for end in (expected, last, first)):
        return
    share = distance(weights, last) / max(distance(first, last), 1e-300)
    if not share < 1:
        return
    same = [index for index in run.on_disk if _equal(weights, run.state(index)[PARAM])]
    if not same and share >= NEAR:
        return
    if AVERAGE in run.manifest.rule.slots and _are_near(run.state(run.on_disk[-1])[AVERAGE], weights):
        warnings.warn(
            "The task's model holds the average of the run's weights, and the run's last weights are scored: score "
            "at='average' for it, or put the run's last weights into the model.",
            LeaveoutWarning,
            stacklevel=4,
        )
        return
    if not same and len(run.on_disk) == run.on_disk[-1] + 1:
        raise MismatchError(
            "The task's model holds trained weights that are neither the run's last ones, nor those after an earlier "
            "step, nor an average that was recorded; was it trained further? The run's own weights are scored: give "
            "the Task a newly built model, or record what you use in the end: to its last step, or with average=.",
            code="weights-not-of-the-run",
        )
    place = f", but those after step {same[0] - 1}" if same else ""
    remedy = f"score run.head({same[0]}) for these" if same else "score run.head(steps) for an earlier state"
    warnings.warn(
        f"The task's model holds trained weights that are not the run's last ones{place} (a best checkpoint, an "
        f"average of weights?). The run's own states count all the same, up to that after step {len(run) - 1}: "
        f"{remedy}, or put the run's last weights into the model.",
        LeaveoutWarning,
        stacklevel=4,
    )


def _are_near(weights: Params, end: Params) -> bool:
    """Say whether two vectors are the same up to rounding, relative to the second."""
    return distance(weights, end) <= 1e-6 * norm(end)


def _equal(left: Params, right: Params) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)
