"""Mixture of experts whose shapes do not depend on the routing, so that it also runs on fake tensors.

Every token has k experts. The T·k pairs of token and expert are sorted by expert and multiplied group by group, so the
work is that of k experts per token, regardless of their number. It is an experts implementation of transformers like
``grouped_mm``, under the name `IMPLEMENTATION`.

A rank that computes only some of the experts (``first_expert`` and ``num_all_experts`` are set, as by tensor
parallelism) leaves zeros for the pairs of the others. Its number of pairs depends on the routing; on fake tensors it is
the rank's share of the experts, which is the mean. A rank computes its experts itself, unless expert parallelism
(`steelyard.modules.dimensions.ep`) has replaced `compute_pairs`. Not modelled: ranks that wait for the rank with the
busiest experts.

Legend of shapes: T tokens, k experts per token, K pairs T·k, E experts of this rank, H hidden size, F width of an
expert.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from steelyard.modules.updates import local_part

IMPLEMENTATION = "steelyard"
MATRICES = ("gate_up_proj", "up_proj", "down_proj")
STACKED_DIMS = 3
"""Names of stacked matrices [E, A, B], and their number of dims."""
_ALIGNED = 8
"""Numbers in bf16 of which PyTorch's kernel needs whole multiples in a row (16 B)."""
ADDED = "added"
"""Attribute of experts with the adapters [E, A, R] and [E, R, B] of each matrix, by name, and the factor of theirs."""


@torch.library.custom_op("steelyard::grouped_mm", mutates_args=())
def grouped_mm(inputs: Tensor, weights: Tensor, ends: Tensor, share: float) -> Tensor:
    """Multiply rows of ``inputs`` [K, A] by the matrix [A, B] of their group in ``weights`` [E, A, B].

    Group e ends before row ``ends[e]``; rows after the last group are zero. ``share`` is the expected fraction of rows
    in groups; only counters of work read it.
    """
    output = inputs.new_zeros((inputs.size(0), weights.size(2)))
    for group, (start, end) in enumerate(_ranges(ends)):
        torch.mm(inputs[start:end], weights[group], out=output[start:end])
    return output


@grouped_mm.register_fake
def _(inputs: Tensor, weights: Tensor, ends: Tensor, share: float) -> Tensor:
    return inputs.new_empty((inputs.size(0), weights.size(2)))


