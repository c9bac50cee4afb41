"""The life of one process of a training run: arguments, checks, the run, and how its end is reported.

Under `steelyard.runtime.launch` an error goes to the launcher, which shows the first one only. Under a torchrun that
was started by hand it goes to stderr: mistakes that all processes of a host see alike are printed by one of them.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from steelyard.errors import UserError
from steelyard.plan.file import read_plan
from steelyard.runtime.data import check_data_path
from steelyard.runtime.failure import Failure, failures_folder, write_failure
from steelyard.runtime.options import TrainOptions, add_train_options
from steelyard.runtime.parent import end_process, watch_parent
from steelyard.runtime.process_group import check_world_size, process_group, world_size

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs this rank's part of a training run and ends the process: 0 done, 1 failed, 2 a mistake of the user."""
    namespace = _parser().parse_args(arguments)
    run_rank(lambda: _train(namespace))


def run_rank(work: Callable[[], None]) -> None:
    """Runs ``work`` as one rank, reports how it failed, and ends the process."""
    watch_parent(lambda: os.kill(os.getpid(), signal.SIGKILL))
    exit_code = 0
    try:
        work()
    except Exception as error:
        exit_code = error.exit_code if isinstance(error, UserError) else FAILED
        _report(Failure.of(error, rank=int(os.environ.get("RANK", "0")), exit_code=exit_code))
    end_process(exit_code)


def _train(namespace: argparse.Namespace) -> None:
    options = TrainOptions.from_namespace(namespace)
    plan = read_plan(namespace.plan)
    check_world_size(plan, world_size())
    check_data_path(namespace.data)
    from steelyard.runtime.train import train  # imports transformers: seconds that a mistake above need not wait for

    with process_group(options.timeout_s):
        train(plan, namespace.data, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun -m steelyard.train", description="One process of a training run under a plan."
    )
    parser.add_argument("plan", help="the plan file")
    parser.add_argument("--data", required=True, help="text file, folder of text files, or .npy or .bin token ids")
    add_train_options(parser)
    return parser


def _report(failure: Failure) -> None:
    folder = failures_folder()
    if folder is not None:
        write_failure(failure, folder)
    elif dist.is_initialized():
        print(f"rank {failure.rank} failed:\n{failure.traceback}", file=sys.stderr)
    elif _speaks_first():
        print(failure.message, file=sys.stderr)


def _speaks_first() -> bool:
    """Whether no other process that this torchrun started has reported a mistake that all of them see."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return True
    try:
        (Path(error_file).parents[1] / "reported").touch(exist_ok=False)
    except OSError:
        return False
    return True
