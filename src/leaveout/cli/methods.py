"""Parses methods as written on the command line: ``acc``, ``sgd-ie``, ``"acc(transport=subspace(16))"``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from leaveout import estimators
from leaveout.errors import InputError, closest
from leaveout.estimators import Estimator
from leaveout.sweep.transports import Subspace

WORDS = {"true": True, "false": False, "none": None}
HOW = "write a name with options, like acc, sgd-ie or 'acc(transport=exact, readout=outputs)'"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


METHODS: dict[str, type[Estimator]] = {
    _plain(name): kind
    for name in estimators.__all__
    if isinstance(kind := getattr(estimators, name), type) and issubclass(kind, Estimator) and kind is not Estimator
}
NAMES = [{"sgdie": "sgd-ie", "adamie": "adam-ie"}.get(name, name) for name in METHODS]
"""The methods as help and messages write them."""
CHOICES: dict[str, Callable[..., Any]] = {"subspace": Subspace}


def parse(text: str) -> Estimator:
    """Build an estimator from text. Only names, numbers and lists are understood: nothing is evaluated.

    >>> parse("sgd-ie").name, parse("ACC(free)") == parse("acc(transport=free)")
    ('SGD-IE', True)
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(\(.*\))?\s*", text, re.DOTALL)
    if not match:
        raise InputError(f"{text!r} is not a method: {HOW}.", code="method-unreadable")
    name = _plain(match[1])
    candidates = [one for one in METHODS if one.startswith(name)]
    if name not in METHODS and len(candidates) == 1:
        name = candidates[0]  # influence, adam
    if name not in METHODS:
        raise InputError(
            f"there is no method {match[1]!r}{closest(match[1], NAMES)}; choose one of {', '.join(NAMES)}.",
            code="method-unknown",
        )
    try:
        call = ast.parse(f"method{match[2] or '()'}", mode="eval").body
    except (SyntaxError, ValueError):
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise InputError(f"{text!r} cannot be read: {HOW}.", code="method-unreadable")
    return _made(METHODS[name], call, text)


def _made(kind: Callable[..., Any], call: ast.Call, text: str) -> Any:
    options = {word.arg or "**": _value(word.value, text) for word in call.keywords}
    parameters = inspect.signature(kind).parameters
    for option in options:
        if option not in parameters:
            raise InputError(
                f"{text!r}: there is no option {option!r}{closest(option, parameters)}; it has {_list(parameters)}.",
                code="method-option-unknown",
            )
    values = [_value(value, text) for value in call.args]
    try:
        inspect.signature(kind).bind(*values, **options)
    except TypeError as error:
        raise InputError(
            f"{text!r}: {error}; the options are {_list(parameters)}.", code="method-option-unknown"
        ) from None
    try:
        return kind(*values, **options)
    except TypeError as error:
        raise InputError(
            f"{text!r}: an option has a value of the wrong kind ({error}).", code="method-option-wrong-kind"
        ) from None
    except InputError as error:
        raise InputError(f"{text!r}: {error}", code=error.code) from None


def _value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return WORDS.get(node.id.lower(), node.id)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return tuple(_value(item, text) for item in node.elts)
        case ast.Call(func=ast.Name(id=name)) if name.lower() in CHOICES:
            return _made(CHOICES[name.lower()], node, text)
    raise InputError(
        f"{text!r}: {ast.unparse(node)!r} is not a name, a number, a list or a text in quotes.",
        code="method-unreadable",
    )


def _list(names: Any) -> str:
    return ", ".join(names) or "no options"
