"""Parameters that several layers share, such as tied embeddings, under any plan: one copy per layer, one gradient.

The layers may be on different stages and under different strategies. All copies start equal. After the backward passes
of a step each rank adds the gradients of its copies and those of the other stages, and keeps its part of the sum: all
copies then take the same optimizer step and stay equal, entry by entry. If all copies are sharded identically, a rank
adds only its parts; otherwise the gradients are gathered, some columns at a time, so that no rank holds a whole matrix.

Costs one more matrix for every copy, with its gradient and optimizer states, and per step the gathering of the
gradients and, with several stages, their sum over the stages that hold a copy. On a single device embedding and head
keep one matrix.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steelyard.model.chain import ModelChain
from steelyard.modules.layers import ChainLayer
from steelyard.modules.replicated import Replica
from steelyard.modules.updates import local_part
from steelyard.plan.plan import Plan
from steelyard.plan.stages import num_slices

_MATRIX_DIMS = 2


class SharedGradient:
    """Copies of one shared parameter that this rank holds, and the sum of their gradients.

    ``group`` joins the stages that hold copies; None for one stage. ``num_slices`` is the number of parts in which
    differently sharded copies are gathered; None if all copies are sharded identically. ``adds`` is false if another
    rank of this stage adds its copies to the sum over the group.
    """

    def __init__(
        self,
        copies: list[nn.Parameter],
        *,
        has_first: bool,
        group: dist.ProcessGroup | None,
        num_slices: int | None,
        adds: bool,
    ) -> None:
        self._copies, self._has_first, self._group, self._num_slices = copies, has_first, group, num_slices
        self._adds = adds
        self._earlier: list[Tensor | None] = []

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is a copy of one that is counted elsewhere."""
        return any(parameter is copy for copy in self._copies[1 if self._has_first else 0 :])

    def begin_step(self) -> None:
        """Set aside the gradients of earlier steps, which are sums already."""
        self._earlier = [copy.grad for copy in self._copies]
        for copy in self._copies:
            copy.grad = None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace the gradient of each copy by the sum of all, and add those of earlier steps.

        Collective over the ranks that hold a copy.
        """
        self._sum_copies()
        for copy, earlier in zip(self._copies, self._earlier, strict=True):
            if earlier is not None:
                local_part(copy.grad).add_(local_part(earlier))
        self._earlier.clear()

    def _sum_copies(self) -> None:
        for copy in self._copies:
            if copy.grad is None:  # a copy that its layer only holds for other layers
                copy.grad = torch.zeros_like(copy)
        gradients = [copy.grad for copy in self._copies]
        if self._num_slices is None:
            device = gradients[0].device_mesh.device_type
            _sum_parts([local_part(gradient) for gradient in gradients], self._group, device)
            return
        num_columns = gradients[0].shape[-1]
        width = -(-num_columns // self._num_slices) if gradients[0].dim() == _MATRIX_DIMS else num_columns
        for start in range(0, num_columns, width):
            first, *others = (_columns(each, start, min(width, num_columns - start)) for each in gradients)
            total = _whole(first)
            for other in others:
                total += _whole(other)
            if not self._adds:
                total.zero_()
            if self._group is not None:
                dist.all_reduce(total, group=self._group)
            for each in (first, *others):  # keep this rank's part of the sum, without communication
                part = total
                if isinstance(each, DTensor):
                    spread = DTensor.from_local(total, each.device_mesh, run_check=False)
                    part = spread.redistribute(placements=each.placements).to_local()
                local_part(each).copy_(part)


def share_ends(plan: Plan, chain: ModelChain, layers: Mapping[str, ChainLayer], replicas: Sequence[Replica]) -> None:
    """Let the head of a model on a single device compute on the embedding's matrix, if they are tied.

    ``replicas`` are those of the layers, in order, without those whose parameters are in host memory.
    """
    if plan.num_devices > 1 or not chain.ties_ends or len(replicas) < len(layers):
        return
    first, last = (layers[str(layer)].get_parameter(path) for layer, path in chain.shared[0].copies)
    replicas[-1].share(last, replicas[0], first)


def find_shared_gradients(plan: Plan, chain: ModelChain, layers: Mapping[str, nn.Module]) -> list[SharedGradient]:
    """Return all shared parameters with a copy in this rank's ``layers``.

    A collective call on every rank: it creates the groups that join the stages with copies.
    """
    strategies = plan.strategies
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    found = []
    for shared in chain.summed:
        stage_of = {
            layer: index for index, stage in enumerate(plan.stages) for part in stage.parts for layer in part.layers
        }
        stages = tuple(sorted({stage_of[layer] for layer, _ in shared.copies}))
        if len(stages) > 1 and stages not in groups:
            groups[stages] = _group_across(plan, stages)
        mine = [(layer, path) for layer, path in shared.copies if str(layer) in layers]
        copies = [layers[str(layer)].get_parameter(path) for layer, path in mine]
        if len({*copies}) > 1 or (copies and len(stages) > 1):
            found.append(
                SharedGradient(
                    copies,
                    has_first=mine[0] == shared.copies[0],
                    group=groups.get(stages),
                    num_slices=num_slices(shared, strategies, chain),
                    adds=_are_alike(plan, stages)
                    or dist.get_rank() in [plan.stages[stage].ranks[0] for stage in stages],
                )
            )
    return found


def _are_alike(plan: Plan, stages: tuple[int, ...]) -> bool:
    return len({plan.stages[stage].num_devices for stage in stages}) == 1


def _group_across(plan: Plan, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return the group of ranks at this rank's place in each stage, or of all ranks of the stages if sizes differ."""
    first_and_last = (plan.stages[stage].ranks for stage in stages)
    spans = [range(first, last + 1) for first, last in first_and_last]
    mine = None
    for ranks in zip(*spans, strict=True) if _are_alike(plan, stages) else [sum(map(tuple, spans), ())]:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _sum_parts(parts: list[Tensor], group: dist.ProcessGroup | None, device: str) -> None:
    """Replace all parts by their sum over the parts and the group, whose ranks hold the same entries.

    The group's sum is computed on a device of type ``device``, whatever device the parts are on.
    """
    first, *others = parts
    for other in others:
        first += other
    if group is not None:
        total = first.to(device)
        dist.all_reduce(total, group=group)
        first.copy_(total)
    for other in others:
        other.copy_(first)


def _columns(gradient: Tensor, start: int, width: int) -> Tensor:
    """Return some columns of a gradient that is sharded by rows, or all of them; a view of this rank's part.

    DTensor's own slicing of a matrix that is sharded twice would gather it first.
    """
    if width == gradient.shape[-1]:
        return gradient
    if not isinstance(gradient, DTensor):
        return gradient.narrow(-1, start, width)
    return DTensor.from_local(
        gradient.to_local().narrow(-1, start, width),
        gradient.device_mesh,
        gradient.placements,
        run_check=False,
        shape=torch.Size((*gradient.shape[:-1], width)),
        stride=(width, 1),
    )


def _whole(gradient: Tensor) -> Tensor:
    """Return all rows of a gradient as a new tensor on the device."""
    if isinstance(gradient, DTensor):
        gradient = gradient.to(gradient.device_mesh.device_type)
    if isinstance(gradient, DTensor) and any(not placement.is_replicate() for placement in gradient.placements):
        return gradient.full_tensor().contiguous()
    return local_part(gradient).clone(memory_format=torch.contiguous_format)
