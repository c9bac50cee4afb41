"""The life of one process of a training run: arguments, checks, the run."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from steelyard.plan.file import read_plan
from steelyard.processes.group import local_rank, process_group, world_size
from steelyard.processes.rank import run_rank
from steelyard.runtime.checks import check_world_size
from steelyard.runtime.data.prepare import prepare_data
from steelyard.runtime.options import DATA_HELP, TrainOptions, add_train_options
from steelyard.runtime.outputs import check_outputs


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs this rank's part of a training run and ends the process: 0 done, 1 failed, 2 a mistake of the user."""
    namespace = _parser().parse_args(arguments)
    run_rank(lambda: _train(namespace))


def _train(namespace: argparse.Namespace) -> None:
    options = TrainOptions.from_namespace(namespace)
    plan = read_plan(namespace.plan)
    check_world_size(plan, world_size())
    if local_rank() == 0:
        prepare_data(Path(namespace.data), options.text, reads_text=plan.chain().family.task.reads_text)
    if os.environ["RANK"] == "0":
        check_outputs(options)
    from steelyard.runtime.train import train  # imports transformers: seconds that a mistake above need not wait for

    with process_group(options.timeout_s):
        train(plan, namespace.data, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun -m steelyard.train", description="One process of a training run under a plan."
    )
    parser.add_argument("plan", help="the plan file")
    parser.add_argument("--data", required=True, help=DATA_HELP)
    add_train_options(parser)
    return parser
