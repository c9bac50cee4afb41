"""Completion of a request: a plan that is searched, compared with baselines, and carries fallbacks and next best plans.

`find_plan` and the command line both answer a request by `complete` and so return the same plan. A plan carries
fallbacks of less memory, with which a run continues if memory runs out, and the next best plans, to be measured
alongside it. If a baseline or a fallback is faster, because a time limit ended the search of the whole space or the
simulator ranks plans differently from the search, it becomes the plan. The plan is then the simplest of those that are
only slightly slower (`steelyard.planning.simple`).
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from steelyard.arguments import checked
from steelyard.cost.job import ASSUMED_IMBALANCE, Job
from steelyard.cost.predict import predict
from steelyard.engines import ENGINES
from steelyard.errors import UserError
from steelyard.hardware import Cluster
from steelyard.levers import LEVERS
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Baseline, Certificate
from steelyard.planning.choose import (
    NothingFitsError,
    PlanningResult,
    accept,
    device_bytes,
    plan_job,
    plan_request,
)
from steelyard.planning.job import job_of, time_factors
from steelyard.planning.price import peak_bytes, prediction_of, refuse_host, with_cost
from steelyard.planning.problem import is_uniform
from steelyard.planning.request import SIMPLIFY, GivenProfiles, PlanRequest, make_request, with_levers
from steelyard.planning.simple import mixture, simplest, with_reasons, with_usual_stages
from steelyard.planning.sizes import fewest_devices, largest_batch, longest_sequence
from steelyard.planning.variants import (
    Answer,
    Progress,
    Study,
    baselines,
    counted,
    group_answers,
    next_larger,
    on_cluster,
    run_by,
    within,
)
from steelyard.planning.why_not import (
    left_out,
    pin_error,
    refuse_impossible,
    samples_not_measured,
    widened,
    widened_text,
)
from steelyard.precision import Precision
from steelyard.units import format_bytes, format_seconds

ENGINE_LIMIT_S, ENGINE_SHARE = 2.0, 0.25
"""Minimum of `engine_limit_s`, and its fraction of the time that the plan took."""
MEMORY_SHARES = (0.9, 0.75, 0.6, 0.5)
"""Maximum memory of each fallback, as a fraction of the plan's predicted memory."""
LEVER_LIMIT_S = 1.0
"""Seconds for the best plan with a value of a lever that is left to the search."""
MOST_LARGER = 3
"""Number of larger clusters that are tried to find one that does not need such a lever."""
CONFIG_LIMIT_S = 5.0
"""Seconds for the best plan of one more configuration."""
ROUNDING_BYTES = 2
"""Bytes lost to rounding when the bytes of a device are converted to bytes of tensors."""


def with_fallbacks(plan: Plan, study: Study, *, num_fallbacks: int) -> Plan:
    """Return the plan with up to ``num_fallbacks`` fallbacks, each a fast plan within a fraction of the plan's memory.

    Fallbacks keep a run from ending and are not the first choice for training, so they are plans of one strategy with
    leading recomputed blocks, and mixes only if none of these fits. If nothing fits into a fraction, the last fallback
    is the plan of minimum memory.
    """
    if num_fallbacks < 1 or plan.prediction is None:
        return plan
    found: list[Plan] = []
    most_bytes, mixes = study.job.budget_bytes, study.job.engine.capabilities.mixes_layers
    for share in MEMORY_SHARES:
        budget = math.floor(share * peak_bytes(plan))
        less = study.simple_plan(within("", budget)) if mixes else None
        if less is not None:
            most_bytes = budget
        else:
            result = _quickly_within(study, budget)
            if result.plan is None and result.miss is not None:
                least_bytes = device_bytes(result.job, result.miss.needed_bytes) + ROUNDING_BYTES
                result = _quickly_within(study, least_bytes) if least_bytes <= most_bytes else result
            less, most_bytes = result.plan, result.job.budget_bytes
        if less is None or peak_bytes(less) >= peak_bytes(found[-1] if found else plan):
            break
        found.append(less)
        if len(found) == num_fallbacks or peak_bytes(less) > budget:
            break
    return plan.model_copy(update={"fallbacks": tuple(each.as_fallback() for each in found)})


