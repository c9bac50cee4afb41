"""Checks of the arguments of public functions against their annotations, for users without a type checker.

`checked` decorates a function, and `check_types` checks the fields of a dataclass. A value of another type is a
`UserError` that names the argument.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from steelyard.errors import UserError, nearest

Given = ParamSpec("Given")
Result = TypeVar("Result")


def checked(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return the function with its arguments checked. It raises `UserError` for an argument of another type."""

    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # an unknown argument, of which Python's own error says more
            return function(*args, **kwargs)
        _check(given, _annotations(function), function.__name__)
        return function(*args, **kwargs)

    return call


def check_types(value: Any) -> None:
    """Raise `UserError` for a field of a dataclass that is not of its type."""
    kind: Any = type(value)
    _check({each.name: getattr(value, each.name) for each in fields(value)}, _annotations(kind), kind.__name__)


@cache
def _annotations(of: Any) -> dict[str, Any]:
    return get_type_hints(of)


def _check(given: Mapping[str, Any], annotations: Mapping[str, Any], name: str) -> None:
    for argument, value in given.items():
        expected = annotations.get(argument, Any)
        if not _is_of(value, expected):
            is_text = get_origin(expected) is Literal and isinstance(value, str)
            raise UserError(
                field=argument,
                found=f"{value!r:.80}, of the type {type(value).__name__}",
                expected=_words(expected),
                hint=nearest(value, get_args(expected)) if is_text else f"help({name}) says what {argument} may be",
            )


def _is_of(value: Any, expected: Any) -> bool:
    """Return whether a value is of an annotated type. An int is also a float, but no bool is a number."""
    kind: Any = get_origin(expected) or expected
    parts = get_args(expected)
    if kind in (Union, UnionType):
        return any(_is_of(value, part) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind in (Any, Callable):
        return kind is Any or callable(value)
    kind = int | float if kind is float else kind
    is_wrong_text = isinstance(value, str | bytes) and kind in (Sequence, Iterable)
    if is_wrong_text or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    if isinstance(value, Mapping) and parts:
        return all(_is_of(key, parts[0]) and _is_of(each, parts[1]) for key, each in value.items())
    of_one_type = isinstance(value, Sequence) and parts and (kind is not tuple or parts[-1] is Ellipsis)
    return not of_one_type or all(_is_of(each, parts[0]) for each in value)


def _words(expected: Any) -> str:
    """Return an annotation without the modules of its names: ``int or 'max'``, ``Sequence[str]``."""
    if get_origin(expected) in (Union, UnionType):
        return " or ".join(map(_words, get_args(expected)))
    if get_origin(expected) is Literal:
        return " or ".join(map(repr, get_args(expected)))
    if expected is type(None):
        return "None"
    return re.sub(r"[\w.]+\.(?=\w)", "", str(expected)) if get_args(expected) else str(expected.__name__)
