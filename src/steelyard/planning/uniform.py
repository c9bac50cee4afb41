"""Plans of one strategy everywhere, as used without a planner, searched as thoroughly as any other plan.

A uniform plan has one strategy for the whole model and one remat choice for all blocks. The embedding and the head are
not recomputed, because no framework recomputes them. An engine may also recompute the first n blocks of every stage.
Layers without experts do not use expert parallelism, and if tensor parallelism does not divide an embedding or a head
(GPT-2's 50,257 tokens), its ranks take samples instead, except in engines of one strategy. Microbatches, stages and
cuts are searched like those of any other plan, so a gain over a uniform plan is a gain over the best one.

Source: the settings of users of `torch.nn.parallel.DistributedDataParallel`, `fully_shard`, and Megatron-LM or
torchtitan ("3D" to "5D").
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.build import usable_bytes
from steelyard.cost.fold import missing_blocks
from steelyard.cost.job import Job
from steelyard.cost.tables import CostTables
from steelyard.model.chain import LayerRole
from steelyard.plan.strategy import Remat, Strategy
from steelyard.search.cuts import Choice, Ints, Leading
from steelyard.search.layers import ROUNDING

REMATS = (Remat.NONE, Remat.SELECTIVE, Remat.FULL)
"""Remat choices in the order of the recomputed work, least first."""
HALVINGS = 24
"""Number of bisections of the interval that contains the minimum time of the slowest stage."""


def uniform_choices(job: Job, tables: CostTables, *, remat_runs: bool = False) -> list[Choice]:
    """Return the uniform plans of a pipeline configuration, up to their cuts, that are legal for every layer.

    There is one for each strategy and remat choice. If the engine can recompute the first n blocks of every stage,
    there is one for each strategy with all n. With ``remat_runs`` there is also one for each strategy in which each
    stage recomputes more in as many of its first blocks as it needs.
    """
    roles = {each.name: each.role for each in job.chain.layer_types}
    of_rows = [roles[name] for name in tables.type_names]
    is_block = np.array([[role is LayerRole.BLOCK] for role in of_rows], dtype=bool)
    blocks, dense, others, undivided = _alike(tables.strategies)
    # an engine of one strategy gives the tp of its blocks to embedding and head
    of_ends = np.where(tables.legal[:, others] | (not job.engine.capabilities.mixes_layers), others, undivided)
    alike = np.where(is_block, np.where(tables.legal[:, blocks], blocks, dense), of_ends)
    counts = np.bincount(tables.layers, minlength=len(tables.layer_types))
    slowest = _SlowestStage(tables, usable_bytes(job), int(np.argmax(np.where(is_block[:, 0], counts, -1))))
    # a first chunk with one block fewer would recompute one fewer than the other chunks
    lacks_first = missing_blocks(job.chain.num_layers - 2, tables.pipeline.num_chunks)[0] > 0
    every = np.arange(len(blocks))
    groups = [(np.stack([every, every], axis=1)[:, None], Leading.NONE)]
    if remat_runs:
        groups.append((_remat_pairs(tables.strategies, tuple(itertools.combinations(REMATS, 2))), Leading.FREE))
    elif job.engine.capabilities.remats_first_blocks and not lacks_first:
        groups.append((_remat_pairs(tables.strategies, ((Remat.NONE, Remat.FULL),)), Leading.SAME))
    return list(_choices(tables, alike, (alike == blocks).any(axis=0), groups, slowest))


def _choices(
    tables: CostTables,
    columns: Ints,
    is_some: NDArray[np.bool_],
    groups: Sequence[tuple[Ints, Leading]],
    slowest: "_SlowestStage",
) -> Iterator[Choice]:
    """Yield the choices with these strategies [K, N] of layer types. ``is_some`` [N]: some layer type uses them."""
    pipeline = tables.pipeline
    rows = np.arange(len(columns))[:, None]
    counts = np.bincount(tables.layers, minlength=len(columns))
    is_used = counts > 0
    flights = min(map(pipeline.in_flight, range(pipeline.num_stages)))
    is_legal, time_s = tables.legal[rows, columns], tables.time_s[rows, columns]
    num_bytes = tables.held_bytes(flights)[rows, columns]
    for pairs, leading in groups:
        legal = is_legal[:, pairs]
        work_s = counts[is_used] @ np.where(legal, time_s[:, pairs], np.inf).min(axis=(2, 3))[is_used]
        held = counts[is_used] @ np.where(legal, num_bytes[:, pairs], np.inf).min(axis=(2, 3))[is_used]
        has_all = np.logical_or.reduce(legal, axis=(2, 3))[is_used].all(axis=0) & is_some[pairs].all(axis=(1, 2))
        slowest_s = slowest.least_s(*np.moveaxis(columns[slowest.row][pairs[has_all]], 2, 0))
        even_s = np.where(np.isfinite(slowest_s), np.maximum(work_s[has_all] / pipeline.num_stages, slowest_s), 0.0)
        least = np.where(np.isfinite(slowest_s), work_s[has_all] + (tables.num_passes - 1) * even_s, np.inf)
        for (first, *others), least_s, least_bytes in zip(
            pairs[has_all].tolist(), least.tolist(), held[has_all].tolist(), strict=True
        ):
            yield Choice(
                columns=columns[:, first[0]],
                recomputed=columns[:, first[1]],
                leading=leading,
                others=tuple((columns[:, plain], columns[:, recomputed]) for plain, recomputed in others),
                least_s=least_s * (1 - ROUNDING),
                least_bytes=tables.overhead_bytes + least_bytes / pipeline.num_stages,
            )


class _SlowestStage:
    r"""Lower bound of the slowest stage's time, by the blocks of one layer type and the memory of each stage.

    Stage $i$ holds $n_i$ of the $N$ blocks and recomputes $r_i$ of them, so $n_i t + r_i \delta \le T$ and
    $n_i h_i - r_i g_i \le R_i$, where a block holds $h_i$ bytes and frees $g_i$ of them if it is recomputed. The
    minimum $T$ for which real numbers with $\sum_i n_i \ge N$ satisfy this is a lower bound for every plan.
    """

    def __init__(self, tables: CostTables, budget_bytes: int, row: int) -> None:
        self.row, self._tables = row, tables
        self._count = tables.layers.count(row)
        self._rooms = np.array(tables.rooms(budget_bytes), dtype=np.float64)
        flights = list(map(tables.pipeline.in_flight, range(tables.pipeline.num_stages)))
        held = {each: tables.held_bytes(each).astype(np.float64) for each in set(flights)}
        last = tables.last_types[row] if tables.last_types else row
        self._held = np.stack([np.minimum(held[each][row], held[each][last]) for each in flights])

    def least_s(self, plain: Ints, recomputed: Ints) -> NDArray[np.float64]:
        """Lower bounds [M] in seconds for strategies [M, P] of blocks, plain and recomputed. Each stage has one of P
        pairs.

        Infinite if the blocks cannot fit.
        """
        times = self._tables.time_s[self.row]
        time_s, more_s = times[plain], times[recomputed] - times[plain]
        held, least = self._held[:, plain], np.minimum(self._held[:, plain], self._held[:, recomputed])
        rooms = np.maximum(self._rooms[:, None, None], 0.0)
        most = np.divide(rooms, least, out=np.full_like(least, np.inf), where=least > 0)
        rate = np.divide(more_s, held - least, out=np.full_like(least, np.inf), where=held > least)
        low, high = np.zeros(len(plain)), self._count * (time_s + np.maximum(more_s, 0.0)).max(axis=1)
        is_possible = np.minimum(most, self._count).max(axis=2).sum(axis=0) >= self._count
        with np.errstate(invalid="ignore", divide="ignore"):
            for _ in range(HALVINGS):
                middle = ((low + high) / 2)[:, None]
                mixed = (middle + rate * rooms) / (time_s + rate * held)
                mixed = np.where(np.isfinite(rate), mixed, np.divide(rooms, held))
                counts = np.minimum(np.minimum(middle / time_s, most), np.where(held > 0, mixed, np.inf))
                is_enough = counts.max(axis=2).sum(axis=0) >= self._count
                low, high = np.where(is_enough, low, middle[:, 0]), np.where(is_enough, middle[:, 0], high)
        return np.where(is_possible, low, np.inf)


@lru_cache(maxsize=64)
def _remat_pairs(strategies: tuple[Strategy, ...], wanted: tuple[tuple[Remat, Remat], ...]) -> Ints:
    """Indices [M, P, 2] into the strategies of `_alike`: for each sharding, the wanted pairs of remat choices, plain
    and recomputed."""
    places = {strategies[index]: place for place, index in enumerate(_alike(strategies)[0].tolist())}
    groups = []
    for sharding in dict.fromkeys(each.without_remat() for each in places):
        remats = {remat: places.get(sharding.with_remat(remat)) for remat in REMATS}
        pairs = [(remats[less], remats[more]) for less, more in wanted if None not in (remats[less], remats[more])]
        groups += [pairs + pairs[:1] * (len(wanted) - len(pairs))] if pairs else []
    return np.array(groups, dtype=np.int64).reshape(-1, len(wanted), 2)


@lru_cache(maxsize=64)
def _alike(strategies: tuple[Strategy, ...]) -> NDArray[np.int64]:
    """Indices [4, N] of strategies: of blocks with experts, of blocks without, of other layers, and of these with whole
    tensors.

    The last equals the one before if no strategy is the same with whole tensors.
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
