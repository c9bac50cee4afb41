"""Attention with sinks in PyTorch's fused kernels, which have none.

A sink is a learned score per head that the softmax of each query counts in addition to the scores of its keys; it has
no value. Here it is one more key, the first, with a value of zero. Queries and keys get `MORE` more entries, of which
the first holds the sink in queries, 1 in the added key and 0 in the other keys. The product of a query with the added
key is then its sink, and kernels compute results and all gradients without storing scores.

Without a mask a query is added in front too, so that causal attention stays square. Its result is dropped.

Source: OpenAI 2025 (gpt-oss model card, arXiv 2508.10925), section 2.2; ``eager_attention_forward`` of transformers'
``gpt_oss``.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward

MORE = 8
"""Entries added to each head, of which one is used: fused kernels need head sizes that are multiples of 8."""


def attend_with_sinks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor,
    dropout: float,
    scaling: float | None,
    **options: Any,
) -> Tensor:
    """Return attention [B, S, h, Dv] of query [B, h, S, D], key [B, g, N, D], value [B, g, N, Dv] and sinks [h].

    ``mask`` [B, 1, S, N] is bool (True where a query sees a key) or added to the scores. Other arguments are as in
    `sdpa_attention_forward`.
    """
    size, width, front = query.size(-1), value.size(-1), int(mask is None)
    scaling = size**-0.5 if scaling is None else scaling
    query = pad(query, (0, MORE, front, 0))
    query[..., size] = (sinks / scaling).unsqueeze(1)
    key = pad(key, (0, MORE, 1, 0))
    key[:, :, 0, size] = 1
    value = pad(value, (0, MORE, 1, 0))
    if mask is not None:
        mask = pad(mask, (1, 0), value=0.0 if mask.is_floating_point() else 1.0)
    output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **options)
    return output[:, front:, :, :width]
