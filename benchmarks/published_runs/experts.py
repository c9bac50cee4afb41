r"""A block with routed experts: what they add to the block of `shapes`, whose feed-forward part is the shared expert.

Each of a rank's $\tau s$ tokens goes to $t$ experts of width $f$, so that a rank computes $p = \tau s t$ pairs, with
$\tau = \text{etp}/\text{tp}$ of a sequence: tensor-parallel ranks that do not divide the experts divide the tokens.
With $g$ matrices of an expert it keeps per pair: the input $2h$, first products $2(g-1)f$, their activation $2f$, and
`Experts.kept_copies` of $2h$.

| dispatcher   | copies of a token that leave a rank for its group of ep × etp                              |
|--------------|----------------------------------------------------------------------------------------------|
| all-to-all   | one for each expert                                                                            |
| DeepEP       | one for each of $r$ ranks, or nodes over the network, that it needs: $r\,(1 - (1 - 1/r)^t)$   |
| all-gather   | one for each rank                                                                              |

Where groups of expert parallelism include tensor-parallel ranks the plan counts those as ``tp`` and the others as
``ep``: ep 8 beside tp 2 and etp 1 is ep 4 of ours. Not modelled: the bytes of the router, its losses.
"""

from dataclasses import dataclass
from typing import Literal

from steelyard.model.family import Routing
from steelyard.profiles.profile import CollectiveCount, LayerProfile, Recomputation, Work
from steelyard.profiles.shapes import Affine

