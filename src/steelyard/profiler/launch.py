"""Measurement of a model on this host: start torchrun with one process per device and return the profile it wrote.

A process is ``torchrun … -m steelyard.profiler --model NAME --traced traced.json -o profile.json``. The first one shows
a progress bar and writes the profile.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from steelyard.errors import InvalidProfileError
from steelyard.levers import Levers
from steelyard.model.chain import Freeze, ModelChain, frozen_chain
from steelyard.model.own import OwnSplit
from steelyard.model.read import load_model
from steelyard.modules.own_proof import build_split
from steelyard.output import write_file
from steelyard.plan.file import dump_json, parse_file
from steelyard.processes.group import process_group
from steelyard.processes.rank import run_rank
from steelyard.processes.start import run_processes
from steelyard.profiler.measure import check_samples, check_trace, measurable_layers, measure
from steelyard.profiles.profile import Profile

_TIMEOUT_S = 300.0
_BAR_WIDTH = 30


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the profile, and end the process with status 0 (done), 1 (failed) or 2 (a user's mistake)."""
    parser = argparse.ArgumentParser(prog="steelyard.profiler", description="Measure a model on this machine.")
    parser.add_argument("--model", required=True, help="packaged model or path to a config.json")
    parser.add_argument("--split", type=Path, help="split of the module that --model, FILE.py:FUNCTION, builds")
    parser.add_argument("--levers", type=json.loads, default={}, help="levers as JSON")
    parser.add_argument("--frozen", type=Freeze.model_validate_json, help="frozen parameters as JSON")
    parser.add_argument("--traced", required=True, type=Path, help="path to the traced profile of the model")
    parser.add_argument("--samples", nargs="+", type=int, default=[1, 2, 4], help="samples per rank and microbatch")
    parser.add_argument("--budget", type=float, default=20.0, help="approximate time limit of measuring in seconds")
    parser.add_argument("--began", type=float, help="Unix time at which the budget starts; default: the first message")
    parser.add_argument("-o", "--output", required=True, type=Path, help="path of the profile to write")
    options = parser.parse_args(arguments)
    run_rank(lambda: _measure_and_write(options))


def _measure_and_write(options: argparse.Namespace) -> None:
    split = options.split and OwnSplit.model_validate_json(options.split.read_text())
    own = build_split(options.model, split) if split else None
    model = load_model(options.model) if own is None else own.chain
    chain = frozen_chain(Levers.of(options.levers).change(model), options.frozen)
    trace = parse_file(options.traced, Profile, InvalidProfileError, what="profile")
    with process_group(_TIMEOUT_S):
        profile = measure(
            chain,
            seq_len=trace.identity.seq_len,
            precision=trace.identity.precision,
            samples=options.samples,
            trace=trace,
            budget_s=options.budget - (time.time() - options.began if options.began is not None else 0.0),
            progress=_show if dist.get_rank() == 0 else lambda _line, _done: None,  # only the first process reports
            own=own,
        )
        if dist.get_rank() == 0:
            _show("done\n", 1.0)
            write_file(options.output, dump_json(profile) + "\n", "--output")


def progress_bar(done: float) -> str:
    """Return a bar for the fraction that is done, 0 to 1, and that fraction in per cent."""
    filled = round(_BAR_WIDTH * done)
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {done:4.0%}"


def _show(line: str, done: float) -> None:
    """Replace the progress bar on a terminal; elsewhere write each state on a separate line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[Kmeasuring {progress_bar(done)} {line}")
    else:
        sys.stderr.write(f"measuring: {done:4.0%} {line.strip()}\n")
    sys.stderr.flush()


_MODULE = "steelyard.profiler"


def measures_gpus() -> bool:
    """Return whether processes of this host measure GPUs, not its CPU cores."""
    return torch.cuda.is_available()


def launch_profiler(
    chain: ModelChain,
    trace: Profile,
    *,
    num_processes: int,
    samples: Sequence[int],
    budget_s: float = 20.0,
    began_s: float | None = None,
    builder: str | None = None,
) -> Profile:
    """Return the profile of ``chain`` on ``num_processes`` devices of this host, as `measure` makes it.

    ``trace`` is a traced profile of ``chain``; ``samples`` are the samples of one rank in a microbatch. ``budget_s`` is
    an approximate limit: of the measurement without the start of the processes, or of everything since the Unix time
    ``began_s``. Each process builds a user's own module with ``builder``, FILE.py:FUNCTION. Progress and errors of the
    processes go to stderr.

    Raises `InvalidProfileError` for wrong arguments, and `RankFailedError` if a process failed (the others are ended).
    """
    check_trace(trace, chain, seq_len=trace.identity.seq_len, precision=trace.identity.precision)
    check_samples(samples)
    measurable_layers(trace, num_processes)
    with tempfile.TemporaryDirectory(prefix="steelyard-") as folder:
        config, traced, output = (Path(folder) / name for name in ("config.json", "traced.json", "profile.json"))
        config.write_text(chain.split.model_dump_json() if builder else json.dumps(dict(chain.config)))
        traced.write_text(dump_json(trace))
        model = ["--model", builder, "--split", str(config)] if builder else ["--model", str(config)]
        arguments = [*model, "--traced", str(traced), "-o", str(output), "--budget", str(budget_s)]
        arguments += [] if began_s is None else ["--began", str(began_s)]
        arguments += ["--levers", json.dumps({change.name: str(change) for change in chain.changes})]
        arguments += ["--frozen", chain.freeze.model_dump_json()] if chain.freeze else []
        arguments += ["--samples", *map(str, samples)]
        run_processes(_MODULE, arguments, num_processes=num_processes)
        return parse_file(output, Profile, InvalidProfileError, what="profile")
