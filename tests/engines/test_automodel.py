"""Tests of the YAML for NeMo Automodel: the plan, the model's config, and what it cannot express."""

from typing import Any

import pytest
import yaml
from transformers import CONFIG_MAPPING, AutoConfig

from steelyard.engines import engine_of
from steelyard.engines.capabilities import unsupported
from steelyard.errors import UserError
from steelyard.model.read import load_model
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import parse_strategy
from tests.engines.examples import divided_experts, exported, text_of, uneven_pipeline, uniform
from tests.engines.known import known_names

CAPABILITIES = engine_of("automodel").capabilities


def content_of(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text_of(plan, "automodel", ".yaml"))
    return found


def test_sizes_and_batch_are_those_of_the_plan() -> None:
    plan = uniform("dp2-fsdp2-cp2", devices=8, zero=2)
    assert unsupported(plan, CAPABILITIES) == ()
    content = content_of(plan)
    distributed = content["distributed"]
    sizes = {key: distributed[f"{key}_size"] for key in ("dp", "dp_replicate", "tp", "cp", "pp", "ep")}
    assert sizes == {"dp": 4, "dp_replicate": 2, "tp": 1, "cp": 2, "pp": 1, "ep": 1}
    assert (distributed["strategy"], distributed["reshard_after_forward"]) == ("fsdp2", False)
    assert content["step_scheduler"]["global_batch_size"] == 64
    assert content["step_scheduler"]["local_batch_size"] == 4


def test_a_pipeline_takes_all_microbatches_at_once_and_has_its_cuts() -> None:
    content = content_of(uneven_pipeline())
    pipeline = content["distributed"]["pipeline"]
    assert content["step_scheduler"]["local_batch_size"] // pipeline["pp_microbatch_size"] == 8
    parts = pipeline["module_fqns_per_model_part"]
    assert parts[0] == ["model.embed_tokens", *(f"model.layers.{block}" for block in range(12)), "model.rotary_emb"]
    assert parts[1][-3:] == ["model.norm", "lm_head", "model.rotary_emb"]
    assert sum(name.startswith("model.layers.") for part in parts for name in part) == 32


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_its_schedules_are_torchs(schedule: str) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    name = content_of(uneven_pipeline(schedule=schedule))["distributed"]["pipeline"]["pp_schedule"]
    assert get_schedule_class(name).__name__ == f"Schedule{name}"


@pytest.mark.parametrize(("remat", "written"), [("none", False), ("selective", "selective"), ("full", True)])
def test_remat_is_a_word_or_a_switch(remat: str, written: object) -> None:
    plan = uniform("fsdp8", devices=8, remat=remat)
    assert content_of(plan)["distributed"]["activation_checkpointing"] == written
    said = any("exact" in line for line in exported(plan, "automodel").left_out)
    assert said is (remat != "none")


@pytest.mark.parametrize("model", ["llama3.1-8b", "qwen3-14b", "gemma2-9b"])
def test_the_config_is_the_model(model: str) -> None:
    written = content_of(uniform("fsdp8", devices=8, model=model))["model"]["config"]
    assert written.pop("_target_") == "transformers.AutoConfig.for_model"
    ours = AutoConfig.for_model(**load_model(model).config).to_dict()
    assert AutoConfig.for_model(**written).to_dict() == ours


def test_experts_are_divided_in_models_that_it_has_code_for() -> None:
    plan = divided_experts("qwen3-30b-a3b", ep=8, num_layers=48)
    assert unsupported(plan, CAPABILITIES) == ()
    distributed = content_of(plan)["distributed"]
    assert (distributed["ep_size"], distributed["moe"]) == (8, {"reshard_after_forward": True})
    assert CAPABILITIES.never_divided <= {*CONFIG_MAPPING}
    other = divided_experts("mixtral-8x22b", ep=8, num_layers=56)
    assert "ep in a model of type mixtral" in unsupported(other, CAPABILITIES)


def test_tp_beside_its_own_experts_is_refused() -> None:
    plan = uniform("fsdp4-tp2", devices=8, model="qwen3-30b-a3b")
    assert unsupported(plan, CAPABILITIES) == ("tp in a model of type qwen3_moe",)


@pytest.mark.parametrize("parallel", ["dp8", "cp8", "fsdp2-cp4+ulysses"])
def test_what_it_has_nothing_of_is_refused(parallel: str) -> None:
    assert CAPABILITIES.refusal(parse_strategy(parallel)) is not None


def test_a_model_that_predicts_no_next_token_is_refused() -> None:
    with pytest.raises(UserError, match="predicts the next token"):
        engine_of("automodel").refuse(load_model("bert-base"), 128)


def test_names_are_those_of_its_files() -> None:
    plans = (uneven_pipeline(), divided_experts("qwen3-30b-a3b", ep=8, num_layers=48))
    for plan in plans:
        content = content_of(plan)
        content["model"].pop("config")
        distributed = content["distributed"]
        used = {f"{key}.{name}" for key, entries in content.items() if isinstance(entries, dict) for name in entries}
        used |= {f"pipeline.{name}" for name in distributed.get("pipeline", ())}
        used |= {f"moe.{name}" for name in distributed.get("moe", ())}
        assert used <= known_names("automodel-0.7.0.txt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        uniform("dp2-fsdp2-cp2", devices=8, zero=2, remat="full"),
        uneven_pipeline(schedule="interleaved-1f1b"),
        divided_experts("qwen3-30b-a3b", ep=8, num_layers=48),
    ],
)
def test_automodel_reads_the_sizes_and_the_pipeline(plan: Plan) -> None:
    parse = pytest.importorskip("nemo_automodel.recipes._dist_utils").parse_distributed_section
    written = content_of(plan)["distributed"]
    read = parse(written)
    sizes = ("dp_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size")
    assert {name: getattr(read["parallelism_sizes"], name) for name in sizes} == {name: written[name] for name in sizes}
    assert read["pp_enabled"] == (plan.num_stages > 1)
    if plan.num_stages > 1:
        assert read["pipeline_config"].module_fqns_per_model_part == written["pipeline"]["module_fqns_per_model_part"]
