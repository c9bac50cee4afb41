"""Result of a dry run: memory by term next to the prediction, and whether it fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from steelyard.plan.plan import Plan
from steelyard.report.tables import Paragraph, framed_table, number
from steelyard.units import format_bytes, format_plural, format_ranges, format_seconds

ALLOWANCES = ("context", "allocator slack")
"""Terms of a prediction that are not tensors: a dry run cannot measure them, so it adds them as predicted."""
MAX_RANK_COLUMNS = 2
"""Maximum number of ranks shown as columns with every term; more ranks are rows with their totals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBudget:
    """Predicted bytes of a rank of a stage by term, and its budget."""

    predicted: Mapping[str, int]
    budget_bytes: int
    margin_bytes: int = 0
    """Reserved part of the budget, kept free if a plan fits that way."""
    host_bytes: int = 0
    """Predicted bytes in host memory, in addition."""

    @property
    def tensor_bytes(self) -> int:
        """Predicted bytes of tensors."""
        return sum(num_bytes for name, num_bytes in self.predicted.items() if name not in ALLOWANCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRank:
    """Result of the dry run of one rank; ``terms`` add up to its peak in a step after the first."""

    rank: int
    stage: int
    ranks: tuple[int, ...]
    """All ranks with the same result."""
    terms: Mapping[str, int]
    where: str
    first_step_bytes: int
    wall_s: float
    budget: StageBudget
    host_bytes: int = 0
    """Peak in host memory."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of tensors in any step."""
        return max(sum(self.terms.values()), self.first_step_bytes)

    @property
    def allowance_bytes(self) -> int:
        """CUDA context and allocator slack, the slack in the same proportion as in the prediction."""
        predicted = self.budget.predicted
        context, slack = (predicted.get(name, 0) for name in ALLOWANCES)
        used = context + self.peak_bytes
        return context + round(used * slack / (self.budget.tensor_bytes + context))

    @property
    def over_bytes(self) -> int:
        """Bytes above the budget; negative if it fits."""
        return self.peak_bytes + self.allowance_bytes - self.budget.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether tensors, context and slack stay within the budget."""
        return self.over_bytes <= 0

    @property
    def is_pressed(self) -> bool:
        """Whether it uses some of the reserved memory."""
        return self.over_bytes > -self.budget.margin_bytes


def check_view(plan: Plan, checked: Sequence[CheckedRank]) -> RenderableType:
    """Return the whole result: verdict, headroom next to the prediction, and peaks by term or by rank."""
    verdict = "does not fit"
    if all(rank.fits for rank in checked):
        verdict = "fits under pressure" if any(rank.is_pressed for rank in checked) else "fits"
    wall_s = sum(rank.wall_s for rank in checked)
    headline = (
        f"{plan.model.name} on {plan.cluster}: {verdict}; {format_plural(len(checked), 'rank')} of {plan.num_devices} "
        f"run on fake tensors in {format_seconds(wall_s)} ({format_seconds(wall_s / len(checked))} per rank)"
    )
    table = term_table(checked) if len(checked) <= MAX_RANK_COLUMNS else total_table(checked)
    first = Paragraph(text=headline, indent=0, style="bold")
    return Group(first, Paragraph(text=headroom_line(checked), indent=0), table)


def headroom_line(checked: Sequence[CheckedRank]) -> str:
    """Return the headroom of the fullest rank: device memory less what the plan predicts and less what was found."""
    fullest = max(checked, key=lambda rank: rank.over_bytes)
    budget, predicted = fullest.budget, sum(fullest.budget.predicted.values())
    found = fullest.peak_bytes + fullest.allowance_bytes
    reserved = f", {format_bytes(budget.margin_bytes)} of them reserved" if budget.margin_bytes else ""
    return (
        f"Fullest rank {fullest.rank}: plan predicts {format_bytes(predicted)}, check found {format_bytes(found)} "
        f"(tensors, context, allocator slack) of {format_bytes(budget.budget_bytes)}: "
        f"{_budget_text(fullest)}{' free' * fullest.fits}{reserved}"
    )


def term_table(checked: Sequence[CheckedRank]) -> Table:
    """Return a column of found and one of predicted bytes per rank, by term."""
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
    table.add_row("peak in the first step", *_left(checked, lambda rank: format_bytes(rank.first_step_bytes)))
    table.add_row("context and slack", *_left(checked, lambda rank: format_bytes(rank.allowance_bytes)))
    table.add_row("free memory", *_left(checked, _budget_text))
    table.add_row("stands for", *_left(checked, lambda rank: format_ranges(rank.ranks)))
    table.add_row("run time", *_left(checked, lambda rank: format_seconds(rank.wall_s)))
    return table


def total_table(checked: Sequence[CheckedRank]) -> Table:
    """Return a row per rank that was run: its peak, the prediction, and its free memory."""
    table = framed_table(
        "Found and predicted, per rank",
        *(number("rank"), number("stage"), "stands for", number("found"), number("predicted"), number("ratio")),
        *("at", number("free"), number("run time")),
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
    """Return a line per group of ranks that does not fit or uses reserved memory, with the bytes."""
    return [
        f"fits under pressure: rank {rank.rank} of stage {rank.stage} (ranks {format_ranges(rank.ranks)}) leaves "
        f"{format_bytes(-rank.over_bytes)} of the {format_bytes(rank.budget.margin_bytes)} reserved for the allocator"
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
