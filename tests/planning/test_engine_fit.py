"""Tests of the best plan for a framework: legal form, none of that form faster, or a clear miss."""

import re
from dataclasses import replace

import pytest

from steelyard.cost.job import DeviceGroup, Job
from steelyard.cost.predict import predict
from steelyard.engines import ENGINES
from steelyard.engines.capabilities import Capabilities, dimensions_of, first_blocks_recomputed, unsupported
from steelyard.engines.engine import Engine
from steelyard.engines.native import NATIVE
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.planning.choose import NothingFitsError, NoUniformPlanError, plan_job
from steelyard.planning.engine_fit import FittedPlan, fit_plan
from steelyard.planning.price import assemble_plan, peak_bytes, with_price
from steelyard.planning.problem import make_tables
from steelyard.planning.uniform import uniform_choices
from steelyard.search.cuts import Leading
from tests.cost.examples import PARAMS, SEQ_LEN, chain, cluster, profile
from tests.schedules.examples import pipeline

DP_ONLY = Engine(
    name="dp",
    capabilities=Capabilities(
        mixes_layers=False, dimensions=dimensions_of("dp"), remats=frozenset({Remat.NONE, Remat.FULL})
    ),
)


def alike(engine: Engine) -> Engine:
    """An engine that runs the same plans as our runtime runs them."""
    return replace(engine, execution=NATIVE.execution)


def small_job(*, global_batch: int = 32, budget_bytes: int = 80 * 2**30) -> Job:
    model = chain()
    return Job(
        chain=model,
        groups=(DeviceGroup(profile=profile(model), cluster=cluster(), budget_bytes=budget_bytes),),
        seq_len=SEQ_LEN,
        global_batch=global_batch,
        precision="bf16",
    )


def one_stage(job: Job, *strategies: str, microbatches: int = 1) -> Plan:
    """A plan of one stage: the strategies of embedding, blocks and head."""
    embedding, blocks, head = (parse_strategy(each) for each in strategies)
    layers = (embedding, *[blocks] * (job.chain.num_layers - 2), head)
    stage = StagePart(ranks=(0, 7), runs=fold_runs(0, layers))
    return assemble_plan(job, pipeline(1, microbatches), (stage,))


MIXED = ("dp8", "fsdp8", "fsdp4-tp2")
UNIFORM = [name for name, engine in ENGINES.items() if not engine.capabilities.mixes_layers]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNIFORM)
def test_what_comes_out_is_within_the_means(name: str) -> None:
    job = small_job()
    fitted = fit_plan(one_stage(job, *MIXED), job, alike(ENGINES[name]))
    assert unsupported(fitted.plan, ENGINES[name].capabilities) == ()
    assert fitted.reasons


def test_a_plan_within_the_means_stays_as_it_is() -> None:
    job = small_job()
    plan = one_stage(job, "dp8", "dp8", "dp8")
    fitted = fit_plan(plan, job, DP_ONLY)
    assert fitted.plan.stages == plan.stages
    assert (fitted.reasons, fitted.slowdown) == ((), 0.0)


def test_no_plan_of_one_strategy_is_faster() -> None:
    job = small_job()
    fitted = fit_plan(one_stage(job, *MIXED), job, alike(ENGINES["deepspeed"]))
    best_s = predict(fitted.plan, job).step_time_s
    for strategy in ("dp8", "fsdp8", "fsdp8 zero2", "dp4-tp2", "fsdp4-tp2", "tp8"):
        for microbatches in (1, 2, 4):
            other = one_stage(job, strategy, strategy, strategy, microbatches=microbatches)
            assert best_s <= predict(other, job).step_time_s * (1 + 1e-9)


@pytest.mark.slow
def test_the_slowdown_is_relative_to_the_wanted_plan() -> None:
    job = small_job()
    wanted = plan_job(job, Decisions()).plan
    assert wanted is not None
    assert wanted.prediction is not None
    fitted = fit_plan(wanted, job, DP_ONLY)
    assert fitted.slowdown is not None
    assert fitted.slowdown >= -1e-9


@pytest.mark.slow
def test_embedding_and_head_are_never_recomputed() -> None:
    job = small_job(budget_bytes=1 << 31)
    theirs = replace(job, engine=ENGINES["torchtitan"])
    for tables in (each.tables for each in make_tables(theirs, Decisions())):
        for choice in uniform_choices(theirs, tables):
            for layer_type, *columns in zip(job.chain.layer_types, choice.columns, choice.recomputed, strict=False):
                remats = {tables.strategies[column].remat for column in columns}
                assert layer_type.name == "block" or remats == {Remat.NONE}


def test_no_first_chunk_recomputes_fewer_blocks_than_the_others() -> None:
    theirs = replace(small_job(budget_bytes=1 << 31), engine=ENGINES["megatron"])
    found: dict[int, set[Leading]] = {}
    for tables in (each.tables for each in make_tables(theirs, Decisions())):
        leading = {choice.leading for choice in uniform_choices(theirs, tables)}
        found.setdefault(tables.pipeline.num_chunks, set()).update(leading)
    assert found[3] == {Leading.NONE}  # 4 blocks and both ends in 2 stages of 3 chunks
    assert Leading.SAME in found[1] & found[2]


