"""Expert parallelism: the routed experts of a block, divided over ranks that hold different tokens.

Each rank routes its own tokens, sends every pair of token and expert to the rank of the expert, and weights and sums
the returned results. No pair is dropped, however uneven the routing is. The ranks of a group are the innermost e of the
D ranks over which the layer divides its data, so computation for each other involves no other rank.

| pass                     | collectives over the e ranks, in order                                               |
|--------------------------|--------------------------------------------------------------------------------------|
| forward                  | all-to-all of the pairs per expert (E numbers), of the pairs [K, H], and back [K, H] |
| backward                 | all-to-all of the gradients [K, H] of what came back, and of what was sent           |
| computed again, full     | as forward                                                                           |
| computed again, selective | none: `steelyard.modules.remat` keeps what all-to-alls return                       |

A rank holds E/e experts as its own parameters: DTensors, sharded by experts over the e ranks. Their gradients come from
the tokens of the whole group and are therefore summed only over the other D/e ranks (`steelyard.modules.replicated`).
Under tensor parallelism, ep divides the experts of each tp rank over the ranks with the same place in tp.

On fake tensors the routing is unknown: every rank sends the same number of pairs to each rank, and receives as many as
it sends, times `ExpertExchange.received_share`. Training counts the received pairs (`take_imbalance`).

Source: Lepikhin et al. 2020 (GShard) for the exchange; torchtitan's ``ExpertParallel`` for experts as DTensors.

Legend of shapes: T tokens, k experts of a token, K pairs T·k, P pairs that this rank computes, E experts of the group
(under tensor parallelism, of this tp rank), H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.modules.experts import Reordered, compute_pairs, even_dim, inverse, routed_experts
from steelyard.modules.layers import ChainLayer
from steelyard.modules.updates import local_part


def apply_expert_parallel(layer: ChainLayer, mesh: DeviceMesh) -> None:
    """Divide the routed experts of the layer over the one axis of ``mesh``, in place.

    Runs after tensor parallelism and before data parallelism. Raises `InvalidModelError` if the layer has no experts,
    and `InvalidPlanError` if the degree does not divide them.
    """
    found = routed_experts(layer)
    if not found:
        raise InvalidModelError(
            field="ep",
            found=f"ep for the {layer.layer_type.name} layers",
            expected="layers with experts",
            hint="drop ep there",
        )
    for experts in found:
        degree = mesh.size()
        if experts.num_experts % degree:
            whole = getattr(experts, "num_all_experts", experts.num_experts)
            each = f", {experts.num_experts} per tp rank" if whole != experts.num_experts else ""
            raise InvalidPlanError(
                field="ep",
                found=f"ep{degree} for {whole} experts{each}",
                expected=f"a divisor of {experts.num_experts}",
                hint="choose another degree of ep or tp",
            )
        for name, parameter in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, _own_part(parameter, mesh))
        experts.compute_pairs = ExpertExchange(mesh)


def exchange_alone(layer: ChainLayer, mesh: DeviceMesh, *, received_share: float) -> None:
    """Make a rank exchange only with itself, in place, so that its work is counted as that of one of several ranks.

    Its computation and its memory except parameters depend on the number of received pairs, not on the number of ranks.
    """
    for experts in routed_experts(layer):
        experts.compute_pairs = ExpertExchange(mesh, received_share=received_share)


def _own_part(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's experts as a shard of the whole parameter; ep divides parts that tp has already divided."""
    local = local_part(parameter.detach())
    own = local.chunk(mesh.size())[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    whole, placements = mesh, (Shard(0),)
    if isinstance(parameter, DTensor):
        with unset_fake_temporarily():  # a mesh is made of real tensors, also while layers are counted on fake ones
            whole = DeviceMesh._concatenate([mesh, parameter.device_mesh])
        placements = (_StridedShard(0, split_factor=parameter.device_mesh.size()), *parameter.placements)
    stored = DTensor.from_local(
        own, whole, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(stored, requires_grad=parameter.requires_grad)


class ExpertExchange:
    """Exchange of pairs with the ranks that hold their experts; replaces `compute_pairs`.

    Rank r of the group holds the experts from r·E/e on.
    """

    def __init__(self, mesh: DeviceMesh, *, received_share: float = 1.0) -> None:
        self.mesh = mesh
        self.received_share = received_share
        """Pairs received per pair sent; used with fake tensors."""
        self.num_pairs = 0
        """Number of pairs that this rank has computed, counted once per forward pass, recomputation included."""

    def __call__(self, experts: nn.Module, inputs_KH: Tensor, ends_E: Tensor, share: float) -> Tensor:  # noqa: N803
        """Return the experts' outputs for rows [K, H] sorted by expert, as `compute_pairs` does."""
        group, degree = self.mesh.get_group(), self.mesh.size()
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))  # noqa: N806
        arriving_E = _all_to_all(counts_E, None, None, group)  # noqa: N806
        sent, received = self._splits(counts_E, arriving_E, num_pairs=int(inputs_KH.size(0) * share))
        self.num_pairs += sum(received)
        others = inputs_KH.size(0) - sum(sent)  # pairs of other tp ranks' experts
        rows_PH = _all_to_all(inputs_KH[: sum(sent)] if others else inputs_KH, received, sent, group)  # noqa: N806
        order_P, own_ends = _by_expert(arriving_E.view(degree, -1), num_pairs=sum(received))  # noqa: N806
        back_P = inverse(order_P)  # noqa: N806
        rows_PH = Reordered.apply(rows_PH, order_P, back_P)  # noqa: N806
        rows_PH = compute_pairs(experts, rows_PH, own_ends, 1.0)  # noqa: N806
        rows_PH = Reordered.apply(rows_PH, back_P, order_P)  # noqa: N806
        returned = _all_to_all(rows_PH, sent, received, group)
        return nn.functional.pad(returned, (0, 0, 0, others)) if others else returned

    def _splits(self, counts_E: Tensor, arriving_E: Tensor, *, num_pairs: int) -> tuple[list[int], list[int]]:  # noqa: N803
        """Return the pairs for and from each rank; ``num_pairs`` are sent if counts have no value."""
        degree = self.mesh.size()
        if isinstance(counts_E, FakeTensor):
            even = num_pairs // degree
            return [even] * degree, [int(even * self.received_share)] * degree
        sent, received = torch.stack([counts_E, arriving_E]).view(2, degree, -1).sum(dim=-1).tolist()
        return sent, received


