"""Trade-offs as panels to draw: labelled axes, points, a line, what is marked; the same for every kind of figure."""

from dataclasses import dataclass

from steelyard.plan.choices import DevicePoint, TradeOffs
from steelyard.units import GIB, MIB, format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelPoint:
    """A point with the text that explains it; ``is_chosen`` for the plan that is taken."""

    x: float
    y: float
    text: str
    is_chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart. ``is_staircase``: from each point the line runs level to the right, as for least times within x."""

    title: str
    x_label: str
    y_label: str
    points: tuple[PanelPoint, ...]
    is_staircase: bool = False
    limit: tuple[float, str] | None = None
    """A vertical line and what it means."""
    ticks: tuple[float, ...] | None = None
    """Where x has marks; chosen evenly where absent."""


def figure_title(found: TradeOffs) -> str:
    """What the figure is about, in one line."""
    return f"{found.model} on {found.cluster}, {found.global_batch} × {found.seq_len} tokens a step, {found.precision}"


def panels(found: TradeOffs) -> tuple[Panel, ...]:
    """Time against memory; time, and money where there is a price, against devices where several counts were asked."""
    drawn = [memory_panel(found)] if found.points else []
    counted = [point for point in found.devices if point.step_time_s is not None]
    if len(counted) > 1:
        drawn.append(_device_panel(found, counted))
        if found.price_per_device_hour is not None:
            drawn.append(_cost_panel(found, counted))
    return tuple(drawn)


def memory_panel(found: TradeOffs) -> Panel:
    """Least step time within each memory per device, with the budget."""
    unit, name = (GIB, "GiB") if found.budget_bytes >= GIB else (MIB, "MiB")
    points = tuple(
        PanelPoint(
            x=point.memory_bytes / unit,
            y=point.step_time_s,
            text=f"{format_bytes(point.memory_bytes)}, {format_seconds(point.step_time_s)} a step: "
            f"{point.setting}; {point.strategies}",
            is_chosen=point.is_chosen,
        )
        for point in reversed(found.points)
    )
    return Panel(
        title="Least step time within a memory budget",
        x_label=f"memory per device ({name})",
        y_label="step time (s)",
        points=points,
        is_staircase=True,
        limit=(found.budget_bytes / unit, f"budget {format_bytes(found.budget_bytes)}"),
    )


def _device_panel(found: TradeOffs, counted: list[DevicePoint]) -> Panel:
    return Panel(
        title="Least step time on a number of devices",
        x_label="devices",
        y_label="step time (s)",
        points=tuple(
            PanelPoint(
                x=point.num_devices,
                y=point.step_time_s or 0.0,
                text=f"{point.cluster}: {format_seconds(point.step_time_s or 0.0)} a step; {point.setting}; "
                f"{point.strategies}",
                is_chosen=point.cluster == found.cluster,
            )
            for point in counted
        ),
        ticks=tuple(float(point.num_devices) for point in counted),
    )


def _cost_panel(found: TradeOffs, counted: list[DevicePoint]) -> Panel:
    return Panel(
        title=f"Cost at {found.price_per_device_hour:g} per device-hour",
        x_label="devices",
        y_label="cost of a billion tokens",
        points=tuple(
            PanelPoint(
                x=point.num_devices,
                y=point.cost_per_billion_tokens or 0.0,
                text=f"{point.cluster}: {point.cost_per_billion_tokens or 0.0:,.2f} per billion tokens",
                is_chosen=point.cluster == found.cluster,
            )
            for point in counted
        ),
        ticks=tuple(float(point.num_devices) for point in counted),
    )
