"""Plans for the likeliest next losses, made while a run trains: ``python -m steelyard.planning.ahead PLAN OUT HOST …``.

HOST is how many processes a host has, with its pool where the plan is over several: ``8:2x8xh100-80gb``. It takes only
what the training leaves of a core, and writes OUT once, when done: the plan with
`steelyard.planning.elastic.with_likely_losses` among its spares.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from steelyard.plan.file import read_plan, write_plan
from steelyard.planning.elastic import with_likely_losses

_LEAST_URGENT = 19


def main(arguments: Sequence[str]) -> None:
    """Writes the plans; raises `UserError` for a plan that nothing can be found for."""
    if hasattr(os, "nice"):
        os.nice(_LEAST_URGENT)
    path, out, *hosts = arguments
    told = [each.partition(":") for each in hosts]
    pools = [pool for _, _, pool in told if pool]
    found = with_likely_losses(read_plan(path), [int(count) for count, _, _ in told], Path(path).parent, pools)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_plan(found, out)


if __name__ == "__main__":
    main(sys.argv[1:])
