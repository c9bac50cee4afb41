"""What a dry run found, term by term beside the prediction, and whether it fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from steelyard.plan.plan import Plan
from steelyard.report.tables import framed_table, number
from steelyard.units import format_bytes, format_plural, format_ranges, format_seconds

ALLOWANCES = ("context", "allocator slack")
"""Terms of a prediction that are no tensors: a dry run cannot find them, and takes them as they are predicted."""
MAX_RANK_COLUMNS = 2
"""More ranks than these are shown as rows, with their totals alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBudget:
    """What was predicted for a rank of a stage, in bytes by term, and what it may hold."""

    predicted: Mapping[str, int]
    budget_bytes: int
    margin_bytes: int = 0
    """What of it is to be left free, where a plan fits so."""
    host_bytes: int = 0
    """What was predicted of it in host memory, beside that."""

    @property
    def tensor_bytes(self) -> int:
        """What tensors are predicted to hold."""
        return sum(num_bytes for name, num_bytes in self.predicted.items() if name not in ALLOWANCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRank:
    """What a dry run of one rank found. ``terms`` add up to its peak in a later step than the first."""

    rank: int
    stage: int
    ranks: tuple[int, ...]
    """All ranks that it stands for."""
    terms: Mapping[str, int]
    where: str
    first_step_bytes: int
    wall_s: float
    budget: StageBudget
    host_bytes: int = 0
    """The most in host memory."""

    @property
    def peak_bytes(self) -> int:
        """The most that tensors hold in any step."""
        return max(sum(self.terms.values()), self.first_step_bytes)

    @property
    def allowance_bytes(self) -> int:
        """What is kept free beside tensors: the context, and the same share of slack as in the prediction."""
        predicted = self.budget.predicted
        context, slack = (predicted.get(name, 0) for name in ALLOWANCES)
        used = context + self.peak_bytes
        return context + round(used * slack / (self.budget.tensor_bytes + context))

    @property
    def over_bytes(self) -> int:
        """Bytes above the budget; negative where it fits."""
        return self.peak_bytes + self.allowance_bytes - self.budget.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether what tensors hold and the allowance stay within the budget."""
        return self.over_bytes <= 0

    @property
    def is_pressed(self) -> bool:
        """Whether it takes of the margin."""
        return self.over_bytes > -self.budget.margin_bytes


def check_view(plan: Plan, checked: Sequence[CheckedRank]) -> RenderableType:
    """The whole result: a sentence, the peaks by term or by rank, and which ranks were run."""
    verdict = "does not fit"
    if all(rank.fits for rank in checked):
        verdict = "fits under pressure" if any(rank.is_pressed for rank in checked) else "fits"
    wall_s = sum(rank.wall_s for rank in checked)
    headline = (
        f"{plan.model.name} on {plan.cluster}: {verdict}; {format_plural(len(checked), 'rank')} of {plan.num_devices} "
        f"run on fake tensors in {format_seconds(wall_s)} ({format_seconds(wall_s / len(checked))} a rank)"
    )
    table = term_table(checked) if len(checked) <= MAX_RANK_COLUMNS else total_table(checked)
    return Group(Text(headline, style="bold"), table)


def term_table(checked: Sequence[CheckedRank]) -> Table:
    """For each rank a column of what was found and one of what was predicted, by term."""
    columns = (number(name) for rank in checked for name in (f"rank {rank.rank}", "predicted"))
    table = framed_table("Found and predicted, per rank", "", *columns)
    names = dict.fromkeys(name for rank in checked for terms in (rank.budget.predicted, rank.terms) for name in terms)
    for name in names:
        if name not in ALLOWANCES:
            pairs = (terms.get(name) for rank in checked for terms in (rank.terms, rank.budget.predicted))
            table.add_row(name, *(format_bytes(size) if size else "–" for size in pairs))
    table.add_section()
    table.add_row(
        "tensors",
        *(
            text
            for rank in checked
            for text in (format_bytes(sum(rank.terms.values())), format_bytes(rank.budget.tensor_bytes))
        ),
        style="bold",
    )
    table.add_row("predicted / found", *_left(checked, _ratio))
    if any(rank.host_bytes for rank in checked):
        on_host = (size for rank in checked for size in (rank.host_bytes, rank.budget.host_bytes))
        table.add_row("in host memory", *map(format_bytes, on_host))
    table.add_row("at", *_left(checked, lambda rank: rank.where))
    table.add_row("in the first step", *_left(checked, lambda rank: format_bytes(rank.first_step_bytes)))
    table.add_row("context and slack", *_left(checked, lambda rank: format_bytes(rank.allowance_bytes)))
    table.add_row("left of the budget", *_left(checked, _budget_text))
    table.add_row("stands for", *_left(checked, lambda rank: format_ranges(rank.ranks)))
    table.add_row("took", *_left(checked, lambda rank: format_seconds(rank.wall_s)))
    return table


def total_table(checked: Sequence[CheckedRank]) -> Table:
    """A row for every rank that was run: its peak, the prediction, and what is left of the budget."""
    table = framed_table(
        "Found and predicted, per rank",
        *(number("rank"), number("stage"), "stands for", number("found"), number("predicted"), number("ratio")),
        *("at", number("left"), number("took")),
    )
    for rank in checked:
        table.add_row(
            str(rank.rank),
            str(rank.stage),
            format_ranges(rank.ranks),
            format_bytes(rank.peak_bytes),
            format_bytes(rank.budget.tensor_bytes),
            _ratio(rank),
            rank.where,
            _budget_text(rank),
            format_seconds(rank.wall_s),
        )
    return table


def misfit_lines(checked: Sequence[CheckedRank]) -> list[str]:
    """A line for each group of ranks that does not fit, or takes of the margin: which, and by how much."""
    return [
        f"fits under pressure: rank {rank.rank} of stage {rank.stage} (ranks {format_ranges(rank.ranks)}) leaves "
        f"{format_bytes(-rank.over_bytes)} free, less than {format_bytes(rank.budget.margin_bytes)}"
        for rank in checked
        if rank.fits and rank.is_pressed
    ] + [
        f"does not fit: rank {rank.rank} of stage {rank.stage} (ranks {format_ranges(rank.ranks)}) needs "
        f"{format_bytes(rank.over_bytes)} ({rank.over_bytes} bytes) more than {format_bytes(rank.budget.budget_bytes)}"
        for rank in checked
        if not rank.fits
    ]


def _left(checked: Sequence[CheckedRank], of: Callable[[CheckedRank], str]) -> list[str]:
    return [text for rank in checked for text in (of(rank), "")]


def _ratio(rank: CheckedRank) -> str:
    return f"{rank.budget.tensor_bytes / rank.peak_bytes:.3f}"


def _budget_text(rank: CheckedRank) -> str:
    return format_bytes(-rank.over_bytes) if rank.fits else f"over by {format_bytes(rank.over_bytes)}"
