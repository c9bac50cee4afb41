"""One process of a training run: ``torchrun --nproc-per-node N -m steelyard.train plan.json --data PATH``.

`steelyard train` starts the processes of one host by itself (`steelyard.runtime.launch`).
"""

from steelyard.processes.allocator import set_allocator

set_allocator()  # before torch is imported

import argparse
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from steelyard.plan.choices import Replanned
from steelyard.plan.file import read_plan
from steelyard.plan.plan import Plan
from steelyard.processes.group import host_ranks, local_rank, process_group, world_size
from steelyard.processes.rank import run_rank
from steelyard.runtime.checks import check_elastic, check_host, check_optimizer, check_outputs, check_world_size
from steelyard.runtime.data.prepare import prepare_data
from steelyard.runtime.elastic_plan import settled_plan
from steelyard.runtime.options import DATA_HELP, TrainOptions, add_train_options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this rank's part of a training run and end the process: 0 done, 1 failed, 2 a mistake of the user."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m steelyard.train", description="One process of a training run under a plan."
    )
    parser.add_argument("plan", help="the plan file")
    parser.add_argument("--data", help=DATA_HELP)
    add_train_options(parser)
    namespace = parser.parse_args(arguments)
    run_rank(lambda: _begin(namespace))


def _begin(namespace: argparse.Namespace) -> None:
    options = TrainOptions.from_namespace(namespace)
    check_elastic(options)
    num_processes, path = world_size(), Path(namespace.plan)
    if not options.elastic:
        plan = read_plan(path)
        check_world_size(plan, num_processes)
        _train(plan, namespace.data, options)
        return
    with settled_plan(
        path, _replan, folder=options.checkpoint_dir, timeout_s=options.timeout_s, pool=options.pool or ""
    ) as mine:
        if mine is not None:
            _train(mine[0], namespace.data, options, store=mine[1])


def _replan(plan: Plan, hosts: Sequence[int], folder: Path, pools: Sequence[str]) -> Replanned:
    from steelyard.planning.elastic import replan  # imports the search, only in a process that needs it

    return replan(plan, hosts, folder, pools)


def _train(plan: Plan, data: str | None, options: TrainOptions, *, store: dist.Store | None = None) -> None:
    check_host(plan, host_ranks(), device=options.device)
    check_optimizer(plan, options)
    source = options.source(data)
    if local_rank() == 0:
        for each in (source, options.eval_source):
            prepare_data(each, options.text, plan)
    if os.environ["RANK"] == "0":
        check_outputs(options)
    gc.disable()  # nothing that is imported becomes garbage, but collections scan it: a sixth of the time
    from steelyard.integrations.run import train  # imports transformers, which takes seconds: report mistakes before

    gc.freeze()
    gc.enable()
    with process_group(options.timeout_s, store=store):
        train(plan, data, options)


if __name__ == "__main__":
    main()
