"""From a request to its finished plan: searched, compared with baselines, with other plans that it carries along.

`find_plan` and the command line answer a request by `complete`, so that both get the same plan. A plan carries plans of
less memory, to go on with where memory runs out, and the next best ones, to measure beside it. Where a baseline turns
out faster, because a time limit ended the search of the whole space or the simulator ranks plans otherwise than the
search, the plan becomes that baseline. In the end it is the simplest of those that are little slower
(`steelyard.planning.simple`).
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
from typing import Any

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
from steelyard.planning.simple import simplest, with_reasons, with_usual_stages
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

ENGINE_LIMIT_S = 1.0
"""Seconds for the best plan of another engine where only the line that names the fastest ones asks for it."""
MEMORY_SHARES = (0.9, 0.75, 0.6, 0.5)
"""Of the predicted memory of the plan: what each fallback may take at most."""
LEVER_LIMIT_S = 1.0
"""Seconds for the best plan with a value of a lever that is left to the search."""
MOST_LARGER = 3
"""Larger clusters that are tried to find one on which such a lever is not needed."""
CONFIG_LIMIT_S = 5.0
"""Seconds for the best plan of one configuration more."""
ROUNDING_BYTES = 2
"""What is lost where the bytes of a device become those that tensors may fill."""


def with_fallbacks(plan: Plan, study: Study, *, num_fallbacks: int) -> Plan:
    """The plan with up to ``num_fallbacks`` others in it, each a fast one within a share of the memory of the plan.

    They save a run from ending and are not to train with, so that no search goes to the end. Where nothing fits into a
    share, the last is the plan of least memory.
    """
    if num_fallbacks < 1 or plan.prediction is None:
        return plan
    found: list[Plan] = []
    most_bytes = study.job.budget_bytes
    for share in MEMORY_SHARES:
        budget = math.floor(share * peak_bytes(plan))
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
    """The result whose plan has up to ``num_plans`` others in it, each the best found of its configuration, fastest
    first.

    Those that the search found, then of the configurations that it left unsolved the most promising: those with the
    lowest bounds. ``uniform`` as of `accept`.
    """
    if result.plan is None:
        return result
    job, found = result.job, list(result.others[: max(0, num_plans)])
    taken = {plan.pipeline for plan in (result.plan, *(plan for plan, _ in result.others))}
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
    """A fast plan within a budget, found by a search that does not go to the end."""
    result = study.plan(within("", budget_bytes), top=1, to_the_end=False)
    assert not isinstance(result, str), "another budget leaves the decisions as they are"
    return result


def is_module(value: object) -> bool:
    """Return whether a value is a ``torch.nn.Module``; imports no torch to know it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def find_plan(
    config: Any,
    cluster: str | Cluster,
    *,
    global_batch: int,
    seq_len: int | None = None,
    precision: Precision = "bf16",
    memory: str | int | None = None,
    memory_margin: float | None = None,
    profile: GivenProfiles | None = None,
    calibration: Sequence[str | Path] = (),
    decisions: Decisions = FREE,
    sample: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    blocks: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] = (),
    imbalance: float = ASSUMED_IMBALANCE,
    simplify: float = SIMPLIFY,
    levers: Mapping[str, str] | None = None,
) -> Plan:
    """Return the simplest plan to train a model on a cluster that is at most 1 % slower than the fastest that fits.

    It is the plan that ``steelyard plan -o`` writes. ``simplify`` is that share as a fraction; 0 returns the fastest.

    ``config`` is a packaged model's name or hub id, the path of a ``config.json``, or its content; ``cluster`` as in
    ``8x8xh100-80gb``, several of these joined by a plus, or a YAML file's path; ``memory`` per device as in ``20GiB``
    or in bytes, else all it has, of which ``memory_margin`` is left free where a plan fits so (of a GPU 0.05);
    ``profile`` a measured profile (its path or value; of several pools one by the name of each), else the model is
    traced and the catalogue's rates are used, scaled by the median of measured runs (``calibration``).

    Or ``config`` is any ``torch.nn.Module`` with lists of blocks (docs/how-to/your-own-model.md). ``sample`` is then
    what is read for two samples or more, the dim of samples first: the module's inputs (a tensor, a tuple, or a
    dictionary by name), and with ``loss``, a function of the module's outputs and of targets, a pair of inputs and
    targets. Without it the module returns its loss. ``blocks`` names the lists that hold the blocks, where they are not
    found.
    A `peft.PeftModel` is its base with the lever that its adapters are.

    ``seq_len`` may be left out where there is one length alone: of an image, or of your own module's sample.

    ``freeze`` names what is not trained: modules or parameters by their path as ``named_parameters`` spells it, ``*``
    and the like as in a shell. What a module of your own has without gradients is not trained either.

    ``imbalance`` is the load of the busiest expert rank relative to the mean, which training reports. ``decisions``
    takes choices away from the search. ``levers`` are what is changed beside strategies, as the options of ``steelyard
    plan`` say it: ``{"optimizer": "adamw-8bit"}``, or ``{"offload": "auto"}`` for the fastest value.

    Raises `NothingFitsError` naming the nearest miss where no plan fits, and another `UserError` for a wrong argument.
    """
    own = None
    changed = import_module("steelyard.modules.levers").changed_by_user(config) if is_module(config) else None
    if changed is not None:
        config, levers = _as_levers(changed, levers or {})
    elif is_module(config):
        from steelyard.modules.own_proof import Built, own_model

        own = own_model(Built(module=config, sample=sample, loss=loss, blocks=blocks))
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
        calibration=tuple(map(Path, calibration)),
        decisions=decisions,
        imbalance=imbalance,
        simplify=simplify,
        levers=levers,
    )
    result = complete(request)
    if result.plan is None:
        raise NothingFitsError(
            field="memory",
            found=f"{format_bytes(result.job.budget_bytes)} per device, in which no plan fits",
            expected=result.miss_text,
            hint=result.remedies,
        )
    return result.plan


