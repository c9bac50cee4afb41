"""Tests of adapters: their text, their cost, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.cost.job import DeviceGroup, Job
from steelyard.cost.predict import predict_memory
from steelyard.errors import UserError
from steelyard.hardware import parse_cluster
from steelyard.levers import Levers
from steelyard.levers.train import Train
from steelyard.modules.build import build_meta_model, build_model
from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.shrink import shrunk_plan
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.complete import NothingFitsError, find_plan
from steelyard.planning.request import make_request
from steelyard.runtime.dry_run import dry_run
from steelyard.tracer.cache import cached_trace
from tests.runtime.lora_cases import FOUR, SHORT, STACKED, lora_plan
from tests.runtime.models import FAMILY_CONFIGS
from tests.sample import sampled

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lora", "lora:r=16,alpha=32,targets=all-linear"),
        ("lora:r=8", "lora:r=8,alpha=16,targets=all-linear"),
        ("lora:alpha=8,r=4,targets=q_proj+mlp.up_proj,rslora", "lora:r=4,alpha=8,targets=q_proj+mlp.up_proj,rslora"),
        ("lora:dropout=0.1,rslora=false", "lora:r=16,alpha=32,targets=all-linear,dropout=0.1"),
        ("full", "full"),
        ("lora:lora_alpha=8,use_rslora=true,r=4", "lora:r=4,alpha=8,targets=all-linear,rslora"),
        ("dora:r=4,targets=q_proj", "lora:r=4,alpha=8,targets=q_proj,use_dora=true"),
        ("dora", "lora:r=16,alpha=32,targets=all-linear,use_dora=true"),
        ("ia3", "ia3"),
        ("oft:oft_block_size=32,target_modules=q_proj+v_proj", "oft:targets=q_proj+v_proj,oft_block_size=32"),
    ],
)
def test_a_text_says_one_value_and_a_value_one_text(text: str, expected: str) -> None:
    found = Train.parse(expected)
    assert str(found) == expected
    assert Levers.of({"train": text}).texts == ({} if text == "full" else {"train": expected})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        *(("lora:r=0", "r=0"), ("lora:r=1.5", "r=1.5"), ("lora:x y=1", "x y=1"), ("lora:r=4,r=5", "r=5")),
        *(("lora:dropout=1", "dropout=1"), ("lora:targets=", "targets="), ("dora:r=4", "dora:r=4")),
        *(
            ("prompt_tuning", "tokens or prefixes"),
            ("adalora:r=4", "the training loop has to update"),
            ("osf", "decomposes the weights"),
        ),
        *(
            ("vblora", "trained parameters are shared by all layers"),
            ("lora:init_lora_weights=pissa", "pissa"),
            ("ia4", "ia4"),
        ),
        *(("full:r=4", "full:r=4"), ("lora:rslora=no", "rslora=no"), ("lora:alpha=x", "alpha=x")),
    ],
)
def test_another_text_is_refused_with_what_is_wrong(text: str, field: str) -> None:
    with pytest.raises(UserError) as caught:
        Train.parse(text)
    assert field in caught.value.found
    assert caught.value.field == "--train"


@pytest.mark.parametrize(("target", "hint"), [("k_prjo", "k_proj"), ("lm_head", ""), ("experts", "")])
def test_targets_of_no_linear_layer_are_refused_before_anything_is_traced(target: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        make_request(
            "llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, levers={"train": f"lora:targets=q_proj+{target}"}
        )
    assert target in caught.value.found
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "found", "hint"),
    [
        ("lora:rank=8", "rank", "r"),
        ("ia3:targets=k_prjo", "k_prjo", "k_proj"),
        ("oft:r=8,oft_block_size=4", "oft:", ""),
        ("lora:layer_replication=0", "lora:", ""),
        ("lora:modules_to_save=lm_head,trainable_token_indices=1", "changes the layers", ""),
        ("lily:r=8", "trained parameters are shared by all layers", ""),
    ],
)
def test_settings_that_peft_refuses_or_that_change_the_base_are_told_before_anything_is_traced(
    text: str, found: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        make_request("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, levers={"train": text})
    assert found in caught.value.found
    assert hint in (caught.value.hint or "")


def test_adapters_at_a_matrix_of_embedding_and_head_are_refused() -> None:
    with pytest.raises(UserError, match="which several layers share"):
        lora_plan("lora:r=4,modules_to_save=embed_tokens", "llama-tied", "dp2, fsdp2", "fsdp2, dp2", num_devices=4)


def test_biases_of_the_base_are_not_trained_beside_adapters() -> None:
    with pytest.raises(UserError, match=r"which trains model.*bias"):
        lora_plan("lora:r=4,bias=all", "qwen2", "dp2, dp2, dp2, dp2", num_devices=2)


def test_magnitudes_begin_as_norms_of_the_weights_that_are_quantized() -> None:
    plan = lora_plan("qlora:r=4,use_dora=true", SHORT, ", ".join(["dp2"] * 4), num_devices=2)
    adapted = [each for each in build_model(plan.chain(), seed=3).modules() if hasattr(each, "lora_magnitude_vector")]
    assert len(adapted) == 2 * 7
    for each in adapted:
        magnitudes, weight = each.lora_magnitude_vector["default"].weight, each.base_layer.weight.float()
        assert torch.equal(magnitudes, weight.norm(dim=1))


def test_adapters_other_than_lora_beside_a_quantized_base_are_refused() -> None:
    with pytest.raises(UserError, match="together with a quantized base"):
        make_request("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, levers={"train": "ia3", "base": "nf4"})


def test_layers_with_other_adapters_than_lora_are_not_divided_by_tp() -> None:
    lora, dora = (lora_plan(text, "llama", ", ".join(["dp2"] * 8), num_devices=2).chain() for text in ("lora", "dora"))
    assert "" in {each.no_tp for each in lora.layer_types}
    assert {each.no_tp for each in dora.layer_types} == {"lora with use_dora adapters do not support tp"}


def test_matrices_stored_together_for_adapters_are_not_divided_by_tp() -> None:
    chain = lora_plan("lora:r=4", FAMILY_CONFIGS["gpt2"], "dp2, dp2, dp2, dp2", num_devices=2).chain()
    assert chain.type_of(1).no_tp == "no tp for adapters with enter"
    assert chain.type_of(0).no_tp == "", "tables of tokens and positions have no adapters"


def test_a_base_without_linear_layers_of_torch_is_not_quantized_without_a_word() -> None:
    with pytest.raises(UserError, match=r"without torch\.nn\.Linear"):
        make_request("gpt2", "1x1xa100-40gb", global_batch=1, seq_len=64, levers={"train": "qlora:r=4"})


def test_a_plan_says_that_routed_experts_are_not_quantized() -> None:
    chain = lora_plan("qlora:r=4", FAMILY_CONFIGS["mixtral"], "dp2, dp2, dp2, dp2", num_devices=2).chain()
    assert any("routed experts are not in nf4" in each for each in chain.warnings(16))


def test_a_plan_says_that_routed_experts_have_no_adapters() -> None:
    mixtral = FAMILY_CONFIGS["mixtral"], ["dp2"] * 4
    plans = ("lora:r=4", "llama", ["dp2"] * 8, False), ("lora", *mixtral, True), (f"lora:{STACKED}", *mixtral, False)
    for text, config, strategies, expected in plans:
        chain = lora_plan(text, config, ", ".join(strategies), num_devices=2).chain()
        assert any("routed experts have no adapters" in each for each in chain.warnings(16)) == expected


@pytest.mark.parametrize(
    ("config", "target", "expected"),
    [
        (FAMILY_CONFIGS["mixtral"], "experts.up_proj", "mlp.experts.down_proj, mlp.experts.gate_up_proj"),
        (FAMILY_CONFIGS["mixtral"], "mlp.gate.weight", "mlp.experts.down_proj, mlp.experts.gate_up_proj"),
        ("llama-tied", "q_proj.weight", "a model with stacked experts"),
    ],
)
def test_a_name_of_no_stacked_matrices_is_refused(config: Any, target: str, expected: str) -> None:
    with pytest.raises(UserError, match="a stacked expert matrix") as caught:
        lora_plan(f"lora:r=4,target_parameters={target}", config, ", ".join(["dp2"] * 4), num_devices=2)
    assert caught.value.expected == expected


def test_a_router_that_is_a_linear_layer_with_two_results_has_no_adapters() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    config = {**FAMILY_CONFIGS["mixtral"], "model_type": "llama4_text", **experts}
    plan = lora_plan("lora:r=4", config, ", ".join(["dp2"] * 4), num_devices=2)
    names = [name for name, _ in build_meta_model(plan.chain()).named_parameters() if ".lora_A." in name]
    linear = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name.partition(".lora_A.")[0].rpartition(".")[2] for name in names} == linear


def test_other_adapters_than_lora_go_with_no_expert_parallelism() -> None:
    strategy = parse_strategy("fsdp4 ep2")
    assert Levers.of({"train": "lora"}).refusal(strategy) is None
    assert Levers.of({"train": "ia3"}).refusal(strategy) == "ia3 adapters do not support ep"
    assert "do not support ep" in str(Levers.of({"train": f"lora:{STACKED}"}).refusal(strategy))


def test_another_engine_is_refused_before_any_search() -> None:
    with pytest.raises(UserError, match="the engine megatron"):
        make_request(
            "llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, engine="megatron", levers={"train": "lora"}
        )


@pytest.mark.slow
def test_seven_billion_fit_on_one_card_of_24_gigabytes_with_adapters_alone(tmp_path: Path) -> None:
    """Hu et al. 2021; Dettmers et al. 2023: 16-bit LoRA of LLaMA 7B takes some 16 GB and states on top."""
    with pytest.raises(NothingFitsError):
        find_plan("llama2-7b", "1x1xrtx-4090", global_batch=1, seq_len=512)
    plan = find_plan("llama2-7b", "1x1xrtx-4090", global_batch=1, seq_len=512, levers={"train": "lora:r=8"})
    assert plan.prediction is not None
    (stage,) = plan.prediction.stages
    # 6.74 billion in bf16; of rank 8 beside 7 matrices of a block some 20 million, with two moments in fp32
    assert stage.memory_bytes["optimizer"] == pytest.approx(8 * 19_988_480, rel=0.01)
    assert stage.memory_bytes["parameters"] == pytest.approx(2 * 6_738_415_616 + 4 * 19_988_480, rel=0.001)
    write_plan(plan, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["levers"] == {
        "train": "lora:r=8,alpha=16,targets=all-linear"
    }
    assert read_plan(tmp_path / "plan.json") == plan


def test_qlora_is_short_for_adapters_beside_a_base_in_nf4() -> None:
    assert Levers.of({"train": "qlora:r=8"}) == Levers.of({"train": "lora:r=8", "base": "nf4"})
    assert Levers.of({"train": "qlora:r=8", "base": "int8"}) == Levers.of({"train": "lora:r=8", "base": "int8"})


@pytest.mark.parametrize(
    ("levers", "found"),
    [({"base": "nf4"}, "nf4 with all of llama-demo trained"), ({"train": "lora", "base": "fp4"}, "'fp4'")],
)
def test_a_quantized_base_that_trains_is_refused_and_an_unknown_one(levers: dict[str, str], found: str) -> None:
    with pytest.raises(UserError) as caught:
        make_request("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, levers=levers)
    assert found in caught.value.found
    assert caught.value.field == "--base"


def test_quantized_experts_are_refused_where_there_are_none() -> None:
    levers = {"train": "lora", "base": "nf4+experts"}
    with pytest.raises(UserError, match="llama-demo, which has no routed experts"):
        make_request("llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=64, levers=levers)


def test_quantized_experts_are_whole_on_every_rank() -> None:
    levers = Levers.of({"train": "lora:r=4", "base": "nf4+experts"})
    assert "quantized experts are not divided" in str(levers.refusal(parse_strategy("fsdp2 ep2")))
    assert levers.refusal(parse_strategy("fsdp2")) is None
    with pytest.raises(UserError, match="quantizes no experts"):
        make_request(
            "olmoe-1b-7b",
            "1x1xa100-40gb",
            global_batch=1,
            seq_len=64,
            engine="transformers",
            levers={"train": "lora", "base": "nf4+experts"},
        )


@pytest.mark.slow
def test_thirty_billion_with_experts_fit_on_one_card_of_24_gigabytes() -> None:
    """Qwen3-30B-A3B, whose 18,944 matrices of experts are in nf4."""
    plan = find_plan(
        "qwen3-30b-a3b",
        "1x1xrtx4090",
        global_batch=1,
        seq_len=512,
        levers={"train": "qlora:r=16", "base": "nf4+experts"},
    )
    assert plan.prediction is not None
    (stage,) = plan.prediction.stages
    blocks = 48 * (3 * 128 * 768 + 2 * 4096 + 2 * 512) * 2048
    rest = 2 * 2 * (151_936 * 2048) + 2 * 48 * 128 * 2048
    adapters = 4 * 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    expected = (1 / 2 + 1 / 64 + 4 / 16384) * blocks + rest + adapters
    assert stage.memory_bytes["parameters"] == pytest.approx(expected, rel=0.005)


@pytest.mark.slow
def test_seventy_billion_fit_on_one_card_of_80_gigabytes_with_a_quantized_base() -> None:
    """Dettmers et al. 2023: 65 billion on one card of 48 GB, with every block recomputed."""
    plan = find_plan("llama3-70b", "1x1xa100-80gb", global_batch=1, seq_len=512, levers={"train": "qlora:r=16"})
    assert plan.prediction is not None
    (stage,) = plan.prediction.stages
    # of the linear layers of 80 blocks; embedding and head are in bf16, 207 million of adapters in fp32
    linear, ends, adapters = 80 * 855_638_016, 2 * 128_256 * 8192, 207_093_760
    expected = (1 / 2 + 1 / 64 + 4 / 16384) * linear + 2 * ends + 4 * adapters
    assert stage.memory_bytes["parameters"] == pytest.approx(expected, rel=0.002)


CASES = {
    "replicated": ("fp32", 2, ("dp2, dp2, dp2 remat=full, dp2 remat=selective, dp2, dp2",)),
    "replicated, bf16": ("bf16", 2, (", ".join(["dp2"] * 6),)),
    "sharded, bf16": ("bf16", 2, ("fsdp2, fsdp2, fsdp2 zero2, fsdp2 remat=full, fsdp2 zero1, fsdp2",)),
    "sharded": ("fp32", 1, (", ".join(["fsdp2"] * 6),)),
    "tensors": ("fp32", 4, (", ".join(["tp2"] * 6),)),
    "tensors and sequence, bf16": ("bf16", 2, (", ".join(["tp2+sp"] * 6),)),
    "nf4, bf16": ("bf16", 2, ("dp2, fsdp2, dp2 remat=full, dp2, fsdp2, dp2",)),
    "nf4": ("fp32", 1, (", ".join(["dp2"] * 6),)),
    "nf4 and dora, bf16": ("bf16", 2, ("dp2, fsdp2, dp2 remat=full, dp2 remat=selective, fsdp2, dp2",)),
    "nf4 and dora": ("fp32", 1, (", ".join(["dp2"] * 6),)),
    "dora, bf16": ("bf16", 2, ("fsdp2, fsdp2 zero2, dp2 remat=full, dp2, dp2 remat=selective, fsdp2",)),
    "dora, stages": ("fp32", 4, ("single, single, single", "single, single, single")),
    "oft, bf16": ("bf16", 2, ("fsdp2, fsdp2 zero2, dp2 remat=full, dp2, dp2 remat=selective, fsdp2",)),
    "vera, bf16": ("bf16", 2, ("fsdp2, fsdp2 zero2, dp2 remat=full, dp2, dp2 remat=selective, fsdp2",)),
    "copies, bf16": ("bf16", 2, ("fsdp2, fsdp2 zero2, dp2 remat=full, dp2, dp2 remat=selective, fsdp2",)),
    "stages": ("fp32", 4, ("single, single, single", "single, single, single")),
    "experts, bf16": ("bf16", 2, ("dp2, dp2, dp2 remat=full, dp2",)),
    "experts": ("fp32", 1, (", ".join(["fsdp2"] * 4),)),
    "experts in nf4, bf16": ("bf16", 2, ("fsdp2, dp2, fsdp2 remat=full, dp2",)),
    "experts in nf4 with adapters, bf16": ("bf16", 2, ("fsdp2, dp2, fsdp2 remat=full, dp2",)),
}


TEXTS = {
    "nf4": "qlora:r=8",
    "nf4 and dora": "qlora:r=8,use_dora=true",
    "dora": "dora:r=8",
    "oft": "oft:oft_block_size=4,targets=all-linear",
    "vera": "vera:r=8,targets=all-linear",
    "experts": f"lora:r=8,{STACKED}",
    "experts in nf4 with adapters": f"qlora:r=8,{STACKED}",
    "copies": "lora:r=8,modules_to_save=embed_tokens+lm_head",
}


NIGHTLY = {"dora, stages", "vera, bf16", "nf4, bf16", "replicated, bf16", "replicated", "sharded"} | {
    *("nf4", "nf4 and dora", "experts", "dora, bf16", "tensors", "experts in nf4, bf16"),
}
"""Casts are in a case with bf16, dora in one with nf4, tp beside sp, stages in another; each kind of base is in one,
quantized experts in the one with adapters at them, too."""
WITH_TP = {"sharded, bf16", "tensors and sequence, bf16", "tensors"}
"""Cases whose layers are also traced under tp, which the plans of the others do not have."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_predicted_bytes_are_at_least_those_found_and_little_more(name: str) -> None:
    precision, count, stages = CASES[name]
    plan = lora_plan(
        TEXTS.get(name.partition(",")[0], "lora:r=8"),
        FAMILY_CONFIGS["mixtral"] if name.startswith("experts") else FOUR,
        *stages,
        base="nf4+experts" if name.startswith("experts in nf4") else None,
        precision=precision,
        num_microbatches=count,
        global_batch=16,
        num_devices=2,
    )
    job = _job(plan, (1, 2) if name in WITH_TP else (1,))
    for stage, terms in enumerate(predict_memory(plan, job)):
        found = dry_run(plan, plan.stages[stage].ranks[0], backend="gloo")
        peak = max(found.first_step.total_bytes, found.later_steps.total_bytes)
        assert 1.0 <= sum(terms.values()) / peak <= 1.1, f"stage {stage}: {terms}, found {found.later_steps}"


def _job(plan: Plan, degrees: tuple[int, ...] = (1, 2)) -> Job:
    profile = cached_trace(plan.chain(), seq_len=plan.seq_len, precision=plan.precision, degrees=degrees)
    cluster = parse_cluster("1x2xcpu").with_memory(GIB)
    return Job(
        chain=plan.chain(),
        groups=(DeviceGroup(profile=profile, cluster=cluster, budget_bytes=GIB),),
        seq_len=plan.seq_len,
        global_batch=plan.global_batch,
        precision=plan.precision,
        levers=plan.chosen_levers,
    )


def test_a_plan_at_small_width_drops_nothing() -> None:
    plan = lora_plan(
        "lora:r=8,dropout=0.1", "llama", ", ".join(["dp2"] * 8), num_microbatches=1, global_batch=2, num_devices=2
    )
    assert shrunk_plan(plan).levers == {"train": "lora:r=8,alpha=16,targets=all-linear"}
