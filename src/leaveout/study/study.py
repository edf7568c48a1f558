"""A study: a run, its task and a query set, given once; every question after that is a short call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from torch.utils.data import Dataset

from leaveout._util import notebook
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, kind_of
from leaveout.estimators import Estimator
from leaveout.estimators.question import Question
from leaveout.estimators.timeline import Timeline, timeline
from leaveout.evaluate.check import MINIMUM, Check
from leaveout.evaluate.choose import Chosen, choose
from leaveout.evaluate.cleanse import cleanse
from leaveout.evaluate.curve import Curve
from leaveout.evaluate.label_issues import AUTO, Labels
from leaveout.evaluate.labels import labels
from leaveout.evaluate.plan import plan
from leaveout.evaluate.refine import refine
from leaveout.evaluate.verdict import Verdict
from leaveout.evaluate.verify import verify
from leaveout.reporting import Page, Show
from leaveout.reporting.show import show_of
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run, open_run
from leaveout.scores import EACH, Scores
from leaveout.study.answers import by_method, in_words, most_trusted, same_kind
from leaveout.study.asked import Asked
from leaveout.study.report import report
from leaveout.task import batches
from leaveout.task.task import Task

_BY_IDENTITY = (Scores, Check, Labels, Dataset)

REMOVED = (0.02, 0.05, 0.1)
"""How many examples ``cleanse`` removes by default, as shares of the training set."""

REPLAYS = 64
"""How many replays ``verify`` compares scores with by default."""

UNASKED = "Nothing was asked yet: try labels() and score()."


class Study:
    """Ask a recorded run about its training examples; the answers are remembered and go into the report.

    Each method calls the function of the same name with this run, task and query set; ``resources=`` given to one of
    them is for that question alone. ``answers`` holds all scores by their full question (``Asked``), ``scores`` those
    of every example by method, ``checks`` their checks by method, ``issues`` the labels, ``curve`` the cleansing curve.
    The same question is not computed twice, and no answer replaces that to another question.

    Args:
        run: the recorded run, or its directory.
        task: what was trained.
        query: the examples whose mean loss is explained; ``labels`` does not need them.
        show: how examples are shown, for labels and the report: a ``Show``, or a function of an example.
        resources: memory budget, engine and progress for everything that is computed.

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> from leaveout.builtin import data
    >>> from leaveout.run.train import train
    >>> digits = data.load("digits", n_train=60, n_val=20)
    >>> task = Task(torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss(), data.flip(digits.train, 0.1, seed=1).examples)
    >>> optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
    >>> study = Study(train(task, optimizer, epochs=5, batch_size=20, seed=0, out=mkdtemp()), task, digits.val)
    >>> labels, scores = study.labels(), study.score()  # which labels look wrong; which examples helped or did harm
    >>> scores.all_exact, len(scores.harmful(3)), "Replay" in repr(study)
    (True, 3, True)
    """

    def __init__(
        self,
        run: Run | str | Path,
        task: Task,
        query: Dataset | None = None,
        *,
        show: Show | Callable[[Any], Any] | None = None,
        resources: Resources | None = None,
    ) -> None:
        self.run, self.task, self._query = _opened(run), _checked(task), query
        if query is not None:
            batches.size(query)  # refuses a loader, or tensors
        self.show, self.resources = show_of(show), resources or Resources()
        self.answers: dict[Asked, Scores] = {}
        self.issues: Labels | None = None
        self.curve: Curve | None = None
        self.choice: Chosen | None = None
        self._checks: dict[Asked, Check] = {}
        self._heads: dict[int, Run] = {}
        self._memory: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    @property
    def scores(self) -> dict[str, Scores]:
        """The scores of every example by method, the newest last; verified ones before those that are not.

        If only some examples or groups were scored, those that were asked for last.
        """
        return {method: self.answers[asked] for method, asked in self._shown.items()}

    @property
    def checks(self) -> dict[str, Check]:
        """The checks of ``scores``, by method."""
        return {method: self._checks[asked] for method, asked in self._shown.items() if asked in self._checks}

    @property
    def _same_kind(self) -> list[Asked]:
        return same_kind(self.answers, self.task.size, self.run.fingerprint)

    @property
    def _shown(self) -> dict[str, Asked]:
        return by_method(self._same_kind, self._checks)

    @property
    def query(self) -> Dataset:
        """The examples whose mean loss is explained."""
        if self._query is None:
            raise InputError(
                "Whose loss is to be explained? Give lo.Study(run, task, query) a query set, such as the validation "
                "set.",
                code="query-missing",
            )
        return self._query

    def score(self, estimator: Estimator | None = None, *, budget: float = 60.0, **options: Any) -> Scores:
        """Score every training example; without an ``estimator`` the method is chosen.

        Every example is replayed exactly if that takes no longer than ``budget`` seconds of processor time; otherwise
        the best of several methods is taken (see ``lo.choose``; ``choice`` holds the comparison). ``options`` are those
        of ``Estimator.score``: ``queries=``, ``ids=``, ``groups=``, ``at=``.
        """
        resources = options.pop("resources", None) or self.resources
        return self._once(
            ("score", estimator, budget, options), lambda: self._scored(estimator, budget, resources, **options)
        )

    def verify(
        self, scores: Scores | None = None, *, replays: int | None = None, seed: int = 0, **options: Any
    ) -> Check:
        """Compare scores, by default the most trustworthy ones, with exact replays: 64 of them, if not said otherwise.

        Scores that ``score`` chose have been compared already. That check is returned, unless it has fewer replays than
        were asked for or its verdict is bad: then new replays, no more than it had, also look for the cause.
        ``options`` are those of ``lo.verify``, such as ``budget=``.
        """
        scores = self._known(scores)
        asked, resources = Asked.of(scores), options.pop("resources", None) or self.resources
        if self.choice is not None and self.choice.scores is scores and self.choice.check is not None and not options:
            check = self.choice.check
            replays = max(2 * MINIMUM, min(REPLAYS, len(check.table))) if replays is None else replays
            trusted = check.verdict in (Verdict.GOOD, Verdict.COARSE)
            if trusted and len(check.table) >= replays and self._checks.get(asked) is check:
                return check
        options = {"replays": REPLAYS if replays is None else replays, "seed": seed, **options}

        def compared() -> Check:
            return verify(scores, self._run_of(scores), self.task, self.query, resources=resources, **options)

        self._checks[asked] = self._once(("verify", scores, options), compared)
        return self._checks[asked]

    def refine(self, scores: Scores | None = None, *, top: int = 32, resources: Resources | None = None) -> Scores:
        """Replace the most extreme scores by exact replays."""
        scores, resources = self._known(scores), resources or self.resources

        def refined() -> Scores:
            exact = refine(scores, self._run_of(scores), self.task, self.query, top=top, resources=resources)
            return self._remember(exact)

        return self._once(("refine", scores, top), refined)

    def labels(self, *, folds: int | str | None = AUTO, **options: Any) -> Labels:
        """Say which labels look wrong; verified scores are included as far as they can be trusted."""
        resources, checks = options.pop("resources", None) or self.resources, self.checks
        verified = [
            one for method, one in self.scores.items() if method in checks and Asked.of(one).everyone(self.task.size)
        ]
        scores = options.pop("scores", most_trusted(verified, checks))
        check = options.pop("check", self._checks.get(Asked.of(scores)) if isinstance(scores, Scores) else None)

        def answered() -> Labels:
            given = {"scores": scores, "check": check, "folds": folds, "classes": self.show.classes, **options}
            self.issues = labels(self.run, self.task, resources=resources, **given)
            return self.issues

        return self._once(("labels", folds, options, scores, check), answered)

    def cleanse(
        self,
        scores: Scores | Labels | Sequence[Scores | Labels] | Dataset | None = None,
        test_set: Dataset | None = None,
        remove: int | Sequence[int] | None = None,
        **options: Any,
    ) -> Curve:
        """Remove the most harmful examples, train again, and measure on the test set; by default 2, 5 and 10 %.

        ``scores`` are the scores or labels to rank by, or several of them; by default the most trustworthy scores, for
        which ``study.cleanse(test_set)`` is short.
        """
        if test_set is None and isinstance(scores, Dataset):
            scores, test_set = None, scores
        if test_set is None:
            raise InputError(
                "cleanse measures on examples that neither training nor the scores have seen: give test_set=, as in "
                "study.cleanse(scores, test_set).",
                code="test-set-missing",
            )
        given: list[Any] = list(scores) if isinstance(scores, list | tuple) else [scores]
        methods = [one if isinstance(one, Labels) else self._known(one) for one in given]
        amounts, resources = self._removed(methods) if remove is None else remove, options.pop("resources", None)

        def measured() -> Curve:
            own = resources or self.resources
            self.curve = cleanse(methods, self.run, self.task, test_set, amounts, resources=own, **options)
            return self.curve

        return self._once(("cleanse", *methods, test_set, amounts, options), measured)

    def _removed(self, methods: Sequence[Scores | Labels]) -> list[int]:
        """Return how many to remove by default: shares of the training set, and no more than are harmful."""
        counts = [len(one) if isinstance(one, Labels) else one.harmful_count for one in methods]
        harmful = min((count for count in counts if count), default=1)
        return sorted({min(harmful, max(1, round(share * self.task.size))) for share in REMOVED})

    def timeline(self, *, at: int | str | None = None, resources: Resources | None = None, **options: Any) -> Timeline:
        """Say when in training each example's influence arose; with ``at`` on the model after that many steps."""
        return self._arose(self._at(at), resources or self.resources, **options)

    def _arose(self, run: Run, resources: Resources, **options: Any) -> Timeline:
        return self._once(
            ("timeline", run.fingerprint, options),
            lambda: timeline(run, self.task, self.query, resources=resources, **options),
        )

    def plan(self) -> pd.DataFrame:
        """Predict time, memory and disk of every method on the run."""
        return self._once(("plan",), lambda: plan(self.task, self.query, self.run, resources=self.resources))

    def report(
        self,
        path: str | Path | None = None,
        *,
        show: Show | Callable[[Any], Any] | None = None,
        overwrite: bool = False,
        resources: Resources | None = None,
    ) -> Page:
        """Write a page about everything that was asked; scores and labels are computed if they were not before.

        It is written to ``path``, by default ``report.html`` in the run's directory.
        """
        first, resources = self._known(None), resources or self.resources
        run = self._run_of(first)
        scores = list(self.scores.values())
        queries = [self.answers[asked] for asked in self._same_kind if self.answers[asked].queries == EACH]
        return report(
            RunPaths(self.run.path).report if path is None else path,
            run,
            list({id(one): one for one in (first, *scores, *queries)}.values()),
            list(self.checks.values()),
            self.curve if run is self.run else None,
            labels=(self.labels if self.issues is None else self.issues) if run is self.run else None,
            task=self.task,
            query=self.query,
            show=self.show if show is None else show_of(show),
            timeline=partial(self._arose, run, resources),
            overwrite=overwrite,
            resources=resources,
        )

    @property
    def best(self) -> Scores | None:
        """The scores to act on: exact ones, else those with the best verdict, else the newest."""
        return most_trusted(list(self.scores.values()), self.checks)

    def __repr__(self) -> str:
        parts = [*self.scores, *(["labels"] if self.issues else []), *(["curve"] if self.curve else [])]
        return f"Study({self.run}, {self.task.size} training examples; {', '.join(parts) or 'nothing asked yet'})"

    def __str__(self) -> str:
        """Say what every question that was asked gave, one per line; before the first, what to ask."""
        rows = [f"{name}: {words}" if name else f"  {words}" for name, words in self._answers_in_words()]
        return "\n".join([f"{self._title}:", *(f"  {row}" for row in rows)]) if rows else f"{self._title}. {UNASKED}"

    def _repr_html_(self) -> str:
        rows = self._answers_in_words()
        return notebook.card(self._title, [] if rows else [UNASKED], ("", ""), rows)

    @property
    def _title(self) -> str:
        return f"Study of {self.run.path}, {self.task.size} training examples"

    def _answers_in_words(self) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        if self.issues is not None:
            rows.append(("labels", self.issues.sentence))
        rows += [(asked.method, in_words(one, self._checks.get(asked))) for asked, one in self.answers.items()]
        if self.curve is not None:
            lines = str(self.curve).splitlines()
            rows += [("" if number else "cleansing", line.strip()) for number, line in enumerate(lines)]
        return rows

    def _scored(self, estimator: Estimator | None, budget: float, resources: Resources, **options: Any) -> Scores:
        run = self._at(options.pop("at", None))
        if estimator is not None:
            if not isinstance(estimator, Estimator):
                name = estimator.__name__ if isinstance(estimator, type) else "ACC"
                raise InputError(
                    f"estimator={estimator!r} is not an estimator: give one such as lo.{name}(), or nothing.",
                    code="estimator-expected",
                )
            return self._remember(estimator.score(run, self.task, self.query, resources=resources, **options))
        return self._take(choose(run, self.task, self.query, budget=budget, resources=resources, **options))

    def _take(self, choice: Chosen) -> Scores:
        """Remember the scores of a choice, and the check that comes with them."""
        self.choice = choice
        scores = self._remember(choice.scores)
        if choice.check is not None:
            self._checks[Asked.of(scores)] = choice.check
        return scores

    def _at(self, at: int | str | None) -> Run:
        """Return the run, or its part up to a state that is scored instead of the last one."""
        if at is None:
            return self.run
        run = Question(self.run, self.task, self.query, at=at).run
        return self._heads.setdefault(run.fingerprint, run)

    def _run_of(self, scores: Scores) -> Run:
        """Return the run that was scored: this one, or its part up to an earlier state."""
        return self._heads.get(scores.run_fingerprint or 0, self.run)

    def _remember(self, scores: Scores) -> Scores:
        asked = Asked.of(scores)
        self.answers.pop(asked, None)  # the newest comes last
        self._checks.pop(asked, None)
        self.answers[asked] = scores
        return scores

    def _known(self, scores: Scores | None) -> Scores:
        """Return these scores, else the best that were computed, else new ones."""
        if scores is None:
            return self.best or self.score()
        if not isinstance(scores, Scores):
            there = f", such as study.scores[{next(iter(self.scores))!r}]" if self.scores else ""
            raise InputError(
                f"Scores are needed, not {kind_of(scores)}: give what study.score() returned{there}.",
                code="scores-expected",
            )
        scores.check_same_run(self._run_of(scores))
        if self.answers.get(Asked.of(scores)) is not scores:
            self._remember(scores)
        return scores

    def _once(self, question: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Compute the answer, or return the stored one; scores and data sets are compared by identity."""
        key = repr([_plain(part) for part in question])
        if key not in self._memory:
            self._memory[key] = (compute(), question)  # keeps the question alive, so that no other object gets its id
        return self._memory[key][0]


def _plain(part: Any) -> Any:
    """Return what a question asks in a form whose repr is complete: that of a long array is not."""
    if isinstance(part, _BY_IDENTITY):
        return id(part)
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(value) for value in part]
    return part.tolist() if hasattr(part, "tolist") else part


def _opened(run: Any) -> Run:
    """Return the run, or the one in a directory."""
    if isinstance(run, str | Path):
        return open_run(run)
    if not isinstance(run, Run):
        raise InputError(
            f"A run is needed first, not {kind_of(run)}: give what recorder.finish() or lo.open_run(path) "
            "returned, or the run's directory.",
            code="run-expected",
        )
    return run


def _checked(task: Any) -> Task:
    if not isinstance(task, Task):
        raise InputError(
            f"A task is needed second, not {kind_of(task)}: give lo.Task(model, loss, train_set).",
            code="task-expected",
        )
    return task
