"""The answer of `steelyard plan` in at most 25 lines: decision, gain, memory, layers with their reasons, engines."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType

from steelyard.model.chain import LayerRole
from steelyard.output import command
from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.plan import Plan, change_lines
from steelyard.plan.prediction import Prediction, gain_text, simplicity_line
from steelyard.report.plan_table import fastest_engines, pool_lines, warning_lines
from steelyard.report.tables import Paragraph
from steelyard.units import format_bytes, format_plural, format_ranges, format_seconds, format_tera

SHOWN_GROUPS = 3
"""Maximum number of groups of layers shown after that of most blocks."""
SHOWN_CHARACTERS = 190
"""Maximum length of a reason in characters: two lines of a terminal of 100 columns."""


def answer_view(plan: Plan, *, engines: Sequence[ComparedBaseline] = (), file: Path | None = None) -> RenderableType:
    """Return the answer as one renderable; ``file`` is the plan file, which commands in the answer name."""
    prediction = plan.prediction
    parts: list[RenderableType] = [Paragraph(text=decision(plan), indent=0, style="bold")]
    parts += warning_lines(prediction)
    parts.append(Paragraph(label="Plan", text=pipeline_text(plan)))
    if prediction is not None:
        parts += _labelled("Gain", gain_text(prediction))
        fullest = prediction.fullest
        taken, budget = prediction.stages[fullest].total_bytes, prediction.stage_budgets()[fullest]
        where = f" (stage {fullest})" if plan.num_stages > 1 else ""
        free = f"; {prediction.margin_text}" if prediction.margin_text else ""
        memory = f"{format_bytes(taken)} of {format_bytes(budget)} on the fullest device{where}{free}"
        parts.append(Paragraph(label="Memory", text=memory))
        parts += _labelled("Host", "" if prediction.host is None else str(prediction.host))
        parts.append(Paragraph(label="Accuracy", text=prediction.accuracy))
        parts.append(Paragraph(label="Search", text=str(prediction.certificate)))
        parts += _labelled("", prediction.order_line)
        source = prediction.profile
        is_assumed = source.rates is not None and source.rates.is_assumed
        is_unusual = source.is_measured or source.time_factor != 1.0 or is_assumed  # not traced at fitted rates
        parts += _labelled("Costs", prediction.costs if is_unusual else "")
        parts += _labelled("", simplicity_line(plan.num_groups, plan.num_stages, prediction))
    parts += _labelled("Training", "" if plan.training is None else str(plan.training))
    parts += [Paragraph(label="Stages", text="; ".join(stage_texts(plan)))] if plan.num_stages > 1 else []
    parts += pool_lines(prediction) if prediction is not None else []
    parts += _layers(plan, prediction, file)
    parts += _labelled("Engines", fastest_engines(engines))
    return Group(*parts)


def _labelled(label: str, text: str) -> list[RenderableType]:
    return [Paragraph(label=label, text=text)] if text else []


def decision(plan: Plan) -> str:
    """Return the model, the devices, and the speed of the plan."""
    job = f"{plan.model.name} on {plan.cluster}"
    if plan.prediction is None:
        return f"{job}: a plan without a prediction"
    found = plan.prediction
    speeds = [f"{found.tokens_per_s_per_device:,.0f} tokens/s"]
    speeds += [] if found.model_flop_per_s is None else [f"{format_tera(found.model_flop_per_s)} TFLOP/s"]
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.1%}"
    return f"{job}: {format_seconds(found.step_time_s)} per step, {' and '.join(speeds)} per device{mfu}"


def pipeline_text(plan: Plan) -> str:
    """Return stages, schedule, microbatches and precision, and changes such as frozen layers and levers."""
    sizes = sorted(set(plan.stage_sizes))
    size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    stages = "no pipeline"
    if plan.num_stages > 1:
        chunks = f", {plan.num_chunks} chunks each" if plan.num_chunks > 1 else ""
        stages = f"{plan.num_stages} stages of {size} devices ({plan.schedule}{chunks})"
    count = format_plural(plan.num_microbatches, "microbatch", "microbatches")
    per_rank = " or ".join(map(str, plan.rank_samples))
    batch = f"{count} of {plan.microbatch_samples} × {plan.seq_len} tokens ({per_rank} per rank)"
    by = "" if plan.engine is None else f", run by {plan.engine}"
    return "; ".join((f"{stages}, {batch}, {plan.precision}{by}", *change_lines(plan)))


def stage_texts(plan: Plan) -> Iterator[str]:
    """Yield the layers of each stage, neighbouring stages of equal contents once: ``3–20: 2 blocks each``."""
    chain = plan.chain()
    pools = [pool.name for pool in plan.stage_pools()] if plan.is_mixed else [""] * plan.num_stages
    contents = []
    for stage, pool in enumerate(pools):
        layers = [layer for part in plan.stages[stage].parts for layer in part.layers]
        roles = [chain.type_of(layer).role for layer in layers]
        words = ["embedding"] * (LayerRole.EMBEDDING in roles)
        words += [format_plural(roles.count(LayerRole.BLOCK), "block")] * (LayerRole.BLOCK in roles)
        words += ["head"] * (LayerRole.HEAD in roles)
        contents.append((stage, ", ".join(words) + (f" on {pool}" if pool else "")))
    for text, run in groupby(contents, key=lambda each: each[1]):
        stages = [stage for stage, _ in run]
        yield f"{format_ranges(stages)}: {text}" + (" each" if len(stages) > 1 else "")


def _layers(plan: Plan, prediction: Prediction | None, file: Path | None) -> Iterator[RenderableType]:
    """Yield the strategy of most blocks, then the largest groups that differ, each with its reason."""
    blocks = [layer for layer in range(len(plan.strategies)) if plan.chain().type_of(layer).role is LayerRole.BLOCK]
    found = [plan.strategies[layer] for layer in blocks]
    usual = max(dict.fromkeys(found), key=found.count)
    count = "all blocks" if found.count(usual) == len(found) else f"{found.count(usual)} of {len(found)} blocks"
    yield Paragraph(label="Layers", text=f"{count}: {usual}")
    reasons = prediction.reasons if prediction is not None else ()
    for text in reasons[:SHOWN_GROUPS]:
        yield Paragraph(text=_shortened(text))
    others = len(reasons) - SHOWN_GROUPS
    if others > 0:
        yield Paragraph(text=f"and {others} more: {command('explain', file or 'PLAN')}")


def _shortened(text: str) -> str:
    """Return a reason with its layer names cut off if it is too long."""
    names, colon, reason = text.partition(": ")
    most = SHOWN_CHARACTERS - len(reason)
    while len(names) > max(most, 20) and ", " in names:
        names = names.removesuffix(", …").rpartition(", ")[0] + ", …"
    return names + colon + reason