@torch.library.custom_op("steelyard::grouped_mm_backward", mutates_args=())
def grouped_mm_backward(
    gradient: Tensor, inputs: Tensor, weights: Tensor, ends: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the inputs, and of the weights in the layout of the weights (autograd would copy
    another)."""
    of_inputs, of_weights = torch.zeros_like(inputs), torch.zeros_like(weights)
    for group, (start, end) in enumerate(_ranges(ends)):
        torch.mm(gradient[start:end], weights[group].T, out=of_inputs[start:end])
        torch.mm(inputs[start:end].T, gradient[start:end], out=of_weights[group])
    return of_inputs, of_weights


@grouped_mm_backward.register_fake
def _(gradient: Tensor, inputs: Tensor, weights: Tensor, ends: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inputs), torch.empty_like(weights)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.share = inputs[3]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *grouped_mm_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.share), None, None


grouped_mm.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.steelyard.grouped_mm, get_raw=True)
def _forward_flop(inputs: Tensor, weights: Tensor, ends: Tensor, share: float, **_: Any) -> int:
    return int(2 * inputs.size(0) * weights.size(1) * weights.size(2) * share)


@register_flop_formula(torch.ops.steelyard.grouped_mm_backward, get_raw=True)
def _backward_flop(gradient: Tensor, inputs: Tensor, weights: Tensor, ends: Tensor, share: float, **_: Any) -> int:
    return 2 * _forward_flop(inputs, weights, ends, share)


def _ranges(ends: Tensor) -> list[tuple[int, int]]:
    bounds = [0, *ends.tolist()]
    return list(pairwise(bounds))


def grouped_product(inputs: Tensor, weights: Tensor, ends: Tensor, share: float) -> Tensor:
    """Return `grouped_mm`, on GPUs in bf16 by PyTorch's own kernel."""
    is_aligned = all(not size % _ALIGNED for size in weights.shape[1:])
    if not (inputs.is_cuda and inputs.dtype == torch.bfloat16 and inputs.size(0) and is_aligned):
        return grouped_mm(inputs, weights, ends, share)
    product = nn.functional.grouped_mm(inputs, weights[: len(ends)], offs=ends)
    if share == 1.0:  # every row lies in a group
        return product
    rows = torch.arange(inputs.size(0), device=inputs.device).unsqueeze(-1) < ends[-1]
    return product.masked_fill(~rows, 0.0)


def compute_pairs(experts: nn.Module, inputs_KH: Tensor, ends_E: Tensor, share: float) -> Tensor:  # noqa: N803
    """Return the outputs of this rank's experts for rows [K, H] sorted by expert; zeros after the last expert's rows.

    Expert e ends before row ``ends_E[e]``; ``share`` as in `grouped_mm`.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    wide_KF = _multiply(experts, first, inputs_KH, ends_E, share)  # noqa: N806
    active_KF = experts._apply_gate(wide_KF) if experts.has_gate else experts.act_fn(wide_KF)  # noqa: N806
    return _multiply(experts, "down_proj", active_KF, ends_E, share)


def _multiply(experts: nn.Module, name: str, inputs_KA: Tensor, ends_E: Tensor, share: float) -> Tensor:  # noqa: N803
    """Multiply rows [K, A] by the matrices of their experts and add biases, if any; return [K, B]."""
    held = getattr(experts, name)
    if isinstance(held, nn.Module):  # in few bits
        product = held(inputs_KA, ends_E, share, experts.is_transposed)
    else:
        weights = local_part(held)
        weights = weights if experts.is_transposed else weights.transpose(1, 2)
        product = grouped_product(inputs_KA, weights, ends_E, share)
    if name in (added := getattr(experts, ADDED, {})):
        inner_EAR, outer_ERB, factor = added[name]  # noqa: N806
        narrow_KR = grouped_product(inputs_KA, inner_EAR.to(inputs_KA.dtype), ends_E, share)  # noqa: N806
        outer_ERB = outer_ERB.to(inputs_KA.dtype).contiguous()  # noqa: N806
        product = product + factor * grouped_product(narrow_KR, outer_ERB, ends_E, share)
    if not experts.has_bias:
        return product
    rows = torch.arange(len(inputs_KA), device=inputs_KA.device)
    group = torch.searchsorted(ends_E, rows, right=True).clamp(max=len(ends_E) - 1)
    bias_KB = local_part(getattr(experts, f"{name}_bias"))[group]  # noqa: N806
    return product + bias_KB.masked_fill((rows >= ends_E[-1]).unsqueeze(-1), 0.0)


def run_experts(self: nn.Module, hidden_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:  # noqa: N803
    """Return the weighted sum [T, H] of each token's experts, over the experts of this rank."""
    num_experts, first = self.num_experts, getattr(self, "first_expert", 0)
    share = num_experts / getattr(self, "num_all_experts", num_experts)
    expert_K = experts_Tk.reshape(-1) - first  # noqa: N806
    expert_K = torch.where((expert_K >= 0) & (expert_K < num_experts), expert_K, num_experts)  # noqa: N806
    sorted_K, order_K = torch.sort(expert_K, stable=True)  # noqa: N806
    bounds_E = torch.arange(1, num_experts + 1, device=sorted_K.device)  # noqa: N806
    ends_E = torch.searchsorted(sorted_K, bounds_E).to(torch.int32)  # noqa: N806
    places_Tk = inverse(order_K).view_as(experts_Tk)  # noqa: N806
    inputs_KH = _Repeated.apply(hidden_TH, order_K, places_Tk)  # noqa: N806
    compute = getattr(self, "compute_pairs", compute_pairs)
    outputs_KH = compute(self, inputs_KH, ends_E, share)  # noqa: N806
    return _WeightedSum.apply(outputs_KH, weights_Tk.to(outputs_KH.dtype), order_K, places_Tk).to(hidden_TH.dtype)


# Rows move between tokens and pairs by lookups in both directions. What autograd makes of an indexing's backward pass,
# zeros to which rows are added, moves 2.5 times the bytes, and sorts the index anew on GPUs.


class Reordered(torch.autograd.Function):
    """Permutation of rows: ``rows[order]``, where ``back`` is the inverse of ``order``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        """Return the reordered rows."""
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the rows in their original order."""
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class _Repeated(torch.autograd.Function):
    """Token of each pair [K, H]; pair t·k + j is at ``places_Tk[t, j]``, and ``order_K`` is the inverse."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, order_K: Tensor, places_Tk: Tensor) -> Tensor:  # noqa: N803
        ctx.save_for_backward(places_Tk)
        return hidden_TH.index_select(0, order_K // places_Tk.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_KH: Tensor) -> tuple[Tensor, None, None]:  # noqa: N803
        return _bag_sums(ctx.saved_tensors[0], gradient_KH), None, None


class _WeightedSum(torch.autograd.Function):
    """Weighted sum [T, H] of each token's pairs, which are at ``places_Tk``."""

    @staticmethod
    def forward(ctx: Any, pairs_KH: Tensor, weights_Tk: Tensor, order_K: Tensor, places_Tk: Tensor) -> Tensor:  # noqa: N803
        ctx.save_for_backward(pairs_KH, weights_Tk, order_K, places_Tk)
        return _bag_sums(places_Tk, pairs_KH, weights_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: N803
        pairs_KH, weights_Tk, order_K, places_Tk = ctx.saved_tensors  # noqa: N806
        num_tokens, num_chosen = places_Tk.shape
        starts_T = torch.arange(0, places_Tk.numel(), num_chosen, device=places_Tk.device)  # noqa: N806
        token_K = torch.arange(num_tokens, device=places_Tk.device).repeat_interleave(num_chosen)  # noqa: N806
        gradient_TH = gradient_TH.contiguous()  # noqa: N806
        of_weights_K = torch.ops.aten._embedding_bag_per_sample_weights_backward(  # noqa: N806
            gradient_TH, pairs_KH, places_Tk.flatten(), starts_T, token_K, _SUM
        )
        of_pairs_KH = gradient_TH.index_select(0, order_K // num_chosen)  # noqa: N806
        of_pairs_KH.mul_(weights_Tk.flatten()[order_K].unsqueeze(-1))
        return of_pairs_KH, of_weights_K.view_as(weights_Tk), None, None


_SUM = 0
"""Mode number of embedding bags for sums."""


def _bag_sums(places_Tk: Tensor, rows_KH: Tensor, weights_Tk: Tensor | None = None) -> Tensor:  # noqa: N803
    """Return the sums [T, H] of the rows at each token's places, by one kernel that reads each row once."""
    return nn.functional.embedding_bag(places_Tk, rows_KH, mode="sum", per_sample_weights=weights_Tk)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation of the whole numbers from 0."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.size(0), device=order.device)
    return places


def even_dim(shape: Sequence[int], num_shards: int) -> int | None:
    """Return the first dim that ``num_shards`` divides; a rank with fewer experts than shards would be padded. None if
    there is none."""
    return next((dim for dim, size in enumerate(shape) if size % num_shards == 0), None)


def routed_experts(module: nn.Module) -> list[nn.Module]:
    """Return the modules below ``module`` that hold routed experts."""
    named = [each for path, each in module.named_modules() if path.rpartition(".")[2] == "experts"]
    return [each for each in named if isinstance(getattr(each, "num_experts", None), int)]


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
