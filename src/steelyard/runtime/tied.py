"""Parameters that several layers hold, such as tied embeddings, under any plan: each layer a copy, all one gradient.

The layers may lie on different stages and under different strategies. All copies start equal. After the backward passes
of a step each rank of a stage with a copy gathers the gradients of its copies, adds those of the other stages and keeps
its part of the sum: all copies then take the same optimizer step and stay equal, entry by entry. Copies of one stage
that are divided alike need no gathering.

Costs one more matrix for every copy, with its gradient and optimizer states, and once a step the gathering of all
gradients and, with several stages, their sum over the stages that hold a copy.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steelyard.model.chain import ModelChain, SharedWeight
from steelyard.modules.updates import local_part
from steelyard.plan.plan import Plan


class SharedGradient:
    """The copies of one shared parameter that this rank holds, and how their gradients meet."""

    def __init__(self, copies: list[nn.Parameter], *, has_first: bool, group: dist.ProcessGroup | None) -> None:
        self._copies = copies
        self._has_first = has_first
        self._group = group

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter repeats one that is counted elsewhere."""
        return any(parameter is copy for copy in self._copies[1 if self._has_first else 0 :])

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replaces the gradient of each copy by the sum of all; collective over the ranks that hold a copy.

        Gradients must hold one step alone: those of an earlier step would count twice.
        """
        if self._group is None and _are_alike([copy.grad for copy in self._copies]):
            _sum_in_place([local_part(copy.grad) for copy in self._copies])
            return
        full = _full_gradient(self._copies[0])
        for other in self._copies[1:]:
            full = full + _full_gradient(other)
        if self._group is not None:
            dist.all_reduce(full, group=self._group)
        for parameter in self._copies:
            _set_gradient(parameter, full)


class TiedEmbedding:
    """All parameters that this rank shares with other layers."""

    def __init__(self, shared: list[SharedGradient]) -> None:
        self._shared = shared

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter repeats one that is counted elsewhere."""
        return any(each.is_copy(parameter) for each in self._shared)

    def sum_gradients(self) -> None:
        """Gives all copies of each shared parameter the sum of their gradients; a collective call."""
        for each in self._shared:
            each.sum_gradients()


def find_tied_embedding(plan: Plan, chain: ModelChain, layers: Mapping[str, nn.Module]) -> TiedEmbedding | None:
    """This rank's part in sharing, or None where none of the rank's ``layers`` has a copy of anything.

    A collective call on every rank: it makes the groups that bring together the stages that hold copies.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    found = []
    for shared in chain.shared:
        stages = _stages_of(plan, shared)
        if len(stages) > 1 and stages not in groups:
            groups[stages] = _group_across(plan, stages)
        mine = [(layer, path) for layer, path in shared.copies if str(layer) in layers]
        if mine:
            copies = [layers[str(layer)].get_parameter(path) for layer, path in mine]
            has_first = mine[0] == shared.copies[0]
            found.append(SharedGradient(copies, has_first=has_first, group=groups.get(stages)))
    return TiedEmbedding(found) if found else None


def _stages_of(plan: Plan, shared: SharedWeight) -> tuple[int, ...]:
    """The stages that hold a copy, rising."""
    stage_of = {
        layer: index % plan.num_stages
        for index, part in enumerate(plan.stages)
        for layer in range(part.first_layer, part.last_layer + 1)
    }
    return tuple(sorted({stage_of[layer] for layer, _ in shared.copies}))


def _group_across(plan: Plan, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of the ranks at the same place in each of the stages, on those ranks."""
    mine = None
    for place in range(plan.stages[0].num_devices):
        ranks = [plan.stages[stage].ranks[0] + place for stage in stages]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _are_alike(gradients: list[Tensor | None]) -> bool:
    """Whether the same entries of all gradients lie on this rank, so that they meet without communication."""
    layouts = {
        (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None for gradient in gradients
    }
    return len(layouts) == 1


def _sum_in_place(gradients: list[Tensor]) -> None:
    """Gives all gradients their sum."""
    first, *others = gradients
    for other in others:
        first += other
    for other in others:
        other.copy_(first)


def _full_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of the whole matrix, as a tensor that may be changed."""
    gradient = parameter.grad
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.clone(memory_format=torch.contiguous_format)


def _set_gradient(parameter: nn.Parameter, full: Tensor) -> None:
    """Keeps this rank's part of ``full`` as the parameter's gradient, without communication."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        gradient.copy_(full)
        return
    replicated = DTensor.from_local(full, gradient.device_mesh, run_check=False)
    gradient.to_local().copy_(replicated.redistribute(placements=gradient.placements).to_local())
