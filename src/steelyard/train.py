"""One process of a training run: ``torchrun --nproc-per-node N -m steelyard.train plan.json --data PATH``.

`steelyard train` starts the processes of one host by itself (`steelyard.runtime.launch`).
"""

from steelyard.processes.allocator import set_allocator

set_allocator()  # before torch is imported

from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from steelyard.plan.choices import Replanned  # noqa: E402
from steelyard.plan.plan import Plan  # noqa: E402
from steelyard.runtime.process import main  # noqa: E402


def replan(plan: Plan, hosts: Sequence[int], folder: Path, pools: Sequence[str]) -> Replanned:
    """Call `steelyard.planning.elastic.replan`, importing the search only in a process that needs it."""
    from steelyard.planning.elastic import replan

    return replan(plan, hosts, folder, pools)


if __name__ == "__main__":
    main(replan=replan)