def _as_levers(changed: tuple[Any, Mapping[str, str]], levers: Mapping[str, str]) -> tuple[ModelChain, dict[str, str]]:
    """The chain of a model that its user has changed, and all levers; raises `UserError` for one that is said twice."""
    model, own = changed
    for name in levers.keys() & own:
        raise UserError(
            field=f"levers.{name}",
            found=f"{levers[name]} for a model with {own[name]}",
            expected="a model without them, or the lever left out",
            hint=f"leave {name} out of levers",
        )
    name = Path(model.config.name_or_path or "model").name
    return chain_from_config(json.loads(model.config.to_json_string()), name=name), {**levers, **own}


def complete(request: PlanRequest, *, progress: Progress = lambda _: None) -> PlanningResult:
    """Return the finished plan of a request, or the nearest miss; raises `UserError` for pins that nothing meets.

    The plan is compared with baselines, and has the next best plans, those of less memory, and what the whole training
    takes in it, as far as the request asks for them. Levers left to the search are chosen first.
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
        progress("searching each pool alone, and even cuts, to compare with")
        result = _compared_with_groups(result, request)
    else:
        result = _completed(result, request, result.job, progress)
    assert result.plan is not None, "as before"
    refuse_host(result.plan)
    if request.tokens is not None:
        result = replace(result, plan=result.plan.with_training(request.tokens, price=request.price))
    return result


def _with_levers_chosen(request: PlanRequest, progress: Progress) -> tuple[PlanRequest, str]:
    """The request with the values of its searched levers under which it is fastest, and why in a line.

    Of those at most as much slower as a simpler plan may be the first, since values that change less come first. The
    next larger cluster that needs none stands beside it.
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
    """Return the best plan of every other engine beside the plan of a result, the fastest first.

    Of no more stages than usual, as of the request's own engine, where others gain too little.
    ``limit_s`` is what the search for each may take, else that of the request.
    """
    if result.plan is None or result.job.is_mixed:
        return ()
    job = result.job
    solved = replace(request, global_batch=job.global_batch, seq_len=job.seq_len, levers=job.levers, searched=())
    study = Study(solved if limit_s is None else replace(solved, time_limit_s=limit_s), job)
    engines = [run_by(engine) for engine in ENGINES.values() if engine != request.engine]
    found = [study.answer(each, of_usual_depth=True) for each in counted(engines, progress)]
    step_s = result.plan.step_s
    return tuple(each.beside(step_s) for each in sorted(found, key=lambda each: each.step_s))


