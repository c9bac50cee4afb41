"""Measurement of a model on the devices of this process group: a traced profile with seconds added to its counts.

Every process calls `measure` and gets the same `Profile`.
"""

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh

from steelyard.errors import InvalidProfileError
from steelyard.levers.optimizer import Optimizer
from steelyard.model.chain import ModelChain
from steelyard.modules.own_pieces import OwnModel
from steelyard.plan.strategy import Strategy, shape_strategies
from steelyard.precision import LayerPrecision
from steelyard.processes.group import current_device
from steelyard.profiler.clock import barrier, over_ranks
from steelyard.profiler.collectives import measure_collectives, num_collectives
from steelyard.profiler.layers import (
    Laps,
    ShortChain,
    build_short_chain,
    layer_meshes,
    measure_laps,
    middle_of,
    times_of,
)
from steelyard.profiler.overheads import (
    AddedBySharding,
    measure_bf16_rate,
    measure_busy_speeds,
    measure_optimizers,
    measure_overlap_slowdown,
    measure_sharding,
    measure_step_overhead,
)
from steelyard.profiles.profile import CollectiveProfile, LayerProfile, MeasuredTime, Profile

Progress = Callable[[str, float], None]
"""Function of one short line about the next measurement, and the fraction of the whole measurement that is done."""
_BESIDE_SHARE, _COLLECTIVES_BEGIN, _OVERHEADS_BEGIN = 0.2, 0.65, 0.95
"""Fractions of a measurement: share of optimizer, sharding and shared cores; start of collectives; of overheads."""
_NUM_ROUNDS = 3


def measure(
    chain: ModelChain,
    *,
    seq_len: int,
    precision: LayerPrecision,
    samples: Sequence[int],
    trace: Profile,
    budget_s: float = 20.0,
    progress: Progress = lambda _line, _done: None,
    own: OwnModel | None = None,
) -> Profile:
    """Return the profile of ``chain`` on this process group's devices, for each of ``samples`` (samples of one rank).

    ``trace`` is a traced profile of the same model, sequence length and precision; the layers whose tensor-parallel
    degree divides the world size are measured, the others are left out. ``budget_s`` is approximate: a part that takes
    longer leaves less time to those after it, and mandatory parts are measured at least once. ``own`` is the user's own
    module that the chain is of.

    Raises `InvalidProfileError` for a trace of something else, or if nothing can be measured.
    """
    check_trace(trace, chain, seq_len=seq_len, precision=precision)
    world_size = dist.get_world_size()
    check_samples(samples)
    layers = measurable_layers(trace, world_size)
    device = current_device()
    budget_s = over_ranks([max(budget_s, 0.0)], device, dist.ReduceOp.MIN)[0]  # processes start one after another
    run = _Run(
        chain=chain,
        seq_len=seq_len,
        precision=precision,
        device=device,
        budget_s=budget_s,
        end_s=time.monotonic() + budget_s,
        progress=progress,
        own=own,
    )
    timed, beside = run.compute(layers, samples)
    collectives = run.collectives() if world_size > 1 else ()
    progress("end of a step, overlap", _OVERHEADS_BEGIN)
    step_overhead_s = measure_step_overhead(device, budget_s=run.left_until(1.0) / 4)
    changes = {"overlap_slowdown": measure_overlap_slowdown(device, budget_s=run.left_until(1.0))}
    barrier(device)
    return trace.model_copy(
        update={
            "identity": trace.identity.model_copy(
                update={
                    "method": "measured",
                    "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                    "device_kind": "gpu" if device.type == "cuda" else "cpu",
                    "num_devices": world_size,
                    "driver": _driver(device),
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                }
            ),
            "layers": timed,
            "collectives": collectives,
            "optimizer_s_per_param": beside.optimizers[Optimizer().word],
            "optimizers": {word: each for word, each in beside.optimizers.items() if word != Optimizer().word},
            "bf16_flop_per_s": beside.bf16_flop_per_s,
            "sharding": tuple(added.beside(collectives) for added in beside.sharding),
            "step_overhead_s": step_overhead_s,
            "busy_speeds": beside.busy_speeds,
            "reserved_over_allocated": reserved_over_allocated(device),
            **(changes if world_size > 1 else {}),
        }
    )


def check_trace(trace: Profile, chain: ModelChain, *, seq_len: int, precision: LayerPrecision) -> None:
    """Raise `InvalidProfileError` unless ``trace`` is a traced profile of this model, length and precision."""
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
                expected=f"{expected!r}, the value to be measured",
                hint=f"trace {chain.name} at the length and precision to be measured",
            )


def measurable_layers(trace: Profile, num_processes: int) -> list[LayerProfile]:
    """Return the layers in shapes whose degrees divide ``num_processes``. Raise `InvalidProfileError` if none do."""
    layers = [layer for layer in trace.layers if not any(num_processes % each for each in layer.degrees.values())]
    if not layers:
        raise InvalidProfileError(
            field="trace.layers",
            found="; ".join(sorted({layer.shape_text for layer in trace.layers})),
            expected=f"a degree that divides the {num_processes} processes",
            hint="also trace undivided layers",
        )
    return layers


def check_samples(samples: Sequence[int]) -> None:
    """Raise `InvalidProfileError` unless there is a number of samples and all are 1 or more."""
    if not samples or min(samples) < 1:
        raise InvalidProfileError(
            field="samples",
            found=str(list(samples)),
            expected="one or more whole numbers of 1 or more",
            hint="give the samples per rank and microbatch, for example 1 2 4",
        )


