"""Plans of Llama with every leaf of the decision tree over 4 and 8 devices, every pipeline degree and schedule.

The leaves take turns on the layers of one-stage plans, so that each strategy meets others before and after it. Over 4
devices each comes with one kind of remat, in turn, and at night with every dimension; over 8, which divide layers no
further in kind, every order and degree comes once, with sp, ZeRO stage and remat in turn. Every pipeline degree runs
under every schedule, with the leaves of its stages in turn.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product

from steelyard.plan.dimensions import Dimension
from steelyard.plan.strategy import Remat, Strategy
from steelyard.search.space import SpaceOptions, enumerate_levels, mixing
from tests.runtime.cases import Case
from tests.runtime.models import FAMILY_CONFIGS, make_plan

_LAYERS = 12
_NUM_DEVICES = 8


def leaves(num_devices: int) -> list[Strategy]:
    """Every strategy of a stage: orders and degrees, sp, ZeRO stage and remat, as far as the runtime has them."""
    found = []
    for levels in enumerate_levels(num_devices, SpaceOptions().dimensions):
        dimensions = {level.dimension.name for level in levels}
        if mixing(levels, SpaceOptions()) is not None:
            continue
        choices = product(
            (False, True) if "tp" in dimensions else (False,), (2, 3) if "fsdp" in dimensions else (3,), Remat
        )
        found += [Strategy.of(levels=levels, sp=sp, zero=zero, remat=remat) for sp, zero, remat in choices]
    return [strategy for strategy in found if strategy.is_aligned]


def _config(num_blocks: int) -> dict[str, object]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}
    return FAMILY_CONFIGS["llama"] | heads | {"num_hidden_layers": num_blocks}


def _edge(strategy: Strategy) -> Strategy:
    """The strategy for an embedding or a head, which take no selective remat."""
    remat = Remat.NONE if strategy.remat is Remat.SELECTIVE else strategy.remat
    return replace(strategy, remat=remat)


def one_of_each_order(strategies: list[Strategy]) -> list[Strategy]:
    """Return one strategy per order of dimensions and degrees, so that sp, ZeRO stage and remat take turns."""
    groups = [list(group) for _, group in groupby(strategies, key=lambda strategy: strategy.levels)]
    return [group[4 * place % len(group)] for place, group in enumerate(groups)]


def dimensions_and_remat(strategy: Strategy) -> tuple[tuple[Dimension, ...], Remat]:
    """Properties that a recomputation fault is likely to depend on."""
    return tuple(level.dimension for level in strategy.levels), strategy.remat


def with_remat_in_turn(strategies: list[Strategy]) -> list[Strategy]:
    """Return, in turn, one of the strategies that differ only in remat, and every dimension with every remat in any
    order."""
    groups = [list(group) for _, group in groupby(strategies, key=lambda each: replace(each, remat=Remat.NONE))]
    found = [group[place % len(group)] for place, group in enumerate(groups)]
    for strategy in strategies:
        if dimensions_and_remat(strategy) not in map(dimensions_and_remat, found):
            found.append(strategy)
    return found


FURTHER = "further "
"""Prefix of the names of cases that cases with another remat cover."""


def _cases_of_leaves() -> Iterator[tuple[str, Case]]:
    of_four = with_remat_in_turn(leaves(4))
    further = [each for each in leaves(4) if each not in of_four]
    of_eight = one_of_each_order(leaves(_NUM_DEVICES))
    for what, num_devices, every in (("", 4, of_four), (FURTHER, 4, further), ("", _NUM_DEVICES, of_eight)):
        for first in range(0, len(every), _LAYERS):
            blocks = every[first : first + _LAYERS]
            chosen = [_edge(blocks[-1]), *blocks, _edge(blocks[0])]
            name = f"{what}leaves {first} to {first + len(blocks) - 1} of {num_devices} devices"
            yield name, _case(", ".join(map(str, chosen)), num_devices=num_devices)


def _cases_of_schedules() -> Iterator[tuple[str, Case]]:
    for degree in (2, 4, 8):
        every = leaves(_NUM_DEVICES // degree)
        for schedule in ("gpipe", "1f1b", "interleaved-1f1b"):
            chunks = 2 if schedule == "interleaved-1f1b" else 1
            parts = [every[(2 * part) % len(every)] for part in range(degree * chunks)]
            others = [every[(2 * part + 5) % len(every)] for part in range(degree * chunks)]
            stages = [f"{one}, {two}" if chunks == 1 else f"{one}" for one, two in zip(parts, others, strict=True)]
            stages[0] = f"{_edge(parts[0])}, {stages[0]}"
            stages[-1] = f"{stages[-1]}, {_edge(parts[-1])}"
            yield f"{degree} stages, {schedule}", _case(*stages, schedule=schedule, num_chunks=chunks)


def _case(*stages: str, schedule: str = "1f1b", num_chunks: int = 1, num_devices: int = _NUM_DEVICES) -> Case:
    num_blocks = sum(len(stage.split(",")) for stage in stages) - 2
    microbatches = max(2, len(stages) // num_chunks)
    make = partial(
        make_plan,
        _config(num_blocks),
        *stages,
        num_microbatches=microbatches,
        global_batch=8 * microbatches,
        seq_len=16,
        schedule=schedule,
        num_devices=num_devices,
        num_chunks=num_chunks,
    )
    return Case(make=make, num_steps=1)


CASES: dict[str, Case] = dict([*_cases_of_leaves(), *_cases_of_schedules()])
