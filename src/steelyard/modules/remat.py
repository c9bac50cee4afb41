"""What of a layer is kept for its backward pass, and what is computed again there, under each remat choice.

| remat     | kept                                                 | computed again in backward |
|-----------|------------------------------------------------------|----------------------------|
| none      | all that autograd saves                              | nothing                    |
| selective | the layer's input, the results of `SAVED_OPERATIONS` | everything else            |
| full      | the layer's input                                    | everything                 |

Selective keeps the results of matrix products, of fused attention, of the reductions (all-reduce, reduce-scatter) of
tensor parallelism and of all-to-alls (of tokens to experts, and of sequence for heads in context parallelism). What it
computes again is bound by memory and not by FLOP: norms, activation functions, rotary embedding, casts, copies, sums.
Not kept are

- all-gathers of sequence parallelism: a result is tp times as large as what it is made from, and with them selective
  would hold more than none does (a Llama-3-8B block at tp 8 with sp: 5.6 hidden states instead of 4.9);
- batched products (``bmm``): in the supported models they are the attention scores of kernels that are not fused;
- products of routed experts: of k experts for each token, they are wider than all else that is kept. Computing them
  again is not bound by memory.

Computing again ends where the last tensor that backward needs has been made. So what only makes the layer's output
(the last matrix product and its reduction) is repeated by neither choice.

Source: Korthikanti et al. 2022, section 4; torchtitan (``distributed/activation_checkpoint.py``) for the operations,
to which the all-reduce of tensor parallelism without sp is added.
"""

from functools import partial

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from steelyard.plan.strategy import Remat

_aten, _collective = torch.ops.aten, torch.ops._c10d_functional

SAVED_OPERATIONS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _collective.all_reduce.default,
    _collective.reduce_scatter_tensor.default,
    _collective.all_to_all_single.default,
)
"""The operations whose results selective remat keeps."""

REMAT_CONTEXTS = {
    Remat.SELECTIVE: partial(create_selective_checkpoint_contexts, list(SAVED_OPERATIONS)),
    Remat.FULL: noop_context_fn,
}
"""What `torch.utils.checkpoint.checkpoint` takes as ``context_fn``, for each choice that computes something again."""
