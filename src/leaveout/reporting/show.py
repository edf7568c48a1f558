"""How an example is shown: a picture, a piece of text, or a row with feature names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from leaveout._util.png import data_uri, is_picture, pixels
from leaveout.builtin.data import Data
from leaveout.errors import InputError
from leaveout.reporting.content import Shown
from leaveout.task.forward import TARGET_KEYS
from leaveout.trajectory.left_out import Groups

TEXT = 600
CELLS = 8
"""The number of entries shown of a numeric row; twice as many for a row with names and values."""


@dataclass(frozen=True)
class Show:
    """How the report shows examples; everything has a sensible default.

    Args:
        example: turns an example into what is shown: an image (a tensor or array of shape H x W, 1|3 x H x W or
            H x W x 3), a string, a 1-D tensor, or a dict of names to values. Without it the example's input is shown.
        train: what is shown for the training examples, by id, if the data set itself holds nothing readable: texts,
            images, rows.
        query: the same for the query examples.
        ids: the names of the training examples, by id: file names, keys of a database. Tables keep the ids.
        text: the text of an example beside its picture or row: a function of an example, or texts by id.
        row: names and values of an example, likewise: a function of an example, a list of dicts, or a data frame with
            the raw columns.
        classes: names of the classes.
        features: names of the entries of 1-D inputs.
        groups: sums of influence are shown by these groups instead of classes; for scores of groups, their members.
        top: how many of the most harmful and of the most helpful examples are shown with what they look like.
        timeline: whether to show when in training influence arose, which takes one SGD-IE sweep.
        title: the title of the page.
    """

    example: Callable[[Any], Any] | None = None
    _: KW_ONLY
    train: Sequence[Any] | None = None
    query: Sequence[Any] | None = None
    ids: Sequence[Any] | None = None
    text: Callable[[Any], Any] | Sequence[str] | None = None
    row: Callable[[Any], Any] | Sequence[Mapping[str, Any]] | pd.DataFrame | None = None
    classes: Sequence[str] = ()
    features: Sequence[str] = ()
    groups: Groups | None = None
    top: int = 60
    timeline: bool = True
    title: str = ""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise InputError(f"top={self.top} shows nothing: give 1 or more.", code="top-not-a-count")

    def shown(self, example: Any, number: int | None = None) -> Shown:
        """Show one example; ``number`` is the id of a training example."""
        plain = present(self.example(example) if self.example else _readable(example), self.features)
        text, row = _part(self.text, example, number), _part(self.row, example, number)
        if text is None and row is None:
            return plain
        cells = Shown() if row is None else present(row)
        return Shown(plain.picture, "" if text is None else present(str(text)).text, cells.row, cells.more)


def _readable(example: Any) -> Any:
    """Return a row of names and values as it is, unless it has a target, as data set examples do; else the input."""
    row = isinstance(example, Mapping) and not any(key in TARGET_KEYS for key in example)
    return example if row else input_of(example)


def _part(source: Any, example: Any, number: int | None) -> Any:
    """Return what a function returns for an example, or its entry in a list or data frame."""
    if source is None or callable(source):
        return None if source is None else source(example)
    if number is None:
        return None
    return source.iloc[number].to_dict() if isinstance(source, pd.DataFrame) else source[number]


def show_of(given: Show | Callable[[Any], Any] | None) -> Show:
    """Return the argument ``show=`` as a ``Show``."""
    return given if isinstance(given, Show) else Show(example=given)


def built_in(dataset: Data) -> Show:
    """Return how the examples of built-in data are shown: flat pixels as a square picture."""
    side = round(len(dataset.features) ** 0.5)
    if dataset.features and dataset.features[0].startswith("pixel") and side**2 == len(dataset.features):
        return Show(example=partial(_square, side), classes=dataset.classes)
    return Show(train=dataset.train.raw, query=dataset.val.raw, classes=dataset.classes, features=dataset.features)


def _square(side: int, example: Any) -> Any:
    return example[0].reshape(side, side)


def input_of(example: Any) -> Any:
    """Return an example's input without its target: the first input, or a dict's text."""
    if isinstance(example, Mapping):
        inputs = [value for key, value in example.items() if key not in TARGET_KEYS]
        return next((value for value in inputs if isinstance(value, str)), inputs[0] if inputs else None)
    return input_of(example[0]) if isinstance(example, tuple | list) and example else example


def present(thing: Any, features: Sequence[str] = ()) -> Shown:
    """Return a picture, text or row, depending on the type of the thing.

    >>> present("a message")
    Shown(picture='', text='a message', row=(), more=0)
    >>> present(np.array([0.5, 0.0, -2.0]), ["age", "hours", "gain"])
    Shown(picture='', text='', row=(('age', '0.5'), ('hours', '0'), ('gain', '-2')), more=0)
    """
    if isinstance(thing, Mapping):
        cells = [(str(name), _cell(value)) for name, value in thing.items()]
        return Shown(row=tuple(cells[: 2 * CELLS]), more=max(0, len(cells) - 2 * CELLS))
    if isinstance(thing, str):
        if not thing.strip():
            return Shown(text="(empty)")
        return Shown(text=thing if len(thing) <= TEXT else thing[:TEXT].rstrip() + " …")
    if isinstance(thing, bool | int | float) or thing is None:
        return Shown(text="" if thing is None else _cell(thing))
    array = thing.detach().cpu().numpy() if isinstance(thing, Tensor) else np.asarray(thing)
    if is_picture(array) and array.dtype.kind in "fui":
        return Shown(picture=data_uri(pixels(array)))
    if array.ndim == 1 and array.dtype.kind == "f":
        return _row(array, features)
    return Shown(text=present(" ".join(map(str, array.flatten()[:TEXT].tolist()))).text)


def _row(array: np.ndarray, features: Sequence[str]) -> Shown:
    """Return all entries of a short row; of a long one those largest in magnitude, and the number of the others."""
    if features and len(features) != len(array):
        raise InputError(
            f"{len(features)} feature names for rows of {len(array)} values: name every feature.",
            code="feature-without-name",
        )
    order = list(range(len(array)))
    if len(array) > CELLS:
        order = [int(i) for i in np.argsort(-np.abs(array), kind="stable")[:CELLS] if array[i] != 0]
    cells = tuple((str(features[i]) if features else f"feature {i}", _cell(float(array[i]))) for i in order)
    return Shown(row=cells, more=len(array) - len(cells))


def _cell(value: Any) -> str:
    number = value.item() if isinstance(value, Tensor | np.generic) and np.size(value) == 1 else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)
