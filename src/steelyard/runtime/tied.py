"""Tied embeddings under any plan: the embedding and the head each keep the matrix, and share its gradient.

The two layers may lie on different stages and under different strategies. After the backward pass the head's gradient
is brought to the embedding's placement and summed with the embedding's, and the sum is brought back: both copies then
take the same optimizer step. Costs one extra copy of the matrix with its states, which the planner counts.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from steelyard.model.chain import ModelChain
from steelyard.plan.plan import Plan
from steelyard.runtime.mesh import PlanMesh
from steelyard.runtime.stage import StageModule


class TiedEmbedding:
    """The copies of the tied matrix that this rank holds, and how their gradients meet."""

    def __init__(self, embedding: nn.Parameter | None, head: nn.Parameter | None, pair: DeviceMesh | None) -> None:
        self._embedding = embedding
        self._head = head
        self._pair = pair

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter repeats one that is counted elsewhere."""
        return parameter is self._head

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replaces the gradient of each copy by the sum of both; collective over the ranks that hold a copy."""
        mine = self._embedding if self._embedding is not None else self._head
        full = _full_gradient(mine)
        if self._embedding is not None and self._head is not None:
            full = full + _full_gradient(self._head)
        else:
            dist.all_reduce(full, group=self._pair.get_group())
        for parameter in (self._embedding, self._head):
            if parameter is not None:
                _set_gradient(parameter, full)


def find_tied_embedding(plan: Plan, chain: ModelChain, mesh: PlanMesh, stage: StageModule) -> TiedEmbedding | None:
    """This rank's part in tying, or None where the model is not tied or the rank's stage has neither copy.

    A collective call on every rank: with more than one stage it makes the groups that pair the first and last stage.
    """
    if not chain.tied_embeddings:
        return None
    last = str(chain.num_layers - 1)
    embedding = stage.layers["0"].embedding.weight if "0" in stage.layers else None
    head = stage.layers[last].output.weight if last in stage.layers else None
    pair = _pair_mesh(plan, mesh) if len(plan.stages) > 1 else None
    if embedding is None and head is None:
        return None
    return TiedEmbedding(embedding, head, pair)


def _pair_mesh(plan: Plan, mesh: PlanMesh) -> DeviceMesh:
    """Ranks of the first and the last stage that lie at the same place in their stage, in pairs."""
    size, last = plan.stages[0].num_devices, plan.stages[-1].ranks[0]
    pairs = [[rank, last + rank] for rank in range(size)]
    found = None
    for pair in pairs:
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            found = DeviceMesh.from_group(group, mesh.world.device_type, mesh=pair, mesh_dim_names=("tied",))
    return found if found is not None else mesh.pipeline


def _full_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.contiguous()


def _set_gradient(parameter: nn.Parameter, full: Tensor) -> None:
    """Keeps this rank's part of ``full`` as the parameter's gradient, without communication."""
    if not isinstance(parameter.grad, DTensor):
        parameter.grad = full
        return
    gradient = parameter.grad
    replicated = DTensor.from_local(full, gradient.device_mesh, run_check=False)
    gradient.to_local().copy_(replicated.redistribute(placements=gradient.placements).to_local())