def with_next_best(result: PlanningResult, *, num_plans: int, uniform: bool = False) -> PlanningResult:
    """Return the result with up to ``num_plans`` next best plans, each the best found of its configuration, fastest
    first.

    The plans that the search found come before those of the most promising configurations that it left unsolved, the
    ones with the smallest lower bounds. ``uniform`` is as in `accept`.
    """
    if result.plan is None:
        return result
    job, found = result.job, list(result.others[: max(0, num_plans)])
    known = (result.plan, *(plan for plan, _ in result.others))
    taken = {replace(plan.pipeline, pass_order=()) for plan in known}
    left = [each for each in result.search.configs if each.pipeline not in taken]
    for each in sorted(left, key=lambda each: each.result.lower_bound_s)[: 2 * num_plans]:
        if len(found) >= num_plans:
            break
        one = accept(job, [each.given], num_alternatives=0, time_limit_s=CONFIG_LIMIT_S, uniform=uniform)
        found += [(best.plan, best.cost) for best in one.ranked[:1]]
    found.sort(key=lambda each: each[1].step_time_s)
    kept = tuple(with_cost(plan, job, cost).as_fallback() for plan, cost in found)
    return replace(result, plan=result.plan.model_copy(update={"next_best": kept}))


def _quickly_within(study: Study, budget_bytes: int) -> PlanningResult:
    """Return a fast plan within a budget, from a search that does not go to the end."""
    result = study.plan(within("", budget_bytes), top=1, to_the_end=False)
    assert not isinstance(result, str), "another budget leaves the decisions as they are"
    return result


