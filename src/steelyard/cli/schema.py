"""``steelyard schema``: JSON schemas of files, and of the values that commands print with ``--json``."""

from importlib import import_module
from typing import Annotated, Any

import typer
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from steelyard.cli.app import COMMANDS
from steelyard.cli.options import complete_one_of, print_json
from steelyard.errors import UserError, nearest
from steelyard.hardware.files import ClusterFile
from steelyard.plan.plan import Plan
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord
from steelyard.search.problem import ProblemFile

FILES: dict[str, type[BaseModel]] = {
    "plan": Plan,
    "problem": ProblemFile,
    "profile": Profile,
    "record": RunRecord,
    "cluster": ClusterFile,
}
"""Files that steelyard reads or writes."""


class _Closed(GenerateJsonSchema):
    """Schemas whose objects have no other keys than those that are named."""

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> dict[str, Any]:
        return super().typed_dict_schema(schema) | {"additionalProperties": False}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
        return super().dataclass_schema(schema) | {"additionalProperties": False}


def printed_types() -> dict[str, Any]:
    """Types of the values that commands print with ``--json``, as `steelyard.cli.options.prints` declares them."""
    functions = {name: getattr(import_module(f"steelyard.cli.{module}"), name) for name, module in COMMANDS.items()}
    return {name: each.json_type for name, each in functions.items() if hasattr(each, "json_type")}


def printed_schema(name: str) -> dict[str, Any]:
    """JSON schema of the value that a command prints with ``--json``."""
    return TypeAdapter(printed_types()[name]).json_schema(schema_generator=_Closed)


def schema(
    name: Annotated[
        str,
        typer.Argument(
            help=f"A file: {', '.join(FILES)}. With --json a command.",
            metavar="NAME",
            autocompletion=complete_one_of(FILES | COMMANDS),
        ),
    ],
    printed: Annotated[
        bool, typer.Option("--json", help="Describe the value that the command NAME prints with --json, not a file.")
    ] = False,
) -> None:
    """Print the JSON schema of a file, or of the value that a command prints with --json."""
    known = printed_types() if printed else FILES
    if name not in known:
        kind, other = ("command", name in FILES) if printed else ("file", name in COMMANDS)
        raise UserError(
            field=kind,
            found=repr(name),
            expected="one of " + ", ".join(known),
            hint=f"steelyard schema {name}" + " --json" * (not printed) if other else nearest(name, known),
        )
    print_json(printed_schema(name) if printed else FILES[name].model_json_schema())
