r"""A job on unlike pools of devices: whose costs each stage has, and the tables of its pools joined into one search.

Every stage lies in one pool. Its layers cost what they would on a cluster of that pool alone, so the tables of a
pipeline are those of its pools side by side (`CostTables.pools`). What only the border of two stages of unlike sizes
has is (between stages of equal size $r$ is that within the one that receives)

$$c = 2 \Big(\max(\ell_a, \ell_b) + \frac{A}{\min(G_a w_a, G_b w_b)}\Big), \qquad r = g_a(s_a) + g_b(s_b)$$

| symbol | unit  | meaning                                                                                     |
|--------|-------|---------------------------------------------------------------------------------------------|
| $c$    | s     | handing over a microbatch's activation in even parts and its gradient back                  |
| $A$    | bytes | activation of a microbatch, over all ranks of a stage                                       |
| $G$    | –     | ranks of the stage before and behind the border                                             |
| $w$    | B/s   | what a device reaches of the link to other pools                                            |
| $\ell$ | s     | latency of that link                                                                        |
| $g$    | s     | gathering the copies that ranks under tp without sp hold, of one activation, inside a pool  |

A budget is that of the roomiest pool; what the devices of another one have less counts as overhead of its stages.

Not modelled: the exchange of a tied matrix goes over the links of each stage's own pool.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import KnownCosts, border_s, build_tables, usable_bytes
from steelyard.cost.execution import Execution
from steelyard.cost.setting import Job, Setting
from steelyard.cost.switching import border_table
from steelyard.cost.tables import CostTables, Pools, Received
from steelyard.errors import InvalidPlanError
from steelyard.hardware import Cluster, MixedCluster
from steelyard.model.chain import ModelChain
from steelyard.plan.plan import Plan, Precision
from steelyard.plan.strategy import Strategy
from steelyard.schedules import PipelineConfig


@dataclass(frozen=True, kw_only=True)
class PooledJob:
    """One job on several pools; ``pools`` are that job on each of them alone, in the order of the cluster."""

    pools: tuple[Job, ...]
    cluster: MixedCluster

    @property
    def chain(self) -> ModelChain:
        """The model."""
        return self.pools[0].chain

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return self.pools[0].seq_len

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.pools[0].global_batch

    @property
    def precision(self) -> Precision:
        """What layers compute in."""
        return self.pools[0].precision

    @property
    def execution(self) -> Execution:
        """How the framework works."""
        return self.pools[0].execution

    @cached_property
    def budget_bytes(self) -> int:
        """What a device of the roomiest pool may hold."""
        return max(pool.budget_bytes for pool in self.pools)

    def on(self, tables: CostTables) -> Cluster | MixedCluster:
        """The pools that joined tables are of, in the order of their ranks."""
        assert tables.pools is not None, "tables of this job are joined"
        return self.cluster.only(tables.pools.order)

    def jobs(self, plan: Plan) -> tuple[Job, ...]:
        """The job of each stage of a plan; raises `InvalidPlanError` for pools that are not of this job."""
        names = [pool.cluster.name for pool in self.pools]
        used = plan.cluster.split("+")
        for name in used:
            if name not in names:
                raise InvalidPlanError(
                    field="cluster",
                    found=f"the pool {name!r}",
                    expected="one of " + ", ".join(names),
                    hint="plan for the pools that are there",
                )
        own = [self.pools[names.index(name)] for name in used]
        ends = list(accumulate(job.cluster.num_devices for job in own))
        return tuple(own[bisect_right(ends, stage.ranks[0])] for stage in plan.stages)


AnyJob = Job | PooledJob


def stage_settings(plan: Plan, job: AnyJob) -> tuple[Setting, ...]:
    """The setting of each stage of a plan; stages that are alike share one."""
    jobs, sizes = job.jobs(plan), plan.stage_sizes
    made = {
        (id(own), size): Setting(job=own, pipeline=plan.pipeline, stage_size=size)
        for own, size in zip(jobs, sizes, strict=True)
    }
    return tuple(made[id(own), size] for own, size in zip(jobs, sizes, strict=True))


def usable_of(job: AnyJob) -> int:
    """`usable_bytes`, of several pools those of the roomiest."""
    return max(map(usable_bytes, job.pools))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The pools that a pipeline goes through in order, by their places in the job, and how many stages each takes."""

    pools: tuple[int, ...]
    stages: tuple[int, ...]

    def sizes(self, job: PooledJob) -> tuple[int, ...]:
        """The ranks of a stage of each pool."""
        pairs = zip(self.pools, self.stages, strict=True)
        return tuple(job.pools[pool].cluster.num_devices // stages for pool, stages in pairs)

    def settings(self, job: PooledJob, pipeline: PipelineConfig) -> tuple[Setting, ...]:
        """The setting of the stages of each pool, which are all alike."""
        sizes = zip(self.pools, self.sizes(job), strict=True)
        return tuple(Setting(job=job.pools[pool], pipeline=pipeline, stage_size=size) for pool, size in sizes)


def pooled_tables(
    job: PooledJob,
    placement: Placement,
    pipeline: PipelineConfig,
    strategies: Sequence[tuple[Strategy, ...]],
    known: Sequence[KnownCosts],
) -> CostTables:
    """The tables of a pipeline over these pools; ``strategies`` and ``known`` are those of each in their order."""
    settings = placement.settings(job, pipeline)
    parts = tuple(build_tables(*each, pooled=True) for each in zip(settings, strategies, known, strict=True))
    border = [0.0] + [border_s(*pair) for pair in pairwise(settings)]
    of_stages = tuple(np.repeat(np.arange(len(parts)), placement.stages).tolist())
    starts = [0, *accumulate(placement.stages)]
    transfer_s = [parts[pool].transfer_s for pool in of_stages]
    for start, seconds in zip(starts, border, strict=False):
        transfer_s[start] = seconds
    blocks = [[_switches(parts, settings, row, column) for column in range(len(parts))] for row in range(len(parts))]
    most_bytes = usable_of(job)
    spared = [most_bytes - usable_bytes(job.pools[pool]) for pool in placement.pools]
    pools = Pools(
        of_strategies=np.repeat(np.arange(len(parts)), [len(part.strategies) for part in parts]),
        of_stages=of_stages,
        transfer_s=tuple(transfer_s),
        overhead_bytes=tuple(parts[pool].overhead_of(stage) + spared[pool] for stage, pool in enumerate(of_stages)),
        order=placement.pools,
        parts=parts,
    )
    return _joined(pipeline, parts, pools, np.block(blocks))


def _switches(parts: Sequence[CostTables], settings: Sequence[Setting], row: int, column: int) -> NDArray[np.float64]:
    """[K, S, S'] seconds from the strategies of one pool to those of another; 0 where none follows on the other."""
    before, after = parts[row].strategies, parts[column].strategies
    if row == column:
        return parts[row].switch_s
    if column - row == 1:
        found = border_table(before, after, settings[row], settings[column])
        return np.concatenate([found] * (len(parts[row].kinds) // len(found)))
    return np.zeros((len(parts[row].kinds), len(before), len(after)))


def _joined(
    pipeline: PipelineConfig, parts: Sequence[CostTables], pools: Pools, switch_s: NDArray[np.float64]
) -> CostTables:
    """The tables of the pools side by side, with these seconds [K, S, S] between strategies."""
    first = parts[0]
    return CostTables(
        pipeline=pipeline,
        kinds=first.kinds,
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
        last_kinds=first.last_kinds,
        pools=pools,
    )


def _beside(parts: Sequence[CostTables], name: str) -> NDArray[Any]:
    return np.concatenate([getattr(part, name) for part in parts], axis=1)


def _received(parts: Sequence[CostTables], pools: Pools) -> Received | None:
    """What stages receive; from another pool in even parts."""
    own = [part.received for part in parts if part.received is not None]
    if len(own) < len(parts):
        return None
    starts = np.cumsum([0, *(each.layouts.max(initial=-1) + 1 for each in own)])
    return Received(
        hidden_bytes=np.concatenate([each.hidden_bytes for each in own]),
        layouts=np.concatenate([each.layouts + start for each, start in zip(own, starts, strict=False)]),
        kept=own[0].kept,
        is_apart=pools.of_strategies[:, None] != pools.of_strategies,
    )
