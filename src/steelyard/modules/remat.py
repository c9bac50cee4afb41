"""Activation checkpointing: the tensors of a layer kept for its backward pass, or recomputed, under each remat choice.

| remat     | kept                                                 | computed again in backward |
|-----------|------------------------------------------------------|----------------------------|
| none      | all that autograd saves                              | nothing                    |
| selective | the layer's input, the results of `SAVED_OPERATIONS` | everything else            |
|           | and of what is `kept_whole`                          |                            |
| full      | the layer's input                                    | everything                 |

Selective keeps the results of matrix products, fused attention, the reductions (all-reduce, reduce-scatter) of tensor
parallelism and all-to-alls (tokens to experts, sequence for heads in context parallelism). The operations that it
recomputes are bound by memory, not by FLOP: norms, activation functions, rotary embedding, casts, copies, sums. It does
not keep

- all-gathers of sequence parallelism: a result is tp times as large as its input, and with them kept selective would
  hold more than none does (a Llama-3-8B block at tp 8 with sp: 5.6 hidden states instead of 4.9);
- batched products (``bmm``): in the supported models they are the attention scores of kernels that are not fused;
- products of routed experts: with k experts per token they are wider than everything else that is kept. Recomputing
  them is not bound by memory;
- tensors that are written to afterwards, as by ``x += y`` or an in-place activation.

Recomputation ends after the last tensor that backward needs. Neither choice therefore repeats operations that only make
the layer's output (the last matrix product and its reduction).

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
"""Operations whose results selective remat keeps."""

Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass through a layer under selective remat, and the data that it hands to the next one."""

    results: deque[Results]
    is_again: bool
    written: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    """Storages that an operation has written to in place."""


_pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)
"""The current pass; a context variable because the callers of code in the middle of a layer do not know of it."""


def kept_whole(compute: Callable[[], Results]) -> Results:
    """Return the result of ``compute``, run outside autograd. Selective remat keeps it, but no intermediate results.

    A layer that is recomputed takes the kept result and does not call ``compute``.
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
    """Return the contexts of the forward pass and of its recomputation in backward."""
    results: deque[Results] = deque()
    forward, again = create_selective_checkpoint_contexts(_policy)
    first = _Pass(results, False)
    return _within(_forgetting_written(forward, first), first), _within(again, _Pass(results, True))


@contextmanager
def _forgetting_written(forward: Any, current: _Pass) -> Iterator[None]:
    """Run the forward pass; at its end forget the kept tensors that were written to, so that they are recomputed.

    Versions of tensors do not show this: a product and its ``_unsafe_view``, which `linear` returns and ``+=`` writes
    to, have different ones.
    """
    with forward:
        yield
    for entries in forward.storage.values():
        for place, entry in entries.items():
            kept = (each.val for each in pytree.tree_leaves(entry) if each is not _RECOMPUTE)
            if any(isinstance(each, Tensor) and _storage(each) in current.written for each in kept):
                entries[place] = _RECOMPUTE


def _policy(_context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep the results of `SAVED_OPERATIONS`, except on the way to a result that is kept whole."""
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
    """Keep the results of `SAVED_OPERATIONS` when operations are traced to be compiled, where nothing is kept whole."""
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
"""Argument ``context_fn`` of `torch.utils.checkpoint.checkpoint` for each choice that recomputes something."""
