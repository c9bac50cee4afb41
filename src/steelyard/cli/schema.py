"""``steelyard schema``: the JSON schema of a file that steelyard reads or writes."""

from typing import Annotated

import typer

from steelyard.cli.options import print_json
from steelyard.errors import UserError, nearest
from steelyard.plan.plan import Plan
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord
from steelyard.search.problem import ProblemFile

FILES = {"plan": Plan, "problem": ProblemFile, "profile": Profile, "record": RunRecord}


def schema(name: Annotated[str, typer.Argument(help="plan, problem, profile or record.", metavar="FILE")]) -> None:
    """Print the JSON schema of a file."""
    if name not in FILES:
        raise UserError(
            field="file", found=repr(name), expected="one of " + ", ".join(FILES), hint=nearest(name, FILES)
        )
    print_json(FILES[name].model_json_schema())
