"""A pipeline as its simulator sees it: how long each pass takes, who waits for its result, and when it was done."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """What the play of one stage left: pass after pass its code, start and end, and when its result was on the link."""

    codes: list[int]
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    """End of the transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTable:
    """What follows from a pass and how long it takes, by pass group: its work times the number of parts, and its part.

    A pass has the code group · m + microbatch.
    """

    num_parts: int
    duration_s: list[float]
    consumer: list[int]
    """Group of the pass that takes the result, or −1."""
    receiver: list[int]
    """Stage of that pass."""
    transfer_s: list[float]
    link: list[int]
    """Of the stage's links, that which the result takes."""
