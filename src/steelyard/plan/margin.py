"""Words for the memory that plans leave free beside their budget, so that every view says the same."""

from steelyard.units import format_bytes


def margin_text(budget_bytes: int, margin_bytes: int) -> str:
    """What is left free beside the budget of a device, where something is."""
    if not margin_bytes:
        return ""
    device_bytes = budget_bytes + margin_bytes
    return f"{margin_bytes / device_bytes:.0%} of {format_bytes(device_bytes)} left free"


def shortfall(peak_bytes: int, budget_bytes: int, margin_bytes: int) -> str:
    """How a plan of so many bytes on its fullest device misses the budget, or takes of the margin; empty if neither."""
    over = peak_bytes - budget_bytes
    if over <= 0:
        return ""
    if over > margin_bytes:
        return f"does not fit: misses {format_bytes(over - margin_bytes)} per device"
    return f"fits under pressure: takes {format_bytes(over)} of the {format_bytes(margin_bytes)} to be left free"
