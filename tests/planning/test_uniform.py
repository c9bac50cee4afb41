"""Tests that baselines are the best of their kind, against pricing each of them one by one."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from steelyard.cost.job import Job
from steelyard.cost.predict import predict
from steelyard.errors import InvalidPlanError
from steelyard.model.chain import LayerRole
from steelyard.plan.choices import ComparedBaseline
from steelyard.plan.decisions import FREE, Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import ONE_STRATEGY, Prediction, gain_text
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.planning import complete as complete_requests
from steelyard.planning.choose import plan_job
from steelyard.planning.price import assemble_plan, peak_bytes, uniform_plan, with_price
from steelyard.planning.problem import make_tables
from steelyard.planning.variants import Study, baselines
from tests.cost.examples import cluster, job
from tests.jobs import make_job, request_of
from tests.sample import sampled
from tests.schedules.examples import pipeline

SINGLE_STAGE = {"plain DDP": ("dp8",), "plain FSDP": ("fsdp8", "fsdp8 zero2")}


def every_plan(of: Job, texts: tuple[str, ...]) -> Iterator[Plan]:
    """Every plan of one stage and one of these strategies, with each remat choice of the blocks."""
    chain = of.chain
    for text in texts:
        strategy = parse_strategy(text)
        for count in (1, 2, 4, 8):
            if (of.global_batch // count) % strategy.sample_degree:
                continue
            for remat in Remat:
                ends = strategy if of.chain.vocab_size % strategy.tensor_degree == 0 else strategy.with_whole_tensors()
                layers = tuple(
                    replace(strategy, remat=remat) if chain.type_of(layer).role is LayerRole.BLOCK else ends
                    for layer in range(chain.num_layers)
                )
                stage = StagePart(ranks=(0, 7), runs=fold_runs(0, layers))
                yield assemble_plan(of, pipeline(1, count), (stage,))


def test_a_plan_of_one_strategy_has_the_microbatches_of_least_memory() -> None:
    of = job(cluster(1, 8))
    plans = [with_price(plan, of) for plan in every_plan(of, ("dp8",)) if plan.strategies[1].remat is Remat.NONE]
    assert peak_bytes(uniform_plan(of, "dp8")) == min(map(peak_bytes, plans)) < max(map(peak_bytes, plans))


def compared(of: Job, decisions: Decisions = FREE) -> tuple[Prediction, list[ComparedBaseline]]:
    """Search results, with their baselines."""
    result = plan_job(of, decisions)
    assert result.plan is not None
    assert result.plan.prediction is not None
    study = Study(request_of(of, decisions), of, tables=result.bounded_tables)
    return result.plan.prediction, plain(study, result.plan.prediction.step_time_s)


@cache
def compared_within(share: float) -> tuple[Prediction, list[ComparedBaseline]]:
    return compared(tight(share))


def plain(study: Study, step_s: float = 1.0) -> list[ComparedBaseline]:
    return [study.answer(each).beside(step_s) for each in baselines()]


def times(baselines: list[ComparedBaseline]) -> list[float]:
    return [each.step_time_s for each in baselines if each.step_time_s is not None]


@pytest.mark.slow
def test_what_a_search_knows_of_its_tables_changes_no_plain_plan() -> None:
    of = tight(0.3)
    prediction, found = compared_within(0.3)
    assert plain(Study(request_of(of), of), prediction.step_time_s) == found


def tight(share: float, **changes: int) -> Job:
    """A job within what plain FSDP takes: at 0 its smallest plan, at 1 its largest."""
    of = job(cluster(1, 8), global_batch=64, **changes)
    taken = [fullest_bytes(plan, of) for plan in every_plan(of, ("fsdp8",))]
    return of.on(budget_bytes=int(min(taken) + share * (max(taken) - min(taken))))


def fullest_bytes(plan: Plan, of: Job) -> int:
    return max(stage.total_bytes for stage in predict(plan, of).stages)


@pytest.mark.slow
@pytest.mark.parametrize("share", sampled([1.0, 0.3, 0.05, 0.0], [0.3, 0.0]))
@pytest.mark.parametrize("name", SINGLE_STAGE)
def test_a_plain_plan_is_the_fastest_of_its_kind_that_fits(name: str, share: float) -> None:
    of = tight(share)
    _, found = compared_within(share)
    costs = [predict(plan, of) for plan in every_plan(of, SINGLE_STAGE[name])]
    fastest = min((cost.step_time_s for cost in costs if cost.fits), default=None)
    (mine,) = (each for each in found if each.name == name)
    assert mine.step_time_s == pytest.approx(fastest) if fastest else mine.step_time_s is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "vocab_size"),
    [
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((1.0, 256), (0.3, 256), (1.0, 257), (0.0, 256))),
        (0.3, 257),
    ],
)
def test_plain_n_d_is_the_fastest_of_all_strategies_that_all_blocks_share(share: float, vocab_size: int) -> None:
    of, options = tight(share, vocab_size=vocab_size), Decisions(num_stages=1)
    offered = {str(replace(each, remat=Remat.NONE)) for each in make_tables(of, options)[0].tables.strategies}
    _, found = compared(of, options)
    mine = next(each for each in found if each.name == ONE_STRATEGY)
    costs = []
    for text in sorted(offered):
        try:
            costs += [predict(plan, of) for plan in every_plan(of, (text,))]
        except InvalidPlanError:  # a strategy that some layer does not allow
            continue
    fastest = min(cost.step_time_s for cost in costs if cost.fits)
    assert mine.step_time_s == pytest.approx(fastest)


@pytest.mark.slow
@pytest.mark.parametrize("share", sampled([1.0, 0.5, 0.3, 0.1, 0.05], [0.3, 0.05]))
def test_no_plain_plan_is_faster_than_the_plan(share: float) -> None:
    prediction, found = compared_within(share)
    assert times(found)
    assert min(times(found)) >= prediction.step_time_s * (1 - 1e-9)


@pytest.mark.slow
def test_the_first_lines_name_the_best_plain_plan_and_what_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    of = tight(0.1)
    monkeypatch.setattr(complete_requests, "job_of", lambda _: of)
    plan = complete_requests.complete(request_of(of, num_next_best=0, num_fallbacks=0)).plan
    assert plan is not None
    prediction = plan.prediction
    assert prediction is not None
    fitting = [each for each in prediction.baselines if each.step_time_s is not None]
    best = min(fitting, key=lambda each: each.step_time_s)
    text = gain_text(prediction, has_decisions=False)
    assert best.name in text
    gain = 1 - prediction.step_time_s / best.step_time_s
    assert f"{gain:.1%} faster" in text or "as fast as" in text


def test_a_vocabulary_that_tp_does_not_divide_leaves_plain_plans_with_tp() -> None:
    _, found = compared(job(cluster(), global_batch=8, vocab_size=257), Decisions(pins=("blocks: tp=4",)))
    last = found[-1]
    assert (last.name, last.missing_bytes) == (ONE_STRATEGY, None)
    assert "tp4" in str(last.strategies)


@pytest.mark.slow
def test_plain_plans_that_do_not_fit_say_what_they_lack() -> None:
    _, found = compared(tight(0.0))
    assert all((each.step_time_s is None) == (each.missing_bytes is not None) for each in found)


@pytest.mark.slow
def test_a_comparison_without_time_names_the_first_that_fits_of_each_type() -> None:
    of = tight(1.0)
    tables = make_tables(of, FREE)
    whole, cut = (plain(Study(request_of(of, time_limit_s=limit_s), of, tables=tables)) for limit_s in (None, 0))
    for best, first in zip(whole, cut, strict=True):
        assert (best.step_time_s is None) == (first.step_time_s is None)
        assert best.step_time_s is None or best.step_time_s <= (first.step_time_s or 0) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("shape", sampled([(1, 8), (2, 4)], [(2, 4)]))
def test_no_plain_plan_of_a_model_with_tied_embeddings_is_faster(shape: tuple[int, int]) -> None:
    of = job(cluster(*shape), global_batch=64, tie_word_embeddings=True, vocab_size=131072)
    prediction, found = compared(of)
    assert prediction.certificate.status == "optimal"
    assert times(found)
    assert prediction.step_time_s <= min(times(found)) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", sampled(["bert-large", "gpt2-xl", "gemma-2b", "llama3.2-1b", "olmoe-1b-7b"], ["gpt2-xl", "olmoe-1b-7b"])
)
def test_no_plain_plan_of_a_packaged_model_of_short_sequences_is_faster(model: str) -> None:
    of = make_job(model, "1x8xa100-80gb", global_batch=64, seq_len=512, precision="bf16", memory=None, profile=None)
    prediction, found = compared(of)
    assert times(found)
    assert prediction.step_time_s <= min(times(found)) * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("partition", sampled(["even", "memory-balanced", "bmw"], ["bmw"]))
def test_other_cuts_of_uniform_plans_are_uniform_too_and_no_faster(partition: str) -> None:
    of = job(cluster(1, 8), global_batch=64)
    plans = [
        plan_job(of, Decisions.model_validate({"uniform": True, "num_stages": 2, "partition": each})).plan
        for each in ("exact", partition)
    ]
    assert plans[0] is not None
    assert plans[1] is not None
    assert len({strategy.without_remat() for strategy in plans[1].strategies[1:-1]}) == 1
    assert predict(plans[0], of).step_time_s <= predict(plans[1], of).step_time_s * 1.01
