"""One process of a measurement: ``torchrun … -m steelyard.profiler --model NAME --traced traced.json -o profile.json``.

The first process shows a line of progress and writes the profile.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from steelyard.errors import InvalidProfileError, UserError
from steelyard.model.read import load_model
from steelyard.plan.file import dump_json, parse_file
from steelyard.profiler.measure import measure
from steelyard.profiles.profile import Profile

_TIMEOUT = timedelta(minutes=5)


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the profile; a mistake in the arguments ends the process with code 2."""
    options = _parser().parse_args(arguments)
    _silence_known_warnings()
    try:
        _measure_and_write(options)
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="steelyard.profiler", description="Measures a model on this machine.")
    parser.add_argument("--model", required=True, help="packaged model or path of a config.json")
    parser.add_argument("--traced", required=True, type=Path, help="traced profile of the model")
    parser.add_argument("--samples", nargs="+", type=int, default=[1, 2, 4], help="samples of a rank in a microbatch")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds that measuring may take, about")
    parser.add_argument("-o", "--output", required=True, type=Path, help="where the profile is written")
    return parser


def _measure_and_write(options: argparse.Namespace) -> None:
    chain = load_model(options.model)
    trace = parse_file(options.traced, Profile, InvalidProfileError, what="profile")
    init_process_group()
    try:
        profile = measure(
            chain,
            seq_len=trace.identity.seq_len,
            precision=trace.identity.precision,
            samples=options.samples,
            trace=trace,
            budget_s=options.budget,
            progress=_show if dist.get_rank() == 0 else _keep_quiet,
        )
        if dist.get_rank() == 0:
            _show("done\n")
            options.output.write_text(dump_json(profile) + "\n")
    finally:
        dist.destroy_process_group()


def _silence_known_warnings() -> None:
    """Two notes of PyTorch, once per layer or process, say nothing to a user: neither is a mistake here."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def init_process_group() -> None:
    """Joins the processes that torchrun started: NCCL with a GPU each, else gloo with one thread each unless told."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=device)
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)


def _show(line: str) -> None:
    """Replaces the line of progress on a terminal; elsewhere every state is a line of its own."""
    print(
        f"\r\x1b[Kmeasuring: {line}" if sys.stderr.isatty() else f"measuring: {line.strip()}\n", end="", file=sys.stderr
    )
    sys.stderr.flush()


def _keep_quiet(line: str) -> None:
    """Shows nothing: the first process speaks for all."""
