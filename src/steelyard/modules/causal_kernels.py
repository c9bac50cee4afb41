"""Causal attention of the last tokens of a prefix, with separate forward and backward, so that keys need not be kept.

A query is one of the last P of N places, and sees the keys up to its place: all of them, or those of a window.

| device, type  | plain causal                                   | sliding window                               |
|---------------|------------------------------------------------|----------------------------------------------|
| CPU           | flash without a mask, on keys before the       | flash with a mask [P, keys in reach]         |
|               | queries and on the queries' square, merged     |                                              |
| CUDA, 16 bits | flash, which aligns queries with the last keys | as in the next line                          |
| CUDA, else    | PyTorch's choice, computed again in backward   | the same, with a mask [P, keys in reach]     |

No mask is made for plain causal attention, and flash executes the causal share of the FLOP.

Two parts of one row of scores, with outputs o and logarithms l of the sums of exponentials, merge to
o = o₁ + (o₂ − o₁) · σ(l₂ − l₁) and l = log(exp l₁ + exp l₂). With the merged o and l the backward kernel of either part
gives that part's gradients. Source: Dao et al. 2022 (FlashAttention), section 3.1; Liu et al. 2023 (Ring Attention).

Legend of shape suffixes: B samples, h query heads, g key-value heads (a divisor of h), P queries, N keys, D head size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

_aten = torch.ops.aten
_FLASH_HEAD_SIZES = range(8, 257, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Parameters of attention scores: the scale of products, and the number of places that a query sees, its own
    included.
    """

    scale: float | None = None
    window: int | None = None

    def reach(self, num_queries: int, num_keys: int) -> int:
        """Return the number of last keys that the queries see."""
        return num_keys if self.window is None else min(num_keys, num_queries + self.window - 1)


class Attended(NamedTuple):
    """Output [B, h, P, D] and log-sum-exp [B, h, P] of attention (empty if recomputed)."""

    output: Tensor
    log_sums: Tensor


class Gradients(NamedTuple):
    """Gradients of query [B, h, P, D], key and value [B, g, N, D]."""

    query: Tensor
    key: Tensor
    value: Tensor


def attend(query_BhPD: Tensor, key_BgND: Tensor, value_BgND: Tensor, scores: Scores) -> Attended:  # noqa: N803
    """Return the attention of the last P of N places."""
    inputs, scores = _in_reach(query_BhPD, key_BgND, value_BgND, scores)
    if query_BhPD.device.type == "cpu":
        return _cpu_forward(*inputs, scores)
    if _has_cuda_flash(query_BhPD, scores):
        output, log_sums, *_ = _aten._scaled_dot_product_flash_attention(*inputs, 0.0, True, scale=scores.scale)
        return Attended(output, log_sums)
    return Attended(_by_torch(*inputs, scores), query_BhPD.new_empty(0))


def attend_backward(
    gradient: Tensor,
    query_BhPD: Tensor,  # noqa: N803
    key_BgND: Tensor,  # noqa: N803
    value_BgND: Tensor,  # noqa: N803
    attended: Attended,
    scores: Scores,
) -> tuple[Gradients, int]:
    """Return the gradients, and the number of last keys in reach, the only ones with gradients of keys and values."""
    inputs, scores = _in_reach(query_BhPD, key_BgND, value_BgND, scores)
    reach = inputs[1].size(2)
    if query_BhPD.device.type == "cpu":
        return _cpu_backward(gradient, *inputs, attended, scores), reach
    if _has_cuda_flash(query_BhPD, scores):
        return _cuda_flash_backward(gradient, *inputs, attended, scores), reach
    return _by_torch_backward(gradient, *inputs, scores), reach


def window_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [P, N] of keys that each of the last P places sees."""
    keys = torch.arange(num_keys, device=device)
    places = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    seen = keys <= places
    return seen if window is None else seen & (keys > places - window)


def _in_reach(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores
) -> tuple[tuple[Tensor, Tensor, Tensor], Scores]:
    """Return the query and the keys and values that any query sees; drop the window if it hides none of these."""
    num_keys = key.size(2)
    reach = scores.reach(query.size(2), num_keys)
    hides = scores.window is not None and scores.window < reach
    inputs = query, key.narrow(2, num_keys - reach, reach), value.narrow(2, num_keys - reach, reach)
    return inputs, scores if hides else Scores(scale=scores.scale)


# CPU


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Attended:
    mask = _cpu_mask(query, key, scores)
    before = key.size(2) - query.size(2)
    if mask is not None or before == 0:
        return _cpu_flash(query, key, value, mask is None, mask, scores)
    earlier = _cpu_flash(query, key[:, :, :before], value[:, :, :before], False, None, scores)
    own = _cpu_flash(query, key[:, :, before:], value[:, :, before:], True, None, scores)
    share = torch.sigmoid(own.log_sums - earlier.log_sums).unsqueeze(-1)
    output = torch.lerp(earlier.output.to(share.dtype), own.output.to(share.dtype), share)
    return Attended(output.to(earlier.output.dtype), torch.logaddexp(earlier.log_sums, own.log_sums))


def _cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scores: Scores
) -> Attended:
    return Attended(
        *_aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scores.scale
        )
    )


def _cpu_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scores: Scores
) -> Gradients:
    mask = _cpu_mask(query, key, scores)
    before = key.size(2) - query.size(2)

    def of_part(key: Tensor, value: Tensor, causal: bool) -> Gradients:
        return Gradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, key, value, *attended, 0.0, causal, attn_mask=mask, scale=scores.scale
            )
        )

    if mask is not None or before == 0:
        return of_part(key, value, mask is None)
    earlier = of_part(key[:, :, :before], value[:, :, :before], False)
    own = of_part(key[:, :, before:], value[:, :, before:], True)
    return Gradients(
        earlier.query + own.query,
        torch.cat([earlier.key, own.key], 2),
        torch.cat([earlier.value, own.value], 2),
    )


def _cpu_mask(query: Tensor, key: Tensor, scores: Scores) -> Tensor | None:
    """Return the additive mask of a window, in the dtype of the scores; None without a window."""
    if scores.window is None:
        return None
    seen = window_mask(query.size(2), key.size(2), scores.window, query.device)
    return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))


# CUDA


def _has_cuda_flash(query: Tensor, scores: Scores) -> bool:
    return scores.window is None and query.element_size() == 2 and query.size(-1) in _FLASH_HEAD_SIZES


def _cuda_flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scores: Scores
) -> Gradients:
    given = (gradient, query, key, value, *attended, None, None, query.size(2), key.size(2), 0.0, True)
    # read only where entries are dropped
    seed, place = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return Gradients(*_aten._scaled_dot_product_flash_attention_backward(*given, seed, place, scale=scores.scale))


def _by_torch(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Return attention by the kernel that PyTorch chooses."""
    if scores.window is None:
        mask = causal_lower_right(query.size(2), key.size(2))
    else:
        mask = window_mask(query.size(2), key.size(2), scores.window, query.device)
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)


def _by_torch_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Gradients:
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        output = _by_torch(inputs[0], inputs[1], inputs[2], scores)
    return Gradients(*torch.autograd.grad(output, inputs, gradient))
