"""Stages × layers with a cell for every layer, coloured by its strategy, and a description of each strategy."""

from collections import Counter
from collections.abc import Iterator

from steelyard.model.chain import LayerRole, ModelChain
from steelyard.plan.dimensions import DIMENSIONS
from steelyard.plan.dimensions.dimension import States
from steelyard.plan.plan import Plan, part_name
from steelyard.plan.prediction import layers_text
from steelyard.plan.stages import StagePart
from steelyard.plan.strategy import Remat, Strategy
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Child, Html, folded, legend, section, table, tag
from steelyard.report.html.palette import strategy_classes
from steelyard.units import format_plural

MOST_CELLS = 32
"""Maximum number of layers on one line of a stage. More continue on the next line."""
_MARKS = {LayerRole.EMBEDDING: "E", LayerRole.HEAD: "H"}
_REMAT_WORDS = {
    Remat.NONE: "keeps all activations",
    Remat.SELECTIVE: "keeps matrix products, recomputes the rest",
    Remat.FULL: "recomputes the whole layer",
}


def strategy_section(found: ReportContents) -> Html:
    """Build the section of the stage and strategy of each layer, with a legend and the same as a table."""
    plan = found.plan
    chain, classes = plan.chain(), strategy_classes(plan.strategies)
    most = max(part.last_layer - part.first_layer + 1 for part in plan.parts)
    most = -(-most // -(-most // MOST_CELLS))
    rows = [_row(plan, index, chain, classes) for index in range(len(plan.parts))]
    return section(
        "strategies",
        "Which layer, where and how",
        tag("p", _lead(plan, chain)),
        tag("div", rows, class_="grid", style=f"--columns:{most}"),
        _legend(plan, classes),
        folded("As a table", table(("stage", "ranks", "layers", "strategy", "what it does"), _rows(plan, chain))),
    )


def describe_strategy(strategy: Strategy) -> str:
    """Describe the work of a stage's devices for a layer of this strategy."""
    used = strategy.dimensions
    parts = [
        dimension.words(strategy)
        for dimension in sorted(DIMENSIONS.values(), key=lambda each: each.states is not States.SHARDED)
        if dimension in used
    ]
    divided = "divides " + "; ".join(parts) if parts else "on a single device"
    return f"{divided}; {_REMAT_WORDS.get(strategy.remat, str(strategy.remat))}"


def ranks_text(part: StagePart) -> str:
    """Return the ranks of a part, such as ``0–31``."""
    first, last = part.ranks
    return str(first) if first == last else f"{first}–{last}"


def _lead(plan: Plan, chain: ModelChain) -> str:
    different = len(set(plan.strategies))
    if different == 1:
        return f"All {chain.num_layers} layers share one strategy."
    return (
        f"{chain.num_layers} layers, {different} different strategies. A cell is a layer; E is the embedding, H the "
        "head with the loss. Colour says how the work is divided, stripes say what is recomputed."
    )


def _row(plan: Plan, index: int, chain: ModelChain, classes: dict[Strategy, str]) -> Html:
    part = plan.parts[index]
    cells = []
    for layer, strategy in enumerate(part.strategies, start=part.first_layer):
        mark = _MARKS.get(chain.type_of(layer).role, "")
        cells.append(tag("i", mark, class_=f"cell {classes[strategy]}", title=f"{chain.layer_name(layer)}: {strategy}"))
    return tag(
        "div",
        tag(
            "div",
            tag("b", f"stage {part_name(plan, index)}"),
            tag("small", tag("span", "rank " if part.num_devices == 1 else "ranks "), ranks_text(part)),
            class_="side",
        ),
        tag("div", cells, class_="cells"),
        class_="row",
    )


def _legend(plan: Plan, classes: dict[Strategy, str]) -> Html:
    items: list[tuple[str, Child]] = []
    for strategy, count in Counter(plan.strategies).most_common():
        share = f" on {format_plural(count, 'layer')} ({count / len(plan.strategies):.0%})"
        items.append((classes[strategy], [tag("b", str(strategy)), share, tag("small", describe_strategy(strategy))]))
    return legend(items, is_tall=True)


def _rows(plan: Plan, chain: ModelChain) -> Iterator[tuple[str, ...]]:
    for index, part in enumerate(plan.parts):
        for place, run in enumerate(part.runs):
            yield (
                f"stage {part_name(plan, index)}" if place == 0 else "",
                ranks_text(part) if place == 0 else "",
                layers_text(chain, *run.layers),
                str(run.strategy),
                describe_strategy(run.strategy),
            )
