r"""Measurement of each collective over message sizes and group shapes, with the calls of the runtime's libraries.

A replicated layer calls ``all_reduce``; FSDP2 calls ``all_gather_single`` and ``reduce_scatter_single`` on fresh
buffers with copies around them, which are measured too. A change of layout from one sharded dim to another is a DTensor
redistribution (over gloo PyTorch gathers and slices, so the redistribution itself is measured and not
``all_to_all_single``). The pipeline sends and receives in a batch. All groups of a shape run at the same time, as they
do inside a stage. Calls follow each other without a barrier: a collective synchronises itself, and the delay of leaving
a barrier would be longer than a small message.

Seconds as a function of message size are fitted to latency plus bytes over rate,

$$t(b) = \alpha + \beta\,b, \qquad \min_{\alpha,\beta \ge 0} \sum_i \big((\alpha + \beta\,b_i - t_i) / t_i\big)^2$$

| symbol   | name          | unit   | meaning                                                        |
|----------|---------------|--------|----------------------------------------------------------------|
| $b$      | tensor bytes  | bytes  | the whole tensor that is reduced, gathered or exchanged        |
| $t$      | seconds       | s      | time of one call                                               |
| $\alpha$ | latency       | s      | time of a call before the first byte                           |
| $\beta$  | 1 / rate      | s/byte | reciprocal of `bytes_per_s`                                    |

Errors are relative, so that 16 KiB counts as much as 16 MiB. Source: the α–β model of Hockney 1994; the weights are
ours. Not modelled: the change of algorithm between small and large messages (seen in ``max_relative_error``), tensor
types other than fp32 (reductions in bf16), congestion between groups of different shapes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from steelyard.profiler.clock import num_repetitions, seconds_of, typical_seconds
from steelyard.profiles.profile import Collective, CollectiveProfile
from steelyard.units import KIB, MIB

_LEAST_S_PER_BYTE = 1e-15
"""Seconds per byte, a rate of 10^15 bytes/s, for a time that does not grow with the size."""


class LinearFit(NamedTuple):
    """Seconds = ``latency_s`` + bytes / ``bytes_per_s``; ``max_relative_error`` over the fitted points."""

    latency_s: float
    bytes_per_s: float
    max_relative_error: float


def fit_latency_and_rate(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> LinearFit:
    """Return the latency (s, not negative) and rate (bytes/s, positive) with the smallest relative errors.

    They are the unconstrained solution if that is valid, or else one with no latency or with no time for bytes. Raises
    `ValueError` for fewer than two different sizes or a time that is not positive.
    """
    if len(set(sizes_bytes)) < 2 or len(sizes_bytes) != len(times_s):
        raise ValueError(f"two or more different sizes with one time each, not {sizes_bytes} and {times_s}")
    if min(times_s) <= 0:
        raise ValueError(f"positive seconds, not {min(times_s)}")
    points = np.array([(1 / time, size / time) for size, time in zip(sizes_bytes, times_s, strict=True)])
    (uu, ub), (_, bb) = points.T @ points
    u, b = points.sum(axis=0)
    lines = [(0.0, max(b / bb, _LEAST_S_PER_BYTE)), (u / uu, _LEAST_S_PER_BYTE)]
    determinant = uu * bb - ub * ub
    if determinant > 0:
        latency_s, s_per_byte = (u * bb - b * ub) / determinant, (b * uu - u * ub) / determinant
        lines += [(latency_s, s_per_byte)] if latency_s >= 0 and s_per_byte > _LEAST_S_PER_BYTE else []
    errors = [points @ line - 1 for line in lines]
    best = int(np.argmin([(each**2).sum() for each in errors]))
    latency_s, s_per_byte = lines[best]
    return LinearFit(float(latency_s), float(1 / s_per_byte), float(np.abs(errors[best]).max()))


SIZES_BYTES = (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)
"""Sizes in bytes of the whole tensors that collectives are measured with."""

_FP32_BYTES = 4
_MOST_CALLS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Groups of ``size`` ranks at a distance of ``stride``; the world is divided into such groups."""

    size: int
    stride: int


