"""Pipeline schedules, one module each, and their registry.

To add one, add a module here and an entry in `SCHEDULES`.
"""

from steelyard.errors import UserError, nearest
from steelyard.schedules.dual_pipe_v import DUAL_PIPE_V
from steelyard.schedules.gpipe import GPIPE
from steelyard.schedules.interleaved import INTERLEAVED_1F1B
from steelyard.schedules.one_f_one_b import ONE_F_ONE_B
from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig, Schedule
from steelyard.schedules.zb_v import ZB_V
from steelyard.schedules.zero_bubble import INTERLEAVED_ZERO_BUBBLE
from steelyard.schedules.zero_bubble_auto import ZERO_BUBBLE_AUTO

SCHEDULES: dict[str, Schedule] = {
    each.name: each
    for each in (GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, INTERLEAVED_ZERO_BUBBLE, ZERO_BUBBLE_AUTO, ZB_V, DUAL_PIPE_V)
}
"""All schedules by name."""
USUAL: Schedule = ONE_F_ONE_B
"""Default schedule of a plan."""


def find_schedule(name: str) -> Schedule:
    """Return the schedule of this name. Raises `UserError`, with the nearest known name, if there is none."""
    if name not in SCHEDULES:
        raise UserError(
            field="schedule", found=repr(name), expected=" or ".join(SCHEDULES), hint=nearest(name, SCHEDULES)
        )
    return SCHEDULES[name]


def names_of(*, with_chunks: bool) -> tuple[str, ...]:
    """Return the names of the schedules with two or more chunks per stage, or of those with one."""
    return tuple(each.name for each in SCHEDULES.values() if each.takes_chunks == with_chunks)


__all__ = [
    "SCHEDULES",
    "USUAL",
    "PassOrder",
    "Phase",
    "PipelineConfig",
    "Schedule",
    "find_schedule",
    "names_of",
]
