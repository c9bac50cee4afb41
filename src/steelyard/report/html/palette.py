"""Colours by name, for terms and strategies; the values stand in ``style.css``, one for light and one for dark.

The hues are those of Okabe and Ito (2008), which people with any common colour blindness can tell apart, with a brown
darker and a pink lighter than all of them. Where there is more to tell than hues can, a pattern does: stripes for
recomputation, hatching for what is no work.
"""

from collections.abc import Iterable, Mapping, Sequence

from steelyard.plan.kinds import KINDS
from steelyard.plan.strategy import Remat, Strategy

_TIME_COLOURS = {
    "compute": "blue",
    "remat": "sky",
    "pipeline": "green",
    "switch": "yellow",
    "optimizer": "slate",
    "waiting": "idle",
    "fixed": "grey",
    "imbalance": "pink hatched",
}
MEMORY_COLOURS = {
    "parameters": "blue",
    "gradients": "sky",
    "optimizer": "slate",
    "gathered parameters": "green",
    "activations": "orange",
    "working set": "vermilion",
    "pipeline buffers": "purple",
    "context": "grey",
    "allocator slack": "idle",
}
HUES = ("blue", "orange", "green", "purple", "sky", "vermilion", "yellow", "slate", "brown", "pink", "grey")
PATTERNS = {Remat.NONE: "", Remat.SELECTIVE: "striped", Remat.FULL: "crossed"}


def time_colours() -> dict[str, str]:
    """The colour of every term of a step's time, those of the kinds of parallelism last."""
    return _TIME_COLOURS | {kind.name: kind.hue for kind in KINDS.values()}


def colours(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """A colour for each name: its own, or for a name without one the next hue that no other has."""
    found: dict[str, str] = {}
    names = list(names)
    free = [hue for hue in HUES if hue not in {known.get(name) for name in names}] or list(HUES)
    for name in names:
        found[name] = known[name] if name in known else free[len(found) % len(free)]
    return found


def strategy_classes(strategies: Sequence[Strategy]) -> dict[Strategy, str]:
    """The classes of each strategy: a hue for how it is parallel, the most used first, and a pattern for remat."""
    counts: dict[str, int] = {}
    for strategy in strategies:
        counts[division(strategy)] = counts.get(division(strategy), 0) + 1
    hue = {
        name: HUES[index % len(HUES)]
        for index, name in enumerate(sorted(counts, key=lambda each: (-counts[each], each)))
    }
    return {each: f"{hue[division(each)]} {PATTERNS[each.remat]}".strip() for each in dict.fromkeys(strategies)}


def division(strategy: Strategy) -> str:
    """How a strategy divides the work, recomputation aside: ``fsdp4-tp2+sp zero2``."""
    text = str(strategy)
    return text if strategy.remat is Remat.NONE else text.removesuffix(f" remat={strategy.remat}")
