"""The life of one process of a training run: arguments, checks, the run."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.plan.replanned import Replan
from steelyard.processes.group import host_ranks, local_rank, process_group, world_size
from steelyard.processes.rank import run_rank
from steelyard.runtime.checks import check_elastic, check_host, check_world_size
from steelyard.runtime.data.prepare import prepare_data
from steelyard.runtime.options import DATA_HELP, TrainOptions, add_train_options
from steelyard.runtime.outputs import check_outputs

if TYPE_CHECKING:
    from torch.distributed import Store


def main(arguments: Sequence[str] | None = None, *, replan: Replan | None = None) -> None:
    """Runs this rank's part of a training run and ends the process: 0 done, 1 failed, 2 a mistake of the user.

    ``replan`` finds the plan of an elastic run for what is there.
    """
    namespace = _parser().parse_args(arguments)
    run_rank(lambda: _begin(namespace, replan))


def _begin(namespace: argparse.Namespace, replan: Replan | None) -> None:
    options = TrainOptions.from_namespace(namespace)
    check_elastic(options)
    num_processes = world_size()
    if not options.elastic or replan is None:
        plan = read_plan(namespace.plan)
        check_world_size(plan, num_processes)
        _train(plan, namespace.data, options)
        return
    from steelyard.runtime.elastic import settled_plan

    path = Path(namespace.plan)
    with settled_plan(
        path, replan, folder=options.checkpoint_dir, timeout_s=options.timeout_s, pool=options.pool or ""
    ) as mine:
        if mine is not None:
            _train(mine[0], namespace.data, options, store=mine[1])


def _train(plan: Plan, data: str, options: TrainOptions, *, store: "Store | None" = None) -> None:
    check_host(plan, host_ranks(), device=options.device)
    if local_rank() == 0:
        prepare_data(Path(data), options.text, task=plan.chain().family.task)
    if os.environ["RANK"] == "0":
        check_outputs(options)
    from steelyard.runtime.train import train  # imports transformers: seconds that a mistake above need not wait for

    with process_group(options.timeout_s, store=store):
        train(plan, data, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun -m steelyard.train", description="One process of a training run under a plan."
    )
    parser.add_argument("plan", help="the plan file")
    parser.add_argument("--data", required=True, help=DATA_HELP)
    add_train_options(parser)
    return parser
