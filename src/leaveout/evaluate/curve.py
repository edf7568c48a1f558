"""The cleansing curve: the test loss and error without some examples, and how much they change."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy

from leaveout._util import notebook
from leaveout._util.equality import Comparable
from leaveout._util.files import free, or_null, read_json, save_csv, save_json
from leaveout.compute.cost import Cost
from leaveout.errors import InputError, RunError
from leaveout.run.reader import Run
from leaveout.scores import LABELS

NOTHING, RANDOM = "nothing", "random"
MEASURES = ("loss", "error")
PAIRED = ("loss_change_se", "error_change_se")
MEASURED = ("loss", "loss_se", "error", "error_se", *PAIRED)
USUAL = "within the range of random removals"
COLUMNS = ("choice", "removed", "order", "draw", *MEASURED)


@dataclass(frozen=True, eq=False)
class Curve(Comparable):
    """Test loss and misclassification after removing examples and training again.

    ``table`` has a row per training: ``choice`` is the method that chose what was removed, ``"random"`` or
    ``"nothing"``; ``order`` numbers the order of the batches and ``draw`` the random choice. ``loss_se`` and
    ``error_se`` are standard errors over the test examples, ``loss_change_se`` and ``error_change_se`` those of the
    difference from the training with every example, test example by test example (NaN in files that do not have
    them). ``error`` is NaN if outputs are not class scores.
    ``run_fingerprint`` identifies the run that was trained again; ``harmful`` is how many examples each method calls
    harmful, which is the most that were removed by it; ``seen`` says where training or scores had seen the test set.
    """

    table: pd.DataFrame
    batches: str
    test_size: int
    cost: Cost
    run_fingerprint: int | None = None
    harmful: dict[str, int] = field(default_factory=dict)
    seen: str = ""

    @property
    def measure(self) -> str:
        """What is measured: ``"error"``, or ``"loss"`` if outputs are not class scores."""
        return "loss" if self.table["error"].isna().all() else "error"

    @property
    def choices(self) -> list[str]:
        """The methods that chose what was removed."""
        return [str(name) for name in self.table["choice"].unique() if name not in (NOTHING, RANDOM)]

    def to_frame(self, level: float = 0.95) -> pd.DataFrame:
        """Return a row for each choice and number removed: the mean over trainings, with an interval.

        For two or more trainings it is Student's interval of their mean: over the orders of the batches if there are
        several, each with the mean of its random choices. For a single one it is over the test
        examples: normal for the loss, Wilson's for the error. ``trainings`` says how many there are.
        """
        rows = []
        for (choice, removed), part in self.table.groupby(["choice", "removed"], sort=False):
            row: dict[str, Any] = {"choice": choice, "removed": removed, "trainings": len(part)}
            for measure in MEASURES:
                values = per_order(part[measure], part["order"])
                if len(values) > 1:
                    low, high = student(values, level)
                elif measure == "error":
                    low, high = wilson(float(values[0]), self.test_size, level)
                else:
                    low, high = normal(float(values[0]), float(part["loss_se"].iloc[0]), level)
                if measure == "error":
                    low, high = max(low, 0.0), min(high, 1.0)
                row |= {measure: float(values.mean()), f"{measure}_low": low, f"{measure}_high": high}
            rows.append(row)
        return pd.DataFrame(rows)

    def changes(self, level: float = 0.95) -> pd.DataFrame:
        """Return a row for each choice and number removed: the paired change of loss and error from removing nothing.

        Each training is compared with the one of the same order with every example. For a single pair the interval is
        over the test examples: normal for the loss, Agresti and Min's for the error; for several it is Student's, over
        the orders of the batches if there are several.
        ``measurable`` says whether the interval of the curve's ``measure`` excludes zero. The interval of a single
        training knows nothing of how much any removal changes a training; where as many were removed at random, at
        least twice, ``usual`` says whether the change is one that another random removal may bring: within Student's
        prediction interval of those.
        """
        base = self.table[self.table["choice"] == NOTHING].set_index("order")
        rows, at_random = [], self._at_random(level)
        for (choice, removed), part in self.table[self.table["choice"] != NOTHING].groupby(
            ["choice", "removed"], sort=False
        ):
            row: dict[str, Any] = {"choice": choice, "removed": removed, "trainings": len(part)}
            for measure in MEASURES:
                values = per_order(part[measure] - base.loc[part["order"], measure].to_numpy(), part["order"])
                spread = float(part[f"{measure}_change_se"].iloc[0])
                if len(values) > 1:
                    low, high = student(values, level)
                elif measure == "error":
                    low, high = paired(float(values[0]), spread, self.test_size, level)
                else:
                    low, high = normal(float(values[0]), spread, level)
                row |= {measure: float(values.mean()), f"{measure}_low": low, f"{measure}_high": high}
            row["measurable"] = row[f"{self.measure}_low"] > 0 or row[f"{self.measure}_high"] < 0
            low, high = at_random.get(int(part["removed"].iloc[0]), (math.inf, -math.inf))
            row["usual"] = choice != RANDOM and len(part) == 1 and low <= row[self.measure] <= high
            rows.append(row)
        return pd.DataFrame(rows)

    def _at_random(self, level: float) -> dict[int, tuple[float, float]]:
        """Return where the change by one more random removal is expected, by the number removed."""
        base = self.table[self.table["choice"] == NOTHING][self.measure].to_numpy(float)
        if len(base) > 1:
            return {}  # over several orders of the batches, every interval has the noise of training
        drawn = self.table[self.table["choice"] == RANDOM]
        several = [part for _, part in drawn.groupby("removed") if len(part) > 1]
        changes = [(int(part["removed"].iloc[0]), part[self.measure].to_numpy(float) - base) for part in several]
        return {number: predicted(values, level) for number, values in changes}

    def change(self, choice: str, removed: int) -> str:
        """Say in a phrase what removing this many by one choice changed: "falls by 1.3 points (0.2 to 2.4)"."""
        row = self._change(choice, removed)
        value, low, high = (float(row[f"{self.measure}{end}"]) for end in ("", "_low", "_high"))
        size = {"loss": "{:.3g}", "error": "{:.1f} points"}[self.measure]
        scale = {"loss": 1.0, "error": 100.0}[self.measure]
        if not row["measurable"]:
            return f"does not change measurably, {_signed(value, low, high, self.measure)}"
        ends = sorted((abs(low), abs(high)))
        words = " to ".join(size.format(scale * end).removesuffix(" points") for end in ends)
        usual = f", {USUAL}" if row["usual"] else ""
        return f"{'falls' if value < 0 else 'rises'} by {size.format(scale * abs(value))} ({words}){usual}"

    def interval(self, choice: str, removed: int) -> str:
        """Write what removing this many by one choice changed, as a number: "-1.3 points (-2.4 to -0.2)"."""
        row = self._change(choice, removed)
        return _signed(row[self.measure], row[f"{self.measure}_low"], row[f"{self.measure}_high"], self.measure)

    def _change(self, choice: str, removed: int) -> pd.Series:
        rows = self.changes()
        return rows[(rows["choice"] == choice) & (rows["removed"] == removed)].iloc[0]

    def __repr__(self) -> str:
        amounts = ", ".join(f"{m}" for m in sorted(set(self.table["removed"]) - {0}))
        return f"Curve(test {self.measure} of {self.test_size} examples without {amounts} by {', '.join(self.choices)})"

    def __str__(self) -> str:
        """Say what each removal changed, one per line, and then how that was measured."""
        lines = [
            f"Without {self.removed(choice, removed)} the test {self.measure} {self.change(choice, removed)}: "
            f"{self.base} → {value}."
            for choice, removed, value, _ in self.rows()
        ]
        how = f"Measured on {self.test_size} test examples, in pairs with nothing removed; {self.batches} batches."
        more = " Training in several orders tells more: shuffles=5." if any(USUAL in line for line in lines) else ""
        return "\n".join([*lines, f"{how}{more}"])

    @property
    def base(self) -> str:
        """The error, or loss, with nothing removed."""
        return self._written(float(self.table[self.table["choice"] == NOTHING][self.measure].mean()))

    def rows(self) -> list[tuple[str, int, str, str]]:
        """List each choice and number removed, with the mean error or loss without them, and how it changed."""
        rows = []
        for _, row in self.changes().iterrows():
            part = self.table[(self.table["choice"] == row["choice"]) & (self.table["removed"] == row["removed"])]
            value = self._written(float(part[self.measure].mean()))
            rows.append((str(row["choice"]), int(row["removed"]), value, _words(row, self.measure)))
        return rows

    def _written(self, value: float) -> str:
        return f"{value:.4g}" if self.measure == "loss" else f"{value:.2%}"

    def removed(self, choice: str, removed: int) -> str:
        """Say what was removed, and whether that is all that the method would remove."""
        if choice == RANDOM:
            return f"{removed:,} at random"
        if self.harmful.get(choice) != removed or removed == 1:
            return chosen(choice, removed)
        return f"all {removed:,} labels that look wrong" if choice == LABELS else f"all {removed:,} harmful by {choice}"

    def _repr_html_(self) -> str:
        measure, rows = self.measure, []
        for _, row in self.changes().iterrows():
            rows.append((row["choice"], row["removed"], _words(row, measure)))
        heads = ("removed by", "examples", f"change of the test {measure}, in pairs")
        return notebook.card(str(self).splitlines()[0], (), heads, rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw the test error, or loss, over how many were removed; needs matplotlib. Returns the axes."""
        ax, frame, measure = notebook.axes(ax), self.to_frame(), self.measure
        base = float(frame[frame["choice"] == NOTHING][measure].iloc[0])
        ax.axhline(base, color="grey", linestyle="--", linewidth=1, label="nothing removed")
        for choice, part in frame[frame["choice"] != NOTHING].groupby("choice", sort=False):
            part = part.sort_values("removed")
            line = ax.plot(part["removed"], part[measure], marker="o", label=str(choice))[0]
            ends = (part[f"{measure}_low"], part[f"{measure}_high"])
            ax.fill_between(part["removed"], *ends, color=line.get_color(), alpha=0.15)
        ax.set(xlabel="examples removed", ylabel=f"test {measure}")
        ax.legend()
        return ax

    def to_csv(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the table of ``to_frame`` to a CSV file, atomically."""
        return save_csv(path, self.to_frame(), overwrite=overwrite)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the curve to one JSON file, atomically."""
        path = free(path, overwrite=overwrite)
        columns = {name: [or_null(value) for value in self.table[name].tolist()] for name in COLUMNS}
        content = {"batches": self.batches, "test_size": self.test_size, "cost": asdict(self.cost), "table": columns}
        content |= {"run_fingerprint": self.run_fingerprint, "harmful": self.harmful}
        content |= {"seen": self.seen} if self.seen else {}
        save_json(path, content)
        return path

    def check_same_run(self, run: Run) -> None:
        """Refuse another run than the one that was trained again."""
        if self.run_fingerprint not in (None, run.fingerprint):
            raise InputError(
                f"The cleansing curve is of another run than {run}: give that of this run.", code="curve-of-another-run"
            )

    @classmethod
    def load(cls, path: str | Path) -> Curve:
        """Read what ``save`` wrote."""
        try:
            content = read_json(Path(path))
            columns = content["table"]
            missing = [float("nan")] * len(columns["choice"])
            table = pd.DataFrame(
                {name: columns.get(name, missing) if name in PAIRED else columns[name] for name in COLUMNS}
            )
            measured = [name for name in COLUMNS if name.startswith(MEASURES)]
            table[measured] = table[measured].astype(float)
            table = table.astype({"choice": str, "removed": int})
            if NOTHING not in table["choice"].tolist():
                raise ValueError("it does not say what removing nothing gives")
            harmful = {str(name): int(count) for name, count in content.get("harmful", {}).items()}
            size, fingerprint = int(content["test_size"]), content.get("run_fingerprint")
            return cls(
                table,
                str(content["batches"]),
                size,
                Cost(**content["cost"]),
                fingerprint,
                harmful,
                str(content.get("seen", "")),
            )
        except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise RunError(
                f"{path} does not hold a cleansing curve ({error}): give a file that Curve.save wrote.",
                code="curve-unreadable",
            ) from None


def chosen(method: str, removed: int) -> str:
    """Say what was removed.

    >>> chosen("labels", 20), chosen("ACC", 20), chosen("ACC", 1)
    ('the 20 labels that look most wrong', 'the 20 most harmful examples by ACC', 'the most harmful example by ACC')
    """
    if method == LABELS:
        return "the label that looks most wrong" if removed == 1 else f"the {removed:,} labels that look most wrong"
    what = "most harmful example" if removed == 1 else f"{removed:,} most harmful examples"
    return f"the {what} by {method}"


def per_order(values: pd.Series, orders: pd.Series) -> np.ndarray:
    """Average random choices that were trained in one order of the batches; with a single order, return them all.

    They share that order, and the training with every example that they are compared with, so they are not independent.

    >>> per_order(pd.Series([1.0, 3.0, 5.0]), pd.Series([0, 0, 1])), per_order(pd.Series([1.0, 3.0]), pd.Series([0, 0]))
    (array([2., 5.]), array([1., 3.]))
    """
    if orders.nunique() > 1:
        values = values.groupby(orders.to_numpy()).mean()
    return values.to_numpy(dtype=float)


def normal(value: float, error: float, level: float = 0.95) -> tuple[float, float]:
    """Return value ± z·(standard error)."""
    half = float(scipy.stats.norm.ppf((1 + level) / 2)) * error
    return value - half, value + half


def student(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return the mean ± t·s/√k over k values."""
    half = scipy.stats.t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def predicted(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return where one more value is expected after k of them: the mean ± t·s·√(1 + 1/k).

    >>> [round(end, 3) for end in predicted(np.array([0.0, 1.0, 2.0]))]
    [-3.968, 5.968]
    """
    count = len(values)
    half = scipy.stats.t.ppf((1 + level) / 2, count - 1) * values.std(ddof=1) * np.sqrt(1 + 1 / count)
    return float(values.mean() - half), float(values.mean() + half)


def wilson(share: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Compute Wilson's interval of a share p of n: (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n), within 0 and 1.

    >>> [round(end, 4) for end in wilson(0.0, 20)], [round(end, 4) for end in wilson(0.5, 10)]
    ([0.0, 0.1611], [0.2366, 0.7634])
    """
    z = float(scipy.stats.norm.ppf((1 + level) / 2))
    middle, half = share + z**2 / (2 * count), z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return float(max(0.0, (middle - half) / (1 + z**2 / count))), float((middle + half) / (1 + z**2 / count))


def paired(change: float, error: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Return Agresti and Min's interval of a difference of two error rates on the same n test examples.

    With b and c the examples that only one of the models gets wrong, half an example is added to each of the four
    cells: d* = (c* − b*)/n*, and its variance ((b* + c*) − (c* − b*)²/n*)/n*². Unlike d ± z·se its width is not zero
    if no prediction changed.

    >>> [round(end, 4) for end in paired(0.0, 0.0, 100)]
    [-0.0192, 0.0192]
    """
    if not error >= 0:
        return float("nan"), float("nan")
    split = (count - 1) * count * error**2 + count * change**2  # b + c, from the sample variance of the differences
    size, net = count + 2, count * change / (count + 2)
    spread = np.sqrt(max(0.0, split + 1 - (count * change) ** 2 / size)) / size
    return normal(net, float(spread), level)


def _words(row: pd.Series, measure: str) -> str:
    change = _signed(row[measure], row[f"{measure}_low"], row[f"{measure}_high"], measure)
    if not row["measurable"]:
        return f"{change}, no measurable change"
    return f"{change}, {USUAL}" if row["usual"] else change


def _signed(value: float, low: float, high: float, measure: str) -> str:
    """Write a change with its interval.

    >>> _signed(-0.013, -0.024, 0.002, "error")
    '-1.3 points (-2.4 to +0.2)'
    >>> _signed(0.002, -0.0001, 0.004, "error")
    '+0.2 points (+0.0 to +0.4)'
    """
    if measure == "loss":
        return f"{value:+.3g} ({low:+.3g} to {high:+.3g})"
    value, low, high = (round(100 * number, 1) + 0.0 for number in (value, low, high))  # -0.0 + 0.0 is 0.0
    return f"{value:+.1f} points ({low:+.1f} to {high:+.1f})"
