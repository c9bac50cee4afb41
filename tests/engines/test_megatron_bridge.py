"""Tests of the recipe for Megatron-Bridge: it is the plan and the model, run against stand-ins.

The stand-ins keep what they are given; the package itself needs Transformer Engine and a GPU.
"""

import ast
import re
import sys
import types
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
from transformers import AutoConfig

from steelyard.engines import ENGINES, check_model, engine_of
from steelyard.engines.capabilities import unsupported
from steelyard.errors import UserError
from steelyard.levers.train import Train
from steelyard.model.read import load_model
from steelyard.plan.plan import Plan, PlanModel
from steelyard.planning.request import make_request
from steelyard.planning.settings import Settings, price_settings
from tests.engines.examples import divided_experts, text_of, uneven_pipeline, uniform
from tests.engines.known import known_names

MODULES = (
    "megatron",
    "megatron.bridge",
    "megatron.bridge.peft.canonical_lora",
    "megatron.bridge.recipes.utils.optimizer_utils",
    "megatron.bridge.training.comm_overlap",
    "megatron.bridge.training.config",
    "megatron.bridge.training.finetune",
    "megatron.bridge.training.flex_dispatcher_backend",
    "megatron.bridge.training.gpt_step",
    "megatron.bridge.training.mixed_precision",
    "megatron.bridge.training.pretrain",
)


class Made:
    """A value of some class of Megatron-Bridge, with the arguments that it was made from."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


@pytest.fixture
def recipe_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the recipe of a plan and return the `ConfigContainer`, whose model names the config it came from."""

    def run(plan: Plan, **of_container: Any) -> Any:
        text = text_of(plan, "megatron-bridge", ".py")
        AutoConfig.for_model(plan.chain().family.model_type)  # imported before there is a stand-in of torch
        modules = {name: types.ModuleType(name) for name in MODULES}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                for alias in node.names:
                    setattr(modules[node.module], alias.name, Made)
        container = partial(Made, **of_container)
        modules["megatron.bridge.training.config"].ConfigContainer = container  # type: ignore[attr-defined]
        bridge, training = modules["megatron.bridge"], "megatron.bridge.training"
        bridge.AutoBridge = types.SimpleNamespace(  # type: ignore[attr-defined]
            from_hf_config=lambda config: types.SimpleNamespace(
                to_megatron_provider=lambda load_weights: Made(config=config, load_weights=load_weights)
            )
        )
        utils = modules["megatron.bridge.recipes.utils.optimizer_utils"]
        utils.distributed_fused_adam_with_cosine_annealing = lambda **_: (Made(), Made())  # type: ignore[attr-defined]
        dispatcher = modules[f"{training}.flex_dispatcher_backend"]
        dispatcher.apply_flex_dispatcher_backend = lambda model, name: setattr(model, "backend", name)  # type: ignore[attr-defined]
        found: dict[str, Any] = {"__name__": "bridge_recipe"}
        with monkeypatch.context() as patched:
            for name, module in modules.items():
                patched.setitem(sys.modules, name, module)
            patched.setitem(sys.modules, "torch", MagicMock())
            exec(text, found)
            return found["recipe"]()

    return run


