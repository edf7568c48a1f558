"""The registry of optimizers: every file in this package that defines ``OPTIMIZER``."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from leaveout.optim.definition import Definition


@cache
def optimizers() -> Mapping[str, Definition]:
    """Return all definitions by the name used in manifests.

    >>> optimizers()["SGD"].linear, optimizers()["Adam"].linear
    (True, False)
    """
    files = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = [import_module(f"{__package__}.{name}") for name in files]
    defined = [module.OPTIMIZER for module in modules if hasattr(module, "OPTIMIZER")]
    return MappingProxyType({definition.name: definition for definition in defined})
