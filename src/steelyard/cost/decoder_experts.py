r"""Routed experts: additions to the block of `steelyard.cost.decoder`, whose feed-forward layer is the shared expert.

Each of a rank's $\tau s$ tokens goes to $t$ experts of width $f$, so a rank computes $p = \tau s t$ token-expert pairs,
with $\tau = \text{etp}/\text{tp}$ of a sequence: tensor-parallel ranks that do not divide the experts divide the
tokens. With $g$ matrices per expert it saves per pair: the input $2h$, first products $2(g-1)f$, their activation $2f$,
and `Kernels.expert_copies` of $2h$. A token is sent once to each of its experts; `Execution.dispatcher` describes
dispatchers that send less.

Tensor-parallel ranks divide the experts, by number or by width; data-parallel ranks divide the remainder. Not modelled:
bytes of the router, its losses.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from steelyard.engines.execution import Kernels
from steelyard.profiles.profile import CollectiveCount, LayerProfile, Recomputation, Work
from steelyard.profiles.shapes import Affine

HALF = 2
"""Bytes of an activation or a weight in bf16 or fp16."""
_ROUTER_KERNELS = 14
"""Scores, top-k, counts, permutation and its inverse."""
_GROUPED_KERNELS = 4
"""Kernels for all experts of a rank together: two products, an activation, a slice."""
_MOVED, _MOVED_EAGERLY, _MOVED_TO_RANKS = (8, 16), (30, 46), (8, 12)
"""Bytes moved outside products per pair and hidden entry, forward and backward. `_MOVED`: read and written by the
experts. `_MOVED_EAGERLY`: torchtitan's operations (models/common/token_dispatcher.py), which gather, convert to fp32,
scale, convert back and add in separate kernels. `_MOVED_TO_RANKS`: in addition, sorting by expert and back between
ranks. The gradient of gathered rows is added to zeros; that of the scores is a product in fp32 and its sum."""
_EAGER_GRADIENTS = 12
"""Bytes per entry in the backward pass of the scores: its input, its output and the product, in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts of a block: their number, the number per token, and their width."""

    count: int
    top_k: int
    ffn: int
    etp: int = 1
    """Tensor-parallel ranks that divide the width of each expert."""


def with_experts(
    block: LayerProfile,
    experts: Experts,
    kernels: Kernels,
    *,
    tokens: int,
    hidden: int,
    gated: bool,
    tp: int,
    imbalance: float,
    slowdown: float,
    trains: bool,
) -> LayerProfile:
    """Add the experts to the block of a rank with ``tokens`` tokens per sample; arguments as of `decoder_layer`.

    Without ``trains`` the experts are frozen because only adapters of other layers are trained.
    """
    pairs = tokens * experts.top_k * experts.etp / tp
    params = experts.count * (3 if gated else 2) * hidden * experts.ffn // tp

    repeats = ("full", "selective") if isinstance(kernels.selective, str) else ("full",)
    activates_again = trains and "moe_act" in kernels.selective

    def of(pairs: float, calls: tuple[CollectiveCount, ...], received: float = 0.0) -> LayerProfile:
        fc1, width = (2 if gated else 1) * experts.ffn / experts.etp, experts.ffn / experts.etp
        kept = HALF * (hidden * (trains + kernels.expert_copies) + fc1 + width * trains) * pairs
        made = HALF * (2 * hidden + fc1) * pairs
        made_backward = max(made, _EAGER_GRADIENTS * hidden * pairs) if kernels.eager_routing else made
        moved = _MOVED_EAGERLY if kernels.eager_routing else _MOVED
        if kernels.eager_routing and received:
            moved = (moved[0] + _MOVED_TO_RANKS[0], moved[1] + _MOVED_TO_RANKS[1])
        own_kernels = kernels.of_each_expert * max(1, experts.count * experts.etp // tp)
        forward, backward = (
            Work(
                matmul_flop=Affine(per_sample=times * 2 * pairs * hidden * (fc1 + width) * slowdown),
                attention_flop=Affine(),
                matmul_bytes=Affine(
                    constant=times * params * HALF, per_sample=times * HALF * pairs * (2 * hidden + fc1 + width)
                ),
                expert_weight_bytes=times * params * HALF,
                memory_bytes=Affine(per_sample=pairs * (moved[times - 1] * hidden + times * HALF * (fc1 + width))),
                num_kernels=times * (_ROUTER_KERNELS + _GROUPED_KERNELS + own_kernels),
                expert_kernels=times * own_kernels,
            )
            for times in (1, 2 if trains else 1)
        )
        return block.model_copy(
            update={
                "num_params": block.num_params + params + experts.count * hidden,
                "expert_params": params,
                "frozen_params": 0 if trains else block.frozen_params + params + experts.count * hidden,
                "frozen_expert_params": 0 if trains else params,
                "forward": _sum(block.forward, forward),
                "backward": _sum(block.backward, backward),
                "forward_collectives": (*block.forward_collectives, *calls),
                "backward_collectives": (*block.backward_collectives, *calls),
                "saved_bytes": _plus(block.saved_bytes, kept),
                "forward_transient_bytes": _plus(block.forward_transient_bytes, made),
                "backward_transient_bytes": _plus(block.backward_transient_bytes, made_backward),
                "recomputations": tuple(
                    _again(
                        each,
                        forward,
                        calls,
                        kept,
                        received,
                        (made, made_backward),
                        repeats=repeats,
                        activation=(HALF * width * pairs, HALF * (fc1 + width) * pairs) if activates_again else (0, 0),
                    )
                    for each in block.recomputations
                ),
            }
        )

    sent = HALF * tokens * hidden * experts.top_k / tp
    exchange = CollectiveCount(kind="all_to_all", count=2, tensor_bytes=Affine(per_sample=2 * sent))
    over_width = tuple(_over_tensors(sent * experts.etp)) if experts.etp > 1 else ()
    divided = (of(times * pairs, (exchange, *over_width), HALF * hidden * times * pairs) for times in (1, 2))
    uneven = imbalance if tp > experts.etp else 1.0
    whole = of(uneven * pairs, tuple(_over_tensors(sent * experts.etp)) if tp > 1 else ())
    return whole.model_copy(update={"divided_experts": tuple(divided)})


def _over_tensors(num_bytes: float) -> Iterator[CollectiveCount]:
    """Yield the collectives that send tokens to the experts of tensor-parallel ranks, whole or divided, and back."""
    for collective in ("all_gather", "reduce_scatter"):
        yield CollectiveCount(kind=collective, count=1, tensor_bytes=Affine(per_sample=num_bytes))


def _again(
    each: Recomputation,
    forward: Work,
    calls: tuple[CollectiveCount, ...],
    kept: float,
    received: float,
    made: tuple[float, float],
    *,
    repeats: tuple[str, ...],
    activation: tuple[float, float],
) -> Recomputation:
    """Add the experts to a remat choice.

    Full remat recomputes them and repeats the exchange of tokens. Selective remat recomputes them from the received
    tokens, or saves all. ``activation``: if only the activation function is recomputed, the bytes that are not saved
    and the bytes that it moves.
    """
    if each.remat in repeats:
        more: dict[str, object] = {"work": _sum(each.work, forward)}
        if each.remat == "full":
            more["collectives"] = (*each.collectives, *calls)
        else:
            more["saved_bytes"] = _plus(each.saved_bytes, received)
        made = (made[0] + kept, made[1] + kept)
    else:
        less, moved = activation if each.remat == "selective" else (0.0, 0.0)
        again = {
            "memory_bytes": _plus(each.work.memory_bytes, moved),
            "num_kernels": each.work.num_kernels + (less > 0),
        }
        more = {"saved_bytes": _plus(each.saved_bytes, kept - less), "work": each.work.model_copy(update=again)}
        made = (made[0] + less, made[1] + less)
    passes = ("forward_transient_bytes", "backward_transient_bytes")
    work = {name: _plus(getattr(each, name), num_bytes) for name, num_bytes in zip(passes, made, strict=True)}
    return each.model_copy(update=more | work)


def _plus(line: Affine, per_sample: float) -> Affine:
    return Affine(constant=line.constant, per_sample=line.per_sample + per_sample)


def _sum(one: Work, other: Work) -> Work:
    lines = {
        name: Affine(
            constant=getattr(one, name).constant + getattr(other, name).constant,
            per_sample=getattr(one, name).per_sample + getattr(other, name).per_sample,
        )
        for name in ("matmul_flop", "attention_flop", "matmul_bytes", "memory_bytes")
    }
    counts = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("num_kernels", "expert_kernels", "expert_weight_bytes")
    }
    return one.model_copy(update=lines | counts)
