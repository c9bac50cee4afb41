"""Comparison of a user's plan with one process on this host: starts the plan's processes and returns their results.

Imports no torch: the command line that calls it starts at once.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidPlanError
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.processes.start import run_processes

SEED = 1


def launch_parity(plan: Plan, *, num_steps: int, max_processes: int) -> dict[str, Any]:
    """Compare a plan with one process; return the fields of `steelyard.runtime.parity.Comparison` and the loss error.

    Raises `InvalidPlanError` if the plan has more ranks than ``max_processes``.
    """
    if plan.num_devices > max_processes:
        raise InvalidPlanError(
            field="stages.ranks",
            found=f"a plan for {plan.num_devices} processes",
            expected=f"at most {max_processes} on this host",
            hint=f"allow more with --max-processes {plan.num_devices} (about 0.5 GiB each)",
        )
    with tempfile.TemporaryDirectory(prefix="steelyard-") as name:
        folder = Path(name)
        write_plan(plan, folder / "plan.json")
        result = folder / "result.json"
        arguments = [str(folder / "plan.json"), "--steps", str(num_steps), "--result", str(result)]
        run_processes("steelyard.runtime.parity_run", arguments, num_processes=plan.num_devices)
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this rank's part of a comparison and end the process; the first rank writes the result."""
    parser = argparse.ArgumentParser(description="One process of a comparison with one process.")
    parser.add_argument("plan")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    namespace = parser.parse_args(arguments)
    from steelyard.processes.rank import run_rank

    run_rank(lambda: _compare(namespace))


def _compare(namespace: argparse.Namespace) -> None:
    from dataclasses import asdict

    import torch
    import torch.distributed as dist

    from steelyard.processes.group import process_group
    from steelyard.runtime.parity import compare, train_alone

    torch.set_num_threads(1)
    plan = read_plan(namespace.plan)
    reference = train_alone(plan, seed=SEED, num_steps=namespace.steps)
    with process_group(600.0):
        found = compare(plan, reference, seed=SEED, num_steps=namespace.steps)
        if dist.get_rank() == 0:
            namespace.result.write_text(json.dumps(asdict(found) | {"loss_error": found.loss_error}))


if __name__ == "__main__":
    main()
