"""Options from registries: one for each lever, and one for the degree of each parallelism dimension.

A lever or a dimension is added in a file of its own; its option needs no line here.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from steelyard.cli.options import GROUPS, LEVER, PARALLELISM, complete_one_of, count, option
from steelyard.levers import LEVERS
from steelyard.limits import MOST_DEVICES
from steelyard.plan.dimensions import DIMENSIONS


def with_levers(function: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option per lever instead of its parameter ``levers``, and per dimension instead of
    ``degrees``.

    The command gets a mapping by name for each of the two. Options are in the order of `GROUPS`.
    """
    signature = inspect.signature(function)
    registries: dict[str, dict[str, Any]] = {"levers": {}, "degrees": {}}
    for name, lever in LEVERS.items():
        completion = complete_one_of(lever.values) if lever.values else None
        declared = option(f"--{name}", "NAME", lever.help, LEVER, autocompletion=completion)
        registries["levers"][name] = Annotated[str | None, declared]
    for name, dimension in DIMENSIONS.items():
        text = f"Degree of {dimension.title} in every layer that allows it."
        declared = count(f"--{name}", text, PARALLELISM, most=MOST_DEVICES)
        registries["degrees"][name] = Annotated[int | None, declared]
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

    def place(parameter: inspect.Parameter) -> int:
        infos = (each for each in get_args(parameter.annotation) if isinstance(each, typer.models.OptionInfo))
        return GROUPS.index(getattr(next(infos, None), "rich_help_panel", None))

    options.sort(key=place)

    @wraps(function)
    def command(**given: Any) -> None:
        found = {key: {name: given.pop(name, None) for name in registry} for key, registry in expanded.items()}
        function(**found, **given)

    command.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in options}
    return command
