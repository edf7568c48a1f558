"""What a report says, as plain data: numbers, strings and pictures as strings. The page is made of this alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


def digits(value: float) -> float:
    """Round to five digits, which are plenty for a page.

    >>> digits(0.123456789)
    0.12346
    """
    return float(f"{value:.5g}")


def rounded(values: Iterable[float]) -> list[float]:
    """Round many numbers so."""
    return [digits(value) for value in values]


@dataclass(frozen=True)
class Shown:
    """An example as it is looked at: a picture (a data URI), a text, or named values with ``more`` left out."""

    picture: str = ""
    text: str = ""
    row: tuple[tuple[str, str], ...] = ()
    more: int = 0


@dataclass(frozen=True)
class Trust:
    """How far the scores can be trusted: ``level`` is exact, good, coarse, hint, none or unchecked."""

    level: str
    headline: str
    sentence: str


@dataclass(frozen=True)
class Table:
    """The scored examples, column by column; ``label`` and ``says`` are numbers into ``names``, -1 for unknown.

    ``p`` is the probability that the trained model gives the example's own label.
    """

    id: list[int | str]
    score: list[float]
    exact: list[bool]
    names: list[str] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    says: list[int] = field(default_factory=list)
    p: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Histogram:
    """How many scores lie between each two edges; zero is an edge."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Query:
    """A query example, and the rows of the table that drive it, with their scores for it."""

    id: int | str
    shown: Shown
    label: str
    says: str
    p: float | None
    loss: float | None
    harmful: list[tuple[int, float]]
    helpful: list[tuple[int, float]]


@dataclass(frozen=True)
class Part:
    """A class or group: the sums of its helpful and of its harmful scores, and its sum's growth over the spans."""

    name: str
    count: int
    helpful: float
    harmful: float
    growth: list[float]


@dataclass(frozen=True)
class Point:
    """A replayed example: what was estimated and what is true."""

    id: int | str
    score: float
    truth: float
    sample: str


@dataclass(frozen=True)
class Line:
    """A curve with its interval; ``low`` and ``high`` are empty where there is none."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Check:
    """Estimates held against the truth: every replayed example, and the measures with their intervals in words."""

    points: list[Point]
    measures: list[tuple[str, str, str]]


@dataclass(frozen=True)
class Cleansing:
    """What retraining without the most harmful examples brought; ``base`` is with all of them."""

    sentence: str
    measure: str
    base: float
    lines: list[Line]


@dataclass(frozen=True)
class Content:
    """Everything that the page says; ``unit`` is empty where scores are changes of the query loss."""

    title: str
    made: str
    method: str
    groups: bool
    unit: str
    summary: list[str]
    facts: list[tuple[str, str]]
    notes: list[str]
    trust: Trust
    total: int
    histogram: Histogram
    table: Table
    shown: dict[int, Shown]
    spans: list[str]
    lines: dict[int, list[float]]
    queries: list[Query]
    parts_of: str
    parts: list[Part]
    check: Check | None
    cleansing: Cleansing | None
