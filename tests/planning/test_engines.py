"""Tests of planning for an engine: any value is one; own settings are never faster; plans name their engine."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.cost.job import Job
from steelyard.cost.kernels import job_under
from steelyard.engines import ENGINE_OF_TARGET, ENGINES, FRONT_ENDS, TARGETS, engine_of
from steelyard.engines.capabilities import Capabilities, dimensions_of, unsupported
from steelyard.engines.engine import Engine
from steelyard.engines.native import NATIVE
from steelyard.errors import UserError
from steelyard.plan.decisions import Decisions
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import InvalidPlanError
from steelyard.plan.strategy import Remat
from steelyard.planning.choose import NoUniformPlanError, plan_job
from steelyard.planning.complete import complete, engine_answers
from steelyard.planning.frontier import memory_points
from steelyard.planning.job import job_of
from steelyard.planning.price import peak_bytes, with_price
from steelyard.planning.problem import pipeline_configs
from steelyard.planning.request import make_request, request_of_plan
from steelyard.planning.settings import Settings, plan_of_settings
from steelyard.planning.variants import Study
from steelyard.planning.why_not import left_out, refuse_impossible
from steelyard.precision import Precision
from steelyard.runtime.checks import check_engine

TOY = Engine(
    name="toy",
    capabilities=Capabilities(
        mixes_layers=False,
        dimensions=dimensions_of("dp", "dp+tp"),
        remats=frozenset({Remat.NONE, Remat.FULL}),
        remats_first_blocks=True,
    ),
    execution=replace(NATIVE.execution, tuned_linear_speedup=3.0),
)
UNIFORM = [engine for engine in ENGINES.values() if not engine.capabilities.mixes_layers]


def llama(**asked: object) -> Job:
    """Llama-3-8B on 8 A100, priced from packaged traces."""
    request = make_request("llama3-8b", "1x8xa100-80gb", global_batch=32, seq_len=4096)
    return job_of(replace(request, **asked))  # type: ignore[arg-type]


def step_s(plan: object) -> float:
    return plan.prediction.step_time_s  # type: ignore[attr-defined,no-any-return]


def test_an_engine_is_one_value() -> None:
    job = job_of(make_request("llama3-8b", "1x8xh100-80gb", global_batch=32, seq_len=4096))
    found = plan_job(replace(job, engine=TOY)).plan
    slower = plan_job(replace(job, engine=replace(TOY, execution=NATIVE.execution))).plan
    assert found is not None
    assert slower is not None
    assert found.engine == "toy"
    assert unsupported(found, TOY.capabilities) == ()
    assert step_s(found) < 0.8 * step_s(slower)


def test_every_engine_and_target_has_a_name_of_its_own() -> None:
    driven = [target for engine in ENGINES.values() for target in engine.targets]
    targets = [target.name for target in (*driven, *FRONT_ENDS)]
    assert sorted(targets) == sorted(TARGETS) == sorted(ENGINE_OF_TARGET)
    with pytest.raises(UserError, match="torchtitan"):
        engine_of("torchtian")


def test_software_that_starts_an_engine_is_told_apart_from_engines() -> None:
    with pytest.raises(UserError, match=r"--engine accelerate, then write the plan with export --to axolotl"):
        engine_of("axolotl")


@pytest.mark.slow
@pytest.mark.parametrize("engine", UNIFORM, ids=lambda engine: engine.name)
def test_no_settings_that_fit_are_faster_than_the_plan_for_an_engine(engine: Engine) -> None:
    job = job_under(llama(), engine)
    free = plan_job(job).plan
    assert free is not None
    num_tried = 0
    for tp, cp, pp, zero, remat in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2, 3), Remat):
        settings = Settings(tp=tp, cp=cp, pp=pp, zero=zero, remat=remat, sp="sp" in engine.capabilities.modes)
        try:
            plan = with_price(plan_of_settings(job, settings), job)
        except UserError:
            continue
        num_tried += 1
        assert peak_bytes(plan) > job.budget_bytes or step_s(free) <= step_s(plan) * 1.001, str(settings)
    assert num_tried > 3


@pytest.mark.parametrize(("precision", "is_traced"), [("bf16", False), ("fp32", True)])
def test_layers_that_stay_traced_are_launched_as_traced_ones(precision: Precision, is_traced: bool) -> None:
    asked = {"global_batch": 1, "seq_len": 64, "precision": precision}
    job = job_of(make_request("llama-demo", "1x1xa100-40gb", **asked))  # type: ignore[arg-type]
    under = job_under(job, ENGINES["automodel"])
    assert (under.profile == job.profile, under.execution.kernels is None) == (is_traced, is_traced)


def test_an_engine_has_its_kernels_in_a_model_whose_tower_reads_no_text() -> None:
    job = job_of(make_request("gemma3-4b", "1x8xh100-80gb", global_batch=8, seq_len=4096))
    under = job_under(job, ENGINES["automodel"])
    assert under.execution.kernels is not None
    assert all(
        one.forward != other.forward for one, other in zip(under.profile.layers, job.profile.layers, strict=True)
    )
    assert [each.num_params for each in under.profile.layers] == [each.num_params for each in job.profile.layers]


def test_settings_cut_the_blocks_evenly() -> None:
    job = job_under(llama(), ENGINES["megatron"])
    plan = plan_of_settings(job, Settings(tp=2, pp=2, vpp=3))
    sizes = [len(part.layers) for part in plan.parts]
    assert sizes == [6, 5, 6, 6, 5, 6][: len(sizes)] or max(sizes) - min(sizes) <= 2
    assert sum(sizes) == job.chain.num_layers
    assert (plan.num_stages, plan.num_chunks, plan.num_microbatches) == (2, 3, 16)
    assert plan.engine == "megatron"


@pytest.mark.parametrize(
    ("engine", "settings", "words"),
    [
        ("megatron", Settings(tp=3), "3 for 8 devices"),
        ("megatron", Settings(micro_batch=3), "samples of the global batch"),
        ("megatron", Settings(pp=8, vpp=8), "64 parts of the pipeline for 32 blocks"),
        ("megatron", Settings(ep=2), "1, because the model has no experts"),
        ("megatron", Settings(zero=3), "megatron-fsdp"),
        ("megatron", Settings(zero=0), "has these states sharded"),
        ("accelerate", Settings(pp=2, zero=3), "a pipeline"),
        ("torchtitan", Settings(cp=2, tp=4), "torchtitan with zero 1"),
    ],
)
def test_settings_that_cannot_be_say_why(engine: str, settings: Settings, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        plan_of_settings(job_under(llama(), ENGINES[engine]), settings)


@pytest.mark.parametrize(
    ("engine", "model", "words"),
    [
        ("automodel", "qwen2.5-3b", "tp 8 over 2 key-value heads"),
        ("torchtitan", "qwen3-30b-a3b", "tp 8 over 4 key-value heads"),
        ("automodel", "gpt2-medium", "tp in a model of type gpt2"),
        ("megatron", "qwen3-30b-a3b", "tp without sp in a model with experts"),
        ("megatron-bridge", "qwen3-30b-a3b", "tp without sp in a model with experts"),
    ],
)
def test_tp_that_an_engine_refuses_at_its_start_is_not_planned(engine: str, model: str, words: str) -> None:
    job = job_of(make_request(model, "1x8xh100-80gb", global_batch=32, seq_len=1024, engine=engine))
    has_sp = not engine.startswith("megatron")
    with pytest.raises(UserError, match=words):
        plan_of_settings(job, Settings(tp=8, sp=has_sp, micro_batch=8, zero=3 if has_sp else 1))


def test_experts_are_divided_over_a_multiple_of_the_ranks_of_tp() -> None:
    job = job_of(make_request("mixtral-8x7b", "1x8xa100-80gb", global_batch=32, seq_len=4096))
    with pytest.raises(UserError, match="ranks of experts by tp"):
        plan_of_settings(job, Settings(tp=2, ep=3))


def test_settings_shard_states_over_the_ranks_of_cp_where_no_samples_are_divided() -> None:
    settings = Settings(cp=8, zero=3)
    titan, megatron = (
        plan_of_settings(job_under(llama(), ENGINES[engine]), replace(settings, zero=zero)).strategies[0]
        for engine, zero in (("torchtitan", 3), ("megatron", 1))
    )
    assert (str(titan), titan.state_shards, titan.sample_degree) == ("fsdp1-cp8", 8, 1)
    assert (str(megatron), megatron.state_shards) == ("cp8", 1)


@pytest.mark.slow
def test_a_plan_names_its_engine_and_is_priced_by_it_again(tmp_path: Path) -> None:
    request = make_request("llama3-8b", "1x8xa100-80gb", global_batch=32, seq_len=4096, engine="megatron")
    plan = complete(replace(request, num_fallbacks=1, num_next_best=1)).plan
    assert plan is not None
    write_plan(plan, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.engine == "megatron"
    assert read.fallback_plan(0).engine == "megatron"
    again = with_price(read, job_of(request_of_plan(read)))
    assert step_s(again) == pytest.approx(step_s(plan))
    assert step_s(with_price(read, job_of(request_of_plan(read, engine="native")))) > step_s(plan)
    with pytest.raises(InvalidPlanError, match="export"):
        check_engine(read)


@pytest.mark.slow
def test_a_plan_that_an_engine_cannot_run_is_not_priced_by_it() -> None:
    request = make_request("llama3-8b", "1x8xa100-80gb", global_batch=32, seq_len=4096)
    mixed = complete(replace(request, decisions=Decisions(pins=("blocks 0-3: fsdp8", "blocks 4-7: dp=8")))).plan
    assert mixed is not None
    with pytest.raises(UserError, match="differ between layers"):
        request_of_plan(mixed, engine="torchtitan")


@pytest.mark.parametrize(
    ("model", "engine", "words"),
    [("bert-base", "megatron", "a model of"), ("llama2-13b", "torchtitan", "a model that torchtitan defines")],
)
def test_a_model_that_an_engine_does_not_have_is_refused_before_any_search(model: str, engine: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        make_request(model, "1x8xa100-80gb", global_batch=32, seq_len=512, engine=engine)
    assert error.value.field == "--engine"


@pytest.mark.slow
def test_fp8_is_priced_where_an_engine_has_it_and_faster() -> None:
    asked = {"global_batch": 32, "seq_len": 4096}
    with pytest.raises(UserError, match="native"):
        make_request("llama3-8b", "1x8xh100-80gb", precision="fp8", **asked)
    plans = [
        plan_job(job_of(make_request("llama3-8b", "1x8xh100-80gb", engine="megatron", precision=each, **asked))).plan
        for each in ("bf16", "fp8")
    ]
    assert plans[0] is not None
    assert plans[1] is not None
    assert step_s(plans[0]) / 2 < step_s(plans[1]) < step_s(plans[0])


def test_linear_layers_in_fewer_bits_are_priced_where_engine_and_device_have_them() -> None:
    job = job_of(make_request("llama3-8b", "1x8xb200", global_batch=32, seq_len=4096))

    def took(precision: Precision) -> float:
        own = replace(job_under(job, ENGINES["megatron"]), precision=precision)
        return step_s(with_price(plan_of_settings(own, Settings()), own))

    assert took("nvfp4") < took("mxfp8") == took("fp8-block") == took("fp8") < took("bf16")
    other = job_under(
        job_of(make_request("llama3-8b", "1x4xgb300", global_batch=32, seq_len=4096)), ENGINES["megatron"]
    )
    speeds = {each: replace(other, precision=each).linear_speedup for each in ("nvfp4", "fp8")}  # type: ignore[arg-type]
    assert speeds["nvfp4"] == 2 * speeds["fp8"]  # not the 3 of the data sheet
    alone = replace(other.cluster.device, peak_flop_per_s={"bf16": 1e15, "nvfp4": 4e15})
    machines = replace(other.cluster, groups=(replace(other.cluster.groups[0], device=alone),))
    assert replace(other.on(cluster=machines), precision="nvfp4").linear_speedup > 3
    asked = {"global_batch": 32, "seq_len": 4096}
    with pytest.raises(UserError, match="nvfp4 with the engine torchtitan"):
        make_request("llama3-8b", "1x8xb200", engine="torchtitan", precision="nvfp4", **asked)
    with pytest.raises(UserError, match="'mxfp8' on device 'h100-80gb'"):
        plan_job(job_of(make_request("llama3-8b", "1x8xh100-80gb", engine="megatron", precision="mxfp8", **asked)))


def test_options_of_an_engine_are_priced_and_stand_in_the_plan() -> None:
    job = job_of(make_request("mixtral-8x22b", "1x8xh100-80gb", global_batch=64, seq_len=4096))
    settings = Settings(ep=8)

    def took(name: str) -> float:
        plan = with_price(plan_of_settings(job_under(job, engine_of(name)), settings), job_under(job, engine_of(name)))
        assert plan.engine == name
        return step_s(plan)

    plain, once = took("megatron"), took("megatron+deepep")
    assert took("megatron+alltoall") == plain
    assert took("megatron+deepep+balanced") < once < plain < took("megatron+allgather")
    with pytest.raises(UserError, match="deepep"):
        engine_of("megatron+deepp")
    with pytest.raises(UserError, match="leave the option out"):
        engine_of("native+deepep")


def test_an_engine_without_what_was_decided_has_no_plan() -> None:
    decided = Decisions(num_stages=2, modes={"zero": (2,)}, max_degrees={"tp": 1})
    with pytest.raises(UserError, match="automodel, which has no strategy"):
        plan_job(job_under(llama(), ENGINES["automodel"]), decided)


@pytest.mark.parametrize(("engine", "has_pipelines"), [("automodel", False), ("torchtitan", False), ("megatron", True)])
def test_a_tied_head_stays_with_its_embedding_where_the_engine_asks_for_it(engine: str, has_pipelines: bool) -> None:
    request = make_request("qwen3-4b", "1x4xa100-80gb", global_batch=32, seq_len=1024, engine=engine)
    job = job_of(request)
    assert any(each.pipeline.num_stages > 1 for each in pipeline_configs(job, Decisions())) == has_pipelines
    settings = Settings(pp=2, micro_batch=1, zero=1)
    if has_pipelines:
        plan_of_settings(job, settings)
        return
    with pytest.raises(UserError, match="shares the embedding's matrix"):
        plan_of_settings(job, settings)
    with pytest.raises(UserError, match="shares the embedding's matrix"):
        pipeline_configs(job, Decisions(num_stages=2))


def test_next_best_plans_are_of_configs_in_which_one_strategy_is_legal() -> None:
    request = make_request("gpt2", "1x4xa100-40gb", global_batch=32, seq_len=1024, engine="transformers")
    plan = complete(replace(request, num_fallbacks=0, num_next_best=9)).plan
    assert plan is not None
    assert {each.pipeline.num_microbatches for each in plan.contenders()} == {1, 2, 4, 8}, "16 and 32 divide no samples"


def test_batches_without_a_legal_plan_are_tried_and_said() -> None:
    request = make_request("falcon-7b", "1x8xa100-40gb", global_batch="max", seq_len=8192, engine="deepspeed")
    result = complete(request)
    assert result.plan is None
    assert [note.partition(": does not fit: ")[0] for note in result.notes[:4]] == [
        f"global batch {count}" for count in (1, 2, 4, 8)
    ]
    assert "no strategy that every layer" in result.notes[0]


@pytest.mark.parametrize("engine", ["native", "megatron", "torchtitan", "deepspeed"])
def test_remat_is_asked_of_blocks(engine: str) -> None:
    request = make_request("llama3-8b", "1x8xa100-80gb", global_batch=32, seq_len=4096, engine=engine)
    for remat in (Remat.SELECTIVE, Remat.FULL):
        if remat in request.engine.capabilities.remats or engine == "native":
            asked = replace(request, decisions=Decisions(remats=(remat,)), num_fallbacks=0, num_next_best=0)
            plan = complete(asked).plan
            assert plan is not None
            assert {strategy.remat for strategy in plan.strategies[1:-1]} == {remat}
            assert plan.strategies[0].remat is Remat.NONE


def test_a_batch_that_the_devices_do_not_divide_is_named() -> None:
    request = make_request("gpt2", "4x8xa100-40gb", global_batch=16, seq_len=1024, engine="transformers")
    with pytest.raises(UserError, match="a --global-batch that 32 divides"):
        complete(request)


@pytest.mark.slow
def test_a_dimension_that_an_engine_lacks_in_a_model_is_named() -> None:
    request = make_request("deepseek-v3", "1x8xh100-80gb", global_batch=8, seq_len=4096, engine="automodel")
    with pytest.raises(UserError, match="it has no tp in a model of type deepseek_v3"):
        plan_job(job_of(request), Decisions(pins=("tp=2",)))


@pytest.mark.parametrize(("model", "is_odd"), [("gpt2-medium", True), ("gpt3-175b", False)])
def test_a_dimension_that_only_the_ends_refuse_is_said_not_to_be_searched(model: str, is_odd: bool) -> None:
    """No tp divides GPT-2's 50,257 tokens; GPT-3 has those that Megatron pads it to."""
    job = job_of(make_request(model, "1x8xa100-80gb", global_batch=32, seq_len=1024, engine="megatron"))
    said = [each for each in left_out(job, Decisions()) if each.startswith("tp,")]
    assert (
        said == ["tp, which megatron gives to all layers: tp 2 does not divide the 50257 vocabulary entries"] * is_odd
    )


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_options_of_an_engine_have_no_order(engine: Engine) -> None:
    """Token dispatchers exclude each other."""
    for pair in itertools.combinations(engine.options, 2):
        if {*pair} <= {"alltoall", "allgather", "deepep"}:
            with pytest.raises(UserError, match="undoes it"):
                engine.with_options(pair)
        else:
            first, second = (engine.with_options(each) for each in (pair, pair[::-1]))
            assert replace(first, name="") == replace(second, name="")