def _searched(request: PlanRequest, progress: Progress) -> PlanningResult:
    """The result under the request's objective, with notes of what was tried on the way."""
    if request.seq_len is None:
        longest = longest_sequence(request, progress=progress)
        return replace(longest.result, notes=tuple(longest.lines("{} tokens")))
    pins = request.decisions.pins
    if pins:
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
    plan = _with_baselines(plan, [each.beside(plan.step_s) for each in others])
    plan = with_reasons(_with_prediction(plan, not_searched=left_out(job, request.decisions)), job)
    if request.num_fallbacks:
        progress("searching plans of less memory")
        plan = with_fallbacks(plan, study, num_fallbacks=request.num_fallbacks)
    return replace(result, plan=plan)


def _compared(
    result: PlanningResult, solved: PlanRequest, progress: Progress
) -> tuple[PlanningResult, Sequence[Answer], Study]:
    """The result with the fastest plan of its own and of the baselines, these, and the study that they come from."""
    assert result.plan is not None, "compared where there is a plan"
    study = Study(solved, result.job, tables=result.bounded_tables)
    found = study.of(result.plan, result.plan.step_s, peak_bytes(result.plan))
    best, *others = study.reconciled([found, *(study.answer(each) for each in counted(baselines(), progress))])
    return replace(result, plan=_at_least_as_fast(result, best)), others, study


def _compared_with_groups(result: PlanningResult, request: PlanRequest) -> PlanningResult:
    """The result over several device groups beside the best plans on one of them, one of which it is if that is
    faster and has what was decided: a plan may leave devices out."""
    job = result.job
    answers, allowed = group_answers(Study(request, job)), [Answer(name="none")]
    for each in answers:
        if each.plan is not None and request.decisions.allows_stages(each.plan.num_stages):
            held = zip(predict(each.plan, job).stages, job.jobs(each.plan), strict=True)
            allowed += [each] if all(stage.total_bytes <= own.budget_bytes for stage, own in held) else []
    plan = _at_least_as_fast(result, min(allowed, key=lambda each: each.step_s))
    return replace(result, plan=_with_baselines(plan, [each.beside(plan.step_s) for each in answers]))


def _at_least_as_fast(result: PlanningResult, best: Answer) -> Plan:
    """The plan of a result, or the best answer to a restriction of its request if that is faster: it is as allowed.

    So it is where a time limit or an open gap let the search of the whole space end before, or where the simulator
    ranks plans otherwise than the search's closed form.
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
    prediction = prediction.model_copy(update={"fastest": plan.prediction.fastest})
    kept = {"asked": plan.asked, "next_best": plan.next_best, "prediction": prediction}
    return best.plan.model_copy(update=kept)


def _with_baselines(plan: Plan, baselines: Sequence[ComparedBaseline]) -> Plan:
    """The plan with these baselines as the baselines of its prediction."""
    found = tuple(Baseline(**{name: getattr(each, name) for name in Baseline.model_fields}) for each in baselines)
    return _with_prediction(plan, baselines=found)


def _with_prediction(plan: Plan, **changes: object) -> Plan:
    """The plan with these fields of its prediction changed."""
    assert plan.prediction is not None, "what was searched is priced"
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=changes)})
