"""Options of levers: one for each that there is, so that a lever is added in a file of its own."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from steelyard.cli.options import complete_one_of
from steelyard.levers import LEVERS, Lever


def with_levers(function: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each lever in the place of its parameter ``levers``, a text by each name."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.name != "levers"]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(lever))
        for name, lever in LEVERS.items()
    ]

    @wraps(function)
    def command(*args: Any, **given: Any) -> None:
        function(*args, levers={name: given.pop(name, None) for name in LEVERS}, **given)

    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (*own, *options)}
    return command


def _option(lever: type[Lever]) -> Any:
    completion = complete_one_of(lever.values) if lever.values else None
    metavar = "|".join(lever.values) if lever.values else "TEXT"
    option = typer.Option(f"--{lever.name}", help=lever.help, metavar=metavar, autocompletion=completion)
    return Annotated[str | None, option]