def group_shapes(world_size: int) -> tuple[GroupShape, ...]:
    """Return the group sizes that divide the world, over neighbouring ranks and over ranks as far apart as possible."""
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    return tuple(GroupShape(size=size, stride=stride) for size in sizes for stride in sorted({1, world_size // size}))


def measure_collectives(
    device: torch.device, *, left_s: Callable[[], float], sizes_bytes: Sequence[int] = SIZES_BYTES
) -> Iterator[CollectiveProfile]:
    """Yield latency (s) and rate (bytes/s) of every collective and group shape; a collective call.

    ``left_s`` returns the seconds left for those not yet measured, which must be the same on all processes.
    ``send_recv`` is between two ranks, so it has only groups of two; in an odd world it is between the first two.
    """
    wanted = _wanted(dist.get_world_size())
    meshes = {shape: shape_mesh(shape, device.type) for shape in group_shapes(dist.get_world_size())}
    for number, (shape, collective) in enumerate(wanted):
        share_s = left_s() / (len(wanted) - number) / len(sizes_bytes)
        times_s = [
            _time_of_call(_CALLS[collective](num_bytes, meshes[shape], device), device, budget_s=share_s)
            for num_bytes in sizes_bytes
        ]
        fit = fit_latency_and_rate(sizes_bytes, times_s)
        yield CollectiveProfile(
            kind=collective,
            group_size=2 if collective == "send_recv" else shape.size,
            strided=shape.stride > 1,
            **fit._asdict(),
        )


def num_collectives(world_size: int) -> int:
    """Number of pairs of collective and group shape that `measure_collectives` measures."""
    return len(_wanted(world_size))


def _wanted(world_size: int) -> list[tuple[GroupShape, Collective]]:
    shapes, pair = group_shapes(world_size), 2 if world_size % 2 == 0 else world_size
    return [
        (shape, collective)
        for shape in shapes
        for collective in _CALLS
        if collective != "send_recv" or shape.size == pair
    ]


def shape_mesh(shape: GroupShape, device_type: str) -> DeviceMesh:
    """Return the one-axis mesh of this rank's group; a collective call."""
    sizes = (dist.get_world_size() // (shape.size * shape.stride), shape.size, shape.stride)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("outer", "group", "inner"))["group"]


def _time_of_call(call: Callable[[], object], device: torch.device, *, budget_s: float) -> float:
    """Seconds of one of several consecutive calls."""
    call()
    num_calls = num_repetitions(seconds_of(call, device), budget_s / 4, least=1, most=_MOST_CALLS)

    def several() -> None:
        for _ in range(num_calls):
            call()

    return typical_seconds(several, device, budget_s=budget_s * 3 / 4, most=6) / num_calls


def _all_reduce(num_bytes: int, mesh: DeviceMesh, device: torch.device) -> Callable[[], object]:
    whole, group = _whole(num_bytes, mesh, device), mesh.get_group()
    return lambda: dist.all_reduce(whole, group=group)


def _all_gather(num_bytes: int, mesh: DeviceMesh, device: torch.device) -> Callable[[], object]:
    whole, group = _whole(num_bytes, mesh, device), mesh.get_group()
    part = torch.zeros(whole.numel() // mesh.size(), device=device)

    def call() -> None:
        gathered = torch.empty_like(whole)
        mine = gathered.view(mesh.size(), -1)[mesh.get_local_rank()]
        mine.copy_(part)
        dist.all_gather_single(gathered, mine, group=group)
        torch.empty_like(gathered).copy_(gathered)

    return call


def _reduce_scatter(num_bytes: int, mesh: DeviceMesh, device: torch.device) -> Callable[[], object]:
    whole, group = _whole(num_bytes, mesh, device), mesh.get_group()

    def call() -> None:
        sent = torch.empty_like(whole).copy_(whole)
        part = torch.empty(whole.numel() // mesh.size(), device=device)
        dist.reduce_scatter_single(part, sent, group=group)

    return call


def _all_to_all(num_bytes: int, mesh: DeviceMesh, device: torch.device) -> Callable[[], object]:
    part = _whole(num_bytes, mesh, device).view(mesh.size(), -1)[:1].contiguous()
    return lambda: DTensor.from_local(part, mesh, (Shard(0),), run_check=False).redistribute(placements=(Shard(1),))


def _send_recv(num_bytes: int, mesh: DeviceMesh, device: torch.device) -> Callable[[], object]:
    """Return a function for one transfer; directions alternate, so that neither side runs ahead; others do nothing."""
    tensor, group = torch.zeros(num_bytes // _FP32_BYTES, device=device), mesh.get_group()
    mine, peer = mesh.get_local_rank(), 1 - mesh.get_local_rank()
    senders = cycle((0, 1))
    if mine > 1:
        return lambda: None

    def call() -> None:
        direction = dist.isend if next(senders) == mine else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(direction, tensor, group=group, group_peer=peer)]):
            work.wait()

    return call


def _whole(num_bytes: int, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Return the whole tensor; its length is a multiple of the squared group size, so that it can be cut twice."""
    unit = mesh.size() ** 2
    return torch.zeros(max(num_bytes // _FP32_BYTES // unit, 1) * unit, device=device)


_CALLS: dict[Collective, Callable[[int, DeviceMesh, torch.device], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
