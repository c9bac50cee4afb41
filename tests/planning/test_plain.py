"""Plain plans are the best of their kind: held against every one of them, priced one by one."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from steelyard.cost.predict import predict
from steelyard.cost.setting import Job
from steelyard.errors import InvalidPlanError
from steelyard.model.chain import LayerRole
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.plan.words import baseline_line
from steelyard.planning import acceptance, walked_search
from steelyard.planning.choose import plan_job
from steelyard.planning.job import make_job
from steelyard.planning.pins import parse_pin
from steelyard.planning.plan_from_search import assemble_plan
from steelyard.planning.problem import PlanOptions, make_tables
from steelyard.planning.rivals import with_baselines
from tests.cost.examples import cluster, job
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
                    replace(strategy, remat=remat) if chain.kind_of(layer).role is LayerRole.BLOCK else ends
                    for layer in range(chain.num_layers)
                )
                stage = StagePart(ranks=(0, 7), runs=fold_runs(0, layers))
                yield assemble_plan(of, pipeline(1, count), (stage,))


def compared(of: Job, options: PlanOptions = PlanOptions()) -> Plan:  # noqa: B008
    result = plan_job(of, options)
    assert result.plan is not None
    return with_baselines(result.plan, of, result.bounded_tables)


@pytest.mark.slow
def test_what_a_search_knows_of_its_tables_changes_no_plain_plan() -> None:
    of, options = tight(0.3), PlanOptions()
    found = compared(of, options)
    assert with_baselines(found, of, make_tables(of, options)) == found


def tight(share: float, **changes: int) -> Job:
    """A job within what plain FSDP takes: at 0 its smallest plan, at 1 its largest."""
    of = job(cluster(1, 8), global_batch=64, **changes)
    taken = [fullest_bytes(plan, of) for plan in every_plan(of, ("fsdp8",))]
    return replace(of, budget_bytes=int(min(taken) + share * (max(taken) - min(taken))))


def fullest_bytes(plan: Plan, of: Job) -> int:
    return max(stage.total_bytes for stage in predict(plan, of).stages)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.3, 0.05, 0.0])
@pytest.mark.parametrize("name", SINGLE_STAGE)
def test_a_plain_plan_is_the_fastest_of_its_kind_that_fits(name: str, share: float) -> None:
    of = tight(share)
    prediction = compared(of).prediction
    assert prediction is not None
    costs = [predict(plan, of) for plan in every_plan(of, SINGLE_STAGE[name])]
    fastest = min((cost.step_time_s for cost in costs if cost.fits), default=None)
    (mine,) = (each for each in prediction.baselines if each.name == name)
    assert mine.step_time_s == pytest.approx(fastest) if fastest else mine.step_time_s is None


@pytest.mark.slow
@pytest.mark.parametrize(("share", "vocab_size"), [(1.0, 256), (0.3, 256), (0.0, 256), (1.0, 257), (0.3, 257)])
def test_plain_n_d_is_the_fastest_of_all_strategies_that_all_blocks_share(share: float, vocab_size: int) -> None:
    of, options = tight(share, vocab_size=vocab_size), PlanOptions(num_stages=1)
    offered = {str(replace(each, remat=Remat.NONE)) for each in make_tables(of, options)[0].tables.strategies}
    found = compared(of, options).prediction
    assert found is not None
    mine = next(each for each in found.baselines if each.name == "plain n-D")
    costs = []
    for text in sorted(offered):
        try:
            costs += [predict(plan, of) for plan in every_plan(of, (text,))]
        except InvalidPlanError:  # a strategy that some layer does not allow
            continue
    fastest = min(cost.step_time_s for cost in costs if cost.fits)
    assert mine.step_time_s == pytest.approx(fastest)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.1, 0.05])
def test_no_plain_plan_is_faster_than_the_plan(share: float) -> None:
    prediction = compared(tight(share)).prediction
    assert prediction is not None
    times = [each.step_time_s for each in prediction.baselines if each.step_time_s is not None]
    assert times
    assert min(times) >= prediction.step_time_s * (1 - 1e-9)


def test_the_first_lines_name_the_best_plain_plan_and_what_is_gained() -> None:
    prediction = compared(tight(0.1)).prediction
    assert prediction is not None
    fitting = [each for each in prediction.baselines if each.step_time_s is not None]
    best = min(fitting, key=lambda each: each.step_time_s)
    assert best.name in baseline_line(prediction)
    gain = 1 - prediction.step_time_s / best.step_time_s
    assert f"{gain:.1%} less time" in baseline_line(prediction) or "as fast as" in baseline_line(prediction)


def test_a_vocabulary_that_tp_does_not_divide_leaves_plain_plans_with_tp() -> None:
    pin = parse_pin("blocks: tp=4", option="--pin", num_layers=6)
    found = compared(job(cluster(), global_batch=8, vocab_size=257), PlanOptions(pins=(pin,))).prediction
    assert found is not None
    last = found.baselines[-1]
    assert (last.name, last.missing_bytes) == ("plain n-D", None)
    assert "tp4" in str(last.strategies)


def test_plain_plans_that_do_not_fit_say_what_they_lack() -> None:
    prediction = compared(tight(0.0)).prediction
    assert prediction is not None
    assert all((each.step_time_s is None) == (each.missing_bytes is not None) for each in prediction.baselines)


def test_a_gap_that_memory_leaves_is_not_blamed_on_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (acceptance, walked_search):
        monkeypatch.setattr(each, "search_all_states", lambda _: None)  # which closes it
    prediction = compared(tight(0.1)).prediction
    assert prediction is not None
    assert (prediction.certificate.status, prediction.certificate.time_limit_s) == ("gap", None)


def test_a_comparison_without_time_names_the_first_that_fits_of_each_kind() -> None:
    of, options = tight(1.0), PlanOptions()
    tables = make_tables(of, options)
    found = plan_job(of, options).plan
    assert found is not None
    whole, cut = (with_baselines(found, of, tables, time_limit_s=limit_s).prediction for limit_s in (None, 0))
    assert whole is not None
    assert cut is not None
    for best, first in zip(whole.baselines, cut.baselines, strict=True):
        assert (best.step_time_s is None) == (first.step_time_s is None)
        assert best.step_time_s is None or best.step_time_s <= (first.step_time_s or 0) * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_no_plain_plan_of_a_model_with_tied_embeddings_is_faster(shape: tuple[int, int]) -> None:
    of = job(cluster(*shape), global_batch=64, tie_word_embeddings=True, vocab_size=131072)
    found = compared(of)
    assert found.prediction is not None
    assert found.prediction.certificate.status == "optimal"
    known = [each.step_time_s for each in found.prediction.baselines if each.step_time_s is not None]
    assert known
    assert found.prediction.step_time_s <= min(known) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert-large", "gpt2-xl", "gemma-2b", "llama3.2-1b", "olmoe-1b-7b"])
def test_no_plain_plan_of_a_packaged_model_of_short_sequences_is_faster(model: str) -> None:
    of = make_job(model, "1x8xa100-80gb", global_batch=64, seq_len=512, precision="bf16", memory=None, profile=None)
    found = compared(of)
    assert found.prediction is not None
    known = [each.step_time_s for each in found.prediction.baselines if each.step_time_s is not None]
    assert known
    assert found.prediction.step_time_s <= min(known) * (1 + 1e-6)
