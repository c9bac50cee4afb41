"""From a request to its finished plan: searched, compared with baselines, with the plans that go along with it.

`find_plan` and the command line answer a request by `complete`, so that both get the same plan.

Other plans that a plan carries along: of less memory, to go on with, and the next best, to measure beside it.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from steelyard.cost.job import ASSUMED_IMBALANCE, Job
from steelyard.cost.predict import predict
from steelyard.hardware import Cluster
from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.plan import Fallback, Plan, Precision
from steelyard.plan.prediction import Baseline, Certificate
from steelyard.planning.choose import NothingFitsError, PlanningResult, device_bytes, plan_job, plan_request
from steelyard.planning.devices import plan_fewest_devices
from steelyard.planning.impossible import refuse_impossible
from steelyard.planning.job import job_of
from steelyard.planning.not_searched import samples_not_measured, widened, widened_text
from steelyard.planning.plan_from_search import accept
from steelyard.planning.price import peak_bytes, prediction_of, with_cost
from steelyard.planning.request import GivenProfiles, PlanRequest, make_request
from steelyard.planning.sizes import largest_batch, longest_sequence
from steelyard.planning.variants import Answer, Study, baselines, pool_baselines
from steelyard.planning.why_not import pin_error
from steelyard.search import OnDemand
from steelyard.units import format_bytes

MEMORY_SHARES = (0.9, 0.75, 0.6, 0.5)
"""Of the predicted memory of the plan: what each fallback may take at most."""
CONFIG_LIMIT_S = 5.0
"""Seconds for the best plan of one configuration more."""
ROUNDING_BYTES = 2
"""What is lost where the bytes of a device become those that tensors may fill."""


def with_fallbacks(
    plan: Plan,
    job: Job,
    decisions: Decisions,
    *,
    num_fallbacks: int,
    tables: Sequence[OnDemand],
) -> Plan:
    """The plan with up to ``num_fallbacks`` others in it, each a fast one within a share of the memory of the plan.

    Where nothing fits into a share, the last is the plan of least memory. ``tables`` are the cost tables of this job
    and these decisions, bounded or not.
    """
    if num_fallbacks < 1 or plan.prediction is None:
        return plan
    found: list[Plan] = []
    for share in MEMORY_SHARES:
        budget = math.floor(share * peak_bytes(plan))
        result = _fastest_within(budget, job, decisions, tuple(tables))
        less, job, tables = result.plan, result.job, result.bounded_tables
        if less is None or peak_bytes(less) >= peak_bytes(found[-1] if found else plan):
            break
        found.append(less)
        if len(found) == num_fallbacks or peak_bytes(less) > budget:
            break
    return plan.model_copy(update={"fallbacks": tuple(_as_fallback(each) for each in found)})


def with_next_best(result: PlanningResult, *, num_plans: int) -> PlanningResult:
    """The result whose plan has up to ``num_plans`` others in it, each the best found of its configuration, fastest
    first.

    Those that the search found, then of the configurations that it left unsolved the most promising.
    """
    if result.plan is None:
        return result
    job, found = result.job, list(result.others[: max(0, num_plans)])
    for tables in _most_promising(result)[: 2 * num_plans]:
        if len(found) >= num_plans:
            break
        limit_s = CONFIG_LIMIT_S
        one = accept(job, [tables], num_alternatives=0, time_limit_s=limit_s)
        found += [(each.plan, predict(each.plan, job)) for each in one.ranked[:1]]
    found.sort(key=lambda each: each[1].step_time_s)
    kept = tuple(_as_fallback(with_cost(plan, job, cost)) for plan, cost in found)
    return replace(result, plan=result.plan.model_copy(update={"next_best": kept}))


def _most_promising(result: PlanningResult) -> list[OnDemand]:
    """The configurations of which no plan was priced, by what no plan of theirs is faster than."""
    assert result.plan is not None, "a result without a plan has no other"
    taken = {plan.pipeline for plan in (result.plan, *(plan for plan, _ in result.others))}
    left = [each for each in result.search.configs if each.pipeline not in taken]
    left.sort(key=lambda each: each.result.lower_bound_s)
    return [each.given for each in left]


def _fastest_within(budget_bytes: int, job: Job, decisions: Decisions, tables: tuple[OnDemand, ...]) -> PlanningResult:
    """A fast plan within a budget, or where none fits the one that misses it least within that of the job.

    One that saves a run from ending, not the plan to train with: the search does not go to the end.
    """
    tight = job.within(budget_bytes)
    search = partial(plan_job, decisions=decisions, top=1, tables=tables, to_the_end=False)
    result = search(tight)
    if result.plan is not None or result.miss is None:
        return result
    least_bytes = device_bytes(tight, result.miss.needed_bytes) + ROUNDING_BYTES
    return search(job.within(least_bytes)) if least_bytes <= job.budget_bytes else result


def _as_fallback(plan: Plan) -> Fallback:
    prediction = plan.prediction.model_copy(update={"alternatives": ()}) if plan.prediction else None
    return Fallback(
        num_microbatches=plan.num_microbatches, schedule=plan.schedule, stages=plan.stages, prediction=prediction
    )


Progress = Callable[[str], None]


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
) -> Plan:
    """Return the fastest plan to train a model on a cluster within the memory of its devices.

    It is the plan that ``steelyard plan -o`` writes.

    ``config`` is a packaged model's name or hub id, the path of a ``config.json``, or its content; ``cluster`` as in
    ``8x8xh100-80gb``, several of these joined by a plus, or a YAML file's path; ``memory`` per device as in ``20GiB``
    or in bytes, else all it has, of which ``memory_margin`` is left free where a plan fits so (of a GPU 0.05);
    ``profile`` a measured profile (its path or value; of several pools one by the name of each), else the model is
    traced and the catalogue's rates are used, scaled by the median of measured runs (``calibration``).

    Or ``config`` is any ``torch.nn.Module`` with lists of blocks (docs/your-own-model.md). ``sample`` is then what is
    read for two samples or more, the dim of samples first: the module's inputs (a tensor, a tuple, or a dictionary by
    name), and with ``loss``, a function of the module's outputs and of targets, a pair of inputs and targets. Without
    it the module returns its loss. ``blocks`` names the lists that hold the blocks, where they are not found.

    ``seq_len`` may be left out where there is one length alone: of an image, or of your own module's sample.

    ``freeze`` names what is not trained: modules or parameters by their path as ``named_parameters`` spells it, ``*``
    and the like as in a shell. What a module of your own has without gradients is not trained either.

    ``imbalance`` is the load of the busiest expert rank relative to the mean, which training reports. ``decisions``
    takes choices away from the search.

    Raises `NothingFitsError` naming the nearest miss where no plan fits, and another `UserError` for a wrong argument.
    """
    own = None
    if is_module(config):
        from steelyard.modules.own_builder import Built, own_model

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
    )
    result = complete(request)
    if result.plan is None:
        raise NothingFitsError(
            field="memory",
            found=f"{format_bytes(result.job.budget_bytes)} per device, in which no plan fits",
            expected=result.miss_text,
            hint="more memory per device, more devices, or a smaller sequence length",
        )
    return result.plan


def complete(request: PlanRequest, *, progress: Progress = lambda _: None) -> PlanningResult:
    """Return the finished plan of a request, or the nearest miss; raises `UserError` for pins that nothing meets.

    The plan is compared with baselines, and has the next best plans, those of less memory, and what the whole training
    takes in it, as far as the request asks for them.
    """
    result = _searched(request, progress)
    if result.plan is None:
        if result.miss is None and request.decisions.pins:
            raise pin_error(request, result.job)
        return result
    if result.job.is_mixed:
        progress("searching each pool alone, and even cuts, to compare with")
        baselines = pool_baselines(result.job, request.decisions, _step_s(result.plan))
        result = replace(result, plan=_with_baselines(result.plan, baselines))
    else:
        result = _completed(result, request, result.job, progress)
    assert result.plan is not None, "as before"
    if request.tokens is not None:
        result = replace(result, plan=result.plan.with_training(request.tokens, price=request.price))
    return result


def _searched(request: PlanRequest, progress: Progress) -> PlanningResult:
    """The result under the request's objective, with notes of what was tried on the way."""
    if request.seq_len is None:
        longest = longest_sequence(request, progress=progress)
        return replace(longest.result, notes=tuple(longest.lines("{} tokens")))
    refuse_impossible(request)
    job = job_of(request if request.global_batch is not None else replace(request, global_batch=1))
    progress(f"searching plans for {request.chain.name} on {request.cluster.name}")
    if job.is_mixed:
        return plan_request(request, job)
    if request.global_batch is None:
        grown = largest_batch(request, job, progress=progress)
        result, notes = grown.result, grown.lines("global batch {}")
    elif request.objective == "devices":
        fewest = plan_fewest_devices(request, job, progress=progress)
        result, notes = fewest.result, fewest.lines()
    else:
        result, notes = plan_request(request, job), _unmeasured(request, job)
        free = request.decisions.model_copy(update={"pins": ()})
        if request.decisions.pins and (beyond := widened_text(widened(job, free, request.decisions))):
            notes.append(beyond)
    return replace(result, notes=(*notes, *_calibrated(request, job)))


