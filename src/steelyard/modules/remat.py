"""What of a layer is kept for its backward pass, and what is computed again there, under each remat choice.

| remat     | kept                                                 | computed again in backward |
|-----------|------------------------------------------------------|----------------------------|
| none      | all that autograd saves                              | nothing                    |
| selective | the layer's input, the results of `SAVED_OPERATIONS` | everything else            |
|           | and of what is `kept_whole`                          |                            |
| full      | the layer's input                                    | everything                 |

Selective keeps the results of matrix products, of fused attention, of the reductions (all-reduce, reduce-scatter) of
tensor parallelism and of all-to-alls (of tokens to experts, and of sequence for heads in context parallelism). What it
computes again is bound by memory and not by FLOP: norms, activation functions, rotary embedding, casts, copies, sums.
Not kept are

- all-gathers of sequence parallelism: a result is tp times as large as what it is made from, and with them selective
  would hold more than none does (a Llama-3-8B block at tp 8 with sp: 5.6 hidden states instead of 4.9);
- batched products (``bmm``): in the supported models they are the attention scores of kernels that are not fused;
- products of routed experts: of k experts for each token, they are wider than all else that is kept. Computing them
  again is not bound by memory;
- what is written to afterwards, as by ``x += y`` or an activation in place.

Computing again ends where the last tensor that backward needs has been made. So what only makes the layer's output
(the last matrix product and its reduction) is repeated by neither choice.

Source: Korthikanti et al. 2022, section 4; torchtitan (``distributed/activation_checkpoint.py``) for the operations,
to which the all-reduce of tensor parallelism without sp is added.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _RECOMPUTE, CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

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

Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass through a layer under selective remat, and what it hands to the next one."""

    results: deque[Results]
    is_again: bool
    written: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    """Storages that an operation has written to in place."""


_pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)
"""The pass that is under way; what computes in the middle of a layer is called by code that knows nothing of it."""


def kept_whole(compute: Callable[[], Results]) -> Results:
    """What ``compute`` returns, outside autograd. Selective remat keeps that, and nothing made on the way to it.

    A layer that is computed again takes what was kept and does not compute.
    """
    current = _pass.get()
    if current is None:
        return compute()
    if current.is_again:
        return current.results.popleft()
    token = _pass.set(None)
    try:
        found = compute()
    finally:
        _pass.reset(token)
    current.results.append(tuple(tensor.detach() for tensor in found))
    return found


def _selective() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For the forward pass, and for what backward computes again."""
    results: deque[Results] = deque()
    forward, again = create_selective_checkpoint_contexts(_policy)
    first = _Pass(results, False)
    return _within(_forgetting_written(forward, first), first), _within(again, _Pass(results, True))


@contextmanager
def _forgetting_written(forward: Any, current: _Pass) -> Iterator[None]:
    """The forward pass; what it has kept and was written to since is forgotten at its end, and computed again.

    Versions of tensors do not tell: that of a product is another than that of its ``_unsafe_view``, which `linear`
    returns and ``+=`` writes to.
    """
    with forward:
        yield
    for entries in forward.storage.values():
        for place, entry in entries.items():
            kept = (each.val for each in pytree.tree_leaves(entry) if each is not _RECOMPUTE)
            if any(isinstance(each, Tensor) and _storage(each) in current.written for each in kept):
                entries[place] = _RECOMPUTE


def _policy(_context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keeps the results of `SAVED_OPERATIONS`, except of those on the way to what is kept whole."""
    current = _pass.get()
    if current is not None and operation._schema.is_mutable:
        named = zip(operation._schema.arguments, (*arguments, *keywords.values()), strict=False)
        written = (each for said, each in named if said.alias_info is not None and said.alias_info.is_write)
        current.written.update(map(_storage, pytree.tree_leaves(list(written))))
    is_saved = operation in SAVED_OPERATIONS and current is not None
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _storage(tensor: Tensor) -> Any:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def compiled_policy(_context: Any, operation: Any, *_arguments: Any, **_keywords: Any) -> CheckpointPolicy:
    """As `_policy` where the operations are traced to be compiled, with nothing kept whole."""
    return CheckpointPolicy.MUST_SAVE if operation in SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _within(operations: AbstractContextManager[Any], current: _Pass) -> Iterator[None]:
    token = _pass.set(current)
    try:
        with operations:
            yield
    finally:
        _pass.reset(token)


REMAT_CONTEXTS = {
    Remat.SELECTIVE: _selective,
    Remat.FULL: noop_context_fn,
}
"""What `torch.utils.checkpoint.checkpoint` takes as ``context_fn``, for each choice that computes something again."""
