r"""Virtual stages: fold the cost tables of a pipeline configuration whose chunks are all cut and trained identically.

A model of a first layer, $B$ blocks and a last layer becomes a chain of $B/v$ blocks between the same two ends. Block
$j$ represents the $v$ blocks $j, j + B/v, \ldots$, one in each chunk, all under one strategy. Dividing the chain into
$P$ stages determines the layers of every chunk of every stage; `unfold_layers` and `unfold_parts` convert back.

A pass is one microbatch through one chunk, and a step has $mv$ passes. The time of a folded block is that of one block,
and its static bytes are those of $v$ blocks. The first layer runs in every $v$-th pass of the first stage, and the last
layer in every $v$-th pass of the last stage: $1/v$ of their time counts, and their saved bytes count once per
microbatch in flight in their own chunk (`_in_chunks`).

$$T = \sum_i t_i + (mv-1)\,\max_i t_i$$

is then the step time of `steelyard.cost.simulator` for identical stages and chunks, and close to it for others. The
first stage also receives from the last one in all its chunks except the first; this is in the time of the first layer.

If $v$ divides $B + 1$ or $B + 2$ instead of $B$, the last layer, or both ends, replace a block: the last chunk has one
block fewer at its end, and in the second case the first chunk has one fewer at its beginning. The folded block at that
place represents $v - 1$ blocks. Megatron calls this `account_for_loss_in_pipeline_split` and
`account_for_embedding_in_pipeline_split`.

If the chunks lie in a V (`PipelineConfig.is_v`), there are two, and block $j$ represents blocks $j$ and $B - 1 - j$.
The first stage has both ends: the folded chain begins with the first and the last layer of the model. The working
memory of the last layer counts in addition to that of the blocks, because the last layer runs while their passes are in
flight. These tables are rough: resharding next to the ends and times of filling and draining are approximate, so that
neither their optimum nor their bound proves anything about the simulated step.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, for the schedule; the folding is ours.
Not modelled: chunks cut differently; the redistribution between the last stage and the next chunk of the first.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from steelyard.cost.tables import LAST, CostTables
from steelyard.schedules import PipelineConfig
from steelyard.schedules.pipeline import Column

Entry = TypeVar("Entry")


def why_not_folded(
    layers: Sequence[int], *, num_stages: int, num_chunks: int, is_v: bool = False, ends_replace_blocks: bool = False
) -> str | None:
    """Return the reason why these layers (their types) do not divide into identical chunks; None if they do.

    ``ends_replace_blocks`` allows the last layer, or both ends, to replace a block.
    """
    blocks = layers[1:-1]
    if num_stages < 2 or num_chunks < 2:
        return "takes two stages and two chunks or more"
    if sum(missing := missing_blocks(len(blocks), num_chunks)) > (2 if ends_replace_blocks else 0):
        return f"{len(blocks)} blocks do not divide into {num_chunks} chunks"
    period = (len(blocks) + sum(missing)) // num_chunks
    if period < num_stages:
        return f"{num_stages} stages of {num_chunks} chunks need {num_stages * num_chunks} blocks or more"
    if is_v:
        return f"the blocks of {num_chunks} chunks differ" if sum(missing) or blocks != blocks[::-1] else None
    if any(blocks[place] != blocks[place + period] for place in range(len(blocks) - period)):
        return f"the blocks of {num_chunks} chunks differ"
    return None


def missing_blocks(num_blocks: int, num_chunks: int) -> tuple[int, int]:
    """Return the number of missing blocks at the beginning of the first chunk and at the end of the last one."""
    missing = -num_blocks % num_chunks
    return missing // 2, missing - missing // 2


def folded(tables: CostTables, pipeline: PipelineConfig, *, round_trip_s: float, fill: float = 1.0) -> CostTables:
    """Fold the tables of a configuration without chunks into those with chunks (see `why_not_folded`).

    ``round_trip_s``: seconds to send from the last stage to the first; ``fill`` as `CostTables.fill`.
    """
    num_chunks = pipeline.num_chunks
    first, last = tables.layers[0], tables.layers[-1]
    blocks = tables.layers[1:-1]
    alone = {first, last} - set(blocks)
    share = np.ones((len(tables.layer_types), 1))
    copies = np.full((len(tables.layer_types), 1), num_chunks)
    for layer_type in alone:
        share[layer_type], copies[layer_type] = 1 / num_chunks, 1
    time_s = tables.time_s * share
    time_s[first] += round_trip_s * (num_chunks - 1) / num_chunks
    activation_bytes = tables.activation_bytes.copy()
    for layer_type, stage, chunk in ((first, 0, 0), (last, pipeline.stage_of_last, num_chunks - 1)):
        if layer_type in alone:
            activation_bytes[layer_type] = _in_chunks(activation_bytes[layer_type], pipeline, stage, {chunk})
    whole = replace(
        tables,
        pipeline=pipeline,
        time_s=fill * time_s,
        switch_s=tables.switch_s if fill == 1 else fill * tables.switch_s,
        transfer_s=fill * tables.transfer_s,
        fill=fill,
        static_bytes=tables.static_bytes * copies,
        activation_bytes=activation_bytes,
    )
    if pipeline.is_v:
        static, works = whole.static_bytes.copy(), whole.transient_bytes.copy()
        static[last] += works[last]
        works[last] = 0
        layers = (first, last, *blocks[: len(blocks) // 2])
        return replace(whole, static_bytes=static, transient_bytes=works, layers=layers)
    before, behind = missing_blocks(len(blocks), num_chunks)
    period = (len(blocks) + before + behind) // num_chunks
    places = [*blocks[period - before : period], *blocks[: period - before]]
    for place, stage in [(0, 0)] * before + [(-1, pipeline.num_stages - 1)] * behind:
        whole, places[place] = _with_missing(whole, places[place], stage, place % num_chunks)
    return replace(whole, layers=(first, *places, last))


def _in_chunks(saved: Column, pipeline: PipelineConfig, stage: int, chunks: Container[int]) -> Column:
    """Spread the bytes that a layer of these chunks saves per microbatch over all passes in flight of a stage."""
    held = pipeline.passes(stage).in_flight([each in chunks for each in range(pipeline.num_chunks)])
    return -(-held * saved // pipeline.in_flight(stage))


def _with_missing(tables: CostTables, layer_type: int, stage: int, chunk: int) -> tuple[CostTables, int]:
    """Return the tables with an additional layer type, as this one but missing in one chunk, and its index."""
    count, chunks = len(tables.layer_types), tables.pipeline.num_chunks
    own = [layer_type] + ([tables.last_types[layer_type]] if tables.last_types else [])
    found = tables.select([*range(count), *own])
    time_s, static_bytes, saved = found.time_s.copy(), found.static_bytes.copy(), found.activation_bytes.copy()
    time_s[count:] *= (chunks - 1) / chunks
    static_bytes[count:] -= static_bytes[count:] // chunks
    saved[count:] = _in_chunks(saved[count:], tables.pipeline, stage, {*range(chunks)} - {chunk})
    name = f"{tables.layer_types[layer_type]} ({count}: {chunks - 1} of {chunks})"
    return replace(
        found,
        layer_types=(*tables.layer_types, name, *([name + LAST] if tables.last_types else [])),
        last_types=(*tables.last_types, *([count + 1] * 2 if tables.last_types else [])),
        time_s=time_s,
        static_bytes=static_bytes,
        activation_bytes=saved,
    ), count


def unfold_layers(
    entries: Sequence[Entry], num_chunks: int, num_layers: int, *, is_v: bool = False
) -> tuple[Entry, ...]:
    """Return an entry for each layer of the model, from one for every layer of folded tables."""
    if is_v:
        first, last, *own = entries
        return (first, *own, *reversed(own), last)
    blocks = tuple(entries[1:-1]) * num_chunks
    before, _ = missing_blocks(num_layers - 2, num_chunks)
    return (entries[0], *blocks[before:][: num_layers - 2], entries[-1]) if num_chunks > 1 else tuple(entries)


def unfold_parts(
    boundaries: Sequence[int], num_chunks: int, num_layers: int, *, is_v: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yield (stage, first layer, end) of every part of the pipeline, in the order of the layers."""
    period, num_stages = boundaries[-1] - 2, len(boundaries) - 1
    if is_v:
        cuts = [0, *(boundary - 1 for boundary in boundaries[1:])]
        yield from ((stage, cuts[stage], cuts[stage + 1]) for stage in range(num_stages))
        yield from (
            (stage, num_layers - cuts[stage + 1], num_layers - cuts[stage]) for stage in range(num_stages)[::-1]
        )
        return
    before = missing_blocks(num_layers - 2, num_chunks)[0] if num_chunks > 1 else 0
    first = 0
    for chunk in range(num_chunks):
        for stage in range(num_stages):
            end = (boundaries[stage + 1] if stage < num_stages - 1 else period + 1) + chunk * period - before
            end = num_layers if (chunk, stage) == (num_chunks - 1, num_stages - 1) else end
            yield stage, first, end
            first = end
