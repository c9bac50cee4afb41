"""Trade-offs as a page of their own: time against memory, time and money against devices, as charts and as tables."""

from importlib.metadata import version

from steelyard.plan.choices import DevicePoint, TradeOffs
from steelyard.report.frontier_table import figure_title, frontier_note
from steelyard.report.html.chart import chart
from steelyard.report.html.markup import Child, Html, document, folded, section, table, tag
from steelyard.report.html.trade_off import trade_off_charts
from steelyard.report.tables import cell
from steelyard.units import format_bytes, format_count, format_seconds


def frontier_page(found: TradeOffs) -> str:
    """The complete page as the text of one file that loads nothing from anywhere."""
    header = tag(
        "header",
        tag("p", "Trade-offs", class_="kicker"),
        tag("h1", found.model, tag("span", " on "), found.cluster),
        tag("p", _lead(found), class_="decision"),
    )
    drawn = [section(f"panel-{index}", each.title, chart(each)) for index, each in enumerate(trade_off_charts(found))]
    rows = section("numbers", "In numbers", *_tables(found))
    footer = tag("footer", tag("p", f"Written by steelyard {version('steelyard')}."))
    return document(figure_title(found), figure_title(found), (header, *drawn, rows, footer))


def _lead(found: TradeOffs) -> str:
    chosen = next((point for point in found.points if point.is_chosen), None)
    batch = f"{found.global_batch:,} × {found.seq_len:,} tokens a step, {found.precision}"
    if found.offers:
        worth = [offer for offer in found.offers if offer.is_worth_having]
        return f"{batch}. Worth having: {', '.join(offer.cluster for offer in worth) or 'none, since nothing fits'}."
    if chosen is None:
        return f"{batch}. Within {found.limit_text} nothing fits."
    return (
        f"{batch}. Within {found.limit_text} a step takes at least "
        f"{format_seconds(chosen.step_time_s)}: {chosen.setting}; {chosen.strategies}."
    )


def _tables(found: TradeOffs) -> list[Html]:
    parts = []
    if found.points:
        rows = [
            (
                tag("b", "this plan") if point.is_chosen else "",
                format_bytes(point.memory_bytes),
                format_seconds(point.step_time_s),
                format_count(point.tokens_per_s),
                point.setting,
                point.strategies,
            )
            for point in found.points
        ]
        headings = ("", "memory per device", "step", "tokens/s", "pipeline", "strategies")
        parts += [table(headings, rows, numeric=(1, 2, 3)), tag("p", frontier_note(found), class_="hint")]
    if found.devices:
        priced = found.price_per_device_hour is not None
        headings = ("devices", "step", "tokens/s", *(("cost of 10⁹ tokens",) if priced else ()), "plan")
        shown = table(headings, [_device_row(point, priced) for point in found.devices], numeric=range(3 + priced))
        parts.append(shown if len(parts) == 0 else folded("By number of devices", shown))
    if found.offers:
        of_offers = ("", "devices", "an hour", "cost of 10⁹ tokens", "step", "tokens/s", "plan")
        parts.append(table(of_offers, [_offer_row(offer) for offer in found.offers], numeric=(2, 3, 4, 5)))
    return parts


def _offer_row(offer: DevicePoint) -> tuple[Child, ...]:
    return (
        tag("b", "worth having") if offer.is_worth_having else "",
        offer.cluster,
        _money(offer.price_per_hour or 0.0),
        cell(offer.cost_per_billion_tokens, _money),
        *_speed(offer),
        offer.reason or f"{offer.setting}; {offer.strategies}",
    )


def _device_row(point: DevicePoint, priced: bool) -> tuple[str, ...]:
    return (
        str(point.num_devices),
        *_speed(point),
        *((cell(point.cost_per_billion_tokens, _money),) if priced else ()),
        point.reason or f"{point.setting}; {point.strategies}",
    )


def _speed(point: DevicePoint) -> tuple[str, str]:
    return cell(point.step_time_s, format_seconds), cell(point.tokens_per_s, format_count)


_money = "{:,.2f}".format
