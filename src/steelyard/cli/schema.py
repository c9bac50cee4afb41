"""``steelyard schema``: the JSON schema of a file or of ``--json`` output."""

from typing import Annotated

import typer
from pydantic import BaseModel

from steelyard.cli.options import complete_one_of, print_json
from steelyard.errors import UserError, nearest
from steelyard.hardware.files import ClusterFile
from steelyard.plan.choices import Explanation, PlanStudy, TradeOffs
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
    "frontier": TradeOffs,
    "explanation": Explanation,
    "study": PlanStudy,
}
"""Files, and ``--json`` output of frontier, explain (its ``explanation``) and report (its ``study``)."""


def schema(
    name: Annotated[
        str,
        typer.Argument(help=", ".join(FILES) + ".", metavar="NAME", autocompletion=complete_one_of(FILES)),
    ],
) -> None:
    """Print the JSON schema of a file or of --json output."""
    if name not in FILES:
        raise UserError(
            field="file", found=repr(name), expected="one of " + ", ".join(FILES), hint=nearest(name, FILES)
        )
    print_json(FILES[name].model_json_schema())
