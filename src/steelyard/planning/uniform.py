"""Plans of one strategy everywhere, as one takes them without a planner; searched as hard as any other plan.

A uniform plan has one strategy for the whole model, one remat choice for all blocks and none for the embedding and the
head, which no framework recomputes. An engine may recompute the first n blocks of every stage instead: the best plans
with remat free for each block are found first, and each is then given the least n with which it fits. That step keeps
the cuts, so it is exact for one stage and a good answer, not a proven one, for more. Layers without experts leave
expert parallelism out, and an embedding or a head that tensor parallelism does not divide (GPT-2's 50,257 tokens) has
its ranks take samples instead. Microbatches, stages and cuts are searched like those of any other plan, so that what is
gained over a uniform plan is gained over the best.

Source: what users of `torch.nn.parallel.DistributedDataParallel`, `fully_shard`, and Megatron-LM or torchtitan ("3D" to
"5D") set.
"""

import heapq
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job
from steelyard.cost.tables import LAST, CostTables
from steelyard.engines.capabilities import block_layers
from steelyard.model.chain import LayerRole
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs, stages_of
from steelyard.plan.strategy import Remat, Strategy
from steelyard.planning.pins import Pin
from steelyard.planning.price import peak_bytes, with_price
from steelyard.search import OnDemand, search
from steelyard.search.frontier import distinct