def test_a_combination_that_an_engine_lacks_in_a_precision_is_named() -> None:
    asked = {"global_batch": 8, "seq_len": 256, "precision": "fp16", "engine": "transformers"}
    request = make_request("llama-demo", "1x8xv100-32gb", **asked)
    with pytest.raises(UserError, match="it has no fsdp with tp in one layer"):
        plan_job(job_of(request), Decisions(pins=("fsdp4-tp2",)))


def test_an_engine_of_one_strategy_divides_its_ends_as_its_blocks() -> None:
    """A plan with ends that tp leaves whole would be written without tp."""
    job = job_of(make_request("gpt2-medium", "1x8xa100-80gb", global_batch=32, seq_len=1024, engine="megatron"))
    with pytest.raises(NoUniformPlanError):
        plan_job(job, Decisions(pins=("blocks: tp=2",)))


@pytest.mark.slow
def test_a_published_run_of_gpt3_is_priced_by_the_packaged_model() -> None:
    """Korthikanti et al. 2022, table 5: 13.75 s on 64 A100 with tp 8, sp, 8 stages of 3 chunks, selective remat."""
    job = job_of(make_request("gpt3-175b", "8x8xa100-80gb", global_batch=64, seq_len=2048, engine="megatron"))
    published = Settings(tp=8, sp=True, pp=8, vpp=3, micro_batch=1, zero=1, remat=Remat.SELECTIVE)
    assert with_price(plan_of_settings(job, published), job).prediction.step_time_s == pytest.approx(13.75, rel=0.1)


