"""Comparisons: the bottleneck, the best plan under each restriction, and the other pipeline configurations."""

from collections.abc import Sequence

from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.prediction import Alternative
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Child, Html, folded, section, table, tag
from steelyard.report.plan_table import as_good_line, step_text, why_lost
from steelyard.report.tables import cell
from steelyard.units import format_bytes, format_change

SHOWN = 8
WIDEST = 0.5
"""Slowdown from which on a plan has the longest bar, as a fraction."""


def baseline_section(found: ReportContents) -> Html:
    """Build the section of the baselines that were searched, and of the plan's own alternatives with their reasons."""
    study, alternatives = found.study, found.prediction.alternatives
    parts: list[Child] = []
    if study.explanation.binds:
        parts.append(tag("p", study.explanation.binds))
    if study.explanation.rivals or study.explanation.budgets:
        parts += [
            tag("h3", "The best plan instead"),
            tag("p", f"Each line was searched again, among {study.scope}.", class_="hint"),
            _baseline_table((*study.explanation.rivals, *study.explanation.budgets)),
            tag("p", line) if (line := as_good_line(found.prediction, study.explanation.rivals)) else None,
        ]
    if study.left_out:
        parts.append(
            tag(
                "p",
                f"No time was left for {', '.join(study.left_out)}: steelyard report {found.plan_file} "
                "without --time-limit searches them, steelyard explain shows them too.",
                class_="hint",
            )
        )
    if alternatives:
        parts += [tag("h3", "Other pipeline configurations"), _alternative_table(found, alternatives[:SHOWN])]
        if len(alternatives) > SHOWN:
            rest = alternatives[SHOWN:]
            parts.append(folded(f"{len(rest)} more that lost", _alternative_table(found, rest)))
    if not parts:
        parts.append(
            tag(
                "p", f"Nothing was compared with this plan: steelyard explain {found.plan_file} searches its baselines."
            )
        )
    return section("rivals", "Why the others lost", *parts)


def _baseline_table(baselines: Sequence[ComparedBaseline]) -> Html:
    rows: list[tuple[Child, ...]] = []
    configs = {baseline.setting for baseline in baselines if baseline.setting}
    for baseline in baselines:
        if baseline.step_time_s is None:
            missing = baseline.missing_bytes
            reason = "no legal strategy" if missing is None else f"does not fit: {format_bytes(missing)} short"
            rows.append((baseline.name, "–", "–", reason))
        else:
            slowdown = baseline.slowdown or 0.0
            look, width = "slower" if slowdown >= 0 else "faster", min(abs(slowdown) / WIDEST, 1.0) * 4
            rows.append(
                (
                    baseline.name,
                    step_text(baseline),
                    [tag("i", class_=look, style=f"width:{width:.2f}em", aria_hidden="true"), format_change(slowdown)],
                    baseline.strategies if len(configs) == 1 else f"{baseline.setting}: {baseline.strategies}",
                )
            )
    return table(("", "step", "slower", "plan"), rows, numeric=(1, 2))


def _alternative_table(found: ReportContents, alternatives: Sequence[Alternative]) -> Html:
    rows = [
        (each.description, step_text(each), cell(each.memory_bytes, format_bytes), why_lost(found.prediction, each))
        for each in alternatives
    ]
    return table(("candidate", "step", "memory", "why it lost"), rows, numeric=(1, 2))