def test_what_fits_nowhere_is_a_miss_in_bytes() -> None:
    job = small_job(budget_bytes=1100 * 2**20)
    with pytest.raises(NothingFitsError, match=r"misses .* \(\d+ bytes\)"):
        fit_plan(one_stage(job, *MIXED), job, DP_ONLY)


def test_what_fits_without_the_margin_alone_takes_of_it() -> None:
    job = small_job(budget_bytes=1100 * 2**20)
    fitted = fit_plan(one_stage(job, *MIXED), job.on(margin_bytes=2**36), DP_ONLY)
    assert peak_bytes(fitted.plan) > job.budget_bytes
    roomy = small_job()
    at_ease = fit_plan(one_stage(roomy, *MIXED), roomy.on(margin_bytes=2**36), DP_ONLY)
    assert peak_bytes(at_ease.plan) <= roomy.budget_bytes


def test_what_is_legal_nowhere_says_so() -> None:
    job = small_job(global_batch=4)
    with pytest.raises(NoUniformPlanError, match="dp, which has no strategy that every layer"):
        fit_plan(one_stage(job, "dp4-tp2", "tp8", "tp8"), job, DP_ONLY)


def first_recomputed(job: Job, count: int) -> Plan:
    """A plan of dp8 with the first ``count`` of its four blocks recomputed."""
    plain, full = parse_strategy("dp8"), parse_strategy("dp8 remat=full")
    stage = StagePart(ranks=(0, 7), runs=fold_runs(0, (plain, *[full] * count, *[plain] * (4 - count), plain)))
    return with_price(assemble_plan(job, pipeline(), (stage,)), job)


FIRST_BLOCKS = replace(
    DP_ONLY,
    name="first blocks",
    capabilities=replace(DP_ONLY.capabilities, remats_first_blocks=True),
)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_as_few_first_blocks_are_recomputed_as_fit(count: int) -> None:
    roomy = small_job(global_batch=8)
    job = roomy.on(budget_bytes=peak_bytes(first_recomputed(roomy, count)))
    asked = Decisions(num_microbatches=1)
    wanted = one_stage(job, "fsdp8", "fsdp8", "fsdp8").model_copy(update={"asked": asked})
    fitted = fit_plan(wanted, job, FIRST_BLOCKS).plan
    found = first_blocks_recomputed(fitted)
    assert found is not None
    peaks = [peak_bytes(first_recomputed(job, number)) for number in range(5)]
    assert found == next(number for number, peak in enumerate(peaks) if peak <= job.budget_bytes) <= count
    assert peak_bytes(fitted) <= job.budget_bytes


def test_nothing_is_recomputed_where_that_would_not_do() -> None:
    job = small_job(global_batch=8, budget_bytes=2**20)
    with pytest.raises(NothingFitsError, match="misses"):
        fit_plan(one_stage(job, "fsdp8", "fsdp8", "fsdp8"), job, FIRST_BLOCKS)


# what the user asked for


def fit(plan: Plan, job: Job, name: str) -> FittedPlan:
    return fit_plan(plan, job, ENGINES[name])


def best(job: Job, **asked: object) -> Plan:
    """The best plan under what a user asked for."""
    found = plan_job(job, Decisions.model_validate(asked)).plan
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchtitan", "megatron", "megatron-fsdp"])
def test_stages_microbatches_and_pins_of_the_user_are_kept(name: str) -> None:
    job = small_job()
    fitted = fit(best(job, num_stages=2, num_microbatches=8, pins=("blocks 0-1: tp=2",)), job, name)
    assert (fitted.plan.num_stages, fitted.plan.num_microbatches) == (2, 8)
    assert {strategy.tensor_degree for strategy in fitted.plan.strategies} == {2}
    assert fitted.kept == ("--pin 'blocks 0-1: tp=2'", "--stages 2", "--microbatches 8")
    assert fitted.given_up == ()


@pytest.mark.slow
@pytest.mark.parametrize("remat", list(Remat))
def test_remat_that_the_user_asked_for_is_kept(remat: Remat) -> None:
    job = small_job()
    fitted = fit(best(job, pins=(f"blocks 0-3: remat={remat}",)), job, "torchtitan")
    assert {strategy.remat for strategy in fitted.plan.strategies[1:-1]} == {remat}
    assert fitted.given_up == ()


@pytest.mark.slow
def test_pinned_remat_of_some_blocks_is_that_of_the_first_ones() -> None:
    job = small_job()
    fitted = fit(best(job, num_stages=1, pins=("blocks 0-1: remat=full", "blocks 2-3: remat=none")), job, "megatron")
    assert [strategy.remat for strategy in fitted.plan.strategies[1:-1]] == [Remat.FULL] * 2 + [Remat.NONE] * 2
    assert fitted.given_up == ()


