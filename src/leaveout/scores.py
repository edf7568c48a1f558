"""Scores: values with their ids, sign, unit, method and cost; never a bare tensor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leaveout._util import notebook
from leaveout._util.equality import Comparable
from leaveout._util.extras import needed_by
from leaveout._util.files import free, read_sealed, save_csv, save_sealed
from leaveout.compute.cost import Cost
from leaveout.errors import InputError, LeaveoutWarning, RunError
from leaveout.run.reader import Run
from leaveout.task.measures import OWN, UNITS, Measure, unit_of

if TYPE_CHECKING:
    import pandas as pd

SIGN = "positive: the query loss would rise without this example; it helped"
OWN_SIGN = "positive: its own loss would rise without this example"
UNIT = "change of the query loss"
EFFECTS = (UNIT, OWN, *UNITS.values())
"""Units that replays have too: changes of the loss, or of another measure."""
MEAN, SELF, EACH = "mean", "self", "each"
"""The single columns of scores for the queries' mean loss, and for each example's own loss; a column per query."""
FEW = 5
"""How many of the most harmful and of the most helpful examples are shown where scores are printed."""

FACTS = (
    *("method", "sign", "unit", "query_fingerprint", "train_ids", "query_ids", "groups", "run_fingerprint"),
    *("precision", "held"),
)
"""What is saved with the values, besides the cost."""

LABELS = "labels"
"""The name for removing the labels that look wrong, in a cleansing curve."""


def sign_of(measure: Measure) -> str:
    """Say what the sign of scores of a measure means.

    >>> sign_of("margin")
    'positive: the query margin would fall without this example; it helped'
    """
    unit = unit_of(measure)
    if unit is None:
        return SIGN
    what = "query measure would rise" if unit == OWN else f"{unit.removeprefix('fall of the ')} would fall"
    return f"positive: the {what} without this example; it helped"


@dataclass(frozen=True, eq=False)
class Scores(Comparable):
    """How the query loss would change without each training example (or group).

    ``values`` has a row for each of ``train_ids`` and a column for each of ``query_ids``. Positive: the loss would
    rise without the example, so it helped. ``exact`` marks the rows that are exact replays rather than estimates, if
    there are any; ``displacements`` are kept if they were requested; ``query_fingerprint`` identifies the queries and
    ``run_fingerprint`` the run, to compare with other scores; ``groups`` says which examples the rows leave out, if
    they are groups; ``spread`` is the standard deviation over several runs, if these are averages (``lo.average``);
    ``precision`` is that of the computation: the parameters' dtype and, if the training ran under ``torch.autocast``,
    its dtype too; ``held`` says what of the training is held as it happened, though it may depend on the parameters.

    >>> scores = Scores(torch.tensor([[0.5], [-1.0], [0.1]]), (0, 1, 2), ("mean",), "ACC")
    >>> scores.harmful(1), scores.helpful(2)
    ([1], [0, 2])
    """

    values: Float[Tensor, "train query"]
    train_ids: tuple[int | str, ...]
    query_ids: tuple[int | str, ...]
    method: str
    cost: Cost = field(default_factory=Cost)
    displacements: dict[str, Tensor] | None = None
    exact: Bool[Tensor, " train"] | None = None
    query_fingerprint: int | None = None
    sign: str = SIGN
    unit: str = UNIT
    groups: dict[str, list[int]] | None = None
    run_fingerprint: int | None = None
    spread: Float[Tensor, "train query"] | None = None
    precision: str = ""
    held: str = ""

    @property
    def mixed(self) -> str:
        """How the training's mixed precision was handled, in words; empty if it had none.

        >>> Scores(torch.zeros(1, 1), (0,), ("mean",), "ACC", precision="float32 around bfloat16").mixed
        'trained in bfloat16 (autocast), derivatives in float32'
        """
        own, _, cast = self.precision.partition(" around ")
        if not cast:
            return ""
        return f"trained in {cast} (autocast), " + ("replayed alike" if self.all_exact else f"derivatives in {own}")

    @property
    def is_effect(self) -> bool:
        """Say whether values are changes of the queries' measure, which replays compute too."""
        return self.unit in EFFECTS

    def __post_init__(self) -> None:
        if self.values.shape != (len(self.train_ids), len(self.query_ids)):
            raise InputError(
                f"Scores of shape {list(self.values.shape)} do not match {len(self.train_ids)} training ids and "
                f"{len(self.query_ids)} query ids: give a row for each training id and a column for each query id.",
                code="scores-shape",
            )
        broken = (~torch.isfinite(self.values)).nonzero()
        if len(broken):
            raise InputError(
                f"The score of {self.train_ids[int(broken[0, 0])]!r} is NaN or infinite: score the run again, or leave "
                "that row out.",
                code="score-not-finite",
            )

    def __repr__(self) -> str:
        rows, columns = self.values.shape
        mixed = f", {self.mixed}" if self.mixed else ""
        return f"Scores({self.method}, {rows} train x {columns} query, {self.unit}{mixed})"

    def __str__(self) -> str:
        """Say which examples did harm and which helped, whether that is exact, and what the sign means."""
        lines, mean = [f"{self.method}: {self._counts}."], dict(zip(self.train_ids, self.mean().tolist(), strict=True))
        harmful = self.harmful(min(FEW, self.harmful_count))
        for name, ids in ("harmful", harmful), ("helpful", self.helpful(min(FEW, self.helpful_count))):
            lines += [f"  most {name}: {', '.join(f'{i} ({mean[i]:+.2g})' for i in ids)}"] if ids else []
        return "\n".join([*lines, self._trust])

    @property
    def harm(self) -> str:
        """How many rows did harm, in words; of estimates, which close to zero are noise, how many are below zero."""
        named = self.groups is not None or any(isinstance(i, str) for i in self.train_ids)
        did = "did harm" if self.all_exact else "have a score below zero"
        return f"{self.harmful_count} of {len(self.train_ids)} {'groups' if named else 'training examples'} {did}"

    @property
    def _counts(self) -> str:
        """How many rows are below and how many above zero, in words."""
        mean_of = f", on average over {len(self.query_ids)} queries" if len(self.query_ids) > 1 else ""
        return f"{self.harm}, {self.helpful_count} {'helped' if self.all_exact else 'above'}{mean_of}"

    @property
    def _trust(self) -> str:
        """Which scores are exact, what was computed in which precision, and what the sign means, in words."""
        exact = 0 if self.exact is None else int(self.exact.sum())
        if self.all_exact:
            trust = "Every score is an exact replay"
        elif exact:
            trust = f"{exact} of {len(self.train_ids)} scores are exact replays, the others are estimates"
        else:
            trust = "These are estimates; verify compares them with exact replays"
        parts = [part for part in (trust, self.mixed, self.held, self.sign) if part]
        return f"{'. '.join(part[:1].upper() + part[1:] for part in parts)}."

    def _repr_html_(self) -> str:
        count, values = len(self.train_ids), self.mean().tolist()
        order = sorted(range(count), key=lambda place: values[place])
        ends = order if count <= 2 * FEW else order[:FEW] + order[-FEW:]  # the most harmful first
        marks = [False] * count if self.exact is None else self.exact.tolist()
        rows = [
            (
                self.train_ids[place],
                f"{values[place]:+.3g}",
                "did harm" if values[place] < 0 else "helped" if values[place] > 0 else "",
                "exact" if marks[place] else "",
            )
            for place in ends
        ]
        return notebook.card(f"{self.method}: {self._counts}", [self._trust], ("train", self.unit, "", ""), rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw the distribution of the mean scores; needs matplotlib. Returns the axes."""
        ax = notebook.axes(ax)
        values = self.mean().detach().cpu().numpy()
        edges = np.histogram_bin_edges(values, 48)
        for part, colour, name in (
            (values[values < 0], notebook.HARM, "did harm"),
            (values[values >= 0], notebook.HELP, "helped"),
        ):
            ax.hist(part, edges, color=colour, label=name)
        ax.set(xlabel=self.unit, ylabel="examples", title=self.method, yscale="symlog")
        ax.legend(loc="upper right")
        return ax

    @property
    def queries(self) -> str:
        """What the columns are: the ``"mean"`` of all queries, ``"each"`` of them, or ``"self"``."""
        single = self.query_ids[0] if len(self.query_ids) == 1 else None
        return str(single) if single in (MEAN, SELF) else EACH

    @property
    def all_exact(self) -> bool:
        """Say whether every row is an exact replay, and nothing is estimated."""
        return self.exact is not None and bool(self.exact.all())

    def mean(self) -> Float[Tensor, " train"]:
        """Average the scores over the queries."""
        return self.values.mean(1)

    @property
    def helpful_count(self) -> int:
        """The number of rows that helped: the query loss would rise without them."""
        return int((self.mean() > 0).sum())

    @property
    def harmful_count(self) -> int:
        """The number of rows that did harm: the query loss would fall without them."""
        return int((self.mean() < 0).sum())

    def helpful(self, k: int = 10) -> list[int | str]:
        """Return the k ids without which the query loss would rise most, most helpful first.

        Only those that helped: fewer than k, with a warning, if fewer have a score above zero.
        """
        return self._ranked(k, self.helpful_count, "helpful", descending=True)

    def harmful(self, k: int = 10) -> list[int | str]:
        """Return the k ids without which the query loss would fall most, most harmful first.

        Only those that did harm: fewer than k, with a warning, if fewer have a score below zero.
        """
        return self._ranked(k, self.harmful_count, "harmful", descending=False)

    def top(self, k: int = 10, query: int | str | None = None) -> pd.DataFrame:
        """Return the k most influential examples, by magnitude: their scores, and which of them are exact.

        Args:
            k: how many.
            query: one of ``query_ids``; by default the mean over all queries.
        """
        with needed_by("Scores.top()"):
            import pandas as pd
        values = self._column(query)
        order = torch.argsort(values.abs(), descending=True, stable=True)[:k].tolist()
        exact = self.exact if self.exact is not None else torch.zeros(len(values), dtype=torch.bool)
        return pd.DataFrame(
            {"score": values[order].tolist(), "exact": exact[order].tolist()},
            index=pd.Index([self.train_ids[row] for row in order], name="train"),
        )

    def _column(self, query: int | str | None) -> Float[Tensor, " train"]:
        if query is None:
            return self.mean()
        if query not in self.query_ids:
            shown = ", ".join(map(repr, self.query_ids[:5])) + (", ..." if len(self.query_ids) > 5 else "")
            raise InputError(f"query={query!r} was not scored: give one of {shown}.", code="query-not-scored")
        return self.values[:, self.query_ids.index(query)]

    def check_same_queries(self, other: Scores) -> None:
        """Refuse to compare scores of different queries."""
        self.check_queries(other.query_ids, other.query_fingerprint)

    def check_queries(self, ids: tuple[int | str, ...], fingerprint: int | None) -> None:
        """Refuse queries other than those that were scored."""
        if self.query_ids != ids or len({self.query_fingerprint, fingerprint} - {None}) > 1:
            raise InputError(
                f"{self.method} was scored for other queries than these: give the query set that was scored.",
                code="queries-differ",
            )

    def check_same_measure(self, measure: Measure) -> None:
        """Refuse a task that measures something else of its queries than these scores do."""
        if self.is_effect and self.unit != (unit_of(measure) or UNIT):
            raise InputError(
                f"These scores by {self.method} are the {self.unit}, and the task measures the "
                f"{unit_of(measure) or UNIT}: give the task that was scored, such as task.measuring(...).",
                code="measures-differ",
            )

    def check_same_run(self, run: Run) -> None:
        """Refuse scores of another run."""
        if self.run_fingerprint not in (None, run.fingerprint):
            raise InputError(
                f"These scores by {self.method} are of another run than {run}: give the run they are of; for "
                "scores with at=n that is run.head(n).",
                code="scores-of-another-run",
            )

    def extreme(self, count: int) -> list[int]:
        """Return the rows of the most extreme scores: half of them from each tail."""
        order = torch.argsort(self.mean(), stable=True).tolist()
        count = min(count, len(order))
        low = count // 2
        return order[:low] + order[len(order) - (count - low) :]

    def _ranked(self, k: int, count: int, kind: str, *, descending: bool) -> list[int | str]:
        if count < k:
            warnings.warn(
                f"By {self.method}, {count} of {len(self.train_ids)} rows are {kind}: {count} are given, not {k}.",
                LeaveoutWarning,
                stacklevel=3,
            )
        order = torch.argsort(self.mean(), descending=descending, stable=True)
        return [self.train_ids[i] for i in order[: min(k, count)].tolist()]

    def to_frame(self, data: Any = None, columns: Sequence[str] = ()) -> pd.DataFrame:
        """Tabulate the scores: training ids as rows, query ids as columns.

        Args:
            data: the training set, if ``columns`` are wanted; such as a ``datasets.Dataset``.
            columns: its columns that come first in the table.
        """
        with needed_by("Scores.to_frame()"):
            import pandas as pd
        frame = pd.DataFrame(
            self.values.detach().cpu().numpy(),
            index=pd.Index(self.train_ids, name="train"),
            columns=pd.Index(self.query_ids, name="query"),
        )
        if not columns:
            return frame
        rows = self._rows_of(data, columns)
        for place, name in enumerate(columns):
            values = [data[row][name] for row in rows]
            frame.insert(place, name, [v.tolist() if isinstance(v, Tensor) else v for v in values])
        return frame

    def to_csv(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the table of ``to_frame`` to a CSV file, atomically."""
        return save_csv(path, self.to_frame(), overwrite=overwrite)

    def to_dataset(self, data: Any, column: str = "influence") -> Any:
        """Return the training set, a ``datasets.Dataset``, with one more column: the mean score of each row.

        Rows that were not scored have None.
        """
        rows = self._rows_of(data, [])
        if column in data.column_names:
            raise InputError(f"The data has a column {column!r}: give column= another name.", code="column-there")
        values: list[float | None] = [None] * len(data)
        for row, value in zip(rows, self.mean().tolist(), strict=True):
            values[row] = value
        return data.add_column(column, values)

    def _rows_of(self, data: Any, columns: Sequence[str]) -> list[int]:
        """Return the rows of the data that were scored; refuse data without these rows or columns."""
        present = getattr(data, "column_names", None)
        missing = [name for name in columns if name not in (present or ())]
        if present is None or missing:
            what = f"has no column {missing[0]!r}" if missing else f"is a {type(data).__name__} without columns"
            raise InputError(f"The data {what}: give the data set that was trained on.", code="columns-missing")
        if strange := [i for i in self.train_ids if not isinstance(i, int) or i >= len(data)]:
            raise InputError(
                f"{strange[0]!r} was scored, which is not one of the data's {len(data)} rows: give the data set that "
                "was trained on, and scores of examples, not of groups.",
                code="rows-missing",
            )
        return [int(i) for i in self.train_ids]

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the scores to one safetensors file, atomically."""
        path = free(path, overwrite=overwrite)
        facts = {name: getattr(self, name) for name in FACTS} | {"cost": asdict(self.cost)}
        given = {"values": self.values, "exact": self.exact, "spread": self.spread}
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        tensors |= {f"displacements/{name}": tensor for name, tensor in (self.displacements or {}).items()}
        save_sealed(path, tensors, facts)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Scores:
        """Read what ``save`` wrote."""
        try:
            tensors, facts = read_sealed(Path(path))
            if facts["method"] == "Replay":  # version 0.1 did not mark replays as exact
                tensors.setdefault("exact", torch.ones(len(tensors["values"]), dtype=torch.bool))
            moved = {key.removeprefix("displacements/"): t for key, t in tensors.items() if "/" in key}
            return cls(
                tensors["values"],
                tuple(facts["train_ids"]),
                tuple(facts["query_ids"]),
                facts["method"],
                Cost(**facts["cost"]),
                moved or None,
                tensors.get("exact"),
                facts["query_fingerprint"],
                facts["sign"],
                facts["unit"],
                facts.get("groups"),
                facts.get("run_fingerprint"),
                tensors.get("spread"),
                facts.get("precision", ""),
                facts.get("held", ""),
            )
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{path} does not hold scores ({error}): give a file that Scores.save wrote.", code="scores-unreadable"
            ) from None
