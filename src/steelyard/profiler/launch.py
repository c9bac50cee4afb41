"""Starts a measurement on this host: torchrun with one process per device, and the profile that they wrote."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from steelyard.errors import InvalidProfileError
from steelyard.model.chain import ModelChain
from steelyard.plan.file import dump_json, parse_file
from steelyard.processes.start import run_processes
from steelyard.profiler.measure import check_samples, check_trace, measurable_layers
from steelyard.profiles.profile import Profile

_MODULE = "steelyard.profiler"


def launch_profiler(
    chain: ModelChain,
    trace: Profile,
    *,
    num_processes: int,
    samples: Sequence[int],
    budget_s: float = 20.0,
    began_s: float | None = None,
) -> Profile:
    """The profile of ``chain`` on ``num_processes`` devices of this host, as `measure` makes it.

    ``trace`` is a traced profile of ``chain``; ``samples`` are the samples of one rank in a microbatch; ``budget_s``
    bounds the measuring, about, without the start of the processes, or all that is done since the Unix time
    ``began_s``. Progress and errors of the processes go to stderr.
    Raises `InvalidProfileError` for wrong arguments, and `RankFailedError` if a process failed (the others are ended).
    """
    check_trace(trace, chain, seq_len=trace.identity.seq_len, precision=trace.identity.precision)
    check_samples(samples)
    measurable_layers(trace, num_processes)
    with tempfile.TemporaryDirectory(prefix="steelyard-") as folder:
        config, traced, output = (Path(folder) / name for name in ("config.json", "traced.json", "profile.json"))
        config.write_text(json.dumps(dict(chain.config)))
        traced.write_text(dump_json(trace))
        arguments = ["--model", str(config), "--traced", str(traced), "-o", str(output), "--budget", str(budget_s)]
        arguments += [] if began_s is None else ["--began", str(began_s)]
        arguments += ["--samples", *map(str, samples)]
        run_processes(_MODULE, arguments, num_processes=num_processes)
        return parse_file(output, Profile, InvalidProfileError, what="profile")