@pytest.mark.slow
def test_a_pin_of_all_layers_asks_for_no_remat_of_the_ends() -> None:
    job = small_job()
    fitted = fit(best(job, pins=("remat=full",)), job, "torchtitan")
    assert {strategy.remat for strategy in fitted.plan.strategies[1:-1]} == {Remat.FULL}
    assert fitted.given_up == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked", "text"),
    [
        ("deepspeed", {"num_stages": 2}, "--stages 2"),
        ("deepspeed", {"pins": ("blocks 0-3: remat=selective",)}, "--pin 'blocks 0-3: remat=selective'"),
        ("megatron", {"pins": ("blocks 0-3: fsdp8",)}, "--pin 'blocks 0-3: fsdp8'"),
        ("torchtitan", {"pins": ("layers 0-5: remat=full",)}, "--pin 'layers 0-5: remat=full'"),
    ],
)
def test_what_a_framework_has_nothing_of_is_given_up_with_the_reason(
    name: str, asked: dict[str, object], text: str
) -> None:
    job = small_job()
    fitted = fit(best(job, num_microbatches=2, **asked), job, name)
    assert fitted.given_up == (
        f"{text}: nothing that {name} can run of this model, batch and number of devices has it",
    )
    assert (fitted.kept, fitted.plan.num_microbatches) == (("--microbatches 2",), 2)


def test_what_leaves_nothing_that_fits_is_given_up_with_what_it_misses() -> None:
    roomy = small_job(global_batch=8)
    least = first_recomputed(roomy, 4)
    job = roomy.on(budget_bytes=peak_bytes(least) + 1000)
    asked = Decisions(pins=("dp=8",), remats=(Remat.NONE,), num_microbatches=1)
    mixed = one_stage(job, *MIXED).model_copy(update={"asked": asked})
    fitted = fit_plan(mixed, job, DP_ONLY)
    assert len(fitted.given_up) == 1
    assert re.fullmatch(
        r"--\w+ \w+: with all that was asked there is not .* misses .* \(\d+ bytes\)", fitted.given_up[0]
    )
    assert len(fitted.kept) == 2
    assert peak_bytes(fitted.plan) <= job.budget_bytes


@pytest.mark.slow
def test_demands_that_no_strategy_of_all_layers_meets_together_give_one_up() -> None:
    job = small_job()
    fitted = fit(best(job, pins=("blocks 0-1: tp=2", "blocks 2-3: tp=4")), job, "torchtitan")
    assert (len(fitted.kept), len(fitted.given_up)) == (1, 1)


# as the framework runs it


@pytest.mark.slow
def test_a_plan_that_a_framework_runs_otherwise_is_searched_again() -> None:
    job = small_job()
    wanted = with_price(one_stage(job, "dp8", "dp8 remat=full", "dp8"), job)
    fitted = fit(wanted, job, "megatron")
    assert not fitted.is_wanted
    assert {strategy.remat for strategy in fitted.plan.strategies} == {Remat.NONE}


def test_a_plan_of_ones_own_is_left_as_it_is() -> None:
    job = small_job()
    fitted = fit(one_stage(job, "dp8", "dp8 remat=full", "dp8"), job, "megatron")
    assert fitted.is_wanted
    assert fitted.plan.prediction is not None


def test_megatron_is_priced_with_a_sharded_optimizer() -> None:
    job = small_job()
    fitted = fit(one_stage(job, "dp8", "dp8", "dp8"), job, "megatron")
    assert fitted.plan.prediction is not None
    terms = fitted.plan.prediction.stages[0].memory_bytes
    num_params = sum(PARAMS[layer_type.name] for layer_type in (job.chain.type_of(layer) for layer in range(6)))
    assert terms["parameters"] == 2 * num_params
    assert terms["optimizer"] == pytest.approx(12 * num_params / 8, rel=1e-3)


@pytest.mark.parametrize(("name", "strategy", "keeps"), [
    ("accelerate", "fsdp8", True),
    ("accelerate", "dp8", False),
    ("accelerate", "dp2-fsdp4", True),
    ("transformers", "fsdp8", True),
    ("transformers", "fsdp4-tp2", False),
])  # fmt: skip
def test_gradients_stay_whole_while_they_accumulate_where_the_framework_keeps_them(
    name: str, strategy: str, keeps: bool
) -> None:
    job = small_job(global_batch=32)
    wanted = one_stage(job, strategy, strategy, strategy).model_copy(update={"num_microbatches": 4})
    fitted = fit(wanted, job, name)
    assert fitted.plan.prediction is not None
    ours = with_price(wanted, job).prediction
    assert ours is not None
    assert fitted.is_wanted
    theirs = fitted.plan.prediction.stages[0]
    assert (theirs.memory_bytes["gradients"] > 2 * ours.stages[0].memory_bytes["gradients"]) == keeps
    assert (fitted.plan.prediction.step_time_s < ours.step_time_s) == keeps
