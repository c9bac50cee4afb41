"""The device mesh of a plan: one axis for the pipeline, and small axes inside a stage that layers combine.

The world is one `DeviceMesh` with the axes ``pp``, ``one`` (of size 1) and ``a0``, ``a1``, … (the prime factors of a
stage's devices). Each layer uses a run of neighbouring small axes for its samples and another for tensor parallelism;
such a run is flattened once for the whole plan, so all layers that use it share one process group. A layer that does
not divide its samples shards over ``one``, so precision and accumulation work alike everywhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from steelyard.plan.kinds import Kind
from steelyard.plan.kinds.kind import Placed
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Strategy, mesh_axes

_PIPELINE = "pp"
_ONE = "one"
_PLACEMENTS: Mapping[str, Placement] = {
    Placed.BATCH: Shard(0),
    Placed.SEQUENCE: Shard(1),
    Placed.HEAD_TAIL: Shard(1),
    Placed.WHOLE: Replicate(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenPlacement:
    """How a hidden state [B, S, H] lies on a stage: a placement for each small axis, and the order of its tokens."""

    axes: tuple[Placement, ...]
    head_tail_degree: int = 1
    """Ranks over which tokens are divided in head-tail order; 1 for the order in which they read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMesh:
    """The meshes of a plan as one rank sees them."""

    world: DeviceMesh
    axis_names: tuple[str, ...]
    """Names of the small axes of a stage, outermost first; ``one`` alone where a stage is a single device."""
    runs: Mapping[tuple[int, ...], DeviceMesh]
    """The one-axis mesh of every run of axes that the plan uses; () is the axis of size 1."""

    @property
    def stage(self) -> DeviceMesh:
        """The mesh of small axes over this rank's stage."""
        return self.world[self.axis_names]

    @property
    def stage_index(self) -> int:
        """The pipeline stage of this rank."""
        return self.world.get_local_rank(_PIPELINE)

    @property
    def pipeline(self) -> DeviceMesh:
        """The ranks at this rank's place in every stage."""
        return self.world[_PIPELINE]

    def samples(self, strategy: Strategy) -> DeviceMesh:
        """The one-axis mesh over which the strategy divides samples."""
        return self._run(strategy.sample_axes)

    def states(self, strategy: Strategy) -> tuple[DeviceMesh, DeviceMesh]:
        """The one-axis meshes over which a layer's states are replicated, and over which they are sharded."""
        return self._run(strategy.replica_axes), self._run(strategy.shard_axes)

    def expert_states(self, strategy: Strategy) -> tuple[DeviceMesh, DeviceMesh]:
        """The same for the states of experts that are divided over ranks."""
        replicas, shards = strategy.expert_state_axes
        return self._run(replicas), self._run(shards)

    def kind(self, strategy: Strategy, kind: Kind) -> DeviceMesh:
        """The one-axis mesh of the ranks that share a kind of the strategy."""
        return self._run(strategy.axes_of(kind) if kind.is_level else strategy.expert_axes)

    def data(self, strategy: Strategy) -> DeviceMesh:
        """The one-axis mesh of the ranks with different samples or tokens."""
        return self._run(strategy.data_axes)

    def hidden_placement(self, strategy: Strategy) -> HiddenPlacement:
        """Placement of a layer's activations [B, S, H] over the small axes of the stage."""
        if not strategy.levels:
            return HiddenPlacement(axes=(Replicate(),))
        letters = strategy.hidden.placements(mesh_axes(strategy.num_devices))
        return HiddenPlacement(
            axes=tuple(_PLACEMENTS[letter] for letter in letters), head_tail_degree=strategy.hidden.head_tail_degree
        )

    def _run(self, axes: tuple[int, ...]) -> DeviceMesh:
        return self.runs[axes]


def build_mesh(plan: Plan, device_type: str) -> PlanMesh:
    """The mesh of a plan over all processes; a collective call, in the same order on every rank.

    Every run of axes that any layer of any stage uses gets its process group here, and none later.
    """
    sizes = mesh_axes(plan.stages[0].num_devices)
    names = tuple(f"a{index}" for index in range(len(sizes)))
    world = init_device_mesh(device_type, (plan.num_stages, 1, *sizes), mesh_dim_names=(_PIPELINE, _ONE, *names))
    wanted = {axes for strategy in set(plan.strategies) for axes in _axes_used(strategy)}
    runs = {axes: _flat_mesh(world, tuple(names[axis] for axis in axes)) for axes in sorted(wanted | {()})}
    return PlanMesh(world=world, axis_names=names or (_ONE,), runs=runs)


def _axes_used(strategy: Strategy) -> Iterator[tuple[int, ...]]:
    """Every run of axes over which layers of a strategy communicate."""
    yield from (strategy.sample_axes, strategy.data_axes, strategy.replica_axes, strategy.shard_axes)
    yield from (strategy.axes_of(kind) for kind in strategy.kinds)
    yield from (strategy.expert_axes, *strategy.expert_state_axes)


def _flat_mesh(world: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The axes ``names`` of the world as one axis."""
    if len(names) < 2:
        return world[names[0] if names else _ONE]
    return world[names]._flatten("".join(names))


def data_index(mesh: PlanMesh, strategy: Strategy) -> int:
    """Which share of every microbatch this rank holds in a layer of this strategy."""
    return mesh.samples(strategy).get_local_rank()


def default_device_type() -> str:
    """``cuda`` where a GPU is at hand, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"