@pytest.mark.slow
def test_the_model_comes_from_its_config_whole(recipe_of: Any) -> None:
    given = {"hidden_act": "silu", "bos_token_id": 7, "initializer_range": 0.03}
    config = dict(load_model("llama3.1-8b").config) | given | {"_name_or_path": "somewhere", "auto_map": {"A": "b.C"}}
    plan = uniform("dp8", devices=8).model_copy(update={"model": PlanModel(name="x", config=config)})
    found = recipe_of(plan).model.config
    assert found.architectures == ["LlamaForCausalLM"]
    assert all(getattr(found, key) == value for key, value in given.items())
    assert found.rope_parameters["rope_type"] == "llama3"
    assert "somewhere" not in text_of(plan, "megatron-bridge", ".py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_rotary_embeddings_stand_as_transformers_4_reads_them_and_5(recipe_of: Any, kind: dict[str, Any]) -> None:
    config = dict(load_model("llama3.1-8b").config)
    del config["rope_theta"], config["rope_scaling"]
    config["rope_parameters"] = {"rope_theta": 12345.0, **kind}
    plan = uniform("dp8", devices=8).model_copy(update={"model": PlanModel(name="x", config=config)})
    assert '"rope_theta": 12345.0' in text_of(plan, "megatron-bridge", ".py")
    assert recipe_of(plan).model.config.rope_parameters == config["rope_parameters"]


def test_nothing_is_evaluated_by_any_version(recipe_of: Any) -> None:
    plan = uniform("dp8", devices=8)
    assert recipe_of(plan).train.eval_iters == 0
    later = recipe_of(plan, validation=Made())
    assert later.validation.eval_iters == 0
    assert not hasattr(later.train, "eval_iters")


def test_degrees_cuts_and_remat_are_those_of_the_plan(recipe_of: Any) -> None:
    plan = uneven_pipeline(schedule="interleaved-1f1b", first_recomputed=2, parallel="dp2-tp2")
    assert unsupported(plan, engine_of("megatron-bridge").capabilities) == ()
    recipe = recipe_of(plan)
    model = recipe.model
    assert (model.tensor_model_parallel_size, model.sequence_parallel) == (2, True)
    assert (model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size) == (2, 2)
    assert model.pipeline_model_parallel_layout == "Et*8|t*8|t*8|t*8L"
    remat = (model.recompute_granularity, model.recompute_method, model.recompute_num_layers)
    assert remat == ("full", "block", 2)
    assert (recipe.train.global_batch_size, recipe.train.micro_batch_size) == (64, 4)
    assert (model.seq_length, recipe.dataset.seq_length) == (4096, 4096)
    assert recipe.ddp.use_distributed_optimizer
    assert not hasattr(model, "use_distributed_optimizer")


def test_selective_remat_names_modules_that_the_model_has(recipe_of: Any) -> None:
    experts = partial(divided_experts, "qwen3-30b-a3b", ep=8, num_layers=48, parallel="dp8")
    for plan, modules in (
        (uniform("dp2-tp2", devices=4, remat="selective"), ["layernorm"]),
        (experts(remat="selective"), ["layernorm", "moe_act"]),
        (experts(), None),
    ):
        assert getattr(recipe_of(plan).model, "recompute_modules", None) == modules


def test_context_parallelism_says_its_method_as_transformer_engine_does(recipe_of: Any) -> None:
    model = recipe_of(uniform("dp2-cp2-tp2", devices=8, sp=True, cp_method="gather")).model
    assert (model.context_parallel_size, model.cp_comm_type) == (2, "all_gather")


def test_fp16_is_a_recipe_of_megatron_bridge() -> None:
    text = text_of(uniform("dp8", devices=8, precision="fp16"), "megatron-bridge", ".py")
    assert "    precision = fp16_mixed()" in text
    assert "    fp16_mixed,\n" in text


def test_gradients_are_reduced_in_bf16_as_it_is_priced(recipe_of: Any) -> None:
    recipe = recipe_of(uniform("dp8", devices=8))
    assert (recipe.ddp.grad_reduce_in_fp32, recipe.mixed_precision.grad_reduce_in_fp32) == (False, False)
    assert ENGINES["megatron-bridge"].execution.reduce_bytes == 2


def test_what_overlaps_as_it_is_priced(recipe_of: Any) -> None:
    assert ENGINES["megatron-bridge"].execution.hidden_collectives == 0.5
    divided, whole = recipe_of(uniform("dp2-cp2-tp2", devices=8, sp=True)), recipe_of(uniform("dp8", devices=8))
    assert (divided.comm_overlap.tp_comm_overlap, whole.comm_overlap.tp_comm_overlap) == (True, False)
    assert divided.comm_overlap.overlap_grad_reduce
    assert divided.model.cross_entropy_fusion_impl == "te"
    without = uniform("dp4-tp2", devices=8, sp=True).model_copy(update={"engine": "megatron-bridge+no-tp-overlap"})
    assert not recipe_of(without).comm_overlap.tp_comm_overlap


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "balancing", "coefficient"), [(False, "none", None), (True, "aux_loss", 0.008 / 48)])
def test_experts_are_divided_sent_once_and_balanced_as_the_config_says(
    recipe_of: Any, asked: bool, balancing: str, coefficient: float | None
) -> None:
    plan = divided_experts("qwen3-30b-a3b", ep=8, num_layers=48, parallel="dp8")
    config = dict(plan.chain().config) | {"output_router_logits": asked, "norm_topk_prob": False}
    model = recipe_of(plan.model_copy(update={"model": PlanModel(name="x", config=config)})).model
    assert (model.expert_model_parallel_size, model.backend) == (8, "deepep")
    assert (model.moe_router_load_balancing_type, model.moe_router_pre_softmax) == (balancing, True)
    assert getattr(model, "moe_aux_loss_coeff", None) == (coefficient and pytest.approx(coefficient, rel=1e-4))


