"""The best plan within a framework's capabilities: the right form, none of that form faster, or a clear miss."""

from dataclasses import replace

import pytest

from steelyard.cost.predict import predict
from steelyard.cost.setting import Job
from steelyard.export import TARGETS
from steelyard.plan.capabilities import Capabilities, first_blocks_recomputed, kinds_of, unsupported
from steelyard.plan.plan import Plan, StagePlan, fold_runs
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.planning import NothingFitsError, PlanOptions, plan_for_framework, plan_job
from steelyard.planning.framework_fit import uniform_tables_of, with_first_blocks_recomputed
from steelyard.planning.plan_from_search import assemble_plan
from steelyard.planning.price import peak_bytes, with_price
from tests.cost.examples import SEQ_LEN, chain, cluster, profile
from tests.schedules.examples import pipeline

DP_ONLY = Capabilities(mixes_layers=False, kinds=kinds_of("dp"), remats=frozenset({Remat.NONE, Remat.FULL}))


def small_job(**changes: object) -> Job:
    model = chain()
    job = Job(
        chain=model,
        profile=profile(model),
        cluster=cluster(),
        seq_len=SEQ_LEN,
        global_batch=32,
        precision="bf16",
        budget_bytes=80 * 2**30,
    )
    return replace(job, **changes)


def one_stage(job: Job, *strategies: str, microbatches: int = 1) -> Plan:
    """A plan of one stage: the strategies of embedding, blocks and head."""
    embedding, blocks, head = (parse_strategy(each) for each in strategies)
    layers = (embedding, *[blocks] * (job.chain.num_layers - 2), head)
    stage = StagePlan(ranks=(0, 7), runs=fold_runs(0, layers))
    return assemble_plan(job, pipeline(1, microbatches), (stage,))


MIXED = ("dp8", "fsdp8", "fsdp4-tp2")
UNIFORM_TARGETS = [name for name, target in TARGETS.items() if not target.capabilities.mixes_layers]


@pytest.mark.parametrize("name", UNIFORM_TARGETS)
def test_what_comes_out_is_within_the_means(name: str) -> None:
    job = small_job()
    fitted = plan_for_framework(one_stage(job, *MIXED), job, TARGETS[name].capabilities, framework=name)
    assert unsupported(fitted.plan, TARGETS[name].capabilities) == ()
    assert fitted.reasons


def test_a_plan_within_the_means_stays_as_it_is() -> None:
    job = small_job()
    plan = one_stage(job, "dp8", "dp8", "dp8")
    fitted = plan_for_framework(plan, job, DP_ONLY, framework="dp")
    assert fitted.plan.stages == plan.stages
    assert (fitted.reasons, fitted.slowdown) == ((), 0.0)


def test_no_plan_of_one_strategy_is_faster() -> None:
    job = small_job()
    fitted = plan_for_framework(one_stage(job, *MIXED), job, TARGETS["deepspeed"].capabilities, framework="deepspeed")
    best_s = predict(fitted.plan, job).step_time_s
    for strategy in ("dp8", "fsdp8", "fsdp8 zero2", "dp4-tp2", "fsdp4-tp2", "tp8"):
        for microbatches in (1, 2, 4):
            other = one_stage(job, strategy, strategy, strategy, microbatches=microbatches)
            assert best_s <= predict(other, job).step_time_s * (1 + 1e-9)


def test_the_slowdown_is_relative_to_the_wanted_plan() -> None:
    job = small_job()
    wanted = plan_job(job, PlanOptions()).plan
    assert wanted is not None
    assert wanted.prediction is not None
    fitted = plan_for_framework(wanted, job, DP_ONLY, framework="dp")
    assert fitted.slowdown is not None
    assert fitted.slowdown >= -1e-9


def test_embedding_and_head_are_never_recomputed() -> None:
    job = small_job(budget_bytes=1 << 31)
    for tables in uniform_tables_of(job, TARGETS["torchtitan"].capabilities):
        for kind, legal in zip(job.chain.kinds, tables.legal, strict=True):
            allowed = {tables.strategies[index].remat for index, is_legal in enumerate(legal) if is_legal}
            assert kind.name == "block" or allowed == {Remat.NONE}


def test_what_fits_nowhere_is_a_miss_in_bytes() -> None:
    job = small_job(budget_bytes=1100 * 2**20)
    with pytest.raises(NothingFitsError, match=r"misses .* \(\d+ bytes\)"):
        plan_for_framework(one_stage(job, *MIXED), job, DP_ONLY, framework="dp")


def test_what_is_legal_nowhere_says_so() -> None:
    job = small_job(global_batch=4)
    with pytest.raises(NothingFitsError, match="legal for every layer"):
        plan_for_framework(one_stage(job, "dp4-tp2", "tp8", "tp8"), job, DP_ONLY, framework="dp")


def first_recomputed(job: Job, count: int) -> Plan:
    """A plan of dp8 with the first ``count`` of its four blocks recomputed."""
    plain, full = parse_strategy("dp8"), parse_strategy("dp8 remat=full")
    stage = StagePlan(ranks=(0, 7), runs=fold_runs(0, (plain, *[full] * count, *[plain] * (4 - count), plain)))
    return with_price(assemble_plan(job, pipeline(), (stage,)), job)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_as_few_first_blocks_are_recomputed_as_fit(count: int) -> None:
    roomy = small_job(global_batch=8)
    job = replace(roomy, budget_bytes=peak_bytes(first_recomputed(roomy, count)))
    fitted = with_first_blocks_recomputed(one_stage(job, "dp8", "dp8 remat=full", "dp8"), job)
    assert fitted is not None
    found = first_blocks_recomputed(fitted)
    assert found is not None
    peaks = [peak_bytes(first_recomputed(job, number)) for number in range(5)]
    assert found == next(number for number, peak in enumerate(peaks) if peak <= job.budget_bytes) <= count


def test_nothing_is_recomputed_where_that_would_not_do() -> None:
    job = small_job(global_batch=8, budget_bytes=2**20)
    assert with_first_blocks_recomputed(one_stage(job, "dp8", "dp8", "dp8"), job) is None
