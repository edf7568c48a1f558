"""What a report says, as plain data: numbers, strings and pictures as strings. The page is built from this alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


def digits(value: float) -> float:
    """Round to five digits, which are enough for a page.

    >>> digits(0.123456789)
    0.12346
    """
    return float(f"{value:.5g}")


def rounded(values: Iterable[float]) -> list[float]:
    """Round many numbers in this way."""
    return [digits(value) for value in values]


@dataclass(frozen=True)
class Shown:
    """An example as it is shown: a picture (a data URI), a text, or named values, with ``more`` left out."""

    picture: str = ""
    text: str = ""
    row: tuple[tuple[str, str], ...] = ()
    more: int = 0


@dataclass(frozen=True)
class Trust:
    """How far the scores can be trusted: ``level`` is exact, good, coarse, hint, none or unchecked.

    ``brief`` says it plainly, ``sentence`` with figures. With a bad verdict, ``instead`` says what to do instead of
    going by the list, and ``act`` which of its rows one may decide on: ``"all"``, those that are ``"exact"``, or none.
    """

    level: str
    headline: str
    sentence: str
    brief: str
    instead: str = ""
    act: str = "all"


@dataclass(frozen=True)
class Answer:
    """One of the first things that a page says; ``about`` is labels, removal or trust, ``level`` as in ``Trust``."""

    about: str
    level: str
    headline: str
    sentence: str


@dataclass(frozen=True)
class Issues:
    """Labels that look wrong, most suspicious first: places in the table, suggested names, score and reason.

    ``folds`` is the number of trainings that judged them out of sample, None if the recorded run did.
    """

    total: int
    folds: int | None
    place: list[int]
    suggested: list[int]
    score: list[float]
    why: list[str]


@dataclass(frozen=True)
class Table:
    """The listed examples, column by column; ``label`` and ``says`` are indices into ``names``, -1 for unknown.

    ``p`` is the probability that the trained model gives the example's own label. Rows are in the order of the first
    method's scores.
    """

    id: list[int | str]
    names: list[str] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    says: list[int] = field(default_factory=list)
    p: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Histogram:
    """The number of scores between each two edges; zero is an edge."""

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
    """A curve with its interval; ``low`` and ``high`` are empty if there is none."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Check:
    """Estimates compared with the truth: every replayed example, and the measures with their intervals in words."""

    points: list[Point]
    measures: list[tuple[str, str, str]]


@dataclass(frozen=True)
class Cleansing:
    """The result of retraining without the most harmful examples; ``base`` is with all of them.

    ``changes`` has for each choice and number removed the change in words, compared with removing nothing.
    """

    sentence: str
    measure: str
    base: float
    lines: list[Line]
    changes: list[tuple[str, int, str]]


@dataclass(frozen=True)
class Method:
    """One method's view of the listed rows, and how far it can be trusted."""

    name: str
    unit: str
    score: list[float]
    exact: list[bool]
    harmful: int
    sentence: str
    trust: Trust
    histogram: Histogram
    parts: list[Part]
    check: Check | None


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of all methods as a table."""

    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Content:
    """Everything that the page says. Each method's results are in ``methods``, the most trustworthy one first.

    ``queries_by`` is the method that scored single queries, if it is not the first one.
    """

    title: str
    made: str
    key: str
    groups: bool
    answers: list[Answer]
    summary: list[str]
    facts: list[tuple[str, str]]
    notes: list[str]
    methods: list[Method]
    verdicts: Verdicts
    total: int
    table: Table
    issues: Issues | None
    shown: dict[int, Shown]
    called: dict[int, str]
    spans: list[str]
    timing: str
    lines: dict[int, list[float]]
    queries: list[Query]
    queries_by: str
    parts_of: str
    cleansing: Cleansing | None
