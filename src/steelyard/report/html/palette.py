"""Colours by name, for terms and strategies. The values are in ``style.css``, one for light and one for dark mode.

A colour has one meaning on the whole page. The time of a parallelism dimension, the layers that it divides and the
tensors that it gathers have its colour. Memory has the colour of its purpose (activations and remat, the optimizer's
states and its time). Two strategies of a dimension differ in shade. Lines and points of charts have none of these
colours.

The hues are those of Okabe and Ito (2008), which people with any common colour blindness can distinguish, with a brown,
a wine and an indigo that are darker and a pink that is lighter than all of them. Patterns show what hues cannot:
stripes for recomputation, hatching for everything that is not work.
"""

from collections.abc import Iterable, Mapping, Sequence

from steelyard.plan.dimensions import DIMENSIONS
from steelyard.plan.dimensions.dimension import States
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
    "parameters": "indigo",
    "gradients": "wine",
    "optimizer": "slate",
    "gathered parameters": next(
        dimension.hue for dimension in DIMENSIONS.values() if dimension.states is States.SHARDED
    ),
    "activations": "sky",
    "working set": "blue",
    "pipeline buffers": "green",
    "context": "grey",
    "allocator slack": "idle",
}
HUES = (
    *("blue", "orange", "green", "purple", "sky", "vermilion", "yellow", "slate", "brown", "pink", "grey"),
    *("indigo", "wine"),
)
SHADES = ("", "darker", "lighter", "darkest")
PATTERNS = {Remat.NONE: "", Remat.SELECTIVE: "striped", Remat.FULL: "crossed"}


def time_colours() -> dict[str, str]:
    """Return the colour of every term of the step time, those of the parallelism dimensions last."""
    return _TIME_COLOURS | {dimension.name: dimension.hue for dimension in DIMENSIONS.values()}


def colours(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return a colour for each name: its own, or the next free hue for a name without one."""
    found: dict[str, str] = {}
    names = list(names)
    free = [hue for hue in HUES if hue not in {known.get(name) for name in names}] or list(HUES)
    for name in names:
        found[name] = known[name] if name in known else free[len(found) % len(free)]
    return found


def strategy_classes(strategies: Sequence[Strategy]) -> dict[Strategy, str]:
    """Return the classes of each strategy: the hue of its dimension of the largest degree, a shade, and a pattern for
    remat.

    The most used strategy of a hue has the hue itself.
    """
    counts: dict[str, int] = {}
    for strategy in strategies:
        counts[division(strategy)] = counts.get(division(strategy), 0) + 1
    hues = {division(strategy): _hue(strategy) for strategy in strategies}
    shade: dict[str, str] = {}
    for name in sorted(counts, key=lambda each: (-counts[each], each)):
        alike = sum(hues[other] == hues[name] for other in shade)
        shade[name] = SHADES[alike % len(SHADES)]
    return {
        each: " ".join((_hue(each), shade[division(each)], PATTERNS[each.remat])).replace("  ", " ").strip()
        for each in dict.fromkeys(strategies)
    }


def _hue(strategy: Strategy) -> str:
    """Return the hue of the level of the largest degree (the outermost of several), or of compute without levels."""
    largest = max(strategy.levels, key=lambda level: level.degree, default=None)
    return _TIME_COLOURS["compute"] if largest is None else largest.dimension.hue


def division(strategy: Strategy) -> str:
    """Return the text of a strategy without its remat, such as ``fsdp4-tp2+sp zero2``."""
    text = str(strategy)
    return text if strategy.remat is Remat.NONE else text.removesuffix(f" remat={strategy.remat}")
