"""The errors of a recording that cannot continue."""

from __future__ import annotations

from pathlib import Path

from leaveout._util.files import is_full
from leaveout.errors import InputError, RunError, UnsupportedError
from leaveout.run.manifest import MANIFEST


def check_on_full(on_full: str) -> None:
    """Refuse an unknown value of ``on_full``, which says what happens when the disk is full."""
    if on_full not in ("stop", "continue"):
        raise InputError(f"on_full={on_full!r} is unknown: use 'stop' or 'continue'.", code="on-full-unknown")


def finished(path: Path) -> RunError:
    """Return the error for resuming a run that is already finished."""
    return RunError(f"The run in {path} is finished: record further steps into another directory.", code="run-finished")


def batch_missing(where: str) -> RunError:
    """Return the error for a step whose batch is unknown."""
    return RunError(
        f"{where}, it is not known which batch this is: draw batches from recorder.watch(loader), or call "
        "recorder.step(ids) before each optimizer.step().",
        code="batch-missing",
    )


def nothing_recorded(other: str | None) -> RunError:
    """Return the error for a loop that took no step with the recorded optimizer, but perhaps with another one."""
    if other is not None:
        return RunError(
            "Nothing was recorded: the optimizer given to Recorder() never took a step, and another one did, "
            f"{other}: make the Recorder with the optimizer that trains.",
            code="nothing-recorded",
        )
    return RunError(
        "Nothing was recorded: optimizer.step() was never called between Recorder() and finish().",
        code="nothing-recorded",
    )


def cut_short(step: int) -> RunError:
    """Return the error for a run that ended early."""
    return RunError(
        f"The run was cut short after step {step}: continue it with resume=True, record it again, or use "
        "open_run(path, partial=True) for the steps that are there.",
        code="run-cut-short",
    )


def last_state_lost(step: int) -> RunError:
    """Return the error for weights that were overwritten after the last step and before they were kept."""
    return RunError(
        f"The parameters were changed after step {step} and before finish(), so that the state it led to is gone: call "
        "finish() before other weights are put into the model, or record with keep='all'. "
        "open_run(path, partial=True) reads the run up to the last state that is on disk.",
        code="last-state-lost",
    )


def parameters_changed(where: str, before: int) -> UnsupportedError:
    """Return the error for parameters that were written to between two steps."""
    return UnsupportedError(
        f"{where}, the parameters are not those that step {before} left: something other than optimizer.step() wrote "
        "to them (weights loaded, clamped, averaged or reset), which cannot be replayed. Leave them alone between "
        "steps, or finish() here and record what follows as another run.",
        code="parameters-changed",
    )


def other_optimizer(steps: int, kind: str, other: str, name: str) -> UnsupportedError:
    """Return the error for a step of another optimizer on the recorded parameters."""
    place = (
        f"{kind} is recorded, and has not taken a step yet"
        if steps == 0
        else f"{kind} was recorded up to step {steps - 1}; the recording ends there, and holds nothing of what follows"
    )
    return UnsupportedError(
        f"Another optimizer, {other}, has moved {name!r}: {place}. Give Recorder() the optimizer that trains these "
        "parameters; where two follow each other, finish() between them and record two runs; one optimizer with a "
        "group for each setting replaces two that take turns.",
        code="other-optimizer",
    )


def moved_without_step(kind: str) -> UnsupportedError:
    """Return the error for parameters that move from batch to batch without a step of the recorded optimizer."""
    return UnsupportedError(
        f"The parameters move while batches are drawn, but not by a step of the {kind} that is recorded: nothing of "
        "this is recorded. Give Recorder() the optimizer whose step() moves them (one of torch.optim).",
        code="other-optimizer",
    )


def batch_not_given() -> InputError:
    """Return the error for a step without its batch, which was to be kept."""
    return InputError(
        "keep_batches=True keeps what the loop trains on, and this step's batch is not given: call "
        "recorder.step(ids, batch).",
        code="batch-not-given",
    )


def input_drawn() -> UnsupportedError:
    """Return the error for inputs that the loop made with random numbers, which are not recorded."""
    return UnsupportedError(
        "In the first step the model was given something else than the loader yielded, and random numbers were drawn "
        "in between. If they went into it (mixup, noise, masking), this run cannot be scored: do that in the data set "
        "or its collate function, or give recorder.step(ids, batch) what the model is given, with keep_batches=True.",
        code="input-drawn",
    )


