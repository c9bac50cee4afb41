"""Trade-offs as tables for the terminal: time against memory, time and money against devices."""

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from steelyard.plan.choices import TradeOffs
from steelyard.report.tables import cell, number, plain_table
from steelyard.units import format_bytes, format_count, format_seconds

SAMPLED = (
    "sampled: every row is the fastest plan within its memory; between two rows the time lies between theirs "
    "(--points looks at more budgets)"
)
PRESSED = (
    "more than the budget fits under pressure, with less than {} per device left free (--memory-margin 0 takes it)"
)
OFFERS = "▶ least time for the money: no other part of the cluster is at least as fast for no more money a token"
COMPLETE = "complete: no plan between these rows is worth having"


def figure_title(found: TradeOffs) -> str:
    """What the figure is about, in one line."""
    return f"{found.model} on {found.cluster}, {found.global_batch} × {found.seq_len} tokens a step, {found.precision}"


def frontier_view(found: TradeOffs) -> RenderableType:
    """What was found, as one renderable."""
    parts: list[RenderableType] = [Text(figure_title(found), style="bold")]
    if found.points:
        parts += [frontier_table(found), Text(frontier_note(found), style="dim")]
    if found.devices:
        parts.append(device_table(found))
    if found.offers:
        parts += [offer_table(found), Text(OFFERS, style="dim")]
    if found.profile is not None:
        parts.append(Text(f"costs {found.profile}", style="dim"))
    return Group(*parts)


def frontier_note(found: TradeOffs) -> str:
    """Whether the frontier has every step, in a sentence, and what fits under pressure alone."""
    sentence = COMPLETE if found.is_complete else SAMPLED
    if not any(found.budget_bytes < point.memory_bytes <= found.device_bytes for point in found.points):
        return sentence
    return f"{sentence}; {PRESSED.format(format_bytes(found.margin_bytes))}"


def frontier_table(found: TradeOffs) -> Table:
    """A row for every point, most memory first; the plan within the budget is marked, and what takes of the margin."""
    figures = [number(each, whole=True) for each in ("memory", "step", "tokens/s", "stages", "micro\nbatches")]
    title = f"Least step time within a memory budget (here {found.limit_text})"
    table = plain_table(title, "", *figures, "strategies")
    for point in found.points:
        over = point.memory_bytes > found.budget_bytes
        table.add_row(
            "▶" if point.is_chosen else "",
            format_bytes(point.memory_bytes) + ("*" if over and point.memory_bytes <= found.device_bytes else ""),
            format_seconds(point.step_time_s),
            format_count(point.tokens_per_s),
            str(point.num_stages),
            str(point.num_microbatches),
            point.strategies,
            style="bold" if point.is_chosen else "dim" if over else "",
        )
    return table


def device_table(found: TradeOffs) -> Table:
    """A row for every number of devices: its best plan, or why there is none."""
    priced = found.price_per_device_hour is not None
    cost = ("cost of\n10⁹ tokens",) if priced else ()
    names = ("devices", "step", "tokens/s", *cost, "stages", "micro\nbatches")
    title = f"Best plan on a number of devices, {format_bytes(found.device_bytes)} each"
    table = plain_table(title, *(number(each, whole=True) for each in names), "strategies")
    for point in found.devices:
        here = point.cluster == found.cluster
        table.add_row(
            str(point.num_devices),
            cell(point.step_time_s, format_seconds),
            cell(point.tokens_per_s, format_count),
            *([cell(point.cost_per_billion_tokens, _money)] if priced else []),
            cell(point.num_stages, str),
            cell(point.num_microbatches, str),
            point.strategies or point.reason,
            style="bold" if here else "",
        )
    return table


def offer_table(found: TradeOffs) -> Table:
    """A row for every part of the cluster: its best plan and what it costs, or why there is none."""
    figures = [number(each, whole=True) for each in ("an hour", "cost of\n10⁹ tokens", "step", "tokens/s")]
    title = "Offers: the best plan on parts of the cluster"
    table = plain_table(title, "", Column("devices", no_wrap=True), *figures, "plan")
    for offer in found.offers:
        table.add_row(
            "▶" if offer.is_worth_having else "",
            offer.cluster.replace("+", "\n+"),
            _money(offer.price_per_hour or 0.0),
            cell(offer.cost_per_billion_tokens, _money),
            cell(offer.step_time_s, format_seconds),
            cell(offer.tokens_per_s, format_count),
            offer.reason or f"{offer.setting}; {offer.strategies}",
            style="bold" if offer.is_worth_having else "",
        )
    return table


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2f}"
