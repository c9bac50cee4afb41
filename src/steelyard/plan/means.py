"""What a framework can express of a plan, as data, and what of a given plan goes beyond it.

A framework with ``mixes_layers`` runs every plan. Any other takes one strategy for the whole model: the same levels, sp
and ZeRO stage on every layer, one remat choice for all blocks, and none for the embedding and the head, which no
framework recomputes. `steelyard.planning.plan_within` searches the best plan of that form.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from steelyard.model.chain import LayerRole, ModelChain
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Parallelism, Remat, Strategy, ZeroStage

Pipeline = Literal["none", "any cuts"]
Kinds = frozenset[Parallelism]

SHOWN_STRATEGIES = 4
"""Strategies of a mix that a reason lists before it ends in …"""


def kinds_of(*names: str) -> frozenset[Kinds]:
    """Sets of kinds that may share a layer, each written as in ``fsdp+tp``; a layer without any always may be."""
    return frozenset(frozenset(Parallelism(kind) for kind in name.split("+")) for name in names) | {frozenset()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a framework can express. The first field decides: the rest is for frameworks of one strategy."""

    mixes_layers: bool
    """Whether each layer may have a strategy of its own."""
    kinds: frozenset[Kinds] = frozenset()
    """The sets of kinds of parallelism that may share a layer."""
    zero_stages: frozenset[ZeroStage] = frozenset()
    zero_stages_with_tp: frozenset[ZeroStage] = frozenset()
    sp: frozenset[bool] = frozenset()
    """Whether tensor parallelism may be without (False) and with (True) sequence parallelism."""
    remats: frozenset[Remat] = frozenset()
    """What may be recomputed of all blocks alike."""
    remats_first_blocks: bool = False
    """Whether the first n blocks of every stage may be recomputed and the others not, n the same on all stages."""
    pipeline: Pipeline = "none"
    schedules: frozenset[str] = frozenset()
    """By name."""

    def refusal(self, strategy: Strategy) -> str | None:
        """Why the framework cannot give a layer this strategy, or None where it can."""
        if self.mixes_layers:
            return None
        kinds = frozenset(level.kind for level in strategy.levels)
        has_tp, has_fsdp = Parallelism.TP in kinds, Parallelism.FSDP in kinds
        zero_stages = self.zero_stages_with_tp if has_tp else self.zero_stages
        reasons = (
            (kinds not in self.kinds, f"{' with '.join(sorted(kinds))} in one layer"),
            (
                has_tp and strategy.levels[-1].kind is not Parallelism.TP,
                "tensor parallelism over ranks that are not neighbours",
            ),
            (has_tp and strategy.sp not in self.sp, f"tensor parallelism {'with' if strategy.sp else 'without'} sp"),
            (has_fsdp and strategy.zero not in zero_stages, f"ZeRO-{strategy.zero}" + " beside tp" * has_tp),
            (strategy.remat not in self.remats, f"{strategy.remat} remat"),
        )
        return next((reason for applies, reason in reasons if applies), None)


def beyond(plan: Plan, means: Means) -> tuple[str, ...]:
    """What of a plan a framework of these means cannot express, one reason each; empty where it can run it as it is."""
    if means.mixes_layers:
        return ()
    chain = plan.chain()
    reasons = [
        *_mixed(plan),
        *_recomputed_ends(plan, chain),
        *_mixed_remat(plan, chain, means),
        *dict.fromkeys(reason for strategy in plan.strategies if (reason := means.refusal(strategy)) is not None),
    ]
    if plan.num_stages > 1 and means.pipeline == "none":
        reasons.append(f"a pipeline ({plan.num_stages} stages)")
    elif plan.num_stages > 1 and plan.schedule not in means.schedules:
        reasons.append(f"the {plan.schedule} schedule")
    return tuple(reasons)


def without_remat(strategy: Strategy) -> Strategy:
    """The strategy with everything kept for the backward pass."""
    return Strategy(levels=strategy.levels, sp=strategy.sp, zero=strategy.zero)


def block_layers(chain: ModelChain) -> tuple[int, ...]:
    """The layers of the chain that are blocks, in order."""
    return tuple(layer for layer in range(chain.num_layers) if chain.kind_of(layer).role is LayerRole.BLOCK)


def recomputed_blocks(plan: Plan) -> tuple[tuple[bool, ...], ...]:
    """For every part of the pipeline, which of its blocks are recomputed in full."""
    blocks = set(block_layers(plan.chain()))
    return tuple(
        tuple(
            strategy.remat is Remat.FULL
            for layer, strategy in enumerate(part.strategies, start=part.first_layer)
            if layer in blocks
        )
        for part in plan.stages
    )


def first_blocks_recomputed(plan: Plan) -> int | None:
    """The n of "the first n blocks of every stage are recomputed in full"; None where the plan is not of that form.

    Every block of a stage with n or fewer of them.
    """
    count = max((sum(part) for part in recomputed_blocks(plan)), default=0)
    fits = all(
        recomputed == (index < count) for part in recomputed_blocks(plan) for index, recomputed in enumerate(part)
    )
    return count if fits else None


def _mixed(plan: Plan) -> list[str]:
    bases = [without_remat(strategy) for strategy in plan.strategies]
    return [f"strategies that differ between layers ({_counted(bases)})"] if len(set(bases)) > 1 else []


def _recomputed_ends(plan: Plan, chain: ModelChain) -> list[str]:
    blocks = set(block_layers(chain))
    ends = [layer for layer in range(chain.num_layers) if layer not in blocks]
    names = [chain.layer_name(layer) for layer in ends if plan.strategies[layer].remat is not Remat.NONE]
    return [f"remat of the {' and the '.join(names)}"] if names else []


def _mixed_remat(plan: Plan, chain: ModelChain, means: Means) -> list[str]:
    choices = [plan.strategies[layer].remat for layer in block_layers(chain)]
    if len(set(choices)) < 2:
        return []
    if means.remats_first_blocks and set(choices) == {Remat.NONE, Remat.FULL}:
        if first_blocks_recomputed(plan) is not None:
            return []
        return [f"remat of blocks that are not the first n of every stage ({_counted(choices)})"]
    return [f"remat that differs between blocks ({_counted(choices)})"]


def _counted(values: Iterable[object]) -> str:
    counts: dict[str, int] = {}
    for value in values:
        counts[str(value)] = counts.get(str(value), 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{text} ×{count}" for text, count in most[:SHOWN_STRATEGIES]]
    return ", ".join(shown + ["…"] * (len(most) > SHOWN_STRATEGIES))
