"""Whether a change of the code leaves every plan and prediction the same to the last bit.

Plans and solves a fixed bank of problems (all families, packaged models, all schedules, several devices, one node
and many, tight and roomy memory, pins, restrictions, frameworks' means, measured profiles, problem files, plans
written by hand) and writes what came out as one JSON file. Of two such files it says what differs.

What is written survives renames in the code; floats read back as the same bits. `bank/` has the problems (`questions`),
how they are put to the package (`answers`) and what of its answers is kept (`records`): who renames something that
the bank uses changes a line in one of the last two.

Run: python benchmarks/same_results.py OUT.json [--only WORD ...]
     python benchmarks/same_results.py --compare BEFORE.json AFTER.json

The second form prints problem, field, before and after, and exits with 1 if anything differs. Models are traced once
and kept as the package keeps them; with XDG_CACHE_HOME naming an empty folder the tracer is compared as well. A
difference means another answer, not a worse one: a new parallelism dimension changes what the search may choose.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bank.questions import BANK
from bank.records import Record, error_record

from steelyard.errors import UserError

SHOWN_CHARACTERS = 400
"""Of a value that differs."""


def run_bank(words: Sequence[str]) -> dict[str, Record]:
    """What came out of every problem, or of those whose name has one of the words; a `UserError` is an answer too."""
    records: dict[str, Record] = {}
    for name, question in (each for questions in BANK for each in questions()):
        if words and not any(word in name for word in words):
            continue
        assert name not in records, f"two problems are called {name}"
        start = time.process_time()
        try:
            records[name] = question()
        except UserError as error:
            records[name] = error_record(error)
        print(f"{time.process_time() - start:7.2f} s  {name}", file=sys.stderr, flush=True)
    return records


def write(records: Mapping[str, Record], path: Path) -> None:
    """The records as JSON: keys sorted, floats in the shortest form that reads back as the same bits."""
    path.write_text(json.dumps(records, sort_keys=True, indent=1) + "\n")


def differences(before: Record, after: Record, place: str = "") -> Iterator[tuple[str, str, str]]:
    """Place, before and after of everything that is not the same text."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _item_differences(before, after, key, f"{place}.{key}" if place else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif json.dumps(before) != json.dumps(after):
        yield place, json.dumps(before), json.dumps(after)


def _item_differences(
    before: Mapping[str, Record], after: Mapping[str, Record], key: str, place: str
) -> Iterator[tuple[str, str, str]]:
    if key in before and key in after:
        yield from differences(before[key], after[key], place)
    else:
        yield place, "there" if key in before else "absent", "there" if key in after else "absent"


def compare(before: Path, after: Path) -> int:
    """Prints what differs between two files, problem by problem; the number of problems that do."""
    one, other = (json.loads(path.read_text()) for path in (before, after))
    names, changed = sorted(one.keys() | other.keys()), 0
    for name in names:
        found = list(_item_differences(one, other, name, ""))
        changed += bool(found)
        for place, was, now in found:
            print(f"{name}: {place or 'the problem'}\n  before {_shortened(was)}\n  after  {_shortened(now)}")
    print(f"{changed} of {len(names)} problems differ")
    return changed


def _shortened(text: str) -> str:
    whole = len(text) <= SHOWN_CHARACTERS
    return text if whole else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"


def main() -> int:
    """Runs the bank, or compares two runs; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="the file to write")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="problems with one of these in their name"
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two files instead")
    given = parser.parse_args()
    if (given.out is None) == (given.compare is None):
        parser.error("give either a file to write or --compare BEFORE AFTER")
    if given.compare:
        return 1 if compare(*given.compare) else 0
    start = time.process_time()
    records = run_bank(given.only)
    if not records:
        parser.error(f"no problem has any of these in its name: {', '.join(given.only)}")
    write(records, given.out)
    print(f"{len(records)} problems in {time.process_time() - start:.0f} s of CPU time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