def _all_to_all(
    rows: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None, group: ProcessGroup
) -> Tensor:
    """Return the rows that the ranks of a group send to this one, in rank order; equal parts if no counts are given."""
    return wait_tensor(all_to_all_single(rows, received, sent, group))


def _by_expert(counts: Tensor, *, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts received rows by expert, and the end of each expert; ``counts`` by rank and expert.

    Temporary tensors are freed here; in the caller they would count in the peaks of a trace.
    """
    expert = torch.arange(counts.size(1), device=counts.device).repeat(counts.size(0))
    expert_P = expert.repeat_interleave(counts.flatten(), output_size=num_pairs)  # noqa: N806
    return expert_P.argsort(stable=True), counts.sum(dim=0).cumsum(dim=0).to(torch.int32)


# divided experts, as data parallelism and others see them


def expert_degree(layer: nn.Module) -> int:
    """Return the number of ranks over which the layer's experts are divided, read from its modules; 1 if undivided."""
    return max((experts.compute_pairs.mesh.size() for experts in _divided(layer)), default=1)


def divided_parameters(layer: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of experts that ep divides."""
    return {parameter for experts in _divided(layer) for parameter in experts.parameters()}


def shard_placement(
    layer: ChainLayer, mesh: DeviceMesh
) -> Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | None:
    """Return FSDP's ``shard_placement_fn`` for a layer with routed experts sharded over ``mesh``; None without experts.

    ``mesh`` has one axis, or two if the outer one replicates. If ep divides the experts, it differs from the mesh of
    the layer's other parameters, which FSDP already knows.
    """
    experts = {parameter for each in routed_experts(layer) for parameter in each.parameters()}
    if not experts:
        return None
    divided = divided_parameters(layer)
    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)

    def place(parameter: nn.Parameter) -> Shard | ShardPlacementResult | None:
        if parameter not in experts:
            return None
        placement = Shard(even_dim(local_part(parameter).shape, info.shard_mesh_size) or 0)
        return ShardPlacementResult(placement=placement, mesh_info=info) if parameter in divided else placement

    return place


# what training shows of the routing


@torch.no_grad()
def take_imbalance(layers: Mapping[str, ChainLayer]) -> dict[str, float]:
    """Return the maximum over the mean of pairs computed per rank, for each layer with divided experts.

    Counted since the last call; 1.0 if there were none. Collective over the ranks that divide the experts.
    """
    found: dict[str, float] = {}
    for name, layer in layers.items():
        for experts in _divided(layer):
            exchange = experts.compute_pairs
            most = torch.tensor(float(exchange.num_pairs), device=local_part(experts.down_proj).device)
            total = most.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group=exchange.mesh.get_group())
            dist.all_reduce(total, group=exchange.mesh.get_group())
            found[name] = (most * exchange.mesh.size() / total).item() if total else 1.0
            exchange.num_pairs = 0
    return found


def _divided(layer: nn.Module) -> list[nn.Module]:
    return [each for each in routed_experts(layer) if isinstance(getattr(each, "compute_pairs", None), ExpertExchange)]
