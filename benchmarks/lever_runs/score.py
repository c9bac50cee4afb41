"""Errors of predictions by source and by lever, verdicts on memory, pairs, and the project's targets.

An error is predicted over measured minus one; of rates it is that of seconds, so that above 0 is predicted slower.
Memory is held against the kind that a row has: allocated and reserved peaks each against their own, a figure of which
the kind is not stated (``peak_memory_gib``) against all that a device shows, apart from the others. A pair has one
figure of its variant over its baseline, predicted and measured.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lever_runs.forecast import Forecast, Outcome, Unpredicted, reported_s
from steelyard.units import GIB

KINDS = ("allocated", "reserved", "kind not stated", "time")
WITHIN = 0.10
EQUAL = 0.02
"""Part by which the two sides of a pair differ at most where they are equal: the sign of such a pair says nothing."""
MARGIN = 0.05
_FITTED = ("a100", "h100", "h200", "mi300x")
"""Beginnings of cards whose rates were fitted to runs (`steelyard.cost.efficiency`)."""
Figures = Mapping[str, tuple[float, float]]


def figures(found: Forecast) -> Figures:
    """Predicted and measured figures of a row by `KINDS`, those that both have."""
    row = found.row
    pairs = {
        "allocated": (found.allocated_bytes / GIB, row.number("peak_allocated_gib")),
        "reserved": (found.reserved_bytes / GIB, row.number("peak_reserved_gib")),
        "kind not stated": (found.device_bytes / GIB, row.number("peak_memory_gib")),
    }
    seconds, tokens, samples = (row.number(name) for name in ("step_time_s", "tokens_per_s", "samples_per_s"))
    if found.step_time_s is not None:
        if seconds:
            pairs["time"] = (reported_s(found) or 0.0, seconds)
        elif tokens and found.tokens_per_s:
            pairs["time"] = (1 / found.tokens_per_s, 1 / tokens)
        elif samples and found.samples_per_s:
            pairs["time"] = (1 / found.samples_per_s, 1 / samples)
    return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if theirs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Signed errors of several rows."""

    count: int
    median_abs: float
    p90_abs: float
    bias: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> "Summary | None":
        """None of no rows."""
        if not errors:
            return None
        sizes = np.abs(np.array(errors))
        return cls(
            count=len(errors),
            median_abs=float(np.median(sizes)),
            p90_abs=float(np.quantile(sizes, 0.9)),
            bias=float(np.median(errors)),
            worst=errors[int(np.argmax(sizes))],
        )


def errors_by(
    outcomes: Iterable[Outcome], group: Callable[[Forecast], Iterable[str]]
) -> dict[tuple[str, str], list[float]]:
    """Errors of open rows that ran, by what ``group`` says of a row and by `KINDS`."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in outcomes:
        if isinstance(each, Forecast) and each.row.is_open:
            for kind, (ours, theirs) in figures(each).items():
                for name in group(each):
                    found[name, kind].append(ours / theirs - 1)
    return found


def of_source(found: Forecast) -> tuple[str, ...]:
    """The source of a row, with its method."""
    return (f"{found.row.source} {found.row.text('method')}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A variant beside a baseline that differs in one lever alone: one kind of figure of both, predicted, measured."""

    name: str
    lever: str
    kind: str
    ours: float
    theirs: float

    @property
    def has_sign(self) -> bool:
        """Whether the measured sides differ by more than what is equal."""
        return abs(self.theirs - 1) > EQUAL

    @property
    def is_right(self) -> bool:
        """Whether the prediction says which side is more; it may say that they are equal where they are."""
        return (self.ours > 1) == (self.theirs > 1) if self.has_sign else abs(self.ours - 1) <= 2 * EQUAL

    @property
    def error(self) -> float:
        """Predicted over measured ratio, minus one."""
        return self.ours / self.theirs - 1


