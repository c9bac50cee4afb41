"""Observation of the strategy applied to each layer, read back from the modules and their activations.

Silently ignoring a plan is the worst error that a runtime can make. The strategies in a run record therefore do not
repeat the plan: the axes come from the meshes of the parameters, ``sp`` and the data degree from the shape of the
layer's hidden state, ZeRO and remat from the state of the module as it ran.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from steelyard.modules.dimensions.ep import divided_parameters, expert_degree
from steelyard.modules.layers import ChainLayer, EmbeddingLayer, Flow, tensors_of
from steelyard.plan.dimensions import CP, DP, FSDP, TP
from steelyard.plan.dimensions.dimension import Level
from steelyard.plan.strategy import Strategy
from steelyard.runtime.parallel_model import ParallelModel


class Passed(NamedTuple):
    """State of a layer during the forward pass of a microbatch."""

    shape: torch.Size
    """Shape [B, s, H] of the hidden state."""
    is_kept_whole: bool
    """Whether its backward pass should leave parameters gathered and gradients unsharded."""


@contextmanager
def observe_layers(model: ParallelModel) -> Iterator[dict[int, Passed]]:
    """Collect the state of each layer of this rank in the first microbatch of a step that runs in the context."""
    found: dict[int, Passed] = {}

    def keep(layer: int, is_embedding: bool) -> object:
        def hook(module: nn.Module, inputs: tuple[Flow, ...], output: Flow) -> None:
            groups = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ()
            is_kept_whole = bool(groups) and not any(
                each.reduce_grads or each.reshard_after_backward for each in groups
            )
            shape = tensors_of(output if is_embedding else inputs[0])[0].shape
            found.setdefault(layer, Passed(shape, is_kept_whole))

        return hook

    with ExitStack() as hooks:
        for name, layer in model.layers.items():
            hooks.enter_context(layer.register_forward_hook(keep(int(name), isinstance(layer, EmbeddingLayer))))
        yield found


def gather_strategies(model: ParallelModel, passed: dict[int, Passed]) -> tuple[str, ...]:
    """Return the applied strategy of every layer of the model, written as in plans; a collective call.

    Raises `RuntimeError` if the ranks of a stage report different strategies.
    """
    lengths = {name: model.chain.hidden_shape(int(name), model.plan.seq_len)[0] for name in model.layers}
    mine = {
        int(name): str(observed_strategy(layer, passed[int(name)], seq_len=lengths[name]))
        for name, layer in model.layers.items()
    }
    reports: list[dict[int, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(reports, mine)
    found: dict[int, set[str]] = {}
    for report in reports:
        for layer, strategy in report.items():
            found.setdefault(layer, set()).add(strategy)
    for layer, strategies in found.items():
        if len(strategies) > 1:
            raise RuntimeError(f"ranks run layer {layer} with different strategies: {', '.join(sorted(strategies))}")
    return tuple(strategies.pop() for _, strategies in sorted(found.items()))


def observed_strategy(layer: ChainLayer, passed: Passed, *, seq_len: int) -> Strategy:
    """Return the strategy that this rank's ``layer`` runs under, given its state in a forward pass.

    With one microbatch per step, zero1 and zero2 cannot be told apart; the result is zero2.
    """
    replicated, sharded, reshards = _data_parallelism(layer)
    tensor = _tensor_parallelism(layer, {replicated[0], sharded[0]})
    tokens, method = layer.divided_tokens or (1, None)
    shards = sharded[1] > 1
    reshards = reshards or not shards
    if shards:
        sharded = sharded[0], sharded[1] // tokens
    else:
        replicated = replicated[0], replicated[1] // tokens
    divided = (sharded[0] or replicated[0], tokens)
    levels = [
        (name, Level(dimension=dimension, degree=degree))
        for (name, degree), dimension in ((replicated, DP), (sharded, FSDP), (divided, CP), (tensor, TP))
        if degree > 1 or (shards and dimension is FSDP)
    ]
    return Strategy.of(
        levels=tuple(level for _, level in sorted(levels, key=lambda pair: pair[0])),
        remat=layer.remat,
        sp=tensor[1] > 1 and passed.shape[1] * tensor[1] * tokens == seq_len,
        zero=3 if reshards else 1 if passed.is_kept_whole else 2,
        cp_method=str(method or "gather"),
        ep=expert_degree(layer),
    )


_Axis = tuple[str, int]
"""Name and size of a mesh axis; size 1 if there is none."""


def _data_parallelism(layer: ChainLayer) -> tuple[_Axis, _Axis, bool]:
    """Return the axes over which states are replicated and sharded, and whether parameters are freed after forward."""
    if not isinstance(layer, FSDPModule):
        mesh = next(layer.parameters()).device_mesh
        return (mesh.mesh_dim_names[0], mesh.size(0)), ("", 1), False
    group = layer._get_fsdp_state()._fsdp_param_groups[0]  # a second group holds experts divided by ep
    mesh = group.mesh_info.mesh
    axes = list(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    reshards = group.post_forward_mesh_info is not None
    return (axes[0] if len(axes) > 1 else ("", 1)), axes[-1], reshards


def _tensor_parallelism(layer: ChainLayer, data_names: set[str]) -> _Axis:
    """Return the mesh axis and degree over which parameters are sharded, apart from data parallelism."""
    by_experts = divided_parameters(layer)
    for parameter in layer.parameters():
        if isinstance(parameter, DTensor) and parameter not in by_experts:
            mesh = parameter.device_mesh
            for axis, name in enumerate(mesh.mesh_dim_names):
                if name not in data_names and not parameter.placements[axis].is_replicate():
                    return name, mesh.size(axis)
    return "", 1
