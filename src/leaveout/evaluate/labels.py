"""Labels to check: which training labels look wrong, judged by how the recorded run treated them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util.trees import PARAM, each
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, UnsupportedError
from leaveout.evaluate.check import Check
from leaveout.evaluate.duplicates import conflicts
from leaveout.evaluate.dynamics import MEMORISED, STATES, Dynamics, TooLongError, dynamics
from leaveout.evaluate.label_issues import AUTO, BUDGET, FOLDS, MEASURES, Labels, Question, table_of
from leaveout.evaluate.reasons import reasons
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.task.classes import class_names
from leaveout.task.task import Task


def labels(
    run: Run,
    task: Task,
    *,
    scores: Scores | None = None,
    check: Check | None = None,
    folds: int | str | None = AUTO,
    budget: float = BUDGET,
    states: int = STATES,
    classes: Sequence[str] = (),
    seed: int = 0,
    resources: Resources | None = None,
) -> Labels:
    """Say which training labels look wrong, from the recorded states, or out of sample if these say little.

    Labels are ranked by exp(mean_t log σ(m_t)) over the states t, where m_t is the margin, the given label's logit
    minus the best other. The number of issues is what confident learning counts on the run's opinions (``dynamics``);
    they are the lowest ranked, plus those that conflict with both an identical input and the opinion. No query is
    needed.

    Args:
        run: the recorded run.
        task: what was trained, a classifier.
        scores: influence of every example on the mean loss of queries whose labels are correct. It is added to the
            margins, both as robust z-scores, if the run has fitted nearly all of its labels, so that margins say
            little; ``check`` determines how much it counts.
        check: the result of ``verify`` for these scores; without it they do not count.
        folds: judge every example by a training that did not see it: the run is trained again ``folds`` times, each
            time without another part of the examples. ``"auto"`` does so, with five folds, if the run predicts more
            than 95% of its labels, so that it may have memorised them, and if it fits the budget; None never does.
        budget: seconds of processor time that ``folds="auto"`` may take.
        states: how many kept states to evaluate.
        classes: names of the classes, from 0 on.
        seed: for the split into folds.
        resources: memory budget and progress.
    """
    resources = resources or Resources()
    if isinstance(folds, str) and folds != AUTO:
        raise InputError(f"folds={folds!r} is unknown: give {AUTO!r}, a number or None.", code="folds-not-a-count")
    influence = _influence(run, task, scores, check)
    asked = Question(states, folds, seed, None if scores is None else scores.method)
    history, misfit, used, too_long = _looked(run, task, asked, budget, resources)
    weight = 0.0 if check is None or used else influence_weight(check, misfit)
    table = judged(run, task, history, weight, influence, classes, resources)
    return Labels(table, asked, weight, misfit, run.fingerprint, used, too_long)


def judged(
    run: Run,
    task: Task,
    history: Dynamics,
    weight: float = 0.0,
    influence: Float[Tensor, " n"] | None = None,
    classes: Sequence[str] = (),
    resources: Resources | None = None,
) -> pd.DataFrame:
    """Build the table of labels from how the run treated the examples, and from weighted influence."""
    resources = resources or Resources()
    values = history.confidence.double()
    if influence is not None and weight > 0:
        # The order is that of the sum; the values stay those of the margins.
        order = (robust(values.log()) + weight * robust(influence)).argsort(stable=True)
        values = torch.empty_like(values).index_copy_(0, order, values.sort().values)
    params = each(lambda tensor: tensor.to(task.device), run.final()[PARAM])
    other = conflicts(task, params, history.labels, resources)
    issue = torch.zeros(task.size, dtype=torch.bool)
    issue[values.argsort(stable=True)[: confident_count(history.opinions, history.labels)]] = True
    predicted = history.opinions.argmax(1)
    disputed = torch.tensor(
        [number for number in other if predicted[number] != history.labels[number]], dtype=torch.long
    )
    issue[disputed] = True
    suggested = history.opinions.scatter(1, history.labels[:, None], -1).argmax(1)
    predicted = torch.where(issue, suggested, predicted)
    return _filled(history, values, issue, predicted, other, classes)


def _looked(
    run: Run, task: Task, asked: Question, budget: float, resources: Resources
) -> tuple[Dynamics, float, int | None, float | None]:
    """Evaluate the examples as asked; also return misfit, folds, and the seconds of folds that take too long."""
    if isinstance(asked.folds, int):
        misfit = dynamics(run, task, states=1, resources=resources).misfit
        again = dynamics(run, task, states=asked.states, folds=asked.folds, seed=asked.seed, resources=resources)
        return again, misfit, asked.folds, None
    history = dynamics(run, task, states=asked.states, resources=resources)
    folds = min(FOLDS, task.size)
    if asked.folds is None or history.misfit >= MEMORISED or folds < 2:
        return history, history.misfit, None, None
    options = {"states": asked.states, "folds": folds, "seed": asked.seed}
    try:
        again = dynamics(run, task, **options, budget=budget, resources=resources)
    except TooLongError as error:
        return history, history.misfit, None, error.seconds
    except (InputError, UnsupportedError):  # the run cannot be trained again without a fifth of its examples
        return history, history.misfit, None, None
    return again, history.misfit, folds, None


def confident_count(opinions: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> int:
    """Count the wrong labels without a threshold to choose: confident learning's calibrated joint.

    The threshold of class j is the mean opinion p_j of the examples labelled j. An example is confidently of the
    class with the largest p_j among those that reach their threshold, or of none. Among the examples with label i that
    are confidently of any class, the share that is confidently of another one is taken to hold for all with label i.

    >>> p = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]])
    >>> confident_count(p, torch.tensor([0, 0, 1, 1]))  # thresholds 0.8 and 0.45; the last is confidently of class 0
    1
    """
    classes, opinions = opinions.shape[1], opinions.double()

    def counted(chosen: Tensor) -> Tensor:
        return torch.bincount(labels[chosen], minlength=classes).double()

    everyone = torch.ones_like(labels, dtype=torch.bool)
    own = opinions.gather(1, labels[:, None])[:, 0]
    thresholds = torch.zeros(classes, dtype=torch.float64).index_add_(0, labels, own) / counted(everyone)
    thresholds = thresholds.nan_to_num(nan=torch.inf)  # a class without labels
    best = torch.where(opinions >= thresholds - 1e-6, opinions, -1.0).max(1)
    sure = best.values >= 0
    share = counted(sure & (best.indices != labels)) / counted(sure).clamp_min(1)
    return round(float((share * counted(everyone)).sum()))


def robust(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Compute (v − median) / (1.4826 · median of |v − median|), a z-score that is robust to outliers.

    >>> robust(torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0]))
    tensor([-1.3490, -0.6745,  0.0000,  0.6745, 66.1001])
    """
    distance = values - values.median()
    spread = 1.4826 * distance.abs().median()
    return distance / spread if spread > 0 else torch.zeros_like(values)