def reserved_over_allocated(device: torch.device) -> float | None:
    """Ratio of the peak bytes that the GPU's allocator reserved so far to the peak bytes of tensors; None on a CPU.

    A CPU's allocator gives back freed memory.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_reserved(device) / max(torch.cuda.max_memory_allocated(device), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """Measurements of computation outside the layers."""

    optimizers: dict[str, float]
    bf16_flop_per_s: float | None
    sharding: tuple[AddedBySharding, ...]
    busy_speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Settings that all parts of one measurement share."""

    chain: ModelChain
    seq_len: int
    precision: LayerPrecision
    device: torch.device
    budget_s: float
    end_s: float
    """Time at which it should be done, on this process's clock."""
    progress: Progress
    own: OwnModel | None

    def left_until(self, share: float) -> float:
        """Seconds until this share of the budget is spent, on the process with the fewest; 0 once it is spent.

        A collective call.
        """
        left_s = over_ranks([self.end_s - time.monotonic()], self.device, dist.ReduceOp.MIN)[0]
        return max(max(left_s, 0.0) - (1 - share) * self.budget_s, 0.0)

    def compute(
        self, layers: Sequence[LayerProfile], samples: Sequence[int]
    ) -> tuple[tuple[LayerProfile, ...], _Beside]:
        """Return the layers with their times, and the overheads of the first shape, which is undivided if that is
        measured.

        On a CPU there are as many rounds as there is time for, so that a slow moment of the machine affects all
        configurations and not one. On a GPU there is one round of two repetitions: the first warms up.
        """
        degrees = [each for each in range(1, dist.get_world_size() + 1) if dist.get_world_size() % each == 0]
        strategies = (each for degree in degrees for each in shape_strategies(degree))
        shapes = [each for each in strategies if any(layer.degrees == each.shape for layer in layers)]
        meshes = {each.num_devices: layer_meshes(each.num_devices, self.device.type) for each in shapes}

        def build(each: Strategy, shard_mesh: DeviceMesh | None = None) -> ShortChain:
            return build_short_chain(
                self.chain,
                [layer.kind for layer in layers if layer.degrees == each.shape],
                strategy=each,
                seq_len=self.seq_len,
                precision=self.precision,
                device=self.device,
                mesh=meshes[each.num_devices],
                shard_mesh=shard_mesh,
                own=self.own,
            )

        self.progress("optimizer, sharding, shared cores", 0.0)
        beside = self._beside(build(shapes[0]), partial(build, shapes[0]), samples)
        num_rounds = 1 if self.device.type == "cuda" else _NUM_ROUNDS
        rounds: dict[Strategy, list[Laps]] = {each: [] for each in shapes}
        times: dict[Strategy, dict[str, tuple[MeasuredTime, ...]]] = {}
        round_s, left_s = 0.0, self.left_until(_COLLECTIVES_BEGIN)
        for number in range(num_rounds):
            is_last = number == num_rounds - 1 or (number > 0 and left_s < 2 * round_s)
            for place, each in enumerate(shapes):
                done = _BESIDE_SHARE + (_COLLECTIVES_BEGIN - _BESIDE_SHARE) * number / num_rounds
                self.progress(f"layers, {each} ({place + 1} of {len(shapes)})", done)
                num_left = len(shapes) * (1 if is_last else num_rounds - number) - place
                budget_s = self.left_until(_COLLECTIVES_BEGIN) / num_left
                short = build(each)
                rounds[each].append(measure_laps(short, samples, budget_s=budget_s, least=2 if num_rounds == 1 else 1))
                times[each] = times_of(short, rounds[each])
            round_s, left_s = left_s - (left := self.left_until(_COLLECTIVES_BEGIN)), left
            if is_last or left_s <= round_s:
                break
        of_shape = {frozenset(each.shape.items()): each for each in shapes}
        timed = tuple(
            layer.model_copy(update={"times": times[of_shape[frozenset(layer.degrees.items())]][layer.kind]})
            for layer in layers
        )
        return timed, beside

    def _beside(self, short: ShortChain, shard: Callable[[DeviceMesh], ShortChain], samples: Sequence[int]) -> _Beside:
        """Measure the times other than the layers' once, of the undivided chain if that was measured."""
        middle, is_whole = middle_of(samples), short.strategy.num_devices == 1 and dist.get_world_size() > 1
        share_s = _BESIDE_SHARE * self.budget_s / 9
        return _Beside(
            optimizers=measure_optimizers(short, budget_s=share_s),
            bf16_flop_per_s=measure_bf16_rate(short, budget_s=share_s),
            sharding=measure_sharding(short, shard, samples=middle, budget_s=4 * share_s) if is_whole else (),
            busy_speeds=measure_busy_speeds(short, samples=middle, budget_s=3 * share_s) if is_whole else (),
        )

    def collectives(self) -> tuple[CollectiveProfile, ...]:
        """Return all collectives, with a line of progress for each."""
        begin, total = _COLLECTIVES_BEGIN, num_collectives(dist.get_world_size())
        self.progress("collectives", begin)
        found = []
        for each in measure_collectives(self.device, left_s=lambda: self.left_until(_OVERHEADS_BEGIN)):
            found.append(each)
            span = "strided" if each.strided else "neighbouring"
            done = begin + (_OVERHEADS_BEGIN - begin) * len(found) / total
            self.progress(f"{each.kind} over {each.group_size} {span} ranks", done)
        return tuple(found)


def _driver(device: torch.device) -> str:
    """Return the software between PyTorch and the device: CUDA and NCCL with their versions."""
    if device.type != "cuda":
        return "none"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"CUDA {torch.version.cuda}, driver {torch._C._cuda_getDriverVersion()}, NCCL {nccl}"