def is_module(value: object) -> bool:
    """Return whether a value is a ``torch.nn.Module``, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


@checked
def find_plan(
    config: Any,
    cluster: str | Path | Cluster,
    *,
    global_batch: int | Literal["max", "devices"],
    seq_len: int | Literal["max"] | None = None,
    precision: Precision = "bf16",
    memory: str | int | None = None,
    memory_margin: float | None = None,
    profile: GivenProfiles | None = None,
    calibration: str | Path | Sequence[str | Path] = (),
    decisions: Decisions = FREE,
    sample: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    blocks: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] = (),
    imbalance: float = ASSUMED_IMBALANCE,
    simplify: float = SIMPLIFY,
    levers: Mapping[str, str | None] | None = None,
) -> Plan:
    """Return the simplest plan to train a model on a cluster that is at most 1 % slower than the fastest that fits.

    It is the plan that ``steelyard plan -o`` writes. ``simplify`` is the fraction that it may be slower (default 0.01);
    0 returns the fastest plan.

    ``config`` is the name of a packaged model, a hub ID, the path of a ``config.json``, its content, or a transformers
    config or model. ``cluster`` is a name like ``8x8xh100-80gb``, several of these joined by ``+``, or the path of a
    YAML file. ``memory`` is the memory per device, in bytes or as in ``20GiB`` (default: all of it). The fraction
    ``memory_margin`` of it is left free if a plan fits that way (default: 0.05 of a GPU, 0 with ``memory``).
    ``profile`` is a measured profile, by path or value, or one per pool by name. Without it, the model is traced and
    priced by the catalogue's rates. Times are scaled by the median of the measured runs in ``calibration``.

    ``config`` can also be any other ``torch.nn.Module`` with lists of blocks (docs/how-to/your-own-model.md).
    ``sample`` is then a batch of two or more samples, with the batch dimension first: the module's inputs (a tensor, a
    tuple, or a dictionary by name). With ``loss``, a function of the module's outputs and of targets, ``sample`` is a
    pair of inputs and targets. Without ``loss``, the module returns its loss. ``blocks`` names the lists of blocks if
    they are not found. A `peft.PeftModel` becomes its base model and the lever for its adapters.

    ``global_batch`` is the number of samples of a step, ``"devices"`` for one per device, or ``"max"`` for the most
    that fit. ``seq_len`` is the number of tokens of a sample, or ``"max"``. It may be omitted if only one length is
    possible: that of an image or of your own module's sample.

    ``freeze`` names the modules or parameters that are not trained, by their paths in ``named_parameters``, with shell
    wildcards such as ``*``. Parameters of your own module without gradients are not trained either.

    ``imbalance`` is the load of the busiest expert rank relative to the mean, which training reports. ``decisions``
    restricts the search. ``levers`` are changes alongside strategies, written like the options of ``steelyard plan``:
    ``{"optimizer": "adamw-8bit"}``, or ``{"offload": "auto"}`` for the fastest value.

    Raises `NothingFitsError` with the nearest miss if no plan fits, and another `UserError` for a wrong argument.
    """
    own = None
    changed = import_module("steelyard.modules.levers").changed_by_user(config) if is_module(config) else None
    if changed is not None:
        config, levers = _as_levers(changed, levers or {})
    elif sample is None and hasattr(of_model := getattr(config, "config", config), "to_json_string"):
        config = _chain_of(of_model)
    elif is_module(config):
        from steelyard.modules.own_proof import Built, own_model

        own = own_model(Built(module=config, sample=sample, loss=loss, blocks=blocks))
    unread = {} if own is not None else {"sample": sample, "loss": loss, "blocks": blocks}
    for name, value in unread.items():
        if value is not None:
            raise UserError(
                field=name,
                found=f"{name} for a model of transformers",
                expected="a torch.nn.Module of your own as the config",
                hint=f"leave {name} out",
            )
    request = make_request(
        config,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        memory=memory,
        profile=profile,
        own=own,
        freeze=(freeze,) if isinstance(freeze, str) else freeze,
        precision=precision,
        memory_margin=memory_margin,
        calibration=tuple(map(Path, [calibration] if isinstance(calibration, str | Path) else calibration)),
        decisions=decisions,
        imbalance=imbalance,
        simplify=simplify,
        levers=levers,
    )
    result = complete(request)
    if result.plan is None:
        raise NothingFitsError(
            field="--memory",
            found=f"{format_bytes(result.job.budget_bytes)} per device, in which no plan fits",
            expected=result.miss_text,
            hint=result.remedies,
        )
    return result.plan


def _as_levers(
    changed: tuple[Any, Mapping[str, str]], levers: Mapping[str, str | None]
) -> tuple[ModelChain, dict[str, str | None]]:
    """Return the chain of a model that its user has changed, and all levers.

    Raises `UserError` if a lever is given twice.
    """
    model, own = changed
    for name in levers.keys() & own:
        raise UserError(
            field=f"levers.{name}",
            found=f"{levers[name]} for a model with {own[name]}",
            expected="a model without them, or the lever left out",
            hint=f"leave {name} out of levers",
        )
    return _chain_of(model.config), {**levers, **own}


def _chain_of(config: Any) -> ModelChain:
    """Return the chain of a transformers config."""
    name = Path(config.name_or_path or "model").name
    return chain_from_config(json.loads(config.to_json_string()), name=name)


@checked
def complete(request: PlanRequest, *, progress: Progress = lambda _: None) -> PlanningResult:
    """Return the finished plan of a request, or the nearest miss.

    The plan is compared with baselines. It carries next best plans, fallbacks and the cost of the whole training if the
    request asks for them. Levers left to the search are chosen first. Raises `UserError` if no plan meets the pins.
    """
    if request.searched:
        chosen, why = _with_levers_chosen(request, progress)
        result = complete(chosen, progress=progress)
        return replace(result, notes=(why, *result.notes))
    result = _searched(request, progress)
    if result.plan is None:
        if result.miss is None and request.decisions.pins:
            raise pin_error(request, result.job)
        return result
    if result.job.is_mixed:
        progress("searching each device group alone, and even cuts, for comparison")
        result = _compared_with_groups(result, request)
    else:
        result = _completed(result, request, result.job, progress)
    assert result.plan is not None, "as before"
    refuse_host(result.plan)
    if request.tokens is not None:
        result = replace(result, plan=result.plan.with_training(request.tokens, price=request.price))
    return result


def _with_levers_chosen(request: PlanRequest, progress: Progress) -> tuple[PlanRequest, str]:
    """Return the request with the fastest values of its searched levers, and the reason in one line.

    Among values within the slowdown allowed for simpler plans, the first is chosen, because values that change less
    come first. The line also names the next larger cluster that fits without the lever.
    """
    plain, found, refused = replace(request, searched=()), list[tuple[float, str, PlanRequest]](), list[str]()
    for words in product(*(LEVERS[name].values for name in request.searched)):
        said = ", ".join(f"{name} {word}" for name, word in zip(request.searched, words, strict=True))
        progress(said)
        try:
            each = with_levers(plain, dict(zip(request.searched, words, strict=True)))
            job = job_of(each)
            best = plan_job(job, each.decisions, top=1, time_limit_s=LEVER_LIMIT_S, to_the_end=False).plan
            found.append((refuse_host(best).step_s if best else math.inf, said, each))
        except UserError as error:
            if not found:
                raise
            refused.append(f"not {error.found}")
    without_s, _, without = found[0]
    step_s, said, chosen = next(each for each in found if each[0] <= (1 + request.simplify_share) * min(found)[0])
    told = (
        f"{said}: nothing fits, nor with another value"
        if step_s == math.inf
        else f"{said}: {format_seconds(step_s)} a step"
    )
    if chosen is not without:
        study, larger = Study(replace(without, time_limit_s=LEVER_LIMIT_S)), request.cluster
        for _ in range(MOST_LARGER):
            larger = next_larger(larger)
            if (answer := study.answer(on_cluster(larger))).plan is not None:
                break
        before = "nothing fits" if without_s == math.inf else format_seconds(without_s)
        after = "nothing fits" if answer.plan is None else f"{format_seconds(answer.step_s)} a step"
        return chosen, f"{told}, {before} without it; without it on {larger.name} {after}"
    others = [f"{name} takes {format_seconds(each_s)}" for each_s, name, _ in sorted(found[1:], key=itemgetter(0))[:1]]
    return chosen, "; ".join((told, *(others if step_s < math.inf else []), *refused))


def engine_answers(
    request: PlanRequest,
    result: PlanningResult,
    *,
    limit_s: float | None = None,
    progress: Progress = lambda _: None,
) -> tuple[ComparedBaseline, ...]:
    """Return the best plan of every other engine, compared with the plan of a result, fastest first.

    These plans have no more stages than usual, as for the request's own engine, unless more stages gain enough.
    ``limit_s`` is the time limit of each search in seconds (default: that of the request). Empty on CPUs, for which the
    others are not made.
    """
    if result.plan is None or result.job.is_mixed or not result.job.cluster.device.is_gpu:
        return ()
    job = result.job
    solved = replace(request, global_batch=job.global_batch, seq_len=job.seq_len, levers=job.levers, searched=())
    study = Study(solved if limit_s is None else replace(solved, time_limit_s=limit_s), job)
    engines = [run_by(engine) for engine in ENGINES.values() if engine != request.engine]
    found = [study.answer(each, of_usual_depth=True) for each in counted(engines, progress)]
    step_s = result.plan.step_s
    return tuple(each.beside(step_s) for each in sorted(found, key=lambda each: each.step_s))


def engine_limit_s(planned_s: float) -> float:
    """Return the time limit in seconds of another engine's search for the line that names the fastest engines, after a
    plan that took ``planned_s`` seconds."""
    return max(ENGINE_LIMIT_S, ENGINE_SHARE * planned_s)


def _searched(request: PlanRequest, progress: Progress) -> PlanningResult:
    """Return the result under the request's objective, with notes on what was tried."""
    if request.seq_len is None:
        longest = longest_sequence(request, progress=progress)
        return replace(longest.result, notes=tuple(longest.lines("{} tokens")))
    pins = request.decisions.pins
    refuse_impossible(request)
    job = job_of(request if request.global_batch is not None else replace(request, global_batch=1))
    limit = "" if request.time_limit_s is None else f", at most {format_seconds(request.time_limit_s)}"
    progress(f"searching plans for {request.chain.name} on {request.cluster.name}{limit}")
    if job.is_mixed:
        return plan_request(request, job, progress)
    if request.global_batch is None:
        grown = largest_batch(Study(request, job), progress=progress)
        result, notes = grown.result, grown.lines("global batch {}")
    elif request.objective == "devices":
        result = fewest_devices(Study(request, job), progress=progress)
        notes = list(result.notes)
    else:
        result, notes = plan_request(request, job, progress), []
        if job.profile.identity.is_measured and (beyond_times := samples_not_measured(job, request.decisions)):
            notes.append(f"left out: {beyond_times.values} {beyond_times.what} ({beyond_times.reason})")
        free = request.decisions.model_copy(update={"pins": ()})
        if pins and (beyond := widened_text(widened(job, free, request.decisions))):
            notes.append(beyond)
    if len(request.calibration) > 1:
        factors = ", ".join(f"{path.name} × {each:.3f}" for path, each in time_factors(job, request.calibration))
        notes = [*notes, f"calibrated by the median of {factors}"]
    return replace(result, notes=tuple(notes))


