"""Data parallelism: every rank has the whole layer and its own samples; gradients are summed once a step.

Outside `fsdp` it is hybrid sharding: states are sharded over the ranks inside and replicated over those outside.
Parameters are then gathered over near ranks only, and only the gradients of one shard cross the far links, once a step.

Source: Zhao et al. 2023 (PyTorch FSDP, arXiv 2304.11277), section 3.2.2, for hybrid sharding.
"""

from collections.abc import Mapping

from steelyard.plan.dimensions.dimension import (
    Contradiction,
    Dimension,
    Divides,
    Levels,
    Placed,
    States,
    StrategyView,
    Value,
    degree_of,
    indivisible_samples,
    is_power_of_four_times,
    shard_levels,
    summed_once,
)


def _contradiction(levels: Levels, _modes: Mapping[str, Value]) -> Contradiction | None:
    """Reject sharding outside replication: it sends whole gradients over the far links and saves no memory."""
    dimensions = [level.dimension for level in levels]
    inside = shard_levels(levels[: dimensions.index(DP)])
    if not inside:
        return None
    return Contradiction(
        field="parallel",
        expected="dp outside fsdp in a layer with both: states sharded over near ranks and replicated over far ones",
        hint="write the dp level first, as in dp4-fsdp8",
    )


def _not_worth(levels: Levels, devices_per_node: int | None) -> str:
    """Return why groups of hybrid sharding are not searched; searched ones span one node, or 4, 16, … nodes.

    Twice the nodes hold half the states each and send hardly more over their links, so a group size between two of
    these gains little over the next larger one. Levels that divide the layer are innermost, on the nearest ranks.
    """
    inside = levels[[level.dimension for level in levels].index(DP) + 1 :]
    if not shard_levels(inside) or devices_per_node is None:
        return ""
    if any(level.dimension.divides is Divides.TENSORS for level in inside[:-1]):
        return "hybrid sharding is searched with neighbouring ranks for tensor parallelism"
    if not is_power_of_four_times(degree_of(inside), devices_per_node):
        return "hybrid sharding is searched with groups of one node, or of 4, 16, 64 … of them"
    return ""


def _words(strategy: StrategyView) -> str:
    copies = "of the shards" if strategy.state_shards > 1 else "of the parameters"
    return f"samples over {strategy.degree(DP)} ranks, each with a copy {copies}"


DP = Dimension(
    name="dp",
    title="data parallelism (replicated parameters)",
    divides=Divides.SAMPLES,
    states=States.REPLICATED,
    illegal=indivisible_samples,
    traffic=summed_once,
    placement=lambda _strategy: Placed.BATCH,
    words=_words,
    term="exposed reduction of gradients",
    hue="purple",
    contradiction=_contradiction,
    not_worth=_not_worth,
    is_of_papers=True,
    plain_name="plain DDP",
)
