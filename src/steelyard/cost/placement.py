r"""Cost tables of a job on heterogeneous device groups, joined from the tables of each group.

Every stage lies in one device group (pool). Its layers cost the same as on a cluster of that group alone, so the tables
of a pipeline are those of its groups, concatenated (`CostTables.pools`). A border between stages of different sizes
additionally has (between stages of equal size $r$ is that within the receiving stage)

$$c = 2 \Big(\max(\ell_a, \ell_b) + \frac{A}{\min(G_a w_a, G_b w_b)}\Big), \qquad r = g_a(s_a) + g_b(s_b)$$

| symbol | unit  | meaning                                                                                     |
|--------|-------|---------------------------------------------------------------------------------------------|
| $c$    | s     | sending a microbatch's activation in even parts and its gradient back                       |
| $A$    | bytes | activation of a microbatch, over all ranks of a stage                                       |
| $G$    | –     | ranks of the stages before and after the border                                             |
| $w$    | B/s   | reached rate of a device's link to other groups                                             |
| $\ell$ | s     | latency of that link                                                                        |
| $g$    | s     | gathering the copies of one activation that ranks under tp without sp hold, inside a group  |

The budget is that of the group with the most memory; the difference counts as overhead of stages in other groups.

Not modelled: links between groups in the exchange of a tied matrix; each stage's own links are used. With several
groups its copies count as sharded differently; with one group they cost the same as on that cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import KnownCosts, border_s, build_tables, usable_bytes
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.switching import border_table
from steelyard.cost.tables import CostTables, Pools, Received
from steelyard.plan.strategy import Strategy
from steelyard.schedules import PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device groups of a pipeline in order, by their index in the job, and the number of stages in each."""

    pools: tuple[int, ...]
    stages: tuple[int, ...]

    def sizes(self, job: Job) -> tuple[int, ...]:
        """Return the number of ranks per stage in each group."""
        pairs = zip(self.pools, self.stages, strict=True)
        return tuple(job.by_group[pool].cluster.num_devices // stages for pool, stages in pairs)

    def of_stages(self, job: Job) -> list[tuple[int, int]]:
        """Return the group index and the number of ranks of each stage."""
        alike = zip(self.pools, self.sizes(job), self.stages, strict=True)
        return [(pool, size) for pool, size, count in alike for _ in range(count)]

    def configs(self, job: Job, pipeline: PipelineConfig) -> tuple[JobConfig, ...]:
        """Return the configuration of the stages of each group, which are identical."""
        sizes = zip(self.pools, self.sizes(job), strict=True)
        return tuple(JobConfig(job=job.by_group[pool], pipeline=pipeline, stage_size=size) for pool, size in sizes)


def pooled_tables(
    job: Job,
    placement: Placement,
    pipeline: PipelineConfig,
    strategies: Sequence[tuple[Strategy, ...]],
    known: Sequence[KnownCosts],
) -> CostTables:
    """Build the tables of a pipeline over several groups; ``strategies`` and ``known`` are per group, in order."""
    configs = placement.configs(job, pipeline)
    pooled = len(configs) > 1
    parts = tuple(build_tables(*each, pooled=pooled) for each in zip(configs, strategies, known, strict=True))
    border = [0.0] + [border_s(*pair) for pair in pairwise(configs)]
    of_stages = tuple(np.repeat(np.arange(len(parts)), placement.stages).tolist())
    starts = [0, *accumulate(placement.stages)]
    transfer_s = [parts[pool].transfer_s for pool in of_stages]
    for start, seconds in zip(starts, border, strict=False):
        transfer_s[start] = seconds
    blocks = [[_switches(parts, configs, row, column) for column in range(len(parts))] for row in range(len(parts))]
    most_bytes = usable_bytes(job)
    spared = [most_bytes - usable_bytes(job.by_group[pool]) for pool in placement.pools]
    pools = Pools(
        of_strategies=np.repeat(np.arange(len(parts)), [len(part.strategies) for part in parts]),
        of_stages=of_stages,
        transfer_s=tuple(transfer_s),
        overhead_bytes=tuple(parts[pool].overhead_of(stage) + spared[pool] for stage, pool in enumerate(of_stages)),
        order=placement.pools,
    )
    return _joined(pipeline, parts, pools, np.block(blocks))


def _switches(parts: Sequence[CostTables], configs: Sequence[JobConfig], row: int, column: int) -> NDArray[np.float64]:
    """Seconds [K, S, S'] of resharding from the strategies of one group to those of another; 0 if they are not
    neighbours."""
    before, after = parts[row].strategies, parts[column].strategies
    if row == column:
        return parts[row].switches
    if column - row == 1:
        found = border_table(before, after, configs[row], configs[column])
        return np.concatenate([found] * (len(parts[row].layer_types) // len(found)))
    return np.zeros((len(parts[row].layer_types), len(before), len(after)))


def _joined(
    pipeline: PipelineConfig, parts: Sequence[CostTables], pools: Pools, switch_s: NDArray[np.float64]
) -> CostTables:
    """Concatenate the tables of the groups, with these seconds [K, S, S] between strategies."""
    first = parts[0]
    return CostTables(
        pipeline=pipeline,
        layer_types=first.layer_types,
        layers=first.layers,
        strategies=tuple(strategy for part in parts for strategy in part.strategies),
        legal=_beside(parts, "legal"),
        time_s=_beside(parts, "time_s"),
        static_bytes=_beside(parts, "static_bytes"),
        activation_bytes=_beside(parts, "activation_bytes"),
        transient_bytes=_beside(parts, "transient_bytes"),
        freed_bytes=None if first.freed_bytes is None else _beside(parts, "freed_bytes"),
        buffers=None if first.buffers is None else np.concatenate([part.buffers_of for part in parts], axis=2),
        repeats=first.repeats,
        stage_bytes={
            count: np.concatenate([part.stage_bytes[count] for part in parts], axis=1) for count in first.stage_bytes
        },
        received=_received(parts, pools),
        switch_s=switch_s,
        transfer_s=min(pools.transfer_s[1:], default=0.0),
        overhead_bytes=min(pools.overhead_bytes),
        last_types=first.last_types,
        cross_layer_inputs=first.cross_layer_inputs,
        pools=pools,
    )


def _beside(parts: Sequence[CostTables], name: str) -> NDArray[Any]:
    return np.concatenate([getattr(part, name) for part in parts], axis=1)


def _received(parts: Sequence[CostTables], pools: Pools) -> Received | None:
    """Return the activations that stages receive; between groups they arrive in even parts."""
    own = [part.received.of(part.layout_of) for part in parts if part.received is not None]
    if len(own) < len(parts):
        return None
    starts = np.cumsum([0, *(each.layouts.max(initial=-1) + 1 for each in own)])
    return Received(
        hidden_bytes=np.concatenate([each.hidden_bytes for each in own]),
        layouts=np.concatenate([each.layouts + start for each, start in zip(own, starts, strict=False)]),
        kept=own[0].kept,
        is_apart=pools.of_strategies[:, None] != pools.of_strategies,
    )
