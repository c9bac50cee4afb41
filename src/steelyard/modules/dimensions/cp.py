"""Context parallel: the tokens of every sequence divided over the ranks of an axis, in head-tail order.

Every rank is given the same samples and computes what follows from its own tokens: it looks them up, rotates them by
their own positions, attends to the tokens of others (`steelyard.modules.context_attention`), and compares them with
their own labels. A rank's loss is the sum over its tokens divided by the global count, so losses and gradients of
parameters add up over the axis as they do over data-parallel ranks.

A layer under cp maps and returns this rank's share of the hidden state, [B, S/c, H], in head-tail order; token ids,
labels and shared inputs come whole and in natural order. Where sequence parallelism divides the hidden state further,
it divides the share.

Source: Dubey et al. 2024, section 3.3.2.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from steelyard.errors import InvalidModelError
from steelyard.model.family import Task
from steelyard.modules.context_attention import (
    DIVISION,
    IMPLEMENTATION,
    SEQUENCE_DIM,
    ContextDivision,
    ContextMethod,
    local_tokens,
)
from steelyard.modules.layers import BlockLayer, ChainLayer, EmbeddingLayer, Flow, LayerContext
from steelyard.modules.pieces import PerSample, SharedInputs


def apply_context_parallel(layer: ChainLayer, mesh: DeviceMesh, method: str) -> None:
    """Make a layer compute this rank's tokens over the one axis of ``mesh``, in place; before or after tp.

    ``method`` is one of `ContextMethod` and matters only to blocks. Raises `InvalidModelError` if anything except
    causal fused attention mixes the layer's tokens. When it runs, the layer raises `InvalidPlanError` if the sequence
    cannot be divided or the heads are too few, and `InvalidModelError` if attention has dropout.
    """
    if layer.family.task is not Task.CAUSAL_LM or not layer.family.fused_attention:
        raise _not_causal(layer)
    if isinstance(layer, BlockLayer):
        attention = [module for module in layer.modules() if _is_divisible(module)]
        if not attention:
            raise _not_causal(layer)
        for module in attention:
            slides = layer.attention_type == "sliding_attention"
            window = getattr(module.config, "sliding_window", None) if slides else None
            setattr(module, DIVISION, ContextDivision(mesh, ContextMethod(method), window))
    layer.divided_tokens = (mesh.size(), ContextMethod(method))
    compute, reads_tokens = layer.compute, isinstance(layer, EmbeddingLayer)

    def compute_own(inputs: Flow, context: LayerContext) -> Flow:
        own = local_tokens(inputs, SEQUENCE_DIM, mesh) if reads_tokens else inputs
        return compute(own, own_context(context, mesh))

    layer.compute = compute_own


def own_context(context: LayerContext, mesh: DeviceMesh) -> LayerContext:
    """Return the context of a forward pass for this rank's tokens, made once per pass and kept in ``context.own``.

    Positions, labels and all other inputs that grow with the tokens are narrowed; masks still cover the whole sequence.
    """
    share = mesh.size(), mesh.get_local_rank()
    if share not in context.own:
        context.own[share] = LayerContext(
            side=_own_side(context.side, mesh),
            labels_BS=None if context.labels_BS is None else local_tokens(context.labels_BS, SEQUENCE_DIM, mesh),
            num_targets=context.num_targets,
            logits=context.logits,
        )
    return context.own[share]


def _own_side(side: SharedInputs, mesh: DeviceMesh) -> SharedInputs:
    def own(tensor: Tensor, dim: int = SEQUENCE_DIM) -> Tensor:
        return local_tokens(tensor, dim, mesh)

    def own_argument(value: Any, dim: int | None) -> Any:
        if dim is None:
            return value
        return replace(value, held=own(value.held, dim)) if isinstance(value, PerSample) else own(value, dim)

    dims = side.token_dims() if side.token_dims and side.arguments else {}
    return SharedInputs(
        position_ids=own(side.position_ids),
        arguments={name: pytree.tree_map(own_argument, side.arguments[name], dims[name]) for name in dims},
    )


def _is_divisible(module: nn.Module) -> bool:
    """Whether a module is causal attention that runs through the registry of transformers."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return getattr(module, "is_causal", None) is True and implementation == IMPLEMENTATION


def _not_causal(layer: ChainLayer) -> InvalidModelError:
    return InvalidModelError(
        field="cp",
        found=f"cp for the {layer.layer_type.name} layers of {layer.family.model_type}",
        expected="a causal language model whose attention is one fused kernel",
        hint="plan without cp",
    )