def _completed(result: PlanningResult, request: PlanRequest, job: Job, progress: Progress) -> PlanningResult:
    if request.num_next_best:
        progress("searching the best plans of other pipeline configurations")
        uniform = is_uniform(job, request.decisions)
        result = with_next_best(result, num_plans=request.num_next_best, uniform=uniform)
    solved = replace(request, cluster=job.cluster, global_batch=job.global_batch, seq_len=job.seq_len, objective="time")
    result, others, study = _compared(result, solved, progress)
    result, limit = with_usual_stages(result, request)
    if not limit.is_free:
        solved = replace(solved, decisions=solved.decisions.with_also(limit))
        result, others, study = _compared(result, solved, progress)
    plan = result.plan
    assert plan is not None, "completed where there is a plan"
    if request.simplify_share and not is_uniform(job, request.decisions):
        progress("searching simpler plans")
        plan = simplest(plan, result, [each.plan for each in others if each.plan is not None], request)
    if request.num_fallbacks:
        progress("searching plans of less memory")
        plan = with_fallbacks(plan, study, num_fallbacks=request.num_fallbacks)
        less = min(map(plan.fallback_plan, range(len(plan.fallbacks))), key=lambda each: each.step_s, default=plan)
        if plan.step_s > less.step_s * (1 + (request.simplify_share if mixture(less) > mixture(plan) else 0.0)):
            faster = study.of(less, less.step_s, peak_bytes(less))
            plan = _at_least_as_fast(replace(result, plan=plan), faster)
            _, *others = study.reconciled([faster, *others])
    plan = _with_baselines(plan, [each.beside(plan.step_s) for each in others])
    plan = with_reasons(_with_prediction(plan, not_searched=left_out(job, request.decisions)), job)
    return replace(result, plan=plan)


