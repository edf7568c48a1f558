"""What was seen of a training loop besides its steps: facts of the run's manifest, and the sentences they stand for."""

from __future__ import annotations

from collections.abc import Mapping

COMPILED = "compiled"
"""The model was called through ``torch.compile``."""

PASSES = "passes"
"""How many forward passes with gradients a step had, where it was more than one for each of its batches."""

GIVEN = "given"
"""What the model was given: ``YIELDED``, the tensors that the loader yielded; ``OTHERWISE``; or ``DRAWN``, others that
were made of them with random numbers."""
YIELDED, OTHERWISE, DRAWN = "as yielded", "otherwise", "at random"

ASIDE = "aside"
"""The model was called without gradients between a batch's arrival and its step."""

BY_LOOP = "by-loop"
"""The kept batches are what the loop gave, not what a loader yielded."""

OTHER = "other-optimizer"
"""The kind of another optimizer that took steps."""

DEPENDS = "depends"
"""What showed that a kept batch held something that had been computed from the parameters."""


def held(seen: Mapping[str, str]) -> str:
    """Say what is held as it happened, in a sentence without its full stop; nothing if that is nothing.

    >>> held({}), held({BY_LOOP: "yes"})[:52]
    ('', 'Kept batches are held as the loop gave them: where t')
    """
    if BY_LOOP not in seen:
        return ""
    sure = seen.get(DEPENDS)
    signs = [
        *([f"steps with {seen[PASSES]} forward passes for a batch"] if PASSES in seen else []),
        *(["calls of the model without gradients before a step"] if ASIDE in seen else []),
        *([f"steps of another optimizer, {seen[OTHER]}"] if OTHER in seen else []),
    ]
    if sure:
        return (
            f"Kept batches are held as they happened: they hold {sure}, which depends on the parameters and does not "
            "change when an example is left out"
        )
    noticed = f". There were {' and '.join(signs)}, which such batches come with" if signs else ""
    return (
        "Kept batches are held as the loop gave them: where they depended on the parameters (carried state, "
        f"adversarial inputs, generated samples), they do not change when an example is left out{noticed}"
    )


def causes(seen: Mapping[str, str]) -> list[str]:
    """Return what was seen of the loop that can make a step end elsewhere, each with what to do.

    >>> causes({GIVEN: YIELDED}), [cause[:28] for cause in causes({PASSES: "2"})]
    ([], ['a step had 2 forward passes '])
    """
    found = []
    if seen.get(GIVEN) == DRAWN:
        found.append(
            "the model was given something else than the loader yielded, with random numbers drawn in between (mixup, "
            "noise, masking): do that in the data set or its collate function, or give recorder.step(ids, batch) what "
            "the model is given, with keep_batches=True"
        )
    elif seen.get(GIVEN) == OTHERWISE:
        found.append(
            "the model was given something else than the batch that was recorded: if other examples were part of it, "
            "record them all; if the loop prepared it, give the Task a forward= that makes the same of a batch"
        )
    if PASSES in seen:
        found.append(
            f"a step had {seen[PASSES]} forward passes for a batch (an attack, SAM, two views): give the Task a "
            "forward= that makes them all, or give recorder.step(ids, batch) what the last one is given, with "
            "keep_batches=True"
        )
    if COMPILED in seen:
        found.append(
            "the model was compiled, and compiled layers draw random numbers of their own: if it has dropout, set "
            "torch._inductor.config.fallback_random = True, or train without torch.compile"
        )
    if OTHER in seen:
        found.append(
            f"another optimizer ({seen[OTHER]}) took steps: what it moves must be part of the batch, not of the loss"
        )
    return found
