r"""Measurement of step time outside the layers: optimizer, sharding, overlap with communication, shared cores.

If c seconds of compute and d seconds of communication take T seconds when they overlap, the slowdown κ is that of the
cost model, where the shorter one costs κ times itself and the rest of the longer one runs alone:

$$T = \kappa\,\min(c, d) + |c - d| \quad\Rightarrow\quad \kappa = \frac{T - |c - d|}{\min(c, d)}$$

Processes of a host share its cores. Layers are measured while all processes compute; in a pipeline some wait for
others, and the rest are faster meanwhile (`measure_busy_speeds`). On GPUs every process has its own device, so there is
nothing to measure.

Source: Miao et al. 2022 (arXiv 2211.13878), section 3.4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from steelyard.levers import Effects
from steelyard.levers.offload import Offload
from steelyard.levers.optimizer import Optimizer
from steelyard.modules.levers.optimizer import make_optimizer
from steelyard.modules.updates import add_square_norms, clip_to_norm, local_part
from steelyard.profiler.clock import barrier, fast_half_mean, num_repetitions, over_ranks, typical_seconds
from steelyard.profiler.collectives import group_shapes, shape_mesh
from steelyard.profiler.layers import ShortChain, repetition_laps
from steelyard.profiles.profile import CollectiveProfile, ShardingTime
from steelyard.units import MIB


def measure_busy_speeds(short: ShortChain, *, samples: int, budget_s: float) -> tuple[float, ...]:
    """Return the speed of a process while 1, 2, … of them compute, relative to all computing; a collective call.

    The speeds never rise and the last one is 1; empty on GPUs. ``short`` must have no tensor parallelism, so that its
    processes need not wait for each other.
    """
    world_size = dist.get_world_size()
    if short.device.type == "cuda" or world_size == 1:
        return ()
    counts = range(1, world_size + 1)
    rounds = [[_seconds(short, samples, count) for count in counts]]
    rounds += [
        [_seconds(short, samples, count) for count in counts]
        for _ in range(num_repetitions(sum(rounds[0]), budget_s - sum(rounds[0]), least=1))
    ]
    typical_s = [fast_half_mean(column) for column in zip(*rounds[1:], strict=True)]
    return non_rising([typical_s[-1] / seconds for seconds in typical_s])


def non_rising(speeds: list[float]) -> tuple[float, ...]:
    """Return ``speeds`` raised, where noise makes it necessary, so that none is below a later one."""
    return tuple(accumulate(reversed(speeds), max))[::-1]


def _seconds(short: ShortChain, samples: int, num_busy: int) -> float:
    """Seconds of a microbatch on the first ``num_busy`` processes, the others idle: the mean over the busy ones."""
    is_busy = dist.get_rank() < num_busy
    if is_busy:
        seconds = sum(repetition_laps(short, samples))
    else:
        barrier(short.device)  # matches the barrier with which the busy ones begin
        seconds = 0.0
    barrier(short.device)
    return over_ranks([seconds], short.device, dist.ReduceOp.SUM)[0] / num_busy


_OVERLAP_ELEMENTS = 4 * MIB
_MATMUL_SIZE = 256
_MOST_MATRIX_SIZE = 1024
"""Larger matrices multiply at the same rate, and take longer than a measurement should."""
_MOST_MATMULS = 5000
_REDUCED_BYTES = 4


def measure_optimizers(short: ShortChain, *, budget_s: float) -> dict[str, float]:
    """Seconds of the end of a step per parameter of a rank, by optimizer, on all processes at once; a collective call.

    They cover clipping, the optimizer, and clearing the gradients. The parameters are those of a short chain, with its
    many small tensors. On a CPU all optimizers are measured except those that need to know matrices; on a GPU only
    AdamW, because the others move as many bytes per second there.
    """
    words = Optimizer.values if short.device.type == "cpu" else (Optimizer().word,)
    known = [each for each in map(Optimizer, words) if each.effects(Effects()).matrices is None]
    return {each.word: _update_s(short, each, budget_s=budget_s / len(known)) for each in known}


def measure_bf16_rate(short: ShortChain, *, budget_s: float) -> float | None:
    """FLOP/s of a process in bf16 products of square matrices, all processes at once; None on a GPU, whose peak is
    known. A collective call."""
    if short.device.type == "cuda":
        return None
    size = min(short.chain.hidden_size, _MOST_MATRIX_SIZE)
    matrix = torch.full((size, size), 1.0 / size, dtype=torch.bfloat16)
    return 2 * size**3 / typical_seconds(lambda: matrix @ matrix, short.device, budget_s=budget_s)


def _update_s(short: ShortChain, lever: Optimizer, *, budget_s: float) -> float:
    parameters = short.parameters()
    num_params = sum(local_part(parameter).numel() for parameter in parameters)
    groups = [{"params": parameters, "weight_decay": 0.1}]
    optimizer = make_optimizer(lever, groups, offload=Offload(), matrices=(), lr=1e-6, betas=(0.9, 0.95))

    def fill_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)

    def update() -> None:
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        square = torch.zeros((), device=short.device)
        with torch.no_grad():
            add_square_norms(square, gradients, [1] * len(gradients))
            clip_to_norm(gradients, square.sqrt(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return typical_seconds(update, short.device, budget_s=budget_s, prepare=fill_gradients) / num_params


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedBySharding:
    """Time that sharding a short chain over a group adds to its microbatch, including the collectives."""

    group_size: int
    seconds: float
    params_of_layers: tuple[int, ...]
    """Parameters of each layer of the chain."""
    trained_of_layers: tuple[int, ...]
    """Trained parameters of each layer of the chain."""
    gathered_bytes: int
    """Bytes gathered per parameter."""

    def beside(self, collectives: Sequence[CollectiveProfile]) -> ShardingTime:
        """Return the added time per layer on average, without the time of the collectives by their measured rates.

        These rates are used although another measurement of the same messages is available: a plan's price is the sum
        of both, which then equals the measured time, whatever the error of the fitted rates.
        """
        by_collective = {
            each.kind: each for each in collectives if each.group_size == self.group_size and not each.strided
        }
        gather, scatter = by_collective["all_gather"], by_collective["reduce_scatter"]
        communication_s = sum(2 * gather.time_s(self.gathered_bytes * count) for count in self.params_of_layers)
        communication_s += sum(scatter.time_s(_REDUCED_BYTES * count) for count in self.trained_of_layers)
        beside_s = max(self.seconds - communication_s, 0.0) / len(self.params_of_layers)
        return ShardingTime(group_size=self.group_size, seconds=beside_s)


def measure_sharding(
    replicated: ShortChain, shard: Callable[[DeviceMesh], ShortChain], *, samples: int, budget_s: float
) -> tuple[AddedBySharding, ...]:
    """Return the time that sharding the layers over groups of each size adds to a microbatch; a collective call.

    It includes the collectives, the work of FSDP2 around them, and the time that processes that share cores lose
    because each layer waits for all of them. ``shard`` makes the chain ``replicated`` sharded over a mesh. Empty on a
    GPU, where the host is ahead of the device.
    """
    if replicated.device.type == "cuda":
        return ()
    shapes = [shape for shape in group_shapes(dist.get_world_size()) if shape.stride == 1]
    found = []
    for shape in shapes:
        sharded = shard(shape_mesh(shape, replicated.device.type))
        added = AddedBySharding(
            group_size=shape.size,
            seconds=_added_s(replicated, sharded, samples, budget_s=budget_s / len(shapes)),
            params_of_layers=tuple(sum(each.numel() for each in layer.parameters()) for layer in sharded.layers),
            trained_of_layers=tuple(
                sum(each.numel() for each in layer.parameters() if each.requires_grad) for layer in sharded.layers
            ),
            gathered_bytes=sharded.dtype.itemsize,
        )
        found.append(added)
    return tuple(found)


def _added_s(replicated: ShortChain, sharded: ShortChain, samples: int, *, budget_s: float) -> float:
    """Additional seconds of a sharded microbatch; both kinds run in turn, so that a slow moment affects both."""

    def both_s() -> list[float]:
        laps_s = [sum(repetition_laps(chain, samples)) for chain in (sharded, replicated)]
        return over_ranks(laps_s, replicated.device, dist.ReduceOp.MAX)

    first_s = sum(both_s())
    rows = [both_s() for _ in range(num_repetitions(first_s, budget_s - first_s, least=1))]
    return fast_half_mean([row[0] for row in rows]) - fast_half_mean([row[1] for row in rows])


def measure_step_overhead(device: torch.device, *, budget_s: float) -> float:
    """Seconds of a step outside all layers: one all-reduce of the loss and one of the gradient norm."""
    scalar = torch.zeros((), device=device)

    def reduce_both() -> None:
        dist.all_reduce(scalar)
        dist.all_reduce(scalar)

    return typical_seconds(reduce_both, device, budget_s=budget_s)


def measure_overlap_slowdown(device: torch.device, *, budget_s: float) -> float:
    """Slowdown of matrix products and an all-reduce that run at the same time, 1 to 2; a collective call."""
    message = torch.zeros(_OVERLAP_ELEMENTS, device=device)
    matrix = torch.full((_MATMUL_SIZE, _MATMUL_SIZE), 1.0 / _MATMUL_SIZE, device=device)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    def both(count: int) -> None:
        pending = dist.all_reduce(message, async_op=True)
        compute(count)
        pending.wait()

    share_s = budget_s / 4
    communication_s = typical_seconds(lambda: dist.all_reduce(message), device, budget_s=share_s)
    ten_s = typical_seconds(lambda: compute(10), device, budget_s=share_s)
    count = min(max(round(10 * communication_s / ten_s), 1), _MOST_MATMULS)
    compute_s = typical_seconds(lambda: compute(count), device, budget_s=share_s)
    both_s = typical_seconds(lambda: both(count), device, budget_s=share_s)
    return slowdown(compute_s, communication_s, both_s)


def slowdown(compute_s: float, communication_s: float, both_s: float) -> float:
    """Slowdown κ of the cost model, see the module; all arguments in seconds.

    It is at least 1, and at most 2, where one after the other takes as long: PyTorch's wrappers do not run both at the
    same time on a CPU, so nothing is ever slower than that.
    """
    alone_s = abs(compute_s - communication_s)
    return min(max((both_s - alone_s) / min(compute_s, communication_s), 1.0), 2.0)
