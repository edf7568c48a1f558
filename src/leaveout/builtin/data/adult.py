"""Adult: does a person of the 1994 census earn more than 50,000 dollars? 48,842 rows, 62 features.

The rows of `adult.data` come first, those of `adult.test` after them; a split draws from both.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from leaveout.builtin.data.examples import Table
from leaveout.builtin.data.files import Remote, original

_ARCHIVE = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
_FILES = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
_COLUMNS = [
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
]
_NUMERIC = ["age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"]
_CATEGORICAL = [column for column in _COLUMNS[:-1] if column not in _NUMERIC]

# The regions are those of the experiments that this library reproduces; they follow income more than geography.
_REGIONS = {
    "us": "? Cuba United-States",
    "west": "Canada England France Germany Greece Italy Philippines",
    "south": "Columbia Dominican-Republic El-Salvador Guatemala Haiti Holand-Netherlands Honduras Jamaica Laos Mexico "
    "Nicaragua Outlying-US(Guam-USVI-etc) Peru Portugal Puerto-Rico Trinadad&Tobago Vietnam",
    "east": "Cambodia China Hong India Iran Japan Taiwan Yugoslavia",
    "other": "Ecuador Hungary Ireland Poland Scotland South Thailand",
}
# Rare values are merged with a similar one, so that 400 training rows do not leave most columns constant.
_MERGED = {
    "workclass": {"Without-pay": "Never-worked"},
    "education": dict.fromkeys(["1st-4th", "5th-6th", "7th-8th", "9th", "10th", "11th", "12th"], "1st-12th"),
    "marital-status": {"Married-AF-spouse": "Married-civ-spouse"},
    "occupation": {"Armed-Forces": "?"},
    "native-country": {country: region for region, countries in _REGIONS.items() for country in countries.split()},
}


class Rows(Sequence[dict[str, Any]]):
    """The rows of a data frame as names and values."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, number: Any) -> Any:
        return self.frame.iloc[number].to_dict()


def _rows(name: str) -> pd.DataFrame:
    """Read one of the two files; `?` stays a separate value."""
    content = original(Remote("adult", name, _ARCHIVE + name, f"sha256:{_FILES[name]}"), _FILES[name])
    return pd.read_csv(
        io.BytesIO(content),
        names=_COLUMNS,
        skiprows=1 if name == "adult.test" else 0,  # its first line is a comment
        skipinitialspace=True,
        na_filter=False,
    )


def table() -> Table:
    """Return six numbers and eight one-hot coded categories; class 1 earns more than 50,000."""
    raw = pd.concat([_rows(name) for name in _FILES], ignore_index=True)
    frame = raw.replace(_MERGED)
    frame["fnlwgt"] = np.log1p(frame["fnlwgt"])
    x = pd.get_dummies(frame[_NUMERIC + _CATEGORICAL], columns=_CATEGORICAL, prefix_sep=":", dtype=np.float64)
    return Table(
        x=x.to_numpy(np.float64),
        y=frame["income"].str.startswith(">").to_numpy(np.int64),  # the labels of adult.test end in a dot
        ids=np.arange(len(frame)),
        n_pool=len(frame),
        features=tuple(x.columns),
        classes=("<=50K", ">50K"),
        standardise=True,
        raw=Rows(raw[_COLUMNS[:-1]]),
    )
