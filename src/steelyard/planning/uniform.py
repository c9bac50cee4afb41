"""Plans of one strategy everywhere, as one takes them without a planner; searched as hard as any other plan.

A uniform plan has one strategy for the whole model, one remat choice for all blocks and none for the embedding and the
head, which no framework recomputes; layers without experts leave expert parallelism out, and an embedding or a head
that tensor parallelism does not divide (GPT-2's 50,257 tokens) has its ranks take samples instead. Microbatches, stages
and cuts are searched like those of any other plan, so that what is gained over a uniform plan is gained over the best.

Source: what users of `torch.nn.parallel.DistributedDataParallel`, `fully_shard`, and Megatron-LM or torchtitan ("3D" to
"5D") set.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import usable_bytes
from steelyard.cost.job import Job
from steelyard.cost.tables import LAST, CostTables
from steelyard.model.chain import LayerRole
from steelyard.plan.strategy import Strategy
from steelyard.search import OnDemand, search
from steelyard.search.frontier import distinct

MOST_MISSES = 16
"""Plans that do not fit of which the nearest miss is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UniformChoice:
    """One strategy for all layers of a configuration, with one remat choice for the blocks."""

    index: int
    """Of the configuration among those given."""
    config_tables: CostTables
    column: NDArray[np.int64]
    """[K] the strategy of each layer type."""
    least_s: float
    """What no plan of it is faster than: all stages alike, and nothing sent between them, or what is known of all."""
    least_bytes: float
    """What the fullest device of any plan of it holds at least: all of them alike."""

    def tables(self) -> CostTables:
        """The cost tables of this choice alone."""
        kept = distinct(self.column)
        narrowed = self.config_tables.select(strategies=kept.tolist())
        narrowed.legal[self.column[:, None] != kept] = False
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
    has_all = tables.legal[rows, columns][counts > 0].all(axis=0) & np.any(columns == blocks, axis=0)
    columns = columns[:, has_all]
    work_s = counts @ tables.time_s[rows, columns]
    least = min(map(pipeline.in_flight, range(pipeline.num_stages)))
    num_bytes = counts @ tables.held_bytes(least)[rows, columns]
    for number, (least_s, least_bytes) in enumerate(zip(work_s.tolist(), num_bytes.tolist(), strict=True)):
        yield UniformChoice(
            index=index,
            config_tables=tables,
            column=columns[:, number],
            least_s=max(given.least_s, least_s * (1 + (pipeline.num_passes - 1) / pipeline.num_stages)),
            least_bytes=tables.overhead_bytes + least_bytes / pipeline.num_stages,
        )


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
