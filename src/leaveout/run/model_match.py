"""Whether a model is the one that was recorded."""

from __future__ import annotations

from torch import Tensor, nn

from leaveout.errors import MismatchError
from leaveout.optim import Rule
from leaveout.run.manifest import Manifest
from leaveout.task import batches


def check_model(manifest: Manifest, model: nn.Module, params: dict[str, Tensor]) -> None:
    """Refuses a model whose trained parameters or frozen values are not those of the run, saying what differs."""
    shapes = {name: list(param.shape) for name, param in params.items()}
    if set(shapes) != set(manifest.shapes):
        name = sorted(set(shapes) ^ set(manifest.shapes))[0]
        where = "the model but not in the run" if name in shapes else "the run but not in the model"
        raise MismatchError(f"Parameter {name!r} is trained in {where}: give the model that was recorded.")
    for name, shape in shapes.items():
        if shape != manifest.shapes[name]:
            raise MismatchError(
                f"Parameter {name!r} has shape {shape} in the model and {manifest.shapes[name]} "
                "in the run: give the model that was recorded."
            )
        dtype = str(params[name].dtype).removeprefix("torch.")
        if dtype != manifest.dtypes[name]:
            raise MismatchError(
                f"Parameter {name!r} is {dtype} in the model and {manifest.dtypes[name]} in the "
                "run: convert the model to the run's type."
            )
    constants = constants_of(model, manifest.rule)
    changed = [n for n in sorted({*constants, *manifest.constants}) if constants.get(n) != manifest.constants.get(n)]
    if changed:
        raise MismatchError(
            f"Frozen values of the model differ from those that were recorded ({', '.join(map(repr, changed))}):"
            " give the model that was recorded, with the same frozen values."
        )


def constants_of(model: nn.Module, rule: Rule) -> dict[str, int]:
    """A checksum of each tensor in the model that is not trained: frozen parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: batches.fingerprint(tensor)[0][0] for name, tensor in named if name not in rule.groups}
