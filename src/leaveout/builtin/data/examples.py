"""A loaded data set: three parts, with each example's row number in the original files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.utils.data import TensorDataset

from leaveout.errors import InputError, check_seed, is_whole


class Examples(TensorDataset):
    """Pairs (x, y) for any `DataLoader`, with `ids`: row numbers in the original files, the same for every split.

    `y` is float 0/1 for a model with one logit, and an int64 class otherwise. `raw` has each example as in the original
    files, if a person could not read it from `x`: a text, or a row of names and values. `true` has the correct labels,
    if some of `y` are known to be wrong.
    """

    def __init__(
        self,
        x: Float[Tensor, "n ..."],
        y: Shaped[Tensor, " n"],
        ids: Int64[Tensor, " n"],
        *,
        raw: Sequence[Any] | None = None,
        true: Shaped[Tensor, " n"] | None = None,
    ) -> None:
        super().__init__(x, y)
        self.ids, self.raw, self.true = ids, raw, true

    @property
    def x(self) -> Float[Tensor, "n ..."]:
        """The inputs."""
        return self.tensors[0]

    @property
    def y(self) -> Shaped[Tensor, " n"]:
        """The labels."""
        return self.tensors[1]


@dataclass(frozen=True)
class Data:
    """A data set by name, split and scaled; `features` is empty for images."""

    name: str
    train: Examples
    val: Examples
    test: Examples
    features: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A data set as it was read, before any split: row i of the first `n_pool` may be used for training.

    The rows after `n_pool` are the official test part; if there are none, the rows left over by a split are. With
    `true`, some of `y` are wrong: training examples keep them, validation and test examples get the correct labels.
    """

    x: Shaped[np.ndarray, "n ..."]
    y: Int64[np.ndarray, " n"]
    ids: Int64[np.ndarray, " n"]
    n_pool: int
    features: tuple[str, ...]
    classes: tuple[str, ...]
    standardise: bool
    raw: Sequence[Any] | None = None
    true: Int64[np.ndarray, " n"] | None = None


class Picked(Sequence[Any]):
    """Some rows of a longer sequence, in a given order.

    >>> list(Picked("abcd", [3, 0]))
    ['d', 'a']
    """

    def __init__(self, whole: Sequence[Any], rows: Sequence[int] | np.ndarray) -> None:
        self.whole, self.rows = whole, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.whole[int(self.rows[number])]


def split(
    n: int, n_train: int, n_val: int, seed: int = 0
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " val"], Int64[np.ndarray, " rest"]]:
    """Split rows 0..n-1 into (train, val, rest): disjoint, drawn by `train_test_split`, repeatable by seed.

    >>> train, val, rest = split(10, 4, 3, seed=0)
    >>> train, val, rest
    (array([9, 1, 6, 7]), array([2, 8, 4]), array([0, 3, 5]))
    """
    if not (is_whole(n_train, 1) and is_whole(n_val, 1)) or n_train + n_val > n:
        raise InputError(
            f"n_train={n_train} and n_val={n_val} must be whole numbers of at least 1 and together at most {n}, the "
            "rows there are.",
            code="split-too-large",
        )
    from sklearn.model_selection import train_test_split  # takes a second, which commands without data can save

    state = check_seed(seed, 0, 2**32 - 1)
    train, val = train_test_split(np.arange(n), train_size=n_train, test_size=n_val, random_state=state)
    return train, val, np.setdiff1d(np.arange(n), np.concatenate([train, val]))


def prepare(name: str, table: Table, n_train: int, n_val: int, seed: int) -> Data:
    """Split a table and scale all its parts by statistics of the training rows only."""
    from sklearn.preprocessing import StandardScaler

    train, val, rest = split(table.n_pool, n_train, n_val, seed)
    official = np.arange(table.n_pool, len(table.x))
    scaler = StandardScaler().fit(table.x[train]) if table.standardise else None

    right = table.y if table.true is None else table.true

    def labels(y: Int64[np.ndarray, " n"], rows: Int64[np.ndarray, " rows"]) -> Tensor:
        picked = torch.from_numpy(y[rows])
        return picked.float() if len(table.classes) == 2 else picked

    def part(rows: Int64[np.ndarray, " rows"], *, clean: bool = True) -> Examples:
        x = table.x[rows]
        if scaler is not None:
            x = scaler.transform(x)
        scaled = torch.from_numpy(x).float()
        if x.dtype == np.uint8:
            scaled /= 255
        raw = None if table.raw is None else Picked(table.raw, rows)
        true = None if clean or table.true is None else labels(right, rows)
        y = labels(right if clean else table.y, rows)
        return Examples(scaled, y, torch.from_numpy(table.ids[rows]), raw=raw, true=true)

    test = part(official if len(official) else rest)
    return Data(name, part(train, clean=False), part(val), test, table.features, table.classes)