def _compared(
    result: PlanningResult, solved: PlanRequest, progress: Progress
) -> tuple[PlanningResult, Sequence[Answer], Study]:
    """Return the result with the fastest of its own plan and the baselines, the baselines, and their study."""
    assert result.plan is not None, "compared where there is a plan"
    study = Study(solved, result.job, tables=result.bounded_tables)
    found = study.of(result.plan, result.plan.step_s, peak_bytes(result.plan))
    best, *others = study.reconciled([found, *(study.answer(each) for each in counted(baselines(), progress))])
    return replace(result, plan=_at_least_as_fast(result, best)), others, study


def _compared_with_groups(result: PlanningResult, request: PlanRequest) -> PlanningResult:
    """Return the result over several device groups, compared with the best plan on each group alone.

    One of those becomes the result if it is faster and meets the decisions, because a plan may leave devices out.
    """
    job = result.job
    answers, allowed = group_answers(Study(request, job)), [Answer(name="none")]
    for each in answers:
        if each.plan is not None and request.decisions.allows_stages(each.plan.num_stages):
            held = zip(predict(each.plan, job).stages, job.jobs(each.plan), strict=True)
            allowed += [each] if all(stage.total_bytes <= own.budget_bytes for stage, own in held) else []
    plan = _at_least_as_fast(result, min(allowed, key=lambda each: each.step_s))
    return replace(result, plan=_with_baselines(plan, [each.beside(plan.step_s) for each in answers]))


def _at_least_as_fast(result: PlanningResult, best: Answer) -> Plan:
    """Return the plan of a result, or the best answer to a restriction of its request if that is faster.

    A restricted plan can be faster if a time limit or an open gap ended the search of the whole space early, or if the
    simulator ranks plans differently from the search's closed form.
    """
    plan, job = result.plan, result.job
    assert plan is not None, "compared where there is a plan"
    if best.plan is None or best.step_s >= plan.step_s or plan.prediction is None:
        return plan
    bound_s = min(plan.prediction.lower_bound_s, best.step_s)
    prediction = prediction_of(
        job,
        best.plan,
        predict(best.plan, job),
        Certificate(status="gap", gap=1 - bound_s / best.step_s),
        lower_bound_s=bound_s,
        alternatives=plan.prediction.alternatives,
        found=[(plan, plan.step_s), *((each, cost.step_time_s) for each, cost in result.others)],
    )
    if (fastest := plan.prediction.fastest) is not None and fastest.step_time_s < best.step_s:
        prediction = prediction.model_copy(update={"fastest": fastest})
    kept = {"asked": plan.asked, "next_best": plan.next_best, "prediction": prediction}
    return best.plan.model_copy(update=kept)


def _with_baselines(plan: Plan, baselines: Sequence[ComparedBaseline]) -> Plan:
    """Return the plan with these baselines in its prediction."""
    found = tuple(Baseline(**{name: getattr(each, name) for name in Baseline.model_fields}) for each in baselines)
    return _with_prediction(plan, baselines=found)


def _with_prediction(plan: Plan, **changes: object) -> Plan:
    """Return the plan with these fields of its prediction changed."""
    assert plan.prediction is not None, "what was searched is priced"
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=changes)})
