"""Tables of measurements for the terminal: a profile, runs next to their predictions, and dry runs.

A dry run shows memory by term next to the prediction, and whether it fits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from steelyard.plan.plan import Plan
from steelyard.profiles.profile import Profile
from steelyard.profiles.record import RunRecord
from steelyard.report.tables import Paragraph, cell, framed_table, name, number
from steelyard.units import MIB, format_bytes, format_plural, format_ranges, format_seconds


def profile_view(profile: Profile) -> RenderableType:
    """Return the measured costs of a profile, and what was measured where."""
    identity = profile.identity
    title = (
        f"{identity.model_name}, {identity.seq_len} tokens, {identity.precision} on {identity.num_devices} × "
        f"{identity.device} ({identity.method} {identity.created})"
    )
    tables = (layer_table(profile), collective_table(profile))
    lines = (Paragraph(text=line, indent=0) for line in machine_lines(profile))
    return Group(Paragraph(text=title, indent=0, style="bold"), *tables, *lines)


def machine_lines(profile: Profile) -> list[str]:
    """Return lines on the machine: shared cores, sharding overhead, misfits, allocator."""
    lines = []
    if profile.busy_speeds:
        speeds = ", ".join(f"{speed:.2f}" for speed in profile.busy_speeds)
        lines.append(f"processes share cores: relative speed while 1, 2, … of them compute: {speeds}")
    if profile.sharding:
        added = ", ".join(f"{format_seconds(each.seconds)} over {each.group_size}" for each in profile.sharding)
        lines.append(f"sharding overhead per layer and microbatch, without its collectives: {added} ranks")
    if profile.misfits:
        lines.append(
            f"warning: latency and rate fit these collectives badly: {', '.join(profile.misfits)}; plans that use them "
            "have this error: profile again on an idle machine, or with a larger --budget"
        )
    if profile.reserved_over_allocated is None:
        lines.append("memory: reserved equals allocated (the CPU allocator caches nothing)")
    else:
        lines.append(f"memory: reserved {profile.reserved_over_allocated:.2f} × allocated")
    return lines


def layer_table(profile: Profile) -> Table:
    """Return measured seconds per layer type, shape and number of samples on a rank."""
    table = Table(
        "layer", "shape", *map(number, ("samples per rank", "forward", "backward", "saved")), header_style="bold"
    )
    for layer in profile.layers:
        for index, time in enumerate(layer.times):
            table.add_row(
                layer.kind if index == 0 else "",
                layer.shape_text if index == 0 else "",
                str(time.samples),
                format_seconds(time.forward_s),
                format_seconds(time.backward_s),
                format_bytes(layer.saved_bytes.at(time.samples)),
            )
    return table


def collective_table(profile: Profile) -> Table:
    """Return fitted latency and rate per collective."""
    table = Table("collective", *map(number, ("ranks", "latency", "rate", "largest error")), header_style="bold")
    for each in profile.collectives:
        table.add_row(
            each.kind,
            f"{each.group_size}{' strided' if each.strided else ''}",
            format_seconds(each.latency_s),
            f"{each.bytes_per_s / MIB:,.0f} MiB/s",
            f"{each.max_relative_error:.0%}",
        )
    return table


def comparison_table(record: RunRecord) -> Table:
    """Return step time and memory per rank, predicted and measured, and their ratio."""
    columns = map(number, ("predicted", "measured", "predicted / measured"))
    table = framed_table("Predicted and measured", "", *columns)
    table.add_row(*beside("step time", record.predicted_step_s, record.median_step_s, format_seconds), end_section=True)
    num_stages = 1 + max(rank.stage for rank in record.ranks)  # an elastic run may end under another plan
    for stage in range(num_stages if num_stages > 1 else 0):
        # its slowest rank
        measured = [rank.busy_s for rank in record.ranks if rank.stage == stage and rank.busy_s is not None]
        expected = None if record.predicted_busy_s is None else record.predicted_busy_s[stage]
        row = beside(f"busy time of stage {stage} per step", expected, max(measured, default=None), format_seconds)
        table.add_row(*row, end_section=stage == num_stages - 1)
    uneven = [rank.imbalance for rank in record.ranks if rank.imbalance is not None]
    if uneven:
        mean = sum(uneven) / len(uneven)
        row = beside("expert load imbalance (assumed)", record.predicted_imbalance, mean, "{:.2f}".format)
        table.add_row(*row, end_section=True)
    for rank in record.ranks:
        name = f"memory of rank {rank.rank}" + (f" (stage {rank.stage})" if num_stages > 1 else "")
        expected = None if record.predicted_peak_bytes is None else record.predicted_peak_bytes[rank.stage]
        table.add_row(*beside(name, expected, rank.peak_bytes, format_bytes))
    return table


def beside(
    name: str, predicted: float | None, measured: float | None, show: Callable[[Any], str]
) -> tuple[str, str, str, str]:
    """Return a row of one quantity, predicted and measured, and their ratio; None for unknown values."""
    return (
        name,
        cell(predicted, show),
        cell(measured, show),
        f"{predicted / measured:.2f}" if predicted is not None and measured else "–",
    )


def trial_table(trials: Sequence[tuple[Plan, RunRecord | None, str]]) -> Table:
    """Return a row per measured plan: step time and memory of a rank, predicted and measured."""
    columns = map(number, ("predicted\nstep", "measured\nstep", "ratio", "predicted\nmemory", "measured\nmemory"))
    table = framed_table("Predicted and measured", "", *columns, "plan")
    for index, (plan, record, words) in enumerate(trials):
        expected_s = plan.prediction.step_time_s if plan.prediction else None
        expected = max(stage.total_bytes for stage in plan.prediction.stages) if plan.prediction else None
        peak = None if record is None else max(rank.peak_bytes for rank in record.ranks)
        ratio = None if record is None or expected_s is None else expected_s / record.median_step_s
        table.add_row(
            str(index),
            cell(expected_s, format_seconds),
            cell(None if record is None else record.median_step_s, format_seconds),
            cell(ratio, "{:.2f}".format),
            cell(expected, format_bytes),
            cell(peak, format_bytes),
            words,
        )
    return table


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
    columns = (number(each, whole=False) for rank in checked for each in (f"rank {rank.rank}", "predicted"))
    table = framed_table("Found and predicted, per rank", name(), *columns)
    for term in dict.fromkeys(each for rank in checked for of in (rank.budget.predicted, rank.terms) for each in of):
        if term not in ALLOWANCES:
            pairs = (terms.get(term) for rank in checked for terms in (rank.terms, rank.budget.predicted))
            table.add_row(term, *(format_bytes(size) if size else "–" for size in pairs))
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
