"""``steelyard profile``: measure layers and collectives on processes of this host."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from steelyard.cli import options
from steelyard.errors import InvalidProfileError, UserError
from steelyard.hardware.files import devices, is_same_device
from steelyard.installed import require_training
from steelyard.levers import Levers
from steelyard.limits import MOST_DEVICES, MOST_SAMPLES, MOST_SECONDS
from steelyard.model.read import load_model
from steelyard.output import command, write_file
from steelyard.plan.file import dump_json, parse_file
from steelyard.plan.strategy import divisors
from steelyard.planning.request import changed_chain
from steelyard.precision import LayerPrecision
from steelyard.profiles.profile import Profile, merge_profiles
from steelyard.report.run_table import profile_view
from steelyard.report.tables import console
from steelyard.units import MIB

SAMPLES = "1,2,4"
MOST_MEASURED = 32
"""Maximum samples per rank derived from a global batch; larger ones run as several microbatches."""
BUDGET_S = 120.0


_PROCESSES = "Processes on this host: one per GPU, or CPU processes."
_SAMPLES = "Micro-batch sizes to measure. Default: 1,2,4."
_BUDGET = "Approximate seconds to spend, start-up included."
Budget = Annotated[
    float, options.option("--budget", "SECONDS", _BUDGET, parser=options.real("--budget", 1, MOST_SECONDS, "120"))
]
_MERGE = "Profile of this model and machine to extend."


@options.prints(Profile)
@options.with_levers
def profile(
    model: options.Model,
    output: Annotated[Path, options.written("Write the profile to this file.")],
    processes: Annotated[int, options.count("--processes -n", _PROCESSES, most=MOST_DEVICES)],
    seq_len: options.SeqLen = None,
    samples: Annotated[str | None, options.option("--samples", "COUNTS", _SAMPLES)] = None,
    global_batch: options.ProfiledBatch = None,
    precision: options.PrecisionOption = "bf16",
    budget_s: Budget = BUDGET_S,
    freeze: options.Freezes = None,
    merge: Annotated[Path | None, options.option("--merge", "FILE", _MERGE)] = None,
    as_json: options.AsJson = False,
    *,
    levers: Mapping[str, str | None],
) -> None:
    """Measure layers and collectives on this machine, with the model as levers change it.

    AdamW is measured; other optimizers are priced by the bytes that they move.
    """
    require_training("`steelyard profile` measures their layers and collectives")
    from steelyard.profiler.launch import launch_profiler, measures_gpus
    from steelyard.tracer.cache import cached_trace

    began_s, sizes = time.time(), parse_samples(samples, global_batch)
    own = options.built_module(model)
    chain = changed_chain(load_model(model) if own is None else own.chain, Levers.of(levers), freeze or (), own)
    earlier = None if merge is None else parse_file(merge, Profile, InvalidProfileError, what="profile")
    degrees = divisors(processes)
    traced = cached_trace(
        chain,
        seq_len=chain.known_seq_len(seq_len),
        precision=options.parse_precision(precision, LayerPrecision),
        degrees=degrees,
        own=own,
        gpu_kernels=measures_gpus(),
    )
    measured = launch_profiler(
        chain,
        traced,
        num_processes=processes,
        samples=sizes,
        budget_s=budget_s,
        began_s=began_s,
        builder=None if own is None else model,
    )
    if earlier is not None:
        measured = merge_profiles(earlier, measured)
    write_file(output, dump_json(measured) + "\n", "--output")
    if as_json:
        options.print_json(measured)
        return
    console().print(profile_view(measured))
    asked = [] if seq_len is None else ["--seq-len", str(seq_len)]
    asked += [] if precision == "bf16" else ["--precision", precision]
    asked += [part for change in chain.changes for part in (f"--{change.name}", str(change))]
    asked += [part for pattern in freeze or () for part in ("--freeze", pattern)]
    plan = command("plan", model, *asked, "--profile", output, *_machine(measured))
    print(f"Written to {output}. Next: {plan}")
    if processes == 1:
        print("A profile of one process serves clusters of any number of nodes and devices.")


def _machine(measured: Profile) -> list[str]:
    """Return the options of `plan` for the measured machine; a CPU process has an equal share of the host's memory."""
    identity = measured.identity
    if identity.device_kind == "gpu":
        known = (each.name for each in devices() if is_same_device(identity.device, each))
        return ["--cluster", f"1x{identity.num_devices}x{next(known, identity.device)}"]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // identity.num_devices
    return ["--cluster", f"1x{identity.num_devices}xcpu", "--memory", f"{memory // MIB}MiB"]


def parse_samples(text: str | None, global_batch: int | None = None) -> tuple[int, ...]:
    """Return the sorted counts in ``1,2,4``, or those for a global batch; raises `UserError` for other texts or both.

    Counts for a batch are powers of two up to the batch, at most `MOST_MEASURED`.
    """
    if global_batch is not None:
        if text is not None:
            raise UserError(
                field="--samples",
                found=f"{text} with --global-batch {global_batch}",
                expected="one of the two: the batch determines the samples",
                hint="leave one out",
            )
        most = min(max(global_batch - 1, 2), MOST_MEASURED)
        return tuple(2**power for power in range(most.bit_length()))
    try:
        counts = tuple(sorted({int(part) for part in (SAMPLES if text is None else text).split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1 or counts[-1] > MOST_SAMPLES:
        raise UserError(
            field="--samples",
            found=repr(text),
            expected=f"whole numbers from 1 to {MOST_SAMPLES}",
            hint="write --samples 1,2,4",
        )
    return counts
