"""Counters of the work of a program, operation by operation, while it runs on fake tensors.

`OpCounter` sees every operation below autograd and below DTensor, on the local tensors of one rank: its FLOP from
PyTorch's registry, the bytes it reads and writes, the collectives it calls, and the storages alive after it.

Not counted: work within operations that PyTorch's FLOP registry does not list, and the scratch space of kernels.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import steelyard.modules.experts  # noqa: F401  registers the products that are counted here
from steelyard.errors import InvalidModelError
from steelyard.modules.fake_op_cache import FakeOpCache, FakeOpMode
from steelyard.modules.gpu_kernels import BACKWARD_FACTOR, kernel_work
from steelyard.profiles.profile import Collective

aten = torch.ops.aten

_COLLECTIVES: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_ATTENTION_CAUSAL_ARGUMENT = {
    aten._scaled_dot_product_flash_attention_for_cpu: 4,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    aten._scaled_dot_product_flash_attention: 4,
    aten._scaled_dot_product_flash_attention_backward: 11,
    aten._scaled_dot_product_efficient_attention: 6,
    aten._scaled_dot_product_efficient_attention_backward: 11,
}
"""Position of ``is_causal`` among the arguments of each attention operation."""
_SLOWER = dict.fromkeys(("bitsandbytes::dequantize_4bit", "bitsandbytes::dequantize_blockwise"), 4)
"""Time of an operation relative to others that move as many bytes. Dequantizing a weight of four bits took 6 ps on an
A100 in litgpt's table and 9 in ms-swift's (bitsandbytes 0.41), where its 2.5 bytes would take 1.75."""


@dataclass(slots=True)
class OpCounts:
    """Totals of one direction (forward or backward) of a layer on one rank, or what one operation adds to them."""

    matmul_flop: float = 0.0
    low_precision_flop: float = 0.0
    """Part of `matmul_flop` in products of 8-bit operands."""
    fp32_flop: float = 0.0
    """Part of `matmul_flop` in products of fp32 operands."""
    attention_flop: float = 0.0
    matmul_bytes: float = 0.0
    expert_weight_bytes: float = 0.0
    """Part of `matmul_bytes` for weights of routed experts and their gradients."""
    memory_bytes: float = 0.0
    num_kernels: int = 0
    key_value_bytes: float = 0.0
    """Keys and values that attention kernels read."""
    attention_bytes: float = 0.0
    """Queries, keys, values and results of attention kernels."""
    square_flop: float = 0.0
    """FLOP of attention if every query saw every key: of its kernels, or of its products if it runs step by step."""
    products: list["SeenProduct"] = field(default_factory=list)
    attention: list["SeenAttention"] = field(default_factory=list)
    collectives: dict[Collective, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Bytes of the whole tensor, for each call."""

    def copy(self) -> "OpCounts":
        """Return a copy of the totals as they are now."""
        collectives = defaultdict(list, {collective: list(calls) for collective, calls in self.collectives.items()})
        return replace(self, collectives=collectives, products=list(self.products), attention=list(self.attention))

    def add(self, other: "OpCounts") -> None:
        """Add other counts, such as those of one operation."""
        if other is _NOTHING:
            return
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.products += other.products
        self.attention += other.attention
        for collective, calls in other.collectives.items():
            self.collectives[collective] += calls

    def beyond(self, other: "OpCounts") -> "OpCounts":
        """Return the counts in excess of those of ``other``, all of which these totals include."""
        collectives: dict[Collective, list[float]] = defaultdict(list)
        for collective, calls in self.collectives.items():
            if more := Counter(calls) - Counter(other.collectives.get(collective, ())):
                collectives[collective] = list(more.elements())
        return OpCounts(
            **{name: getattr(self, name) - getattr(other, name) for name in _SUMS},
            products=list((Counter(self.products) - Counter(other.products)).elements()),
            attention=list((Counter(self.attention) - Counter(other.attention)).elements()),
            collectives=collectives,
        )


class SeenProduct(NamedTuple):
    """One kernel that multiplies matrices [m, k] × [k, n], ``groups`` of them."""

    groups: float
    m: float
    n: float
    k: float


class SeenAttention(NamedTuple):
    """One kernel of fused attention; ``rows`` are samples × query heads."""

    rows: int
    head_dim: float
    queries: int
    keys: int
    is_causal: bool
    masked: bool
    backward: bool


