r"""Which ranks compute for longer than predicted next to the others: $r_i > (1 + \sigma)\,\operatorname{median} r$.

| symbol   | argument | meaning                                                                                |
|----------|----------|----------------------------------------------------------------------------------------|
| $r_i$    | ``work`` | own computation of rank i, its waiting left out, over that predicted for its stage     |
| $\sigma$ | ``share`` | how much longer is allowed                                                             |

The median (the lower of two) leaves out what a prediction misses on all ranks alike. Without a prediction a rank is
compared with those of its own stage.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SLOW_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """Seconds of a step in which a rank computes and waits for nobody."""

    rank: int
    stage: int
    host: str
    own_s: float
    pool: str = ""
    """Of devices, where a plan is over several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that computes ``factor`` times as long as predicted next to the others."""

    rank: int
    stage: int
    host: str
    factor: float
    pool: str = ""

    def __str__(self) -> str:
        stage = f"stage {self.stage} in {self.pool}" if self.pool else f"stage {self.stage}"
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank} ({stage}){where} computes {self.factor:.1f} × as long"


def slow_ranks(work: Sequence[OwnWork], predicted_s: Sequence[float] | None, share: float) -> tuple[SlowRank, ...]:
    """Those that are slower by more than ``share``, the slowest first; ``predicted_s`` is of each stage."""
    if share <= 0 or not work:
        return ()
    ratios = [each.own_s / _expected_s(each, work, predicted_s) for each in work]
    typical = statistics.median_low(ratios)
    found = [
        SlowRank(rank=each.rank, stage=each.stage, host=each.host, factor=ratio / typical, pool=each.pool)
        for each, ratio in zip(work, ratios, strict=True)
        if ratio > (1 + share) * typical
    ]
    return tuple(sorted(found, key=lambda each: -each.factor))


def _expected_s(one: OwnWork, work: Sequence[OwnWork], predicted_s: Sequence[float] | None) -> float:
    if predicted_s is not None:
        return predicted_s[one.stage]
    return statistics.median_low(each.own_s for each in work if each.stage == one.stage)