MOST_MISSES = 16
"""Plans that do not fit of which the nearest miss is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UniformChoice:
    """One strategy for all layers of a configuration, with one remat choice for the blocks, or a free one for each."""

    index: int
    """Of the configuration among those given."""
    config_tables: CostTables
    columns: NDArray[np.int64]
    """[K, R] the strategies of each layer type: one, or with free remat one for each choice."""
    least_s: float
    """What no plan of it is faster than: all stages alike, and nothing sent between them, or what is known of all."""
    least_bytes: float
    """What the fullest device of any plan of it holds at least: all of them alike."""

    def tables(self) -> CostTables:
        """The cost tables of this choice alone."""
        kept = distinct(self.columns.ravel())
        narrowed = self.config_tables.select(strategies=kept.tolist())
        narrowed.legal[~(self.columns[:, :, None] == kept).any(axis=1)] = False
        return narrowed


def uniform_tables(job: Job, given: Sequence[OnDemand], *, deadline: float = math.inf) -> list[CostTables]:
    """Cost tables of the uniform plans that may be the fastest, for each strategy and remat choice its own.

    Left out are those that cannot fit, unless none can, those that are slower than one that is found at once, and after
    ``deadline``, a `time.monotonic` value, all that promise less than those before.
    """
    seen: list[UniformChoice] = []
    kept: list[UniformChoice] = []
    reached_s = [math.inf]
    for choice in uniform_choices(job, given, known_s=lambda: min(reached_s)):
        if kept and time.monotonic() > deadline:
            break
        seen.append(choice)
        if choice.least_bytes > usable_bytes(job):
            continue
        found = search([choice.tables()], usable_bytes(job), num_alternatives=0).best
        if found is not None and found.score_s <= min(reached_s):
            kept.append(choice)
            reached_s.append(found.score_s)
    kept = kept or sorted(seen, key=lambda each: each.least_bytes)[:MOST_MISSES]
    return [each.tables() for each in kept]


def uniform_choices(
    job: Job,
    given: Sequence[OnDemand],
    *,
    known_s: Callable[[], float] = lambda: math.inf,
) -> Iterator[UniformChoice]:
    """The choices that are legal for every layer, the one that promises the least time first.

    Ends where none that is left is as fast as ``known_s``, which is asked again before each: the tables of
    configurations that come to nothing are not made.
    """
    waiting: list[tuple[float, int, int, UniformChoice | None]] = [
        (each.least_s, index, 0, None) for index, each in enumerate(given)
    ]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] <= known_s():
        _, index, _, choice = heapq.heappop(waiting)
        if choice is not None:
            yield choice
            continue
        for number, each in enumerate(_choices(index, given[index], job)):
            heapq.heappush(waiting, (each.least_s, index, number, each))


def _choices(index: int, given: OnDemand, job: Job) -> Iterator[UniformChoice]:
    """The choices of a configuration that are legal for every layer."""
    tables, pipeline = given.tables, given.pipeline
    roles = {each.name: each.role for each in job.chain.layer_types}
    is_block = np.array(
        [[roles[name.removesuffix(LAST).partition(" (")[0]] is LayerRole.BLOCK] for name in tables.layer_types],
        dtype=bool,
    )
    blocks, dense, ends, undivided = _alike(tables.strategies)
    of_ends = np.where(tables.legal[:, ends], ends, undivided)
    columns = np.where(is_block, np.where(tables.legal[:, blocks], blocks, dense), of_ends)
    rows = np.arange(len(tables.layer_types))[:, None]
    counts = np.bincount(tables.layers, minlength=len(tables.layer_types))
    least = min(map(pipeline.in_flight, range(pipeline.num_stages)))
    is_legal, time_s = tables.legal[rows, columns], tables.time_s[rows, columns]
    num_bytes = tables.held_bytes(least)[rows, columns]
    is_used, is_some = counts > 0, np.any(columns == blocks, axis=0)
    for every in _remat_sets(tables.strategies, blocks, has_pairs=job.engine.capabilities.remats_first_blocks):
        has_all = is_legal[:, every].any(axis=2)[is_used].all(axis=0) & is_some[every].all(axis=1)
        sets = every[has_all]
        legal = is_legal[:, sets]
        work_s = counts[is_used] @ np.where(legal, time_s[:, sets], np.inf).min(axis=2)[is_used]
        held = counts[is_used] @ np.where(legal, num_bytes[:, sets], np.inf).min(axis=2)[is_used]
        for chosen, least_s, least_bytes in zip(sets, work_s.tolist(), held.tolist(), strict=True):
            yield UniformChoice(
                index=index,
                config_tables=tables,
                columns=columns[:, chosen],
                least_s=max(given.least_s, least_s * (1 + (pipeline.num_passes - 1) / pipeline.num_stages)),
                least_bytes=tables.overhead_bytes + least_bytes / pipeline.num_stages,
            )


def _remat_sets(
    strategies: Sequence[Strategy], blocks: NDArray[np.int64], *, has_pairs: bool
) -> Iterator[NDArray[np.int64]]:
    """[M, 1] each strategy of blocks, by its place among ``blocks``; [M, 2] each without and with full remat."""
    yield np.arange(len(blocks))[:, None]
    if has_pairs:
        places = {strategies[index]: place for place, index in enumerate(blocks.tolist())}
        pairs = [
            (place, places[full])
            for strategy, place in places.items()
            if strategy.remat is Remat.NONE and (full := replace(strategy, remat=Remat.FULL)) in places
        ]
        yield np.array(pairs, dtype=np.int64).reshape(-1, 2)


def with_first_blocks_recomputed(plan: Plan, job: Job, pins: Sequence[Pin] = ()) -> Plan | None:
    """Return the plan with the first n blocks of every stage recomputed, n the least with which it fits.

    None where it fits with no n that the pins of its layers leave.
    """
    blocks = set(block_layers(plan.chain()))
    most = max(sum(layer in blocks for layer in part.layers) for part in plan.parts)

    def fits(count: int) -> bool:
        return peak_bytes(with_price(_first_blocks(plan, count, blocks), job)) <= job.budget_bytes

    if not fits(most):
        return None
    for count in range(bisect_left(range(most), True, key=fits), most + 1):
        found = _first_blocks(plan, count, blocks)
        if all(pin.allows(found.strategies[layer]) for pin in pins for layer in blocks if pin.covers(layer)):
            return found
    return None


def _first_blocks(plan: Plan, count: int, blocks: set[int]) -> Plan:
    parts = []
    for part in plan.parts:
        seen = 0
        strategies: list[Strategy] = []
        for layer, strategy in enumerate(part.strategies, start=part.first_layer):
            recomputes = layer in blocks and seen < count
            seen += layer in blocks
            strategies.append(replace(strategy.without_remat(), remat=Remat.FULL if recomputes else Remat.NONE))
        parts.append(StagePart(ranks=part.ranks, runs=fold_runs(part.first_layer, tuple(strategies))))
    return plan.model_copy(update={"stages": stages_of(parts), "prediction": None})


@lru_cache(maxsize=64)
def _alike(strategies: tuple[Strategy, ...]) -> NDArray[np.int64]:
    """[4, N] strategies: of blocks with experts, of blocks without, of other layers, and of those whole.

    The last is the one before where none of the strategies is the same with whole tensors.
    """
    places = {strategy: index for index, strategy in enumerate(strategies)}
    found = []
    for strategy, blocks in places.items():
        whole = strategy.with_whole_experts()
        at_ends = whole.without_remat()
        dense, ends = places.get(whole), places.get(at_ends)
        if dense is not None and ends is not None:
            found.append((blocks, dense, ends, places.get(at_ends.with_whole_tensors(), ends)))
    return np.array(found, dtype=np.int64).reshape(-1, 4).T