def test_other_engines_stand_beside_a_plan_the_fastest_first() -> None:
    request = make_request("llama3-8b", "1x8xa100-80gb", global_batch=32, seq_len=4096)
    result = complete(replace(request, num_fallbacks=0, num_next_best=0))
    found = engine_answers(request, result)
    assert {each.name for each in found} == {*ENGINES} - {"native"}
    times = [each.step_time_s for each in found if each.step_time_s is not None]
    assert times == sorted(times)
    alone = plan_job(job_under(result.job, ENGINES["megatron"])).plan
    assert alone is not None
    assert next(each.step_time_s for each in found if each.name == "megatron") == pytest.approx(step_s(alone), rel=1e-3)


@pytest.mark.slow
def test_another_engine_has_no_more_stages_than_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.planning.simple.USUAL_STAGES", 1)
    monkeypatch.setattr("steelyard.planning.simple.STAGE_PARAMS", 10**15)
    monkeypatch.setattr("steelyard.planning.complete.ENGINES", {"megatron-fsdp": ENGINES["megatron-fsdp"]})
    request = make_request("llama3-8b", "2x4xa100-40gb", global_batch=16, seq_len=2048)
    request = replace(request, num_fallbacks=0, num_next_best=0)
    (beside,) = engine_answers(request, complete(request))
    own = complete(replace(request, engine=ENGINES["megatron-fsdp"])).plan
    assert own is not None
    assert own.num_stages == 1
    assert beside.step_time_s == pytest.approx(step_s(own), rel=1e-9)
    assert step_s(own) > step_s(plan_job(job_of(replace(request, engine=ENGINES["megatron-fsdp"]))).plan)


