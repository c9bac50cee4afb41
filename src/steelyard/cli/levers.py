"""Options from registries: one for each lever, and one for the degree of each parallelism dimension.

A lever or a dimension is added in a file of its own; its option needs no line here.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from steelyard.cli.options import GROUPS, LEVER, PARALLELISM, complete_one_of, count, option
from steelyard.levers import LEVERS, Lever
from steelyard.limits import MOST_DEVICES
from steelyard.plan.dimensions import DIMENSIONS, Dimension


def with_levers(function: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option per lever instead of its parameter ``levers``, and per dimension instead of
    ``degrees``.

    The command gets a mapping by name for each of the two. Options are in the order of `GROUPS`.
    """
    signature = inspect.signature(function)
    registries: dict[str, dict[str, Any]] = {
        "levers": {name: _lever_option(lever) for name, lever in LEVERS.items()},
        "degrees": {name: _degree_option(dimension) for name, dimension in DIMENSIONS.items()},
    }
    expanded = {name: registries[name] for name in signature.parameters if name in registries}
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        *(each.replace(kind=kind) for each in signature.parameters.values() if each.name not in expanded),
        *(
            inspect.Parameter(name, kind, default=None, annotation=option)
            for registry in expanded.values()
            for name, option in registry.items()
        ),
    ]
    options.sort(key=lambda option: GROUPS.index(_group(option)))

    @wraps(function)
    def command(**given: Any) -> None:
        found = {key: {name: given.pop(name, None) for name in registry} for key, registry in expanded.items()}
        function(**found, **given)

    command.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in options}
    return command


def _group(option: inspect.Parameter) -> str | None:
    info = next((each for each in get_args(option.annotation) if isinstance(each, typer.models.OptionInfo)), None)
    return getattr(info, "rich_help_panel", None)


def _lever_option(lever: type[Lever]) -> Any:
    completion = complete_one_of(lever.values) if lever.values else None
    return Annotated[str | None, option(f"--{lever.name}", "NAME", lever.help, LEVER, autocompletion=completion)]


def _degree_option(dimension: Dimension) -> Any:
    text = f"Degree of {dimension.title} in every layer that allows it."
    return Annotated[int | None, count(f"--{dimension.name}", text, PARALLELISM, most=MOST_DEVICES)]
