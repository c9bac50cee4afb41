"""Tables of trade-offs for the terminal and for pages: time against memory, time and cost against devices."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from steelyard.plan.choices import FrontierPoint, TradeOffs
from steelyard.report.tables import Paragraph, cell, name, number, plain_table
from steelyard.units import format_bytes, format_count, format_seconds

SAMPLED = (
    "sampled: each row is the fastest plan within its memory; plans between two rows have times between theirs "
    "(search more budgets with --points)"
)
PRESSED = "rows marked * keep less than the reserved {} per device free (take one with --memory-margin 0)"
OFFERS = "▶ worth its price: no other part of the cluster is as fast or faster at the same or a lower cost per token"
COMPLETE = "complete: no plan between two rows is faster than the row below"


def figure_title(found: TradeOffs) -> str:
    """Return the model, cluster, batch and precision in one line."""
    return (
        f"{found.model} on {found.cluster}, {found.global_batch} × {found.seq_len} tokens per step, {found.precision}"
    )


def frontier_view(found: TradeOffs) -> RenderableType:
    """Return all tables as one renderable."""
    parts: list[RenderableType] = [Paragraph(text=figure_title(found), indent=0, style="bold")]
    if found.points:
        parts += [frontier_table(found), Paragraph(text=frontier_note(found), indent=0)]
    if found.devices:
        parts.append(device_table(found))
    if found.offers:
        parts += [offer_table(found), Paragraph(text=OFFERS, indent=0)]
    if found.profile is not None:
        parts.append(Paragraph(text=f"costs {found.profile}", indent=0, style="dim"))
    return Group(*parts)


def frontier_note(found: TradeOffs) -> str:
    """Return whether the frontier is complete, and what marked rows mean."""
    sentence = COMPLETE if found.is_complete else SAMPLED
    if not any(found.budget_bytes < point.memory_bytes <= found.device_bytes for point in found.points):
        return sentence
    return f"{sentence}; {PRESSED.format(format_bytes(found.margin_bytes))}"


def frontier_table(found: TradeOffs) -> Table:
    """Return a row per point, most memory first; the chosen plan and points in reserved memory are marked."""
    title = f"Fastest plan within each memory budget (▶ within {found.limit_text})"
    return point_table(title, found.points, found.budget_bytes, found.device_bytes)


def point_table(title: str, points: Sequence[FrontierPoint], budget_bytes: int, device_bytes: int) -> Table:
    """Return a row per point of a frontier, as in `frontier_table`."""
    figures = [number(each) for each in ("memory", "step", "tokens/s", "stages", "microbatches")]
    table = plain_table(title, "", *figures, "strategies")
    for point in points:
        over = point.memory_bytes > budget_bytes
        table.add_row(
            "▶" if point.is_chosen else "",
            format_bytes(point.memory_bytes) + ("*" if over and point.memory_bytes <= device_bytes else ""),
            format_seconds(point.step_time_s),
            format_count(point.tokens_per_s),
            str(point.num_stages),
            str(point.num_microbatches),
            point.strategies,
            style="bold" if point.is_chosen else "dim" if over else "",
        )
    return table


def device_table(found: TradeOffs) -> Table:
    """Return a row per number of devices: its best plan, or why there is none."""
    priced = found.price_per_device_hour is not None
    cost = ("cost of\n10⁹ tokens",) if priced else ()
    names = ("devices", "step", "tokens/s", *cost, "stages", "microbatches")
    title = f"Best plan by number of devices, {format_bytes(found.device_bytes)} each"
    table = plain_table(title, *map(number, names), "strategies")
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
    """Return a row per part of the cluster: its best plan and cost, or why there is none."""
    figures = [number(each) for each in ("per hour", "cost of\n10⁹ tokens", "step", "tokens/s")]
    title = "Best plan on parts of the cluster"
    table = plain_table(title, "", name("devices"), *figures, "plan")
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
