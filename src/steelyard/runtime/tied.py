"""Tied embeddings under any plan: the embedding and the head each keep the matrix, and share its gradient.

The two layers may lie on different stages and under different strategies. Both copies start equal. After the backward
passes of a step each rank of the first and the last stage gathers the gradient of its copy, adds the other's and keeps
its part of the sum: both copies then take the same optimizer step and stay equal, entry by entry.

Costs a second copy of the matrix with its gradient and optimizer states, and once a step the gathering of both
gradients and, with several stages, their exchange between the first and the last.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steelyard.model.chain import ModelChain
from steelyard.plan.plan import Plan


class TiedEmbedding:
    """The copies of the tied matrix that this rank holds, and how their gradients meet."""

    def __init__(
        self, embedding: nn.Parameter | None, head: nn.Parameter | None, pair: dist.ProcessGroup | None
    ) -> None:
        self._embedding = embedding
        self._head = head
        self._pair = pair

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter repeats one that is counted elsewhere."""
        return parameter is self._head

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replaces the gradient of each copy by the sum of both; collective over the ranks that hold a copy.

        Gradients must hold one step alone: those of an earlier step would count twice.
        """
        copies = [parameter for parameter in (self._embedding, self._head) if parameter is not None]
        full = _full_gradient(copies[0])
        for other in copies[1:]:
            full = full + _full_gradient(other)
        if self._pair is not None:
            dist.all_reduce(full, group=self._pair)
        for parameter in copies:
            _set_gradient(parameter, full)


def find_tied_embedding(plan: Plan, chain: ModelChain, layers: Mapping[str, nn.Module]) -> TiedEmbedding | None:
    """This rank's part in tying, or None where the model is not tied or none of the rank's ``layers`` has a copy.

    A collective call on every rank: with more than one stage it makes the groups that pair the first and last stage.
    """
    if not chain.tied_embeddings:
        return None
    pair = _pair_group(plan) if plan.num_stages > 1 else None
    embedding, head = "0", str(chain.num_layers - 1)
    if embedding not in layers and head not in layers:
        return None
    return TiedEmbedding(
        embedding=layers[embedding].embedding.weight if embedding in layers else None,
        head=layers[head].output.weight if head in layers else None,
        pair=pair,
    )


def _pair_group(plan: Plan) -> dist.ProcessGroup | None:
    """The group of two ranks at the same place in the first and the last stage, on those ranks."""
    last = plan.stages[-1].ranks[0]
    mine = None
    for rank in range(plan.stages[0].num_devices):
        group = dist.new_group([rank, last + rank])
        if dist.get_rank() in (rank, last + rank):
            mine = group
    return mine


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
