"""Packages that only an extra brings, and what is said where one of them is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from leaveout.errors import UnsupportedError

_EXTRAS = {
    "cli": ("rich", "tomlkit", "typer"),
    "data": ("pandas", "pooch", "scipy", "sklearn"),
    "notebook": ("matplotlib",),
    "processes": ("cloudpickle", "joblib"),
    "ray": ("ray",),
    "report": ("jinja2",),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "mlflow": ("mlflow",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
_EXTRA_OF = {package: extra for extra, packages in _EXTRAS.items() for package in packages}


@contextmanager
def needed_by(user: str) -> Iterator[None]:
    """Import packages of an extra in this context: if one is missing, say who needs it and what to install.

    >>> with needed_by("lo.verify"):
    ...     raise ModuleNotFoundError(name="scipy.stats")
    Traceback (most recent call last):
    leaveout.errors.UnsupportedError: lo.verify needs scipy, which is not installed: pip install "leaveout[data]".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _EXTRA_OF:
            raise
        raise UnsupportedError(
            f'{user} needs {package}, which is not installed: pip install "leaveout[{_EXTRA_OF[package]}]".',
            code="extra-missing",
        ) from None
