"""Data by name, split and scaled as the experiments need it, with stable row numbers.

>>> data = load("digits")
>>> len(data.train), len(data.val), len(data.test)
(1000, 400, 397)
>>> data.train.x.shape, data.train.ids.unique().shape
(torch.Size([1000, 64]), torch.Size([1000]))
"""

from collections.abc import Callable
from typing import NamedTuple

from leaveout.builtin.data import adult, cifar10, digits, files, mnist, news
from leaveout.builtin.data.examples import Data, Examples, Table, prepare, split
from leaveout.builtin.data.noise import Noisy, flip, gaussian, ones
from leaveout.errors import InputError, closest

__all__ = ["Data", "Examples", "Noisy", "flip", "gaussian", "is_here", "load", "names", "ones", "sizes", "split"]


class _Source(NamedTuple):
    table: Callable[[], Table]
    n_train: int
    n_val: int
    folder: str | None = None  # below the data directory; None for data that scikit-learn ships
    file: str = "*"  # that must exist


_SOURCES = {
    "20news": _Source(news.table, 400, 400, "20news"),
    "adult": _Source(adult.table, 400, 400, "adult"),
    "cifar10": _Source(cifar10.table, 40_000, 10_000, "cifar10"),
    "cifar10n": _Source(cifar10.human_table, 40_000, 10_000, "cifar10", "cifar-10n.npz"),
    "cifar10n-worst": _Source(cifar10.worst_human_table, 40_000, 10_000, "cifar10", "cifar-10n.npz"),
    "digits": _Source(digits.table, 1_000, 400),
    "digits-1v7": _Source(digits.one_against_seven, 200, 100),
    "mnist": _Source(mnist.table, 50_000, 10_000, "mnist"),
    "mnist-1v7": _Source(mnist.one_against_seven, 400, 400, "mnist"),
}


def names() -> tuple[str, ...]:
    """Name the data sets that `load` knows.

    >>> names()
    ('20news', 'adult', 'cifar10', 'cifar10n', 'cifar10n-worst', 'digits', 'digits-1v7', 'mnist', 'mnist-1v7')
    """
    return tuple(_SOURCES)


def sizes(name: str) -> tuple[int, int]:
    """Return how many training and validation examples `load` draws by default.

    >>> sizes("digits")
    (1000, 400)
    """
    source = _known(name)
    return source.n_train, source.n_val


def is_here(name: str) -> bool:
    """Say whether files of a data set are on this machine; `load` checks that they are complete and unchanged.

    >>> is_here("digits")
    True
    """
    source = _known(name)
    return source.folder is None or files.find(source.folder, source.file) is not None


def _known(name: str) -> _Source:
    if name not in _SOURCES:
        raise InputError(
            f"there is no data set {name!r}{closest(name, _SOURCES)}; choose one of {', '.join(_SOURCES)}.",
            code="data-unknown",
        )
    return _SOURCES[name]


def load(name: str, n_train: int | None = None, n_val: int | None = None, seed: int = 0) -> Data:
    """Load a data set: `n_train` and `n_val` rows drawn by seed (the experiments' numbers by default), and a test part.

    The test part is the official one for mnist, mnist-1v7 and cifar10, and all remaining rows for the others. The
    training labels of cifar10n were given by people and some are wrong: `train.true` has the original ones, which
    validation and test examples use.
    """
    source = _known(name)
    n_train = source.n_train if n_train is None else n_train
    n_val = source.n_val if n_val is None else n_val
    return prepare(name, source.table(), n_train, n_val, seed)
