"""Published measurements of single training levers beside what the cost model says of them.

    python benchmarks/levers.py [FOLDER] [--predictions OUT.csv]

FOLDER holds runs.csv (or runs.csv.gz); without it those in ``lever_runs/data`` are predicted. A row is a measurement
with its model, card, framework and levers; its columns beyond those that `lever_runs.rows` names are ignored. Open rows
are held against what was measured, by source and by lever; sealed rows, whose measured columns are blank, are predicted
as well. OUT.csv has a line per row: id, step_time_s, tokens_per_s,
peak_allocated_gib, peak_reserved_gib, fits, skipped (the reason, empty where predicted).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from lever_runs.forecast import Outcome, Unpredicted, forecast, write_predictions
from lever_runs.rows import OPEN_ROWS, read_rows
from lever_runs.score import KINDS, WITHIN, Pair, Summary, Verdicts, errors_by, of_source, pairs_of, targets_of

from steelyard.errors import UserError

_SHOWN_REASONS = 80
_ROWS_AT_ONCE = 16
"""Neighbours are of one source, and share what is traced and priced."""


def error_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """A table of errors by source and kind of figure, as Markdown."""
    lines = ["| source, method | figure | rows | median | 90 % | bias | worst |", "|" + "---|" * 7]
    found = errors_by(outcomes, of_source)
    for name, kind in sorted(found, key=lambda each: (each[0], KINDS.index(each[1]))):
        summary = Summary.of(found[name, kind])
        assert summary is not None, "a group has rows"
        lines.append(
            f"| {name} | {kind} | {summary.count} | {summary.median_abs:.1%} | {summary.p90_abs:.1%} | "
            f"{summary.bias:+.1%} | {summary.worst:+.1%} |"
        )
    return lines


def pair_lines(pairs: Sequence[Pair]) -> list[str]:
    """A table of pairs by lever and kind of figure, as Markdown."""
    lines = ["| lever | figure | pairs | sign right | median error of ratio | within 10 % |", "|" + "---|" * 6]
    for lever, kind in sorted({(each.lever, each.kind) for each in pairs}):
        own = [each for each in pairs if (each.lever, each.kind) == (lever, kind)]
        signed = [each.is_right for each in own if each.has_sign]
        summary = Summary.of([each.error for each in own])
        assert summary is not None, "a lever has pairs"
        within = sum(abs(each.error) <= WITHIN for each in own)
        lines.append(
            f"| {lever} | {kind} | {len(own)} | {sum(signed)} of {len(signed)} | {summary.median_abs:.1%} | "
            f"{within} of {len(own)} |"
        )
    return lines


def target_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """A table of targets, as Markdown."""
    lines = ["| figure | target | reached | met |", "|" + "---|" * 4]
    for each in targets_of(outcomes):
        reached = "–" if each.reached is None else f"{each.reached:.1%}"
        met = {True: "yes", False: "no", None: "–"}[each.is_met]
        lines.append(f"| {each.name} | {'≤' if each.at_most else '≥'} {each.bound:.0%} | {reached} | {met} |")
    return lines


def skipped_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Reasons to skip rows with their numbers, the most frequent first."""
    reasons = Counter(each.reason for each in outcomes if isinstance(each, Unpredicted))
    return [f"{count:5}  {reason}" for reason, count in reasons.most_common(_SHOWN_REASONS)]


def main() -> None:
    """Predicts every row and prints errors, pairs, targets and what was skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=OPEN_ROWS)
    parser.add_argument("--predictions", type=Path)
    options = parser.parse_args()
    try:
        rows = read_rows(options.folder)
        with ProcessPoolExecutor() as pool:
            outcomes = list(pool.map(forecast, rows, chunksize=_ROWS_AT_ONCE))
    except UserError as error:
        sys.exit(f"{error.field}: found {error.found}; expected {error.expected}")
    if options.predictions is not None:
        write_predictions(outcomes, options.predictions)
    verdicts = Verdicts.of(outcomes)
    print("\n".join([*error_lines(outcomes), "", *pair_lines(pairs_of(outcomes)), "", *target_lines(outcomes), ""]))
    print(f"ran, refused: {verdicts.refused} of {verdicts.num_ran}")
    print(f"out of memory, accepted: {verdicts.accepted} of {verdicts.num_oom}")
    skipped = sum(isinstance(each, Unpredicted) for each in outcomes)
    print(f"{len(outcomes)} rows, {len(outcomes) - skipped} predicted, {skipped} skipped:")
    print("\n".join(skipped_lines(outcomes)))


if __name__ == "__main__":
    main()
