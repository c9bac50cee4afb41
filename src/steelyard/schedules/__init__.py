"""Pipeline schedules: a module each with the passes of a rank and all that follows from them, and their registry.

A new one is a module here and an entry in `SCHEDULES`.
"""

from steelyard.errors import UserError, nearest
from steelyard.schedules.gpipe import GPIPE
from steelyard.schedules.interleaved import INTERLEAVED_1F1B
from steelyard.schedules.one_f_one_b import ONE_F_ONE_B
from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig, Schedule
from steelyard.schedules.zero_bubble import INTERLEAVED_ZERO_BUBBLE

SCHEDULES: dict[str, Schedule] = {
    each.name: each for each in (GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, INTERLEAVED_ZERO_BUBBLE)
}
"""All schedules by name."""
USUAL: Schedule = ONE_F_ONE_B
"""The schedule of a plan that names none."""


def find_schedule(name: str) -> Schedule:
    """The schedule of this name; raises `UserError` naming the nearest known one."""
    if name not in SCHEDULES:
        raise UserError(
            field="schedule", found=repr(name), expected=" or ".join(SCHEDULES), hint=nearest(name, SCHEDULES)
        )
    return SCHEDULES[name]


def names_of(*, with_chunks: bool) -> tuple[str, ...]:
    """The names of the schedules whose stages hold two or more chunks of the model, or of the others."""
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