_SUMS = tuple(each.name for each in fields(OpCounts) if each.type in (int, float))
"""Names of the counts that are numbers."""
_NOTHING = OpCounts()
Operations = FakeOpCache[OpCounts]
"""Cache of operations, for any number of `OpCounter`s."""


class OpCounter(FakeOpMode):
    """Counter into ``counts`` (replace it between phases) that also logs storages as they appear and are freed.

    ``log`` holds (storage id, bytes), with negative bytes when the storage is freed. Storages given to ``watch`` before
    the first operation are logged as present. Operations in ``seen`` are not run again.
    """

    def __init__(self, seen: Operations | None = None) -> None:
        super().__init__()
        self._seen = FakeOpCache() if seen is None else seen
        self.counts = OpCounts()
        self.log: list[tuple[int, int]] = []
        self._ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = count()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Log the storages of these tensors as present from now on, if they have no number yet."""
        for storage in (_local(tensor).untyped_storage() for tensor in tensors):
            if storage not in self._ids:
                key, size = next(self._numbers), storage.nbytes()
                self._ids[storage] = key
                self.log.append((key, size))
                weakref.finalize(storage, self.log.append, (key, -size))

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors (parameters, shared inputs) out of the log."""
        for tensor in tensors:
            self._ids[_local(tensor).untyped_storage()] = next(self._numbers)

    def storage_ids(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the ids of the storages of these tensors in the log."""
        storages = [_local(tensor).untyped_storage() for tensor in tensors]
        return {self._ids[storage] for storage in storages if storage in self._ids}

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation and count it, unless it only queries a tensor."""
        if func.namespace == "prim":
            return func(*args, **kwargs)
        out, effect = self._seen.run(func, args, kwargs, lambda out: _effect(func, args, kwargs, out))
        if not self.is_learning:
            self.counts.add(effect)
            self.watch(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out


def live_bytes(log: list[tuple[int, int]], *, without: set[int]) -> list[int]:
    """Bytes alive after each event of a log, leaving out the storages ``without``."""
    total, history = 0, [0]
    for key, size in log:
        if key not in without:
            total += size
        history.append(total)
    return history


def _effect(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCounts:
    if func.namespace == "_c10d_functional":
        return _effect_of_collective(func, args, out)
    packet = func._overloadpacket
    if func.is_view or packet in _FREE_OPERATIONS:
        return _NOTHING
    touched = out if packet in _FILLING_OPERATIONS else (args[1:] if packet is aten.copy_ else args, kwargs, out)
    # bytes of a tensor that an operation reads or writes; broadcast dimensions count once
    moved = sum(
        min(leaf.numel() * leaf.element_size(), leaf.untyped_storage().nbytes())
        for leaf in tree_leaves(touched)
        if isinstance(leaf, Tensor)
    )
    if packet in _ATTENTION_CAUSAL_ARGUMENT:
        query, key, value = args[:3]
        backward = "backward" in packet.__name__
        count: Callable[..., int] = sdpa_backward_flop_count if backward else sdpa_flop_count
        shapes = [tensor.shape for tensor in args[: 4 if backward else 3]]
        query_heads = shapes[1 if backward else 0][1]
        square_flop = count(*((shape[0], query_heads, *shape[2:]) for shape in shapes))
        return OpCounts(
            num_kernels=1,
            matmul_bytes=moved,
            attention_flop=square_flop * (0.5 if _is_causal(packet, args, kwargs) else 1.0),
            square_flop=square_flop,
            key_value_bytes=key.nbytes + value.nbytes,
            attention_bytes=2 * query.nbytes + key.nbytes + value.nbytes,
            attention=[_seen_attention(packet, args, kwargs)],
        )
    if packet in _HUB_KERNELS:
        return _effect_of_hub_kernel(packet, args, moved - out[-1].nbytes)
    if packet in flop_registry:
        flop = flop_registry[packet](*args, **kwargs, out_val=out)
        weights = sum(leaf.nbytes for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor) and leaf.dim() == 3)
        of_experts = weights if packet in _GROUPED_PRODUCTS else 0
        return OpCounts(
            num_kernels=1,
            matmul_bytes=moved,
            expert_weight_bytes=of_experts,
            matmul_flop=flop,
            low_precision_flop=flop if packet is aten._scaled_mm else 0,
            fp32_flop=flop if isinstance(out, Tensor) and out.dtype is torch.float32 else 0,
            square_flop=flop if packet in _BATCHED_PRODUCTS else 0,
            products=list(_seen_products(packet, args, out)),
        )
    return OpCounts(num_kernels=1, memory_bytes=moved * _SLOWER.get(func.name().partition(".")[0], 1))


def _effect_of_hub_kernel(packet: Any, args: tuple[Any, ...], moved: int) -> OpCounts:
    """Return the counts of a call that reads and writes ``moved`` bytes; none if it has no reference code."""
    factor, work = _HUB_KERNELS[packet], kernel_work(args[0], args[-1])
    if not any(work.are_tensors):
        return _NOTHING
    flop = factor * work.flop
    return OpCounts(
        num_kernels=1,
        matmul_flop=flop,
        fp32_flop=flop if args[0][0].dtype is torch.float32 else 0,
        memory_bytes=max(moved, factor * work.product_bytes),
    )


def _effect_of_collective(func: Any, args: tuple[Any, ...], out: Any) -> OpCounts:
    name = func._overloadpacket.__name__
    if name == "wait_tensor":
        return _NOTHING
    if name not in _COLLECTIVES:
        raise InvalidModelError(
            field="collective",
            found=f"the layer calls {name}",
            expected="one of " + ", ".join(sorted(_COLLECTIVES)),
            hint="this collective has no cost model: add it in steelyard/tracer/counting.py",
        )
    collective = _COLLECTIVES[name]
    whole = out if collective == "all_gather" else args[0]
    return OpCounts(collectives=defaultdict(list, {collective: [whole.numel() * whole.element_size()]}))


_HUB_KERNELS = {torch.ops.steelyard.kernel: 1, torch.ops.steelyard.kernel_backward: BACKWARD_FACTOR}
"""Work of each direction of a kernel in units of its forward pass."""
_BATCHED_PRODUCTS = {aten.bmm, aten.baddbmm}
_GROUPED_PRODUCTS = {torch.ops.steelyard.grouped_mm, torch.ops.steelyard.grouped_mm_backward}
"""Products of rows with the weights of their experts; the weights are the operands of three dims."""
_FREE_OPERATIONS = {
    aten._unsafe_view,
    aten.detach,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.alias,
    aten.lift_fresh,
}
_FILLING_OPERATIONS = {aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like}
"""Operations that use a tensor only for its shape or type, and read nothing of it."""


def _seen_products(packet: Any, args: tuple[Any, ...], out: Any) -> tuple[SeenProduct, ...]:
    """Return the shapes of an operation's matrix products; none for a convolution."""
    if packet is torch.ops.steelyard.grouped_mm:
        return (_of_experts(*args[:2], share=args[3]),)
    if packet is torch.ops.steelyard.grouped_mm_backward:
        there = _of_experts(*args[1:3], share=args[4])
        return (there._replace(n=there.k, k=there.n), there._replace(m=there.k, k=there.m))
    if packet not in _PRODUCT_OPERANDS:
        return ()
    first = args[_PRODUCT_OPERANDS[packet]]
    groups = first.shape[0] if first.dim() == 3 else 1
    return (SeenProduct(groups=groups, m=out.shape[-2], n=out.shape[-1], k=first.shape[-1]),)


def _of_experts(inputs: Tensor, weights: Tensor, *, share: float) -> SeenProduct:
    """Return the product of rows with the weights of their experts, with equally many rows for each."""
    experts, inner, outer = weights.shape
    return SeenProduct(groups=experts, m=inputs.shape[0] * share / experts, n=outer, k=inner)


_PRODUCT_OPERANDS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1, aten._scaled_mm: 0}
"""Position of the first factor among the arguments of each product."""


def _seen_attention(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeenAttention:
    backward = "backward" in packet.__name__
    query, key, value, *others = args[1:] if backward else args
    mask = others[0] if "efficient" in packet.__name__ else kwargs.get("attn_mask")
    return SeenAttention(
        rows=query.shape[0] * query.shape[1],
        head_dim=(query.shape[-1] + value.shape[-1]) / 2,
        queries=query.shape[2],
        keys=key.shape[2],
        is_causal=_is_causal(packet, args, kwargs),
        masked=mask is not None,
        backward=backward,
    )


def _is_causal(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an attention kernel computes only one half of the square."""
    position = _ATTENTION_CAUSAL_ARGUMENT[packet]
    return bool(kwargs.get("is_causal", args[position] if len(args) > position else False))


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