def influence_weight(check: Check, misfit: float) -> float:
    """Return how much influence counts besides the margins: max(0, τ) · max(0, 1 − misfit / 0.05).

    τ is the lower end of Kendall's τ with exact replays in the worse of both samples; for exact scores, of τ between
    replays from moved starts. Margins are the better signal unless the run has fitted nearly every label; then they say
    little.
    """
    taus = [check.extreme.kendall, check.random.kendall]
    if check.exact and check.ceiling is not None:
        taus = [check.ceiling.extreme, check.ceiling.random]
    lows = [tau.low for tau in taus]
    trust = 0.0 if any(map(math.isnan, lows)) else max(0.0, min(lows))
    return trust * max(0.0, 1 - misfit / MEMORISED)


def _influence(run: Run, task: Task, scores: Scores | None, check: Check | None) -> Tensor | None:
    if scores is None:
        if check is not None:
            raise InputError(
                "check= says how far scores can be trusted: give these scores= as well.", code="check-without-scores"
            )
        return None
    scores.check_same_run(run)
    if scores.train_ids != tuple(range(task.size)) or scores.queries == "self":
        raise InputError(
            "Labels need a score of every training example by itself for a query set: give scores without ids= and "
            "groups=, and not self_influence.",
            code="labels-scores-incomplete",
        )
    if check is not None:
        check.check_same_scores(scores)
    return scores.mean().double().cpu()


def _filled(
    history: Dynamics,
    values: Tensor,
    issue: Tensor,
    predicted: Tensor,
    other: dict[int, int],
    classes: Sequence[str],
) -> pd.DataFrame:
    given, suggested = class_names(history.labels, classes), class_names(predicted, classes)
    epochs = [*(epoch + 1 for epoch in history.epochs), None]  # counted from 1; None for an example never learned
    last = max(history.epochs) + 1
    columns: dict[str, list[Any]] = {
        "is_label_issue": issue.tolist(),
        "label_score": values.tolist(),
        "given_label": given if classes else history.labels.tolist(),
        "predicted_label": suggested if classes else predicted.tolist(),
        "why": reasons(history, issue, predicted, other, classes, last),
        **{name: getattr(history, name).tolist() for name in MEASURES},
        "learned_epoch": [epochs[place] for place in history.learned.tolist()],
        "conflicts_with": [other.get(number) for number in range(len(values))],
    }
    return table_of(columns)