@pytest.mark.slow
def test_a_frontier_for_an_engine_has_its_plans_alone() -> None:
    request = make_request("llama3-8b", "1x8xa100-80gb", global_batch=32, seq_len=4096, engine="megatron")
    points, _ = memory_points(Study(request), None, max_searches=6)
    assert len(points) > 2
    for point in points:
        shardings = {each.split(" ×")[0].partition(" remat")[0] for each in point.strategies.split(", ")}
        assert len(shardings) == 1, point.strategies


@pytest.mark.parametrize(
    ("engine", "decided", "expected"),
    [
        ("deepspeed", Decisions(remats=(Remat.SELECTIVE,)), "one of none, full"),
        ("megatron", Decisions(pins=("fsdp=8",)), "not fsdp, which needs the engine megatron-fsdp"),
        ("megatron", Decisions(modes={"zero": (2, 3)}), "not fsdp, which needs the engine megatron-fsdp"),
        ("megatron", Decisions(modes={"zero": (1,)}), None),
        ("megatron-fsdp", Decisions(modes={"zero": (1,)}), "zero among 3, 2"),
        ("deepspeed", Decisions(pins=("blocks 0-3: cp=2",)), "not cp, which this engine does not run"),
        ("accelerate", Decisions(num_stages=2), "this engine runs no pipelines"),
        ("accelerate", Decisions(num_stages=1, remats=(Remat.NONE, Remat.SELECTIVE)), None),
    ],
)
def test_a_decision_that_an_engine_does_not_have_is_refused_by_its_name(
    engine: str, decided: Decisions, expected: str | None
) -> None:
    request = make_request("llama3-8b", "1x8xa100-80gb", global_batch=32, seq_len=4096, engine=engine)
    request = replace(request, decisions=decided)
    if expected is None:
        refuse_impossible(request)
    else:
        with pytest.raises(UserError, match=expected) as error:
            refuse_impossible(request)
        assert error.value.field in ("--remat", "--pin", "--fsdp", "--zero", "--stages")


@pytest.mark.parametrize(
    ("engine", "expected"), [("megatron", "1f1b, interleaved-1f1b"), ("deepspeed", "no schedule: this engine runs no")]
)
def test_a_schedule_that_an_engine_does_not_run_is_refused_by_its_name(engine: str, expected: str) -> None:
    request = make_request("llama3-8b", "1x8xa100-80gb", global_batch=8, seq_len=4096, engine=engine)
    with pytest.raises(UserError) as caught:
        complete(replace(request, decisions=Decisions(schedules=("gpipe",))))
    assert caught.value.found == f"gpipe with the engine {engine}"
    assert caught.value.expected.startswith(expected)