HALF = 2
Dispatcher = Literal["all-to-all", "deep", "all-gather"]
_ROUTER_KERNELS = 14
"""Scores, top-k, counts, permutation and its inverse."""
_GROUPED_KERNELS = 4
"""Of all experts of a rank together: two products, an activation, a slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of a block and how a framework divides and feeds them."""

    count: int
    top_k: int
    ffn: int
    dispatcher: Dispatcher = "all-to-all"
    kernels_of_each: int = 0
    """Kernels that every local expert has of its own, beside those of all together."""
    slowdown: float = 1.0
    """How many times as long their matmuls take as at the rate of the linear layers around them."""
    kept_copies: int = 4
    """Tensors of a pair, as wide as the hidden state, that are kept beside what enters its expert: what comes out and
    what putting tokens in order leaves. Seen in Megatron-Core's allocated bytes, of models whose routing is not forced;
    found on the open rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRank:
    """One rank's part of the experts, by `Experts` and the degrees of a row."""

    experts: Experts
    tokens: int
    hidden: int
    gated: bool
    tp: int
    ep: int
    etp: int
    node_ranks: int
    """Ranks of a node."""
    imbalance: float
    """How many times the mean of pairs the fullest rank computes where tensor-parallel ranks alone divide experts."""

    @property
    def group(self) -> int:
        """Ranks that hold all experts once."""
        return self.ep * self.etp

    @property
    def inside_tp(self) -> int:
        """Ways in which tensor-parallel ranks divide the experts, be it by whole ones or by their width."""
        return min(self.tp, self.group)

    @property
    def outside_tp(self) -> int:
        """Ways in which data ranks divide them."""
        return self.group // self.inside_tp

    @property
    def params(self) -> int:
        """Of a rank before data ranks divide any."""
        matrices = 3 if self.gated else 2
        return self.experts.count * matrices * self.hidden * self.experts.ffn // self.inside_tp

    def added_to(self, block: LayerProfile) -> LayerProfile:
        """The block with its experts."""
        whole = self._with_pairs(block, 1)
        if self.outside_tp == 1:
            return whole
        return whole.model_copy(update={"divided_experts": (whole, self._with_pairs(block, 2))})

    def _with_pairs(self, block: LayerProfile, times: int) -> LayerProfile:
        pairs = times * self.tokens * self.experts.top_k * self.etp / self.tp
        pairs *= self.imbalance if self.outside_tp == 1 < self.ep else 1.0
        fc1, width = (2 if self.gated else 1) * self.experts.ffn / self.etp, self.experts.ffn / self.etp
        forward, backward = (self._work(pairs, fc1, width, backward=each) for each in (False, True))
        kept = HALF * (self.hidden * (1 + self.experts.kept_copies) + fc1 + width) * pairs
        made = HALF * (2 * self.hidden + fc1) * pairs
        calls = self._calls()
        return block.model_copy(
            update={
                "num_params": block.num_params + self.params + self.experts.count * self.hidden,
                "expert_params": self.params,
                "forward": _sum(block.forward, forward),
                "backward": _sum(block.backward, backward),
                "forward_collectives": (*block.forward_collectives, *calls),
                "backward_collectives": (*block.backward_collectives, *calls),
                "saved_bytes": _plus(block.saved_bytes, kept),
                "forward_transient_bytes": _plus(block.forward_transient_bytes, made),
                "backward_transient_bytes": _plus(block.backward_transient_bytes, made),
                "recomputations": tuple(self._again(each, forward, calls, kept, made) for each in block.recomputations),
            }
        )

    def _again(
        self, each: Recomputation, forward: Work, calls: tuple[CollectiveCount, ...], kept: float, made: float
    ) -> Recomputation:
        more: dict[str, object] = {"saved_bytes": _plus(each.saved_bytes, kept)}
        if each.remat == "full":
            more = {"work": _sum(each.work, forward), "collectives": (*each.collectives, *calls)}
            made += kept
        passes = ("forward_transient_bytes", "backward_transient_bytes")
        return each.model_copy(update=more | {name: _plus(getattr(each, name), made) for name in passes})

    def _work(self, pairs: float, fc1: float, width: float, *, backward: bool) -> Work:
        h, times = self.hidden, 2 if backward else 1
        per_rank = self.params * HALF
        operands = HALF * pairs * (2 * h + fc1 + width)
        local = max(1, self.experts.count // self.ep)
        kernels = _ROUTER_KERNELS + _GROUPED_KERNELS + self.experts.kernels_of_each * local
        return Work(
            matmul_flop=Affine(per_sample=times * 2 * pairs * h * (fc1 + width) * self.experts.slowdown),
            attention_flop=Affine(),
            matmul_bytes=Affine(constant=times * per_rank, per_sample=times * operands),
            expert_weight_bytes=times * per_rank,
            memory_bytes=Affine(per_sample=times * HALF * pairs * (4 * h + fc1 + width)),
            num_kernels=times * kernels,
        )

    def _calls(self) -> tuple[CollectiveCount, ...]:
        """Of one direction: tokens to experts and back, and over the ranks that divide each expert's width."""
        if self.group == 1:
            return ()
        copies = {
            "all-to-all": float(self.experts.top_k),
            "deep": self._once_per_place(),
            "all-gather": float(self.ep),
        }[self.experts.dispatcher]
        sent = HALF * self.tokens * self.hidden * copies / self.tp
        calls = []
        if self.outside_tp > 1:
            calls.append(CollectiveCount(kind="all_to_all", count=2, tensor_bytes=Affine(per_sample=2 * sent)))
        if self.etp > 1 or self.outside_tp == 1:
            gathered = Affine(per_sample=sent * self.etp)
            calls += [CollectiveCount(kind=collective, count=1, tensor_bytes=gathered) for collective in _OVER_TP]
        return tuple(calls)

    def _once_per_place(self) -> float:
        """Copies where a token goes to a rank once, or over the network to a node once, for even routing."""
        near = min(self.group, self.node_ranks)
        places = self.ep if near == self.group else self.group // near
        return Routing(top_k=self.experts.top_k).places(places)


_OVER_TP: tuple[Literal["all_gather"], Literal["reduce_scatter"]] = ("all_gather", "reduce_scatter")


def _plus(line: Affine, per_sample: float) -> Affine:
    return Affine(constant=line.constant, per_sample=line.per_sample + per_sample)


def _sum(one: Work, other: Work) -> Work:
    names = ("matmul_flop", "attention_flop", "matmul_bytes", "memory_bytes")
    lines = {
        name: Affine(
            constant=getattr(one, name).constant + getattr(other, name).constant,
            per_sample=getattr(one, name).per_sample + getattr(other, name).per_sample,
        )
        for name in names
    }
    return one.model_copy(
        update=lines
        | {
            "num_kernels": one.num_kernels + other.num_kernels,
            "expert_weight_bytes": one.expert_weight_bytes + other.expert_weight_bytes,
        }
    )