def _unmeasured(request: PlanRequest, job: Job) -> list[str]:
    found = samples_not_measured(job, request.decisions)
    return [] if found is None else [f"left out: {found.values} {found.what} ({found.reason})"]


def _calibrated(request: PlanRequest, job: Job) -> list[str]:
    """A line for what several runs calibrate by."""
    if len(request.calibration) < 2:
        return []
    from steelyard.planning.calibration import time_factors

    factors = time_factors(job, request.calibration, job_of)
    return [f"calibrated by the median of {', '.join(f'{path.name} × {factor:.3f}' for path, factor in factors)}"]


def _completed(result: PlanningResult, request: PlanRequest, job: Job, progress: Progress) -> PlanningResult:
    if request.num_next_best:
        progress("searching the best plans of other pipeline configurations")
        result = with_next_best(result, num_plans=request.num_next_best)
    progress("searching the plain plans to compare with")
    assert result.plan is not None, "completed where there is a plan"
    solved = replace(request, cluster=job.cluster, global_batch=job.global_batch, seq_len=job.seq_len, objective="time")
    limit_s, tables = request.time_limit_s, result.bounded_tables
    study = Study(solved, job, tables=tables, time_limit_s=limit_s)
    found = study.of(result.plan, _step_s(result.plan), peak_bytes(result.plan))
    best, *others = study.reconciled([found, *(study.answer(each) for each in baselines())])
    plan = _at_least_as_fast(result.plan, best, job)
    plan = _with_baselines(plan, [each.beside(_step_s(plan)) for each in others])
    if request.num_fallbacks:
        progress("searching plans of less memory")
        plan = with_fallbacks(
            plan,
            job,
            request.decisions,
            num_fallbacks=request.num_fallbacks,
            tables=result.bounded_tables,
        )
    return replace(result, plan=plan)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None, "what was searched is priced"
    return plan.prediction.step_time_s


def _at_least_as_fast(plan: Plan, best: Answer, job: Job) -> Plan:
    """The plan, or the best answer to a restriction of its request if that is faster: it is as allowed.

    So it is where a time limit or an open gap let the search of the whole space end before.
    """
    if best.plan is None or best.step_s >= _step_s(plan) or plan.prediction is None:
        return plan
    bound_s = min(plan.prediction.lower_bound_s, best.step_s)
    prediction = prediction_of(
        job,
        best.plan,
        predict(best.plan, job),
        Certificate(status="gap", gap=1 - bound_s / best.step_s),
        lower_bound_s=bound_s,
        alternatives=plan.prediction.alternatives,
    )
    return plan.model_copy(
        update={
            "num_microbatches": best.plan.num_microbatches,
            "schedule": best.plan.schedule,
            "stages": best.plan.stages,
            "prediction": prediction,
        }
    )


def _with_baselines(plan: Plan, baselines: Sequence[ComparedBaseline]) -> Plan:
    """The plan with these baselines as the baselines of its prediction."""
    assert plan.prediction is not None, "compared by its prediction"
    found = tuple(Baseline(**{name: getattr(each, name) for name in Baseline.model_fields}) for each in baselines)
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"baselines": found})})