@pytest.mark.slow
def test_a_window_and_biases_are_set_whatever_the_bridge_reads(recipe_of: Any) -> None:
    plan = uniform("dp8", devices=8, model="mistral-7b")
    config = dict(load_model("mistral-7b").config) | {"sliding_window": 1024}
    model = recipe_of(plan.model_copy(update={"model": PlanModel(name="x", config=config)})).model
    assert (model.window_size, model.add_bias_linear) == ((1023, 0), False)
    both = dict(load_model("llama3.1-8b").config) | {"attention_bias": True, "mlp_bias": True}
    assert recipe_of(plan.model_copy(update={"model": PlanModel(name="x", config=both)})).model.add_bias_linear


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("deepseek-v3", {"moe_router_bias_update_rate": 0.0, "mtp_num_layers": None, "q_lora_rank": 1536}),
        ("gpt-oss-20b", {"window_size": (127, 0)}),
    ],
)
def test_models_that_only_their_bridges_build_are_those_of_transformers(
    recipe_of: Any, model: str, expected: dict[str, Any]
) -> None:
    engine = ENGINES["megatron-bridge"]
    request = make_request(model, "8x8xh100-80gb", global_batch=64, seq_len=4096, engine=engine.name)
    plan, _ = price_settings(request, engine, "bf16", Settings(ep=8))
    text = text_of(plan, "megatron-bridge", ".py")
    used = re.findall(r"^    (model\.\w+) = ", text, re.MULTILINE)
    assert {*used} <= known_names("megatron-bridge-0.3.1.txt")
    made = recipe_of(plan).model
    always = {"moe_router_load_balancing_type": "none", "make_vocab_size_divisible_by": 1}
    assert {name: getattr(made, name) for name in always | expected} == always | expected
    assert made.config.architectures == [load_model(model).config["architectures"][0]]
    assert made.config.num_hidden_layers == load_model(model).num_layers - 2


def test_names_are_those_of_its_files() -> None:
    plans = (
        uneven_pipeline(schedule="interleaved-1f1b", first_recomputed=2, parallel="dp2-tp2"),
        uniform("dp2-cp2-tp2", devices=8, sp=True),
        divided_experts("qwen3-30b-a3b", ep=8, num_layers=48, parallel="dp8"),
    )
    for plan in plans:
        used = set()
        for node in ast.walk(ast.parse(text_of(plan, "megatron-bridge", ".py"))):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("model."):
                used.add(ast.unparse(node.targets[0]))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Config", "Container")):
                used |= {f"{ast.unparse(node.func)}.{word.arg}" for word in node.keywords}
        assert used <= known_names("megatron-bridge-0.3.1.txt")


@pytest.mark.parametrize(
    ("model", "named"), [("pythia-6.9b", "gpt_neox"), ("mixtral-8x7b", "mixtral"), ("gpt2", "gpt2")]
)
def test_what_megatron_would_lose_or_has_no_bridge_for_is_refused(model: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        engine_of("megatron-bridge").refuse(load_model(model), 1024)
    assert named not in str(caught.value.expected)


LORA = {"train": "lora:r=8,alpha=12,dropout=0.05"}


def test_it_is_given_the_adapters_of_the_plan(recipe_of: Any) -> None:
    container = recipe_of(uniform("dp4-tp2", devices=8, sp=True, levers=LORA))
    adapters = container.peft
    assert (adapters.dim, adapters.alpha, adapters.dropout) == (8, 12, 0.05)
    assert len(adapters.target_modules) == 7
    assert container.checkpoint.pretrained_checkpoint == "base"
    some = recipe_of(uniform("dp8", devices=8, levers={"train": "lora:targets=o_proj+down_proj"})).peft
    assert some.target_modules == ["linear_proj", "linear_fc2"]
    used = {f"CanonicalLoRA.{each}" for each in vars(adapters)}
    assert used | {"ConfigContainer.peft"} <= known_names("megatron-bridge-0.3.1.txt")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("lora:rslora", "alpha / r"), ("lora:targets=q_proj+v_proj", "or none"), ("lora:targets=mlp.up_proj", "only for")],
)
def test_adapters_that_it_has_not_are_refused(text: str, reason: str) -> None:
    refused = ENGINES["megatron-bridge"].lever_refusal(Train.parse(text))
    assert refused is not None
    assert reason in refused


def test_adapters_are_refused_before_a_search_for_a_model_with_experts() -> None:
    plan = divided_experts("qwen3-30b-a3b", ep=1, num_layers=48, parallel="dp8")
    chain = plan.model_copy(update={"levers": LORA}).chain()
    with pytest.raises(UserError, match="adapters in qwen3-30b-a3b, which has experts") as refused:
        check_model(ENGINES["megatron-bridge"], chain, 4096)
    assert refused.value.field == "--engine"


def test_megatron_keeps_blocks_cast_to_8_bits_and_bridge_has_them_as_its_parameters() -> None:
    """Two bytes of each parameter of a block."""
    found = {}
    for engine in ("megatron", "megatron-bridge"):
        for precision in ("bf16", "fp8"):
            request = make_request("llama-demo", "1x2xh100-80gb", global_batch=2, seq_len=128, engine=engine)
            plan, _ = price_settings(request, ENGINES[engine], precision, Settings())
            assert plan.prediction is not None
            found[engine, precision] = plan.prediction.stages[0].memory_bytes["parameters"]
    chain = load_model("llama-demo")
    ends = 2 * chain.vocab_size * chain.hidden_size
    blocks = found["megatron", "bf16"] // 2 - ends
    assert found["megatron", "fp8"] - found["megatron", "bf16"] == pytest.approx(2 * blocks, rel=1e-3)
    assert found["megatron-bridge", "fp8"] == found["megatron-bridge", "bf16"]