def pass_differs(*, compiled: bool, outside: bool) -> UnsupportedError:
    """Return the error for a forward pass that gives something else when it is computed again from the record."""
    if outside:
        why = "it draws from numpy's or Python's generator, whose state is not recorded: draw from PyTorch's"
    elif compiled:
        why = (
            "it was compiled, and compiled layers draw random numbers of their own: set "
            "torch._inductor.config.fallback_random = True before compiling, or train without torch.compile"
        )
    else:
        why = (
            "it depends on something that is not recorded (a generator, counter or cache of its own), or parameters "
            "were changed between the pass and the step: make it a function of parameters, buffers, inputs and "
            "PyTorch's random generators, and leave parameters to the optimizer"
        )
    return UnsupportedError(
        f"The model's first forward pass gives other outputs when it is computed again: {why}. Otherwise this run "
        "cannot be scored.",
        code="pass-differs",
    )


def not_transformed(reason: str, names: list[str]) -> UnsupportedError:
    """Return the error for a model that ``torch.func`` cannot differentiate."""
    own = f", which has autograd functions of its own ({', '.join(names)})" if names else ""
    cure = (
        "Write what they do with PyTorch's own functions, or give them a setup_context and generate_vmap_rule = True."
        if names
        else "Leave what it names out of the forward pass."
    )
    return UnsupportedError(
        f"torch.func cannot take the gradient of this model{own}: {reason}. This run cannot be scored. {cure}",
        code="model-not-supported",
    )


def outputs_stay() -> UnsupportedError:
    """Return the error for outputs that do not depend on the parameters that the model is called with."""
    return UnsupportedError(
        "The model's outputs do not follow its parameters when these are replaced (torch.func.functional_call), so "
        "this run cannot be scored: let the forward pass read them from the module itself, not from copies elsewhere.",
        code="outputs-do-not-follow",
    )


def rows_differ(ids: int, place: int, found: str) -> UnsupportedError:
    """Return the error for a batch without a row for each of its examples."""
    return UnsupportedError(
        f"The first batch has {ids} examples, and its item {place} is {found}: such a run cannot be scored. Let the "
        "loader's collate function return tensors alone, with a row for each example.",
        code="rows-differ",
    )


def average_late(step: int) -> UnsupportedError:
    """Return the error for an average that was updated after its step had been written."""
    return UnsupportedError(
        f"The averaged model was updated after step {step} had been written by flush(): update it before flush().",
        code="average-updated-late",
    )


def buffers_apart(name: str) -> UnsupportedError:
    """Return the error for a buffer that each of several processes updates from its own batches."""
    return UnsupportedError(
        f"The buffer {name!r} moves in training, in each of several processes by its own batches: a process has no "
        "statistics of the others' examples, and evaluates with those of the first. Put BatchNorm into evaluation "
        "mode, take GroupNorm or LayerNorm, or train in one process.",
        code="distributed-buffers",
    )


def not_finite(step: int, name: str, ids: list[int], bad: list[int]) -> RunError:
    """Return the error for a step that made a parameter NaN or infinite; ``bad`` are the examples that are so too."""
    blame = (
        f"example {bad[0]} of its batch holds NaN or infinite values; repair or leave out that example"
        if bad
        else f"lower the learning rate or look at the losses of its batch's examples {ids[:8]}"
    )
    return RunError(
        f"Step {step} made parameter {name!r} NaN or infinite: {blame}; the steps before it are kept.",
        code="step-not-finite",
    )


def not_written(path: Path, error: OSError) -> str:
    """Return the message for a disk that is full, or fails: what has been written, and how to continue."""
    begun = (path / MANIFEST).exists()
    there = "open_run(path, partial=True) reads what is on disk" if begun else "nothing is on disk yet"
    cure = "make room" if _is_full(error) else "mend that"
    return f"The run in {path} could not be written further ({error}): {there}; {cure} and continue it with resume=True"


def _is_full(error: OSError) -> bool:
    return error.errno is None or is_full(error)  # safetensors gives no number


def not_an_epoch(epoch: object) -> InputError:
    """Return the error for an epoch that is not a whole number from 0 on."""
    return InputError(
        f"epoch={epoch!r} does not count an epoch: give a whole number from 0 on.", code="epoch-not-a-count"
    )


def not_copied() -> UnsupportedError:
    """Return the error for a recorder that is pickled or copied."""
    return UnsupportedError(
        "A Recorder belongs to the process and the training that it records, and cannot be pickled or copied: pass on "
        "the Run that finish() returns.",
        code="recorder-not-copied",
    )


def already_recording() -> RunError:
    """Return the error for a second recorder on the same optimizer."""
    return RunError(
        "This optimizer is being recorded already: call finish() on its recorder first.", code="already-recording"
    )


def stopped(message: str, error: OSError) -> RunError:
    """Return the error for a disk that takes no more, if the training is to stop then."""
    message = f"{message}, or train on without recording by on_full='continue'."
    return RunError(message, code="disk-full") if _is_full(error) else RunError(message, code="run-not-writable")
