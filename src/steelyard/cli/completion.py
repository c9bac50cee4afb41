"""What the shell completes beside commands and options: names that the packages know."""

from collections.abc import Callable, Iterable

from steelyard.hardware import devices, links
from steelyard.model.read import hub_names, model_names


def complete_model(incomplete: str) -> list[str]:
    """The packaged models that begin so, by name or by id on the hub."""
    return [name for name in (*model_names(), *hub_names()) if name.startswith(incomplete)]


def complete_network(incomplete: str) -> list[str]:
    """The links of the catalogue that begin so, with the number of ports that was typed before."""
    ports, times, name = incomplete.rpartition("x") if incomplete[:1].isdigit() else ("", "", incomplete)
    return [ports + times + link.name for link in links() if link.name.startswith(name)]


def complete_one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes to those of ``names`` that begin so."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def complete_cluster(incomplete: str) -> list[str]:
    """What was typed with the devices that may end it, ``8x8xh`` → ``8x8xh100-80gb``; nothing for another form."""
    parts = incomplete.split("x", 2)
    if len(parts) < 3 or not (parts[0].isdigit() and parts[1].isdigit()):
        return []
    start = f"{parts[0]}x{parts[1]}x"
    return [start + device.name for device in devices() if device.name.startswith(parts[2])]
