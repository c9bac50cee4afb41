"""Plans of the plain kinds that one takes without a planner, each the best of its kind that fits.

A plain plan has one strategy for the whole model, one remat choice for all blocks and none for the embedding and the
head, which no framework recomputes. Microbatches, and where the kind has a pipeline its stages and cuts, are searched
like those of any other plan, so that what is gained over a plain plan is gained over the best of its kind.

| kind     | strategies                         | pipeline        |
|----------|------------------------------------|-----------------|
| DDP      | dp                                 | none            |
| FSDP     | fsdp, ZeRO-2 or ZeRO-3             | none            |
| 3D       | dp and tp (with or without sp)     | any, cuts free  |

Source: what users of `torch.nn.parallel.DistributedDataParallel`, `fully_shard` and Megatron-LM set.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import usable_bytes
from steelyard.cost.setting import Job
from steelyard.cost.tables import CostTables
from steelyard.model.chain import LayerRole
from steelyard.plan.kinds import DP, FSDP, TP, Kind
from steelyard.plan.strategy import Remat
from steelyard.search import search


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainKind:
    """A way to train that needs no planner, by the name that its users give it."""

    name: str
    kinds: frozenset[Kind]
    """The kinds of parallelism that a layer may use, all or some of them."""
    has_pipeline: bool


MOST_MISSES = 16
"""Plans that do not fit of which the nearest miss is looked for."""

PLAIN_KINDS = (
    PlainKind(name="plain DDP", kinds=frozenset({DP}), has_pipeline=False),
    PlainKind(name="plain FSDP", kinds=frozenset({FSDP}), has_pipeline=False),
    PlainKind(name="plain 3D (dp, tp, pp)", kinds=frozenset({DP, TP}), has_pipeline=True),
)


def plain_tables(
    kind: PlainKind, job: Job, settings: Sequence[CostTables], floors: Sequence[CostTables]
) -> list[CostTables]:
    """Cost tables of the plain plans of a kind that may be its fastest, for each strategy and remat choice its own.

    ``floors`` are of every setting the tables with bytes that no plan of it is below.

    Left out are those that cannot fit, unless none can, and those that are slower than one that is found at once.
    """
    pairs = zip(settings, floors, strict=True)
    choices = [choice for setting, floor in pairs for choice in _choices(setting, floor, job, kind)]
    fitting = [each for each in choices if each.least_bytes <= usable_bytes(job) + 1]
    if not fitting:
        return [each.tables() for each in sorted(choices, key=lambda each: each.least_bytes)[:MOST_MISSES]]
    kept: list[CostTables] = []
    best_s = math.inf
    for choice in sorted(fitting, key=lambda each: each.least_s):
        if choice.least_s > best_s:
            break
        kept.append(choice.tables())
        found = search(kept[-1:], usable_bytes(job), num_alternatives=0).best
        best_s = min(best_s, math.inf if found is None else found.score_s)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """One strategy for all layers of a setting, with one remat choice for the blocks."""

    setting: CostTables
    ends: int
    blocks: int
    is_block: NDArray[np.bool_]
    """[K]"""
    least_s: float
    """What no plan of it is faster than: all stages alike, and nothing sent between them."""
    least_bytes: float
    """What the fullest device of any plan of it holds at least: all of them alike, by the floor of the setting."""

    def tables(self) -> CostTables:
        """The cost tables of this choice alone."""
        if self.blocks == self.ends:
            return self.setting.select(strategies=[self.ends])
        narrowed = self.setting.select(strategies=[self.ends, self.blocks])
        narrowed.legal[self.is_block, 0] = False
        narrowed.legal[~self.is_block, 1] = False
        return narrowed


def _choices(tables: CostTables, floor: CostTables, job: Job, kind: PlainKind) -> Iterator[_Choice]:
    """The choices of a setting that are of a plain kind and legal for every layer."""
    pipeline = tables.pipeline
    if pipeline.num_stages > 1 and not kind.has_pipeline:
        return
    roles = {each.name: each.role for each in job.chain.kinds}
    is_block = np.array([roles[name.partition(" (")[0]] is LayerRole.BLOCK for name in tables.kinds], dtype=bool)
    counts = np.bincount(tables.layers, minlength=len(tables.kinds))
    held, of_block = floor.static_bytes + floor.activation_bytes, is_block[list(tables.layers)]
    places = {strategy: index for index, strategy in enumerate(tables.strategies)}
    for strategy, ends in places.items():
        if strategy.remat is not Remat.NONE or not set(strategy.kinds) <= kind.kinds:
            continue
        for remat in Remat:
            blocks = places.get(replace(strategy, remat=remat))
            if blocks is None:
                continue
            column = np.where(is_block, blocks, ends)
            rows = np.arange(len(column))
            if tables.legal[rows, column][counts > 0].all():
                work_s = float(counts @ tables.time_s[rows, column])
                least_s = work_s * (1 + (pipeline.num_passes - 1) / pipeline.num_stages)
                whole = held[list(floor.layers), np.where(of_block, blocks, ends)].sum()
                yield _Choice(
                    setting=tables,
                    ends=ends,
                    blocks=blocks,
                    is_block=is_block,
                    least_s=least_s,
                    least_bytes=floor.overhead_bytes + float(whole) / pipeline.num_stages,
                )
