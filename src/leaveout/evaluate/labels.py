"""Labels to check: which training labels look wrong, judged by how the recorded run treated them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util import notebook
from leaveout._util.equality import Comparable
from leaveout._util.files import free, read_json, save_json, save_text
from leaveout._util.trees import PARAM, each
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, RunError
from leaveout.evaluate.duplicates import conflicts
from leaveout.evaluate.dynamics import STATES, Dynamics, dynamics
from leaveout.evaluate.reasons import reasons
from leaveout.evaluate.verify import Check
from leaveout.run.reader import Run
from leaveout.scores import LABELS, MEAN, Scores
from leaveout.task.classes import class_names
from leaveout.task.task import Task

MEMORISED = 0.05
"""Influence is asked only where the last state predicts fewer than this share of the labels otherwise."""
MEASURES = ("margin", "loss", "probability", "variability", "forgotten")
COLUMNS = (
    *("is_label_issue", "label_score", "given_label", "predicted_label", "why"),
    *MEASURES,
    *("learned_epoch", "conflicts_with"),
)


@dataclass(frozen=True)
class Question:
    """What labels were asked for, so that an answer can be found again."""

    states: int = STATES
    folds: int | None = None
    seed: int = 0
    influence: str | None = None


@dataclass(frozen=True, eq=False)
class Labels(Comparable):
    """Which labels look wrong. ``len(labels)`` is how many do.

    ``table`` has a row for every training example: ``is_label_issue``, ``label_score`` (0 to 1, low is likely wrong),
    ``given_label`` and ``predicted_label`` as cleanlab's Datalab has them (for an issue the most likely *other*
    label), and ``why``; then what the run showed: ``margin`` and ``loss`` averaged over the states, mean
    ``probability`` of the given label and its ``variability``, how often it was ``forgotten``, the
    ``learned_epoch`` from which on it was predicted (missing if it never was), and an example with the same input and
    another label in ``conflicts_with``. ``weight`` is how much influence counted beside the margins; ``misfit`` the
    share of labels that the last state predicts otherwise.
    """

    table: pd.DataFrame
    question: Question
    weight: float
    misfit: float
    run_fingerprint: int | None = None

    def __len__(self) -> int:
        return int(self.table["is_label_issue"].sum())

    @property
    def issues(self) -> pd.DataFrame:
        """The rows of the labels that look wrong, the most suspicious first."""
        ranked = self.ranked()
        return ranked[ranked["is_label_issue"]]

    @property
    def ids(self) -> list[int]:
        """The examples whose labels look wrong, the most suspicious first."""
        return self.issues.index.tolist()

    def ranked(self, k: int | None = None) -> pd.DataFrame:
        """Return the k most suspicious rows, whether or not they count as issues; all by default."""
        return self.table.sort_values("label_score", kind="stable")[:k]

    def changes(self, k: int | None = None) -> list[str]:
        """List the most frequent changes among the issues, as in "6 → 9: 4", most frequent first."""
        issues = self.issues
        pairs = Counter(f"{a} → {b}" for a, b in zip(issues["given_label"], issues["predicted_label"], strict=True))
        return [f"{change}: {times}" for change, times in pairs.most_common(k)] + (
            ["..."] if k and len(pairs) > k else []
        )

    @property
    def sentence(self) -> str:
        """Say the answer in a sentence."""
        count = len(self)
        answer = f"{count} of {len(self.table)} labels {'looks' if count == 1 else 'look'} wrong"
        if count:
            answer += f" ({', '.join(self.changes(3))})"
        return f"{answer}.{f' {self.advice}' if self.advice else ''}"

    @property
    def advice(self) -> str:
        """What to do where the run's own margins say little."""
        if self.question.folds is not None or self.misfit >= MEMORISED:
            return ""
        return (
            f"The trained model predicts {1 - self.misfit:.1%} of the given labels: if it would not do so on new "
            "examples, it has memorised them, and folds=5 (--folds 5) judges them out of sample."
        )

    def __repr__(self) -> str:
        return f"Labels({len(self)} of {len(self.table)} look wrong)"

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        columns = ["given_label", "predicted_label", "label_score", "why"]
        rows = [(number, *row) for number, *row in self.issues[:10][columns].itertuples()]
        return notebook.card(f"{len(self)} labels look wrong", [self.sentence], ("train", *columns), rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw how often each given label looks like each other one; needs matplotlib. Returns the axes."""
        issues = self.issues
        counts = pd.crosstab(issues["given_label"].astype(str), issues["predicted_label"].astype(str))
        ax = notebook.axes(ax)
        ax.imshow(counts.to_numpy(), cmap="Oranges")
        ax.set_xticks(range(counts.shape[1]), counts.columns)
        ax.set_yticks(range(counts.shape[0]), counts.index)
        ax.set(xlabel="suggested label", ylabel="given label", title=f"{len(self)} labels look wrong")
        return ax

    def to_scores(self) -> Scores:
        """Return the order of the labels as scores, so that ``cleanse`` can remove those that look wrong.

        They are negative for the issues alone, and lowest for the most suspicious.
        """
        values = self.table["label_score"].to_numpy(dtype=float) - 1.000001 * self.table["is_label_issue"].to_numpy()
        ids = tuple(int(i) for i in self.table.index)
        column = torch.from_numpy(values)[:, None]
        return Scores(column, ids, (MEAN,), LABELS, unit="label score", run_fingerprint=self.run_fingerprint)

    def to_frame(self) -> pd.DataFrame:
        """Copy the table, a row for every training example in order."""
        return self.table.copy()

    def to_csv(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the table to a CSV file, whole or not at all."""
        path = free(path, overwrite=overwrite)
        save_text(path, self.table.to_csv())
        return path

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the labels to one JSON file, whole or not at all."""
        path = free(path, overwrite=overwrite)
        table = self.table.astype(object).where(self.table.notna(), None)
        content = {
            "sentence": self.sentence,
            "question": asdict(self.question),
            "weight": self.weight,
            "misfit": self.misfit,
            "run_fingerprint": self.run_fingerprint,
            "table": table.to_dict("list"),
        }
        save_json(path, content)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Labels:
        """Read what ``save`` wrote."""
        try:
            content = read_json(Path(path))
            columns = {name: content["table"][name] for name in COLUMNS}
            labels = cls(
                _table(columns),
                Question(**content["question"]),
                float(content["weight"]),
                float(content["misfit"]),
                content["run_fingerprint"],
            )
            str(labels)  # whatever the sentence needs is there
            return labels
        except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise RunError(
                f"{path} does not hold labels ({error}): give a file that Labels.save wrote.", code="labels-unreadable"
            ) from None


def labels(
    run: Run,
    task: Task,
    *,
    scores: Scores | None = None,
    check: Check | None = None,
    folds: int | None = None,
    states: int = STATES,
    classes: Sequence[str] = (),
    seed: int = 0,
    resources: Resources | None = None,
) -> Labels:
    """Say which training labels look wrong, from the recorded states alone.

    Labels are ranked by exp(mean_t log σ(m_t)) over the states t, where m_t is the margin, the given label's logit
    minus the best other. As many of the lowest are issues as confident learning counts on the run's opinions
    (``dynamics``), plus those that conflict with an identical input and with the opinion. No query is needed.

    Args:
        run: the recorded run.
        task: what was trained, a classifier.
        scores: influence of every example on the mean loss of queries whose labels are right. It is added to the
            margins, both as robust z-scores, where the run has fitted nearly all of its labels, so that margins say
            little; ``check`` decides how much it counts.
        check: what ``verify`` says of these scores; without it they do not count.
        folds: judge every example by a training that did not see it: the run is trained again ``folds`` times, each
            time without another part of the examples. Worth it where the model memorises its labels.
        states: how many kept states to look at.
        classes: names of the classes, from 0 on.
        seed: of the division into folds.
        resources: memory budget and progress.
    """
    resources = resources or Resources()
    influence = _influence(run, task, scores, check)
    history = dynamics(run, task, states=states, folds=folds, seed=seed, resources=resources)
    weight = 0.0 if check is None else influence_weight(check, history.misfit)
    values = history.confidence.double()
    if influence is not None and weight > 0:
        # The order is the sum's, the values stay those of the margins.
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
    question = Question(states, folds, seed, None if scores is None else scores.method)
    table = _filled(history, values, issue, predicted, other, classes)
    return Labels(table, question, weight, history.misfit, run.fingerprint)


def confident_count(opinions: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> int:
    """Count the wrong labels without a threshold to choose: confident learning's calibrated joint.

    The threshold of class j is the mean opinion p_j of the examples labelled j. An example is confidently of the
    class with the largest p_j among those that reach their threshold, or of none. Of the examples with label i, the
    share that is confidently of another class is taken among those that are confidently of any, and counted for all.

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
    """Compute (v − median) / (1.4826 · median of |v − median|), a z-score that outliers do not move.

    >>> robust(torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0]))
    tensor([-1.3490, -0.6745,  0.0000,  0.6745, 66.1001])
    """
    distance = values - values.median()
    spread = 1.4826 * distance.abs().median()
    return distance / spread if spread > 0 else torch.zeros_like(values)


def influence_weight(check: Check, misfit: float) -> float:
    """Say how much influence counts beside the margins: max(0, τ) · max(0, 1 − misfit / 0.05).

    τ is the lower end of Kendall's τ with exact replays in the worse of both samples. Margins are the better signal
    unless the run has fitted nearly every label, and then they say little.
    """
    lows = [part.kendall.low for part in (check.extreme, check.random)]
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
    epochs = [*history.epochs, None]
    last = max(history.epochs) + 1
    columns: dict[str, list[Any]] = {
        "is_label_issue": issue.tolist(),
        "label_score": values.tolist(),
        "given_label": given if classes else history.labels.tolist(),
        "predicted_label": suggested if classes else predicted.tolist(),
        "why": reasons(history, issue, other, classes, last),
        **{
            name: getattr(history, name).tolist()
            for name in ("margin", "loss", "probability", "variability", "forgotten")
        },
        "learned_epoch": [None if (e := epochs[place]) is None else e + 1 for place in history.learned.tolist()],
        "conflicts_with": [other.get(number) for number in range(len(values))],
    }
    return _table(columns)


def _table(columns: dict[str, list[Any]]) -> pd.DataFrame:
    whole = {name: pd.array(columns[name], dtype="Int64") for name in ("learned_epoch", "conflicts_with")}
    table = pd.DataFrame({**columns, **whole})
    return table.rename_axis("train")
