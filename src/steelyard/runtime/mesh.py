"""Device mesh of a plan: one axis for the pipeline, and small axes within a stage that layers combine.

The world is one `DeviceMesh` with the axes ``pp``, ``one`` (of size 1) and ``a0``, ``a1``, … (the prime factors of a
stage's device count). If stages have different sizes, each stage has its own mesh, without ``pp``. Each layer uses a
run of adjacent small axes for its samples and another run for tensor parallelism. A run is flattened once for the whole
plan, so all layers that use it share one process group. A layer that does not divide its samples shards over ``one``,
so precision and accumulation work the same way for every layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from steelyard.plan.dimensions import Dimension
from steelyard.plan.dimensions.dimension import Placed
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
    """Placement of a hidden state [B, S, H] on a stage: a placement for each small axis, and the order of tokens."""

    axes: tuple[Placement, ...]
    head_tail_degree: int = 1
    """Number of ranks over which tokens are divided in head-tail order; 1 for their natural order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMesh:
    """Meshes of a plan, as seen by one rank."""

    world: DeviceMesh
    """Mesh of all stages or, if stage sizes differ, of this rank's stage."""
    stage_index: int
    """Pipeline stage of this rank."""
    axis_names: tuple[str, ...]
    """Names of the small axes of a stage, outermost first; only ``one`` if a stage is a single device."""
    runs: Mapping[tuple[int, ...], DeviceMesh]
    """One-axis mesh of every run of axes that the plan uses; () is the axis of size 1."""

    @property
    def whole(self) -> DeviceMesh:
        """One-axis mesh of all ranks of this rank's stage; exists in plans that train routers."""
        return self.runs[tuple(range(self.stage.ndim if self.axis_names != (_ONE,) else 0))]

    @property
    def stage(self) -> DeviceMesh:
        """Mesh of the small axes over this rank's stage."""
        return self.world[self.axis_names]

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """Process group of the ranks at this rank's position in every stage; None if stage sizes differ."""
        names = self.world.mesh_dim_names
        return self.world[_PIPELINE].get_group() if names and _PIPELINE in names else None

    def states(self, strategy: Strategy) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the one-axis meshes over which a layer's states are replicated and over which they are sharded."""
        return self.runs[strategy.replica_axes], self.runs[strategy.shard_axes]

    def dimension(self, strategy: Strategy, dimension: Dimension) -> DeviceMesh:
        """Return the one-axis mesh of the ranks that a dimension of the strategy divides over."""
        return self.runs[strategy.axes_of(dimension) if dimension.is_level else strategy.expert_axes]

    def hidden_placement(self, strategy: Strategy) -> HiddenPlacement:
        """Return the placement of a layer's activations [B, S, H] over the small axes of the stage."""
        letters = strategy.hidden.placements(mesh_axes(strategy.num_devices))
        return self.placement(letters, strategy.hidden.head_tail_degree)

    def placement(self, letters: str, head_tail_degree: int) -> HiddenPlacement:
        """Return the placement with these letters, one per small axis; no letters if a stage is a single device."""
        axes = tuple(_PLACEMENTS[letter] for letter in letters) or (Replicate(),)
        return HiddenPlacement(axes=axes, head_tail_degree=head_tail_degree)


def build_mesh(plan: Plan, device_type: str) -> PlanMesh:
    """Build the mesh of a plan over all processes; a collective call, in the same order on every rank.

    All process groups, one for each run of axes that a layer of any stage uses, are created here and none later.
    """
    sizes = plan.stage_sizes
    own = plan.stage_of(dist.get_rank())
    uses_whole = plan.chain().trains_routers
    if len(set(sizes)) == 1:
        axes = mesh_axes(sizes[0])
        world = init_device_mesh(
            device_type, (plan.num_stages, 1, *axes), mesh_dim_names=(_PIPELINE, _ONE, *_axis_names(axes))
        )
        return _mesh_of(world, own, axes, _runs_used(plan.strategies, axes if uses_whole else ()))
    found = None
    for stage, part in enumerate(plan.parts):
        axes = mesh_axes(part.num_devices)
        ranks = torch.arange(part.ranks[0], part.ranks[1] + 1).view(1, *axes)
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=(_ONE, *_axis_names(axes)))
        runs = _runs_used(part.strategies, axes if uses_whole else ())
        if stage == own:
            found = _mesh_of(mesh, stage, axes, runs)
        else:
            # as `_mesh_of`, for ranks that cannot slice the mesh: creating a group is collective over all ranks
            for run in runs:
                if len(run) > 1:
                    flat = _MeshLayout([mesh._layout[1 + axis] for axis in run]).collapse()
                    DeviceMesh._init_one_process_group(flat, mesh._rank_map, "others", (None, None))
    assert found is not None, "every rank is of a stage"
    return found


def _axis_names(axes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"a{index}" for index in range(len(axes)))


def _mesh_of(world: DeviceMesh, stage_index: int, axes: tuple[int, ...], runs: Sequence[tuple[int, ...]]) -> PlanMesh:
    names = _axis_names(axes)
    meshes = {run: world[tuple(names[axis] for axis in run) or (_ONE,)] for run in runs}
    meshes = {
        run: mesh._flatten("".join(mesh.mesh_dim_names)) if len(run) > 1 else mesh for run, mesh in meshes.items()
    }
    return PlanMesh(world=world, stage_index=stage_index, axis_names=names or (_ONE,), runs=meshes)


def _runs_used(strategies: tuple[Strategy, ...], together: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all runs of axes that layers of these strategies communicate over, the empty run, and all of ``together``.

    ``together`` holds the sizes of the axes if something is summed over all of them.
    """
    whole = tuple(range(len(together)))
    found = {(), whole}
    for strategy in set(strategies):
        found |= {strategy.sample_axes, strategy.data_axes, strategy.replica_axes, strategy.shard_axes}
        found |= {strategy.axes_of(dimension) for dimension in strategy.dimensions}
        found |= {strategy.expert_axes, *strategy.expert_state_axes}
    return sorted(found)


def data_index(mesh: PlanMesh, strategy: Strategy) -> int:
    """Return the index of this rank's share of every microbatch in a layer of this strategy."""
    return mesh.runs[strategy.sample_axes].get_local_rank()