def pairs_of(outcomes: Iterable[Outcome]) -> tuple[Pair, ...]:
    """All pairs of open rows of which both sides are predicted and measured."""
    sides: dict[str, dict[str, list[Forecast]]] = defaultdict(lambda: defaultdict(list))
    for each in outcomes:
        if isinstance(each, Forecast) and each.row.is_open:
            for name, lever in each.row.pairs:
                sides[name][lever].append(each)
    found = []
    for name, by_lever in sides.items():
        base = by_lever.get("baseline", [])
        for lever, variants in by_lever.items():
            for variant in variants if lever != "baseline" and base else ():
                before, after = figures(base[0]), figures(variant)
                for kind in before.keys() & after.keys():
                    ours, theirs = (after[kind][side] / before[kind][side] for side in (0, 1))
                    found.append(Pair(name=name, lever=lever, kind=kind, ours=ours, theirs=theirs))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Rows whose status is known, and those that are called wrongly."""

    num_ran: int
    refused: int
    num_oom: int
    accepted: int

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> "Verdicts":
        """Outcomes of open rows on a known device."""
        known = [each for each in outcomes if isinstance(each, Forecast) and each.row.is_open and each.fits is not None]
        ran = [each for each in known if each.row.text("status") == "ok"]
        oom = [each for each in known if each.row.text("status") == "oom"]
        return cls(
            num_ran=len(ran),
            refused=sum(not each.fits for each in ran),
            num_oom=len(oom),
            accepted=sum(bool(each.fits) for each in oom),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target: a figure, its bound, and whether it is to be at most or at least that."""

    name: str
    bound: float
    reached: float | None
    at_most: bool = True

    @property
    def is_met(self) -> bool | None:
        """None where nothing measured it."""
        if self.reached is None:
            return None
        return self.reached <= self.bound if self.at_most else self.reached >= self.bound


def targets_of(outcomes: Sequence[Outcome]) -> tuple[Target, ...]:
    """Every target with what was reached, all of open rows but the first."""
    runs = [each for each in outcomes if each.row.text("scope") == "run"]
    opened = [each for each in outcomes if isinstance(each, Forecast) and each.row.is_open]
    adapters = [each for each in opened if each.row.text("method") in ("lora", "qlora", "rslora")]
    low = _errors(adapters, "allocated")
    memory = Summary.of(low + _errors(adapters, "reserved"))
    times = _errors([each for each in adapters if each.row.text("gpu").lower().startswith(_FITTED)], "time")
    verdicts, pairs = Verdicts.of(outcomes), pairs_of(outcomes)
    held, timed = ([each for each in pairs if (each.kind == "time") is is_time] for is_time in (False, True))
    special = [abs(each.error) for each in timed if each.lever in ("compile", "precision")]
    return (
        Target(name="rows of scope run predicted", bound=0.85, reached=_part(_predicted(runs)), at_most=False),
        Target(
            name="adapters, memory: median error", bound=0.05, reached=None if memory is None else memory.median_abs
        ),
        Target(name="adapters, memory: 90 % of errors", bound=0.12, reached=None if memory is None else memory.p90_abs),
        Target(name="adapters, more than 5 % below allocated", bound=0.0, reached=_part([e < -MARGIN for e in low])),
        Target(name="ran, refused", bound=0.03, reached=_ratio(verdicts.refused, verdicts.num_ran)),
        Target(name="out of memory, accepted", bound=0.0, reached=_ratio(verdicts.accepted, verdicts.num_oom)),
        Target(name="pairs in memory: sign right", bound=0.97, reached=_signs(held), at_most=False),
        Target(name="pairs in memory: median error", bound=0.10, reached=_median([abs(p.error) for p in held])),
        Target(name="pairs in time: sign right", bound=0.97, reached=_signs(timed), at_most=False),
        Target(name="pairs in time: median error", bound=0.10, reached=_median([abs(p.error) for p in timed])),
        Target(name="adapters, time on fitted cards: median", bound=0.12, reached=_median(list(map(abs, times)))),
        Target(name="compile and float8 pairs: median", bound=0.06, reached=_median(special)),
    )


def _errors(found: Iterable[Forecast], kind: str) -> list[float]:
    pairs = (figures(each).get(kind) for each in found)
    return [pair[0] / pair[1] - 1 for pair in pairs if pair is not None]


def _predicted(outcomes: Iterable[Outcome]) -> list[bool]:
    return [not isinstance(each, Unpredicted) for each in outcomes]


def _signs(pairs: Sequence[Pair]) -> float | None:
    return _part([each.is_right for each in pairs if each.has_sign])


def _part(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def _ratio(count: int, total: int) -> float | None:
    return count / total if total else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
