r"""What it costs to hand an activation from a layer in one layout to the next layer in another.

The stage mesh has small axes; on each, the activation is divided by samples (B), by sequence (S) or replicated (R).
Going from one layout to another, axes are undone from the innermost outwards, as DTensor does: a divided axis that
must change, or that lies inside one of the same dim that must change, is gathered (its local part grows), or, from B
to S and back, exchanged all-to-all. Making a replicated axis divided is a slice and free. The gradient goes the other
way. Bytes are exact for this procedure; seconds follow from the collectives' costs.

Not modelled: overlap with compute; the smarter orders that DTensor may find.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.communication import Group, collective_s
from steelyard.cost.setting import Setting
from steelyard.plan.strategy import Layout, Strategy, mesh_axes
from steelyard.profiles.profile import CollectiveKind

Placement = str
"""``B`` divided by samples, ``S`` divided by sequence, ``R`` replicated; one letter per axis of the stage mesh."""


def switch_table(strategies: tuple[Strategy, ...], setting: Setting) -> NDArray[np.float64]:
    """[S, S] seconds from the first strategy's layout to the second's: a microbatch's activation there, gradient back."""
    layouts = [strategy.layout for strategy in strategies]
    distinct = list(dict.fromkeys(layouts))
    index = np.array([distinct.index(layout) for layout in layouts])
    costs = np.array([[_switch_s(before, after, setting) for after in distinct] for before in distinct])
    table: NDArray[np.float64] = costs[np.ix_(index, index)]
    return table


def _switch_s(before: Layout, after: Layout, setting: Setting) -> float:
    sizes = mesh_axes(setting.devices_per_stage)
    there = moves(placements(before, sizes), placements(after, sizes), sizes)
    back = moves(placements(after, sizes), placements(before, sizes), sizes)
    job = setting.job
    total = 0.0
    for kind, axis, fraction in (*there, *back):
        stride = int(np.prod(sizes[axis + 1 :], dtype=int))
        group = Group(size=sizes[axis], stride=stride, span=setting.devices_per_stage)
        total += collective_s(kind, fraction * setting.activation_bytes, group, job.cluster, job.profile)
    return total


def placements(layout: Layout, sizes: tuple[int, ...]) -> Placement:
    """The placement on each axis of the stage mesh, outermost first."""
    letters: list[str] = []
    for is_tensor, degree in layout.axes:
        product = 1
        while product < degree:
            product *= sizes[len(letters)]
            letters.append(("S" if layout.sp else "R") if is_tensor else "B")
    return "".join(letters)


@lru_cache(maxsize=65536)
def moves(before: Placement, after: Placement, sizes: tuple[int, ...]) -> tuple[tuple[CollectiveKind, int, float], ...]:
    """Collectives that redistribute: kind, axis, and the tensor's bytes as a fraction of the whole activation."""
    current = list(before)
    local = 1.0
    for axis, letter in enumerate(current):
        local /= sizes[axis] if letter != "R" else 1
    found: list[tuple[CollectiveKind, int, float]] = []
    for axis in reversed(range(len(sizes))):
        letter = current[axis]
        if letter == "R" or (letter == after[axis] and not _inside_change(current, after, axis)):
            continue
        if after[axis] not in ("R", letter):
            found.append(("all_to_all", axis, local))
            current[axis] = after[axis]
            continue
        local *= sizes[axis]
        found.append(("all_gather", axis, local))
        current[axis] = "R"
    return tuple(found)


def _inside_change(current: list[str], after: Placement, axis: int) -> bool:
    """Whether an outer axis that divides the same dim is about to change."""
    return any(current[outer] == current[axis] and current[outer] != after[outer] for outer in range(axis))
