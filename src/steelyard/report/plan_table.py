"""A plan for the terminal: the answer of `steelyard plan` in at most 25 lines, and all tables.

The answer is the decision, gain, memory, layers with their reasons, and engines. Tables are strategies, predicted time
and memory per stage, and plans that lost.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from steelyard.errors import InvalidClusterError
from steelyard.hardware import Cluster
from steelyard.model.chain import LayerRole
from steelyard.output import command
from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.plan import Plan, answer_lines, part_name
from steelyard.plan.prediction import (
    SAME_SHARE,
    Alternative,
    Baseline,
    CostSource,
    Prediction,
    against,
    layers_text,
    margin_text,
    misfits,
)
from steelyard.report.tables import Paragraph, folded, framed_table, name, number
from steelyard.units import (
    GB,
    format_bytes,
    format_change,
    format_days,
    format_money,
    format_plural,
    format_ranges,
    format_seconds,
)

SHOWN_ALTERNATIVES = 5
SHOWN_ENGINES = 3
MAX_STAGE_COLUMNS = 4
"""Maximum number of stages shown as columns with every term; more stages are rows with their totals."""


def _dim(text: str) -> Paragraph:
    return Paragraph(text=text, indent=0, style="dim")


def pool_lines(prediction: Prediction) -> list[RenderableType]:
    """Return a line per device group: its stages, or why it is left out."""
    lines: list[RenderableType] = []
    for pool in prediction.pools or ():
        left = margin_text(pool.budget_bytes, pool.margin_bytes)
        memory = format_bytes(pool.budget_bytes) + (f" ({left})" if left else "")
        used = f"{format_plural(pool.num_stages, 'stage')} on {pool.num_devices} devices of {memory}"
        words = used if pool.num_stages else f"left out: {pool.reason or 'not part of the plan'}"
        lines.append(Paragraph(text=f"Group {pool.name}: {words}", indent=0, style="" if pool.num_stages else "yellow"))
    return lines


def reason_lines(prediction: Prediction) -> list[RenderableType]:
    """Return the reasons of layers that differ from most blocks, a line for each strategy."""
    return [_dim(text[:1].upper() + text[1:]) for text in prediction.reasons]


def warning_lines(prediction: Prediction | None) -> list[RenderableType]:
    """Return the warnings of a prediction."""
    return [
        Paragraph(text=f"Warning: {text}", indent=0, style="yellow")
        for text in (prediction.warnings if prediction else ())
    ]


def link_lines(plan: Plan, prediction: Prediction) -> list[str]:
    """Return a line with the links that were assumed, at their rate per device; none if they were measured or the
    cluster is unknown."""
    try:
        machines = plan.hardware_value()
    except InvalidClusterError:
        return []
    rates = {pool.device.name: pool.device.host_bytes_per_s for pool in machines.pools if prediction.host}
    on_host = "; ".join(f"{rate / GB:.3g} GB/s on {name}" for name, rate in rates.items() if rate)
    copies = [f"Copies between device and host assumed, per device and direction: {on_host}"] if on_host else []
    if machines.is_mixed:
        pairs = [(pool, link) for pool, link in zip(machines.pools, machines.links, strict=True) if link is not None]
        words = [f"{link.name} from {pool.name}, {link.rate_text()}" for pool, link in pairs]
        sources = {each.name: each.profile for each in prediction.pools or ()}
        return [
            f"Links assumed between groups, per device and direction: {'; '.join(words)}",
            *(f"In {pool.name}: {text}" for pool, _ in pairs if (text := _links(pool, sources.get(pool.name)))),
            *copies,
        ]
    text = _links(machines, prediction.profile)
    return [*([f"Links assumed, per device and direction: {text}"] if text else []), *copies]


def _links(cluster: Cluster, source: CostSource | None) -> str:
    """Return the links of a cluster and their rates; empty if they were measured."""
    between = cluster.inter_link if cluster.num_nodes > 1 else None
    links = [(cluster.intra_link, "inside a node", cluster.devices_per_node)]
    links += [(between, "between nodes", 1)] if between is not None else []
    is_measured = source is not None and source.is_measured and not source.links_assumed
    if is_measured or cluster.intra_link.needs_profile:
        return ""
    return "; ".join(f"{link.name} {where}, {link.rate_text(count)}" for link, where, count in links)


def gain_sentence(plan: Plan) -> str:
    """Return the gain over each baseline, equal baselines once, with the days and money of a whole training.

    Empty if none was searched.

    ``It is 2.2% faster than plain FSDP (141 days, $67.9 K); plain DDP does not fit (39.1 GiB short)``
    """
    prediction, training = plan.prediction, plan.training
    gains = []
    baselines: dict[tuple[str, str], Baseline] = {}
    for each in prediction.baselines if prediction else ():
        baselines.setdefault((each.setting, each.strategies or each.name), each)
    for each in baselines.values():
        if each.step_time_s is None:
            continue
        gain = 1 - prediction.step_time_s / each.step_time_s if prediction else 0.0
        saved = []
        if training is not None and gain > SAME_SHARE:
            part = gain / (1 - gain)
            saved = [format_days(part * training.days)]
            saved += [] if training.cost is None else [format_money(part * training.cost)]
        gains.append(f"{against(gain)} {each.name}" + (f" ({', '.join(saved)})" if saved else ""))
    takes = [f"It is {', '.join(gains)}"] if gains else []
    text = "; ".join((*takes, *misfits(baselines.values())))
    return text[:1].upper() + text[1:]


def stage_table(plan: Plan) -> Table:
    """Return a row per run of equal layers: stage (and its chunk), ranks, layers, strategy."""
    chain = plan.chain()
    pools = [pool.name for pool in plan.stage_pools()] if plan.is_mixed else []
    group = [folded("group")] if pools else []
    table = framed_table(
        "Strategies", name("stage"), *group, name("ranks"), folded("layers"), folded("parallel"), name("remat")
    )
    for index, part in enumerate(plan.parts):
        for run_index, run in enumerate(part.runs):
            first = run_index == 0
            table.add_row(
                part_name(plan, index) if first else "",
                *([pools[index] if first else ""] if pools else []),
                f"{part.ranks[0]}–{part.ranks[1]}" if first else "",
                layers_text(chain, *run.layers),
                str(run.strategy.without_remat()),
                str(run.remat),
                end_section=run_index == len(part.runs) - 1,
            )
    return table


def term_table(prediction: Prediction) -> Table:
    """Return time and memory of each stage by term, and the headroom."""
    columns = (number(f"stage {index}") for index in range(len(prediction.stages)))
    table = framed_table("Predicted, per stage", "", *columns)
    for term in _terms([stage.time_s for stage in prediction.stages]):
        table.add_row(term, *(format_seconds(stage.time_s.get(term, 0.0)) for stage in prediction.stages))
    table.add_row(
        "time per microbatch",
        *(format_seconds(stage.total_time_s) for stage in prediction.stages),
        style="bold",
        end_section=True,
    )
    for term in _terms([stage.memory_bytes for stage in prediction.stages]):
        table.add_row(term, *(format_bytes(stage.memory_bytes.get(term, 0)) for stage in prediction.stages))
    table.add_row("memory", *(format_bytes(stage.total_bytes) for stage in prediction.stages), style="bold")
    table.add_row("headroom", *_all_left(prediction))
    return table


def fastest_engines(engines: Sequence[ComparedBaseline]) -> str:
    """Return the fastest other engines next to the plan, as in ``megatron 71.8 s (−10.6%)``; empty if none runs it.

    ``engines`` are in the order of their step times. Others whose search was cut short, which may be faster, are named.
    """
    shown = [each for each in engines if each.step_time_s is not None][:SHOWN_ENGINES]
    found = [f"{each.name} {step_text(each)} ({format_change(each.slowdown or 0.0)})" for each in shown]
    cut = [each.name for each in engines if each.is_bound and each not in shown]
    parts = [", ".join(found)] * bool(found)
    parts += [f"not searched to the end: {', '.join(cut)}"] * bool(cut)
    return "; ".join([*parts, "all: --engines"]) if parts else ""


def engine_line(other: ComparedBaseline) -> str:
    """Return the plan of another engine, as in ``megatron: 71.8 s, 10.6% faster than the plan: tp4 ×82; 8 stages``."""
    if other.step_time_s is None:
        return f"  {other.name}: {f'cannot run it: {other.reason}' if other.reason else no_plan_text(other)}"
    words = against(-(other.slowdown or 0.0))
    return f"  {other.name}: {step_text(other)}, {words} the plan: {other.strategies}; {other.setting}"


def no_plan_text(other: ComparedBaseline) -> str:
    """Return the reason why a baseline has no plan."""
    if other.is_bound:
        return "no plan found before the time was up"
    if other.reason:
        return f"not possible: {other.reason}"
    return f"does not fit ({format_bytes(other.missing_bytes)} short)" if other.missing_bytes else "no legal strategy"


def total_table(prediction: Prediction) -> Table:
    """Return a row per stage: time, compute, memory, activations and headroom."""
    columns = ("stage", "time per microbatch", "compute", "memory", "activations", "headroom")
    table = framed_table("Predicted, per stage", *map(number, columns))
    for index, (stage, left) in enumerate(zip(prediction.stages, _all_left(prediction), strict=True)):
        table.add_row(
            str(index),
            format_seconds(stage.total_time_s),
            format_seconds(stage.time_s.get("compute", 0.0)),
            format_bytes(stage.total_bytes),
            format_bytes(stage.memory_bytes.get("activations", 0)),
            left,
        )
    return table


def alternative_table(prediction: Prediction, shown: int = SHOWN_ALTERNATIVES) -> Table:
    """Return the best candidates that lost, and why."""
    title = f"Plans that lost (best {min(shown, len(prediction.alternatives))} of {len(prediction.alternatives)})"
    table = framed_table(title, "pipeline configuration", number("step"), "why")
    for alternative in prediction.alternatives[:shown]:
        table.add_row(alternative.description, step_text(alternative), why_lost(prediction, alternative))
    return table


def why_lost(prediction: Prediction, alternative: Alternative) -> str:
    """Return the reason why a candidate lost, and whether by less than the prediction error."""
    return ("within prediction error: " if prediction.is_as_good(alternative.step_time_s) else "") + alternative.reason


def as_good_line(prediction: Prediction, baselines: Sequence[ComparedBaseline]) -> str:
    """Return the names of baselines within prediction error of the plan; empty if there are none."""
    names = [baseline.name for baseline in baselines if prediction.is_as_good(baseline.step_time_s)]
    if not names or prediction.interval is None:
        return ""
    error = f"within {prediction.interval.as_good:.0%}, so either may be faster"
    return f"Within prediction error of this plan ({error}): {', '.join(names)}."


def step_text(other: Alternative | ComparedBaseline) -> str:
    """Return the step time of another plan, with ``≤`` if the search was not finished."""
    if other.step_time_s is None:
        return "–"
    return ("≤ " if other.is_bound else "") + format_seconds(other.step_time_s)


def _all_left(prediction: Prediction) -> list[str]:
    left = prediction.left_bytes()
    return [format_bytes(each) if each >= 0 else f"over by {format_bytes(-each)}" for each in left]


def _terms(columns: list[dict[str, float]] | list[dict[str, int]]) -> list[str]:
    """Return all names in the order of their first occurrence."""
    return list(dict.fromkeys(name for column in columns for name in column))


SHOWN_GROUPS = 3
"""Maximum number of groups of layers shown after that of most blocks."""
SHOWN_CHARACTERS = 190
"""Maximum length of a reason in characters: two lines of a terminal of 100 columns."""


def answer_view(
    plan: Plan, *, engines: Sequence[ComparedBaseline] = (), file: Path | None = None, lost: int | None = None
) -> RenderableType:
    """Return the answer as one renderable; ``file`` is the plan file, which commands in the answer name.

    If ``lost`` is given, all reasons and tables follow, with so many plans that lost.
    """
    prediction = plan.prediction
    (_, first), *lines = answer_lines(plan, everything=lost is not None)
    parts: list[RenderableType] = [Paragraph(text=first, indent=0, style="bold"), *warning_lines(prediction)]
    parts += [Paragraph(label="" if label in _UNNAMED else label, text=text) for label, text in lines]
    parts += [Paragraph(label="Stages", text="; ".join(stage_texts(plan)))] if plan.num_stages > 1 else []
    parts += pool_lines(prediction) if prediction is not None else []
    parts += _layers(plan, prediction, file, SHOWN_GROUPS if lost is None else plan.num_groups)
    fastest = fastest_engines(engines)
    parts += [Paragraph(label="Engines", text=fastest)] if fastest else []
    parts += [] if lost is None else _tables(plan, prediction, lost)
    return Group(*parts)


_UNNAMED = ("Order", "Groups")
"""Lines that continue the one before in an answer."""


def _tables(plan: Plan, prediction: Prediction | None, lost: int) -> Iterator[RenderableType]:
    """Yield strategies, predicted time and memory, what was not searched, assumed links, and plans that lost."""
    yield stage_table(plan)
    if prediction is not None:
        yield term_table(prediction) if plan.num_stages <= MAX_STAGE_COLUMNS else total_table(prediction)
        yield from (_dim(f"not searched: {text}") for text in prediction.not_searched)
        yield from map(_dim, link_lines(plan, prediction))
        if prediction.alternatives and lost > 0:
            yield alternative_table(prediction, lost)


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


def _layers(plan: Plan, prediction: Prediction | None, file: Path | None, shown: int) -> Iterator[RenderableType]:
    """Yield the strategy of most blocks, then the ``shown`` largest groups that differ, each with its reason."""
    blocks = [layer for layer in range(len(plan.strategies)) if plan.chain().type_of(layer).role is LayerRole.BLOCK]
    found = [plan.strategies[layer] for layer in blocks]
    usual = max(dict.fromkeys(found), key=found.count)
    count = "all blocks" if found.count(usual) == len(found) else f"{found.count(usual)} of {len(found)} blocks"
    yield Paragraph(label="Layers", text=f"{count}: {usual}")
    reasons = prediction.reasons if prediction is not None else ()
    if plan.is_mixed:  # no reasons are known over several device groups
        runs = [run for part in plan.parts for run in part.runs if run.strategy != usual]
        reasons = tuple(f"{layers_text(plan.chain(), *run.layers)}: {run.strategy}" for run in runs)
    for text in reasons[:shown]:
        yield Paragraph(text=_shortened(text))
    others = len(reasons) - shown
    if others > 0:
        yield Paragraph(text=f"and {others} more: {command('explain', file or 'PLAN')}")


def _shortened(text: str) -> str:
    """Return a reason with its layer names cut off if it is too long."""
    names, colon, reason = text.partition(": ")
    most = SHOWN_CHARACTERS - len(reason)
    while len(names) > max(most, 20) and ", " in names:
        names = names.removesuffix(", …").rpartition(", ")[0] + ", …"
    return names + colon + reason
