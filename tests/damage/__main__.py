"""``python -m tests.damage``: runs many cases, prints the seed of each failure, and saves them on request."""

import argparse
import collections
import itertools
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from tests.damage.cases import make_case, whole_files
from tests.damage.corpus import keep, kept
from tests.damage.documents import REAL_TYPES, real_split, whole
from tests.damage.numbers import WITHIN, number_cases
from tests.damage.run import FindingError, Runner, describe

MOST_SHOWN = 20


def main() -> int:
    """1 where a case ended badly, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--keep", type=Path, help="a folder for the cases that end badly")
    parser.add_argument("--kept", action="store_true", help="try what ended badly once, too")
    parser.add_argument("--numbers", type=int, default=0, help="try so many values for every number of a file, too")
    parser.add_argument("--split", choices=REAL_TYPES, help="numbers of a model's split alone, with torch at hand")
    parser.add_argument("--every", type=int, default=1, help="of the cases of --split one in so many")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.cases)
    if options.split:
        import steelyard.runtime.dry_run  # noqa: F401  whose import takes longer than a case may

        documents = {"split": real_split(options.split)}
        every = number_cases(documents, len(WITHIN) + 3, WITHIN, ("model", "split"))
        cases = itertools.islice(every, 0, None, options.every)
        print(f"numbers of the split of {options.split}", flush=True)
    else:
        with multiprocessing.get_context("fork").Pool(1) as other:  # which imports torch where a split is not known yet
            documents = other.apply(whole)
        cases = itertools.chain(
            kept() if options.kept else (),
            number_cases(documents, options.numbers),
            (make_case(seed, documents) for seed in seeds),
        )
        print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    outcomes: collections.Counter[str] = collections.Counter()
    found: collections.Counter[str] = collections.Counter()
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), whole_files(documents), has_torch=bool(options.split))
        for case in cases:
            try:
                outcomes[runner.run(case)] += 1
            except FindingError as error:
                last = str(error).rstrip().splitlines()
                place = next((line.strip() for line in reversed(last) if line.startswith('  File "')), "")
                found[f"{last[-1][:90]}  {place[-70:]}"] += 1
                if found.total() <= MOST_SHOWN:
                    print(describe(case, error), flush=True)
                if options.keep is not None:
                    keep(case, options.keep)
    for name, count in found.most_common():
        print(f"{count:6}  {name}")
    print(f"{outcomes.total() + found.total()} cases in {time.perf_counter() - started_s:.0f} s: {dict(outcomes)}")
    print(f"findings: {found.total()} of {len(found)} sorts")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
