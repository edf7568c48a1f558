"""Digits: 1,797 images of 8 x 8 pixels, shipped inside scikit-learn, so that a demo needs no network."""

import numpy as np

from leaveout.builtin.data.examples import Table


def table() -> Table:
    """Return flat rows of 64 pixels in [0, 1], ten classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return Table(
        x=x / 16,  # the pixels are counts 0..16
        y=y.astype(np.int64),
        ids=np.arange(len(y)),
        n_pool=len(y),
        features=tuple(f"pixel_{row}_{column}" for row in range(8) for column in range(8)),
        classes=tuple("0123456789"),
        standardise=False,
    )


def one_against_seven() -> Table:
    """Return digit 1 (class 0) against 7 (class 1), standardised: a small substitute for the larger two-class sets."""
    whole = table()
    rows = np.flatnonzero((whole.y == 1) | (whole.y == 7))
    return Table(
        x=whole.x[rows],
        y=(whole.y[rows] == 7).astype(np.int64),
        ids=rows,
        n_pool=len(rows),
        features=whole.features,
        classes=("1", "7"),
        standardise=True,
    )
