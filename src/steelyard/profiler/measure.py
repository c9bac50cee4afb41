"""Measures a model on the devices of this process group: the counts of a traced profile, with seconds added.

Every process calls `measure` and gets the same `Profile`.
"""

import datetime
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import transformers

from steelyard.errors import InvalidProfileError
from steelyard.model.chain import ModelChain
from steelyard.plan.plan import Precision
from steelyard.profiler.clock import barrier
from steelyard.profiler.collectives import SIZES_BYTES, measure_collectives
from steelyard.profiler.layers import build_short_chain, layer_meshes, measure_layers
from steelyard.profiler.overheads import measure_optimizer, measure_overlap_slowdown, measure_step_overhead
from steelyard.profiles.profile import CollectiveProfile, LayerProfile, MeasuredTime, Profile

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Takes one short line about what is measured next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Seconds that the parts of a measurement may take; each part repeats at least three times whatever its budget."""

    layers_s: float
    collectives_s: float
    overheads_s: float

    @classmethod
    def of(cls, total_s: float) -> "Budget":
        """The usual division of ``total_s`` seconds."""
        return cls(layers_s=0.6 * total_s, collectives_s=0.3 * total_s, overheads_s=0.1 * total_s)


def measure(
    chain: ModelChain,
    *,
    seq_len: int,
    precision: Precision,
    samples: Sequence[int],
    trace: Profile,
    budget_s: float = 20.0,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    progress: Progress = _log.info,
) -> Profile:
    """The profile of ``chain`` on this process group's devices, for each of ``samples`` (samples of one rank).

    ``trace`` is a traced profile of the same model, sequence length and precision; those of its layers whose
    tensor-parallel degree divides the world size are measured, the others are left out. ``sizes_bytes`` are the
    sizes of whole tensors that collectives are measured with. Raises `InvalidProfileError` for a trace of something
    else, or if nothing can be measured.
    """
    check_trace(trace, chain, seq_len=seq_len, precision=precision)
    world_size = dist.get_world_size()
    check_samples(samples)
    layers = measurable_layers(trace, world_size)
    device = current_device()
    budget = Budget.of(budget_s)
    run = _Run(chain=chain, seq_len=seq_len, precision=precision, device=device, budget=budget, progress=progress)
    timed, optimizer_s_per_param = run.layers_and_optimizer(layers, samples)
    collectives = run.collectives(sizes_bytes) if world_size > 1 else ()
    progress("end of a step, overlap")
    step_overhead_s = measure_step_overhead(device, budget_s=budget.overheads_s / 4)
    changes = {"overlap_slowdown": measure_overlap_slowdown(device, budget_s=budget.overheads_s / 2)}
    barrier(device)
    return trace.model_copy(
        update={
            "identity": trace.identity.model_copy(update=_measured_identity(device, world_size)),
            "layers": timed,
            "collectives": collectives,
            "optimizer_s_per_param": optimizer_s_per_param,
            "step_overhead_s": step_overhead_s,
            **(changes if world_size > 1 else {}),
        }
    )


def check_trace(trace: Profile, chain: ModelChain, *, seq_len: int, precision: Precision) -> None:
    """Raises `InvalidProfileError` unless ``trace`` is a traced profile of this model, length and precision."""
    identity = trace.identity
    for field, found, expected in (
        ("method", identity.method, "traced"),
        ("config_hash", identity.config_hash, chain.config_hash),
        ("seq_len", identity.seq_len, seq_len),
        ("precision", identity.precision, precision),
    ):
        if found != expected:
            raise InvalidProfileError(
                field=f"trace.identity.{field}",
                found=repr(found),
                expected=f"{expected!r}, as is to be measured",
                hint=f"trace {chain.name} at the length and precision to be measured",
            )


def measurable_layers(trace: Profile, num_processes: int) -> list[LayerProfile]:
    """The layers whose tensor-parallel degree divides ``num_processes``; raises `InvalidProfileError` if none does."""
    layers = [layer for layer in trace.layers if num_processes % layer.tp == 0]
    if not layers:
        raise InvalidProfileError(
            field="trace.layers",
            found=f"tp degrees {sorted({layer.tp for layer in trace.layers})}",
            expected=f"a degree that divides the {num_processes} processes",
            hint="trace with tp 1 as well",
        )
    return layers


def check_samples(samples: Sequence[int]) -> None:
    """Raises `InvalidProfileError` unless there is a number of samples and all are 1 or more."""
    if not samples or min(samples) < 1:
        raise InvalidProfileError(
            field="samples",
            found=str(list(samples)),
            expected="one or more whole numbers of 1 or more",
            hint="give the samples that one rank holds in a microbatch, for example 1 2 4",
        )


def current_device() -> torch.device:
    """The device of this process: its current GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What all parts of one measurement share."""

    chain: ModelChain
    seq_len: int
    precision: Precision
    device: torch.device
    budget: Budget
    progress: Progress

    def layers_and_optimizer(
        self, layers: Sequence[LayerProfile], samples: Sequence[int]
    ) -> tuple[tuple[LayerProfile, ...], float]:
        """The layers with their times, and the optimizer's seconds per parameter (at the smallest tp)."""
        settings = sorted({(layer.tp, layer.sp) for layer in layers})
        times: dict[tuple[str, int, bool], tuple[MeasuredTime, ...]] = {}
        optimizer_s_per_param: float | None = None
        for index, (tp, sp) in enumerate(settings):
            self.progress(f"layers, tp {tp}{' with sp' if sp else ''} ({index + 1} of {len(settings)})")
            short = build_short_chain(
                self.chain,
                [layer.kind for layer in layers if (layer.tp, layer.sp) == (tp, sp)],
                tp=tp,
                sp=sp,
                seq_len=self.seq_len,
                precision=self.precision,
                device=self.device,
                mesh=layer_meshes(tp, self.device.type),
            )
            measured = measure_layers(short, samples, budget_s=self.budget.layers_s / len(settings))
            times.update({(kind, tp, sp): found for kind, found in measured.items()})
            if optimizer_s_per_param is None:
                optimizer_s_per_param = measure_optimizer(short, budget_s=self.budget.overheads_s / 4)
        assert optimizer_s_per_param is not None
        timed = tuple(layer.model_copy(update={"times": times[layer.kind, layer.tp, layer.sp]}) for layer in layers)
        return timed, optimizer_s_per_param

    def collectives(self, sizes_bytes: Sequence[int]) -> tuple[CollectiveProfile, ...]:
        """All collectives, with a line of progress for each."""
        return tuple(
            self._reported(
                measure_collectives(self.device, budget_s=self.budget.collectives_s, sizes_bytes=sizes_bytes)
            )
        )

    def _reported(self, found: Iterable[CollectiveProfile]) -> Iterable[CollectiveProfile]:
        self.progress("collectives")
        for collective in found:
            span = "strided" if collective.strided else "neighbouring"
            self.progress(f"{collective.kind} over {collective.group_size} {span} ranks")
            yield collective


def _measured_identity(device: torch.device, world_size: int) -> dict[str, object]:
    return {
        "method": "measured",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_devices": world_size,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
