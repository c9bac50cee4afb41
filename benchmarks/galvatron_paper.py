"""Galvatron's published predictions against our search, under the published inputs and cost rules.

Every cell is a model on a cluster of 8 or 16 GPUs with a memory budget and a space of strategies: what the published
planner predicts (`data/galvatron_2022/predicted_by_published_planner.csv`; - where the file has no row), the published
plan scored again under the rules as `galvatron/rules.py` states them, the published planner rebuilt (its greedy cuts
with optimal stages), and our optimum with its plan. In samples per second.

Run: python benchmarks/galvatron_paper.py [--models t5 swin] [--predictions FILE] [--save-problems DIR]

``--save-problems`` also writes each cell as a problem file for ``steelyard solve``. In those of T5 and Swin a switch
between two stages is paid, which the published rules leave out; a few of them are slower for that, one by 0.5 %.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from galvatron.cells import PREDICTIONS, Cell, Published, all_cells, best, problem, published_cells, score_published
from galvatron.cuts import Plan
from galvatron.greedy import greedy_best
from galvatron.inputs import NAMES
from galvatron.tables import plan_text

from steelyard.search.problem import save_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell of the comparison; None where nothing fits."""

    cell: Cell
    is_published: bool
    published: Published | None
    rescored: Plan | None
    rebuilt: Plan | None
    ours: Plan | None

    @property
    def verdict(self) -> str:
        """Ours against the published number, or against the rebuilt planner where that is not at hand."""
        theirs = self.published if self.is_published else self.rebuilt
        if self.ours is None or theirs is None:
            return "=" if self.ours is theirs else "WORSE" if self.ours is None else "fits"
        gain = round(self.ours.throughput, 2) / round(theirs.throughput, 2) - 1
        return "=" if gain == 0 else f"{gain:+.1%}" + " WORSE" * (gain < 0)


def compare(cell: Cell, predictions: dict[Cell, Published | None]) -> Row:
    """One cell, all sides of it."""
    published, ours = predictions.get(cell), best(cell)
    return Row(
        cell=cell,
        is_published=cell in predictions,
        published=published,
        rescored=score_published(cell, published) if published else None,
        rebuilt=ours if cell.inputs.is_alike else greedy_best(cell),
        ours=ours,
    )


def lines(row: Row) -> Iterator[str]:
    """The cell as a line of the printed table, and the published plan below it where it is not ours."""
    published = _rate(row.published) if row.is_published else "-"
    rescored = _rate(row.rescored) if row.is_published else "-"
    rebuilt = "=" if row.cell.inputs.is_alike else _rate(row.rebuilt)
    ours = _plan(row.ours, row.cell)
    yield f"{row.cell!s:29} {published:>9} {rescored:>7} {rebuilt:>7} {_rate(row.ours):>7} {row.verdict:>6}  {ours}"
    theirs = _plan(row.rescored or row.rebuilt, row.cell)
    if theirs != ours:
        yield f"{'':29} {'':>9} {'':>7} {'':>7} {'':>7} {'theirs':>6}  {theirs}"


def _rate(side: Plan | Published | None) -> str:
    return f"{side.throughput:.2f}" if side else "OOM"


def _plan(plan: Plan | None, cell: Cell) -> str:
    if plan is None:
        return "nothing fits"
    stages = plan.stages[:1] if cell.inputs.is_alike else plan.stages
    return f"batch {plan.batch}: {plan_text(plan.num_stages, stages)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--save-problems", type=Path, metavar="DIR")
    options = parser.parse_args()
    predictions = published_cells(options.predictions)
    rows = []
    print(f"{'':29} {'published':>9} {'again':>7} {'rebuilt':>7} {'ours':>7}")
    for cell in all_cells():
        if cell.model not in options.models:
            continue
        rows.append(compare(cell, predictions))
        print(*lines(rows[-1]), sep="\n", flush=True)
        if options.save_problems:
            save_cell(cell, options.save_problems)
    given = [row for row in rows if row.is_published]
    print(f"{len(rows)} cells, of which {len(given)} published: {_summary(given)}; the others: ", end="")
    print(_summary([row for row in rows if not row.is_published]))


def save_cell(cell: Cell, folder: Path) -> None:
    """Write the cell as a problem file; a cell in which no batch can fit has no configurations and gets none."""
    content = problem(cell)
    if content.configs:
        folder.mkdir(parents=True, exist_ok=True)
        save_problem(folder / f"{cell.file_name}.json", content)


def _summary(rows: list[Row]) -> str:
    worse = sum(row.verdict.endswith("WORSE") for row in rows)
    equal = sum(row.verdict == "=" for row in rows)
    return f"{equal} equal, {len(rows) - equal - worse} better, {worse} worse"


if __name__ == "__main__":
    main()
