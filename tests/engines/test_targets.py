"""Tests of the files of each target: their content, and that an installed target library reads them."""

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
import types
import warnings
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.engines import ENGINE_OF_TARGET, ENGINES, TARGETS
from steelyard.engines.capabilities import unsupported
from steelyard.engines.deepspeed import PRESETS
from steelyard.engines.engine import Entries
from steelyard.engines.torchtitan import TORCHTITAN
from steelyard.engines.writing import UniformPlan, describe_uniform
from steelyard.errors import UserError
from steelyard.levers import NO_LEVERS
from steelyard.model.chain import ModelChain
from steelyard.model.read import load_model, model_names
from steelyard.plan.file import parse_value
from steelyard.plan.plan import InvalidPlanError, Plan, PlanModel
from steelyard.plan.strategy import parse_strategy
from tests.engines.examples import container_of, divided_experts, exported, mixed, text_of, uneven_pipeline, uniform
from tests.engines.known import known_names
from tests.processes.warm import HANG_LIMIT_S

FSDP = uniform("fsdp8", devices=8, remat="full")
FP16 = uniform("fsdp8", devices=8, precision="fp16")
"""Four microbatches of 16 samples: two on each of 8 ranks."""


def comment_lines(name: str, content: str) -> list[str]:
    if name.endswith(".json"):
        return json.loads(content)["_comment"]
    lines = [line for line in content.splitlines() if re.match("#($| )", line) and "-*-" not in line]
    return [line.removeprefix("#").removeprefix(" ") for line in lines]


@pytest.mark.parametrize("name", TARGETS)
def test_every_file_opens_with_what_was_and_was_not_carried_over(name: str) -> None:
    plan = mixed() if name == "pytorch" else FSDP
    export = exported(plan, name, unsupported=("something else",))
    for file, content in export.files[1:] if export.script else export.files:
        lines = comment_lines(file, content)
        assert any(line.startswith("For ") for line in lines[:1])
        assert lines.index("Carried over:") < lines.index("Not carried over:") < lines.index("  something else")
        first = content.splitlines()[1 if content.startswith(("#!", "# -*-")) else 0]
        assert first.startswith(("#", "{"))


@pytest.mark.parametrize("name", TARGETS)
def test_only_what_does_not_start_our_runtime_asks_to_set_the_allocator(name: str) -> None:
    text = "".join(content for _, content in exported(FSDP, name).files)
    assert ("export PYTORCH_ALLOC_CONF=expandable_segments:True" in text) == (not TARGETS[name].starts_steelyard)


@pytest.mark.parametrize("name", TARGETS)
def test_every_file_says_how_it_is_launched_and_weights_are_converted(name: str) -> None:
    plan = uniform("fsdp16", devices=16, cluster="2x8xa100-80gb")
    export = exported(plan, name)
    for file, content in export.files[1:] if export.script else export.files:
        lines = comment_lines(file, content)
        usage = lines[lines.index("How to use it:") + 1 :]
        where = "once" if TARGETS[name].starts_all_hosts else "on each of the 2 hosts"
        assert usage[0].startswith(f"  {where}: ")
        assert f"  weights: {TARGETS[name].weights}" in usage
        assert any(line.startswith("  vocabulary: 128256 tokens, ") for line in usage)


@pytest.mark.parametrize(
    ("name", "padded"), [("torchtitan", "not padded"), ("megatron", "padded to 152064, a multiple")]
)
def test_the_vocabulary_is_padded_as_the_target_pads_it(name: str, padded: str) -> None:
    plan = uniform("dp4-tp2", devices=8, model="qwen3-14b")
    text = text_of(plan, name, ".py" if name == "torchtitan" else ".sh")
    assert f"vocabulary: 151936 tokens, {padded}" in text


def test_a_model_of_images_has_no_vocabulary() -> None:
    plan = uniform("fsdp8", devices=8, model="vit-base", seq_len=197)
    assert "vocabulary" not in text_of(plan, "deepspeed", ".json")


def test_an_export_says_that_it_is_of_the_text_alone() -> None:
    chain = FSDP.chain()
    split = chain.split.model_copy(update={"text_alone": "--image-size none"})
    model = PlanModel(name="text", config=dict(chain.config), split=split)
    left_out = exported(FSDP.model_copy(update={"model": model}), "deepspeed").left_out
    assert any("text_config only, without images or sound: --image-size none" in line for line in left_out)


def test_a_cpu_has_no_allocator_to_set() -> None:
    assert "ALLOC_CONF" not in text_of(FSDP.model_copy(update={"cluster": "1x8xcpu"}), "deepspeed", ".json")


def test_the_statement_says_where_nothing_is_lost() -> None:
    from steelyard.engines.writing import Draft, Request, Target, export_plan

    target = Target(
        name="x",
        software="x 1",
        summary="",
        write=lambda _: Draft(files=(("a.txt", "body\n"),), carried=("all",), launch="start it"),
        weights="as they are",
    )
    content = export_plan(target, Request(plan=FSDP, headline="h", unsupported=())).files[0][1]
    assert "Not carried over: nothing; the whole plan is carried over." in content


# torchtitan


def titan(plan: Plan) -> dict[str, Any]:
    """The TOML of a plan; in the place of Llama-3-8B, which 0.2 does not have as it is, stands Llama-3.1-8B."""
    if plan.model.name == "llama3-8b":
        plan = plan.model_copy(update={"model": PlanModel(name="llama3.1-8b")})
    return tomllib.loads(text_of(plan, "torchtitan", ".toml"))


def test_torchtitan_gets_degrees_batch_and_remat() -> None:
    content = titan(FSDP)
    assert content["parallelism"]["data_parallel_shard_degree"] == 8
    assert content["parallelism"]["data_parallel_replicate_degree"] == 1
    assert content["training"]["local_batch_size"] == 2
    assert content["training"]["global_batch_size"] == 64
    assert content["activation_checkpoint"]["mode"] == "full"
    assert content["model"] == {"name": "llama3", "flavor": "8B"}


def test_torchtitan_gets_the_cuts_of_uneven_stages() -> None:
    content = titan(uneven_pipeline())["parallelism"]
    parts = content["module_fqns_per_model_part"]
    assert parts[0] == ["tok_embeddings", *(f"layers.{block}" for block in range(12))]
    assert parts[1] == [*(f"layers.{block}" for block in range(12, 32)), "norm", "output"]
    assert (content["pipeline_parallel_degree"], content["pipeline_parallel_schedule"]) == (2, "1F1B")


def test_a_pipeline_takes_all_microbatches_at_once_in_torchtitan() -> None:
    content = titan(uneven_pipeline())
    microbatch = content["parallelism"]["pipeline_parallel_microbatch_size"]
    assert content["training"]["local_batch_size"] // microbatch == 8


def test_interleaved_stages_have_a_part_for_every_chunk() -> None:
    content = titan(uneven_pipeline(schedule="interleaved-1f1b"))["parallelism"]
    assert len(content["module_fqns_per_model_part"]) == 4
    assert content["pipeline_parallel_schedule"] == "Interleaved1F1B"


def test_zero_2_keeps_parameters_after_forward_in_torchtitan() -> None:
    content = titan(uniform("fsdp8", devices=8, zero=2))
    assert content["parallelism"]["fsdp_reshard_after_forward"] == "never"


def test_torchtitans_loss_is_in_pieces_unless_its_option_has_it_whole() -> None:
    plan = FSDP.model_copy(update={"engine": "torchtitan", "model": PlanModel(name="llama3.1-8b")})
    whole = plan.model_copy(update={"engine": "torchtitan+whole-loss"})
    line = "config.loss = config.loss.loss_fn"
    assert line not in text_of(plan, "torchtitan", ".py")
    assert line in text_of(whole, "torchtitan", ".py")
    pieces = TORCHTITAN.execution.kernels.loss_pieces  # type: ignore[union-attr]
    assert pieces == 8  # `ChunkedLossWrapper.Config.num_chunks` of 0.3.0
    assert TORCHTITAN.with_options(["whole-loss"]).execution.kernels.loss_pieces == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("word", "converter"), [("rowwise", "Float8Linear"), ("mxfp8", "MXFP8Linear")])
def test_torchtitan_converts_and_compiles_linear_layers_in_8_bits(word: str, converter: str) -> None:
    model = PlanModel(name="llama3.1-8b")
    plan = FSDP.model_copy(update={"engine": "torchtitan", "model": model, "levers": {"float8": word}})
    function = text_of(plan, "torchtitan", ".py")
    assert f"converters=[{converter}Converter.Config(" in function
    assert "config.compile = CompileConfig(enable=True)" in function
    content = titan(plan)
    (name,) = content["model"]["converters"]
    assert content["compile"] == {"enable": True}
    assert content["quantize"]["linear"][name.rpartition(".")[2]]["recipe_name"].startswith(word)
    for text in (function, text_of(plan, "torchtitan", ".toml")):
        assert TORCHTITAN.reader is not None
        found = TORCHTITAN.reader.read(Entries(TORCHTITAN.reader.values(text)), plan.chain(), 8)
        assert (found.precision, found.levers) == ("bf16", {"float8": word})


def test_scales_of_whole_tensors_are_of_torchtitan_0_2_alone() -> None:
    model = PlanModel(name="llama3.1-8b")
    plan = FSDP.model_copy(update={"engine": "torchtitan", "model": model, "levers": {"float8": "tensorwise"}})
    assert [name for name, _ in exported(plan, "torchtitan").files] == ["steelyard_llama3_1_8b.toml"]
    with pytest.raises(UserError, match=r"only 0\.2 supports"):
        exported(plan.model_copy(update={"model": PlanModel(name="llama3-8b")}), "torchtitan")


def test_both_forms_for_torchtitan_say_the_same() -> None:
    tree = ast.parse(text_of(uneven_pipeline(), "torchtitan", ".py"))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords)
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    content = titan(uneven_pipeline())["parallelism"]
    given["module_fqns_per_model_part"][-1][-1] = "output"
    assert {key: given[key] for key in content} == content


def test_names_for_torchtitan_are_those_of_its_versions() -> None:
    tree = ast.parse(text_of(uneven_pipeline(), "torchtitan", ".py"))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords)
    assert {str(keyword.arg) for keyword in call.keywords} <= known_names("torchtitan-0.3.0-parallelism.txt")
    content = titan(uneven_pipeline())
    used = {f"{section}.{key}" for section, entries in content.items() for key in entries}
    assert used <= known_names("torchtitan-0.2.2.txt")


def main_settings(plan: Plan) -> dict[str, Any]:
    """Settings that the function for torchtitan's main sets, by section and key."""
    tree = ast.parse(text_of(plan, "torchtitan", "_main.py"))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords)
    found = {f"parallelism.{keyword.arg}": ast.literal_eval(keyword.value) for keyword in call.keywords}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("config.training."):
            found[ast.unparse(node.targets[0]).removeprefix("config.")] = ast.literal_eval(node.value)
    return found


@pytest.mark.parametrize("plan", [uneven_pipeline(), uniform("fsdp2-cp2-tp2", devices=8, sp=True)])
def test_names_for_torchtitans_main_are_those_of_its_files(plan: Plan) -> None:
    assert set(main_settings(plan)) <= known_names("torchtitan-main.txt")


def test_torchtitans_main_counts_tokens_and_microbatches() -> None:
    found = main_settings(uneven_pipeline())
    assert found["training.num_tokens_per_microbatch_per_dp_rank"] == 4 * 4096
    assert found["training.num_tokens_per_train_step"] == 64 * 4096
    assert found["parallelism.num_pp_microbatches"] == 8
    assert len(found["parallelism.pipeline_parallel_module_fqns_per_model_part"]) == 2


@pytest.mark.parametrize("target", ["torchtitan", "transformers", "pytorch"])
def test_the_launch_on_several_hosts_says_how_many_and_where_they_meet(target: str) -> None:
    plan = uniform("fsdp16", devices=16, cluster="2x8xa100-80gb")
    text = "\n".join(content for _, content in exported(plan, target).files)
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500" in text


@pytest.mark.parametrize("target", ["torchtitan", "transformers", "pytorch"])
def test_the_launch_on_one_host_meets_nobody(target: str) -> None:
    text = "\n".join(content for _, content in exported(uniform("fsdp8", devices=8), target).files)
    assert "torchrun --standalone --nproc-per-node 8" in text


def test_torchtitan_itself_builds_the_parallelism() -> None:
    configs = pytest.importorskip("torchtitan.config")
    tree = ast.parse(text_of(uneven_pipeline(), "torchtitan", ".py"))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords)
    made = configs.ParallelismConfig(**{word.arg: ast.literal_eval(word.value) for word in call.keywords})
    assert made.tensor_parallel_degree == 2


def test_a_model_that_torchtitan_does_not_define_is_refused() -> None:
    with pytest.raises(UserError, match="a model that torchtitan defines"):
        exported(uniform("fsdp8", devices=8, model="mistral-7b"), "torchtitan")


def test_torchtitan_gets_context_parallelism_inside_its_shards() -> None:
    content = titan(uniform("fsdp2-cp2-tp2", devices=8, sp=True))["parallelism"]
    assert content["context_parallel_degree"] == 2
    assert content["data_parallel_shard_degree"] == 2
    assert content["context_parallel_rotate_method"] == "allgather"
    assert {f"parallelism.{key}" for key in content} <= known_names("torchtitan-0.2.2.txt")
    assert "context_parallel_degree=4," in text_of(uniform("fsdp2-cp4", devices=8), "torchtitan", ".py")
    alone = titan(uniform("fsdp1-cp8", devices=8))["parallelism"]
    assert (alone["context_parallel_degree"], alone["data_parallel_shard_degree"]) == (8, 1)
    assert alone["fsdp_reshard_after_forward"] == "always"


@pytest.mark.parametrize("parallel", ["cp8", "fsdp2-cp4+ulysses"])
def test_torchtitan_refuses_states_that_cp_replicates_and_ulysses(parallel: str) -> None:
    assert ENGINES["torchtitan"].capabilities.refusal(parse_strategy(parallel)) is not None


@pytest.mark.parametrize("target", ["deepspeed", "accelerate", "transformers"])
def test_what_no_file_makes_a_framework_do_is_refused(target: str) -> None:
    assert ENGINES[target].capabilities.refusal(parse_strategy("fsdp2-cp4")) == "cp with fsdp in one layer"


# Megatron-LM


def megatron_flags(plan: Plan) -> dict[str, str | None]:
    """The flags in the arrays of the script with their values."""
    lines = [line.strip() for line in text_of(plan, "megatron", ".sh").splitlines()]
    pairs = [line.partition(" ") for line in lines if line.startswith("--") and not line.endswith("\\")]
    return {flag: value.strip("'") or None for flag, _, value in pairs}


def test_megatron_gets_degrees_and_the_layout_of_uneven_stages() -> None:
    flags = megatron_flags(uneven_pipeline())
    assert flags["--tensor-model-parallel-size"] == "2"
    assert flags["--pipeline-model-parallel-size"] == "2"
    assert flags["--pipeline-model-parallel-layout"] == "Et*12|t*20L"
    assert "--sequence-parallel" in flags


def test_megatron_gets_a_part_for_every_chunk() -> None:
    flags = megatron_flags(uneven_pipeline(schedule="interleaved-1f1b"))
    assert flags["--pipeline-model-parallel-layout"] == "Et*8|t*8|t*8|t*8L"


@pytest.mark.parametrize(("zero", "shards"), [(2, "optim_grads"), (3, "optim_grads_params")])
def test_megatron_shards_as_far_as_zero_says(zero: int, shards: str) -> None:
    flags = megatron_flags(uniform("fsdp8", devices=8, zero=zero))
    assert flags["--data-parallel-sharding-strategy"] == shards


def test_megatron_recomputes_the_first_blocks_of_every_stage() -> None:
    flags = megatron_flags(uneven_pipeline(first_recomputed=3))
    assert flags["--recompute-method"] == "block"
    assert flags["--recompute-num-layers"] == "3"


def test_megatron_recomputes_every_block() -> None:
    flags = megatron_flags(FSDP)
    assert (flags["--recompute-method"], flags["--recompute-num-layers"]) == ("uniform", "1")


def test_megatron_shards_the_optimizer_of_replicas() -> None:
    flags = megatron_flags(uniform("dp4-tp2", devices=8, sp=True))
    assert {"--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce"} <= set(flags)
    assert "--use-megatron-fsdp" not in flags
    assert set(flags) <= known_names("megatron-core-0.19.2.txt")


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [({}, ("0", "0")), ({"attention_dropout": 0.1}, ("0.1", "0"))])
def test_megatron_drops_out_what_the_model_does(given: dict[str, float], expected: tuple[str, str]) -> None:
    config = dict(load_model("llama3-8b").config) | given
    flags = megatron_flags(uniform("dp8", devices=8).model_copy(update={"model": PlanModel(name="x", config=config)}))
    assert (flags["--attention-dropout"], flags["--hidden-dropout"]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "balancing", "coefficient"), [(True, "aux_loss", "0.00125"), (False, "none", None)])
def test_megatron_balances_experts_where_the_config_asks_for_it(
    asked: bool, balancing: str, coefficient: str | None
) -> None:
    config = dict(load_model("mixtral-8x7b").config) | {"output_router_logits": asked}
    plan = uniform("dp8", devices=8, model="mixtral-8x7b")
    plan = plan.model_copy(update={"model": PlanModel(name="x", config=config)})
    flags = megatron_flags(plan)
    assert (flags["--moe-router-load-balancing-type"], flags.get("--moe-aux-loss-coeff")) == (balancing, coefficient)
    assert ("computes it per layer and per data rank" in text_of(plan, "megatron", ".sh")) is asked
    assert set(flags) <= known_names("megatron-core-0.19.2.txt")


@pytest.mark.slow
def test_megatron_takes_as_many_experts_of_a_token_as_transformers_where_the_config_is_silent() -> None:
    config = dict(load_model("qwen3-30b-a3b").config)
    del config["num_experts_per_tok"]
    plan = uniform("dp8", devices=8, model="qwen3-30b-a3b")
    plan = plan.model_copy(update={"model": PlanModel(name="x", config=config)})
    assert megatron_flags(plan)["--moe-router-topk"] == "8"


def test_megatron_leaves_sharded_parameters_to_its_other_target() -> None:
    assert any("the engine megatron-fsdp" in reason for reason in unsupported(FSDP, ENGINES["megatron"].capabilities))
    assert unsupported(FSDP, ENGINES["megatron-fsdp"].capabilities) == ()


def run_megatron(plan: Plan, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The exported script with a `torchrun` that prints its arguments."""
    (folder / "torchrun").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (folder / "torchrun").chmod(0o755)
    (folder / "megatron.sh").write_text(text_of(plan, "megatron", ".sh"))
    path = {"PATH": f"{folder}:/usr/bin:/bin", "MEGATRON": "a checkout"}
    return subprocess.run(
        ["bash", "megatron.sh"], cwd=folder, env=path | environment, capture_output=True, text=True, check=False
    )


def test_megatron_starts_on_all_hosts_of_the_cluster(tmp_path: Path) -> None:
    plan = uniform("dp16", devices=16, cluster="2x8xa100-80gb")
    words = run_megatron(plan, tmp_path, NODE_RANK="1", MASTER_ADDR="first").stdout.splitlines()
    given = dict(itertools.pairwise(words))
    wanted = {"--nnodes": "2", "--nproc-per-node": "8", "--node-rank": "1", "--master-addr": "first"}
    assert wanted.items() <= given.items()
    assert "a checkout/pretrain_gpt.py" in words


@pytest.mark.parametrize("given", [{"NODE_RANK": "0"}, {"MASTER_ADDR": "first"}])
def test_megatron_asks_each_host_for_its_number_and_the_first(tmp_path: Path, given: dict[str, str]) -> None:
    finished = run_megatron(uniform("dp16", devices=16, cluster="2x8xa100-80gb"), tmp_path, **given)
    assert finished.returncode == 1
    assert re.search("set (NODE_RANK|MASTER_ADDR) to", finished.stderr)


def test_megatron_on_one_host_needs_no_more_than_its_checkout(tmp_path: Path) -> None:
    finished = run_megatron(uniform("dp8", devices=8), tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_megatron_gets_the_batch_and_the_model() -> None:
    flags = megatron_flags(FSDP)
    assert (flags["--micro-batch-size"], flags["--global-batch-size"]) == ("2", "64")
    assert (flags["--num-layers"], flags["--hidden-size"], flags["--num-query-groups"]) == ("32", "4096", "8")
    assert "--swiglu" in flags


@pytest.mark.parametrize(("method", "sends"), [("gather", "all_gather"), ("ulysses", "a2a")])
def test_megatron_gets_context_parallelism_and_its_method(method: str, sends: str) -> None:
    flags = megatron_flags(uniform("dp2-cp2-tp2", devices=8, sp=True, cp_method=method))
    assert (flags["--context-parallel-size"], flags["--cp-comm-type"]) == ("2", sends)
    assert set(flags) <= known_names("megatron-core-0.19.2.txt")


@pytest.mark.parametrize(
    ("precision", "flag", "recipe"),
    [("fp8-block", "fp8", "blockwise"), ("mxfp8", "fp8", "mxfp8"), ("nvfp4", "fp4", "nvfp4")],
)
def test_megatron_gets_the_format_of_linear_layers(precision: str, flag: str, recipe: str) -> None:
    flags = megatron_flags(uniform("dp8", devices=8, precision=precision, engine="megatron"))
    assert flags[f"--{flag}-recipe"] == recipe
    assert {"--bf16", f"--{flag}-format"} <= set(flags)
    assert set(flags) <= known_names("megatron-core-0.19.2.txt")


def test_megatron_scales_the_loss_of_fp16_and_keeps_its_gradients_in_fp32() -> None:
    flags = megatron_flags(uniform("dp8", devices=8, precision="fp16"))
    assert "--bf16" not in flags
    assert {"--fp16", "--accumulate-allreduce-grads-in-fp32"} <= set(flags)
    assert flags["--initial-loss-scale"] == "65536"
    assert set(flags) <= known_names("megatron-core-0.19.2.txt")


@pytest.mark.parametrize(
    ("engine", "dispatcher", "backend"),
    [
        ("megatron", "alltoall", None),
        ("megatron+allgather", "allgather", None),
        ("megatron+deepep+balanced", "flex", "deepep"),
    ],
)
def test_megatron_gets_the_dispatcher_that_its_engine_names(engine: str, dispatcher: str, backend: str | None) -> None:
    plan = divided_experts("qwen3-30b-a3b", ep=8, num_layers=48, parallel="dp8")
    flags = megatron_flags(plan.model_copy(update={"engine": engine}))
    assert flags["--moe-token-dispatcher-type"] == dispatcher
    assert flags.get("--moe-flex-dispatcher-backend") == backend
    assert ("--moe-router-force-load-balancing" in flags) == ("balanced" in engine)
    assert set(flags) <= known_names("megatron-core-0.19.2.txt")


@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-7b", "mistral-7b"])
def test_names_for_megatron_are_those_of_its_version(model: str) -> None:
    plan = uniform("fsdp8", devices=8, model=model, remat="full", seq_len=2048)
    assert set(megatron_flags(plan)) <= known_names("megatron-core-0.19.2.txt")


def test_pipeline_names_for_megatron_are_those_of_its_version() -> None:
    assert set(megatron_flags(uneven_pipeline(first_recomputed=3))) <= known_names("megatron-core-0.19.2.txt")


# accelerate and transformers, which are installed wherever the tests run


def accelerate_file(plan: Plan, folder: Path) -> Path:
    path = folder / "accelerate.yaml"
    path.write_text(text_of(plan, "accelerate", ".yaml"))
    return path


def loaded_by_accelerate(plan: Plan, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate.commands.config.config_args import load_config_from_file
    return load_config_from_file(str(accelerate_file(plan, folder)))


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    config = loaded_by_accelerate(FSDP, tmp_path)
    assert config.distributed_type == "FSDP"
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (8, 1, "bf16")
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_activation_checkpointing"] is True


def test_accelerate_reads_fp16_for_which_it_makes_a_scaler(tmp_path: Path) -> None:
    assert loaded_by_accelerate(FP16, tmp_path).mixed_precision == "fp16"


def test_accelerate_gets_a_port_and_is_told_where_the_first_host_goes(tmp_path: Path) -> None:
    plan = uniform("fsdp16", devices=16, cluster="2x8xa100-80gb")
    config = loaded_by_accelerate(plan, tmp_path)
    assert (config.num_machines, config.main_process_port, config.rdzv_backend) == (2, 29500, "static")
    assert "--machine_rank RANK --main_process_ip FIRST_HOST" in text_of(plan, "accelerate", ".yaml")
    assert "--main_process_ip" not in text_of(FSDP, "accelerate", ".yaml")


def test_accelerate_keeps_parameters_under_zero_2(tmp_path: Path) -> None:
    config = loaded_by_accelerate(uniform("fsdp8", devices=8, zero=2), tmp_path)
    assert config.fsdp_config["fsdp_reshard_after_forward"] is False


def test_plain_replication_is_ddp_in_accelerate(tmp_path: Path) -> None:
    config = loaded_by_accelerate(uniform("dp8", devices=8), tmp_path)
    assert config.distributed_type == "MULTI_GPU"
    assert config.parallelism_config == {}


def test_the_sizes_for_accelerate_are_a_parallelism_config(tmp_path: Path) -> None:
    config = loaded_by_accelerate(HYBRID, tmp_path)
    from accelerate.parallelism_config import ParallelismConfig

    sizes = {key.removeprefix("parallelism_config_"): size for key, size in config.parallelism_config.items()}
    assert ParallelismConfig(**sizes).total_size == 8


def test_accelerate_launch_takes_every_key_as_an_option(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    config = loaded_by_accelerate(HYBRID, tmp_path)
    options = {action.dest for action in launch_command_parser()._actions}
    assert set(config.fsdp_config) | set(config.parallelism_config) <= options


def test_accelerate_is_told_to_keep_no_cache_beside_recomputed_shards() -> None:
    told = "model.config.use_cache = False"
    assert told in text_of(FSDP, "accelerate", ".yaml")
    assert told not in text_of(uniform("fsdp8", devices=8), "accelerate", ".yaml")
    assert told not in text_of(uniform("dp8", devices=8, remat="full"), "accelerate", ".yaml")


def test_accelerate_is_told_which_routers_its_loading_leaves_out() -> None:
    told = "for routers with buffers, as in DeepSeek-V3: fsdp_cpu_ram_efficient_loading: false"
    assert told in text_of(uniform("fsdp8", devices=8, model="mixtral-8x7b"), "accelerate", ".yaml")
    assert told not in text_of(FSDP, "accelerate", ".yaml")


def test_accelerate_is_given_no_tp_while_it_imports_what_transformers_does_not_have() -> None:
    from accelerate import Accelerator
    from transformers.integrations import tensor_parallel

    needed = re.search(
        r"from transformers.integrations.tensor_parallel import (\w+)", getsource(Accelerator._prepare_tp)
    )
    assert needed is not None
    assert not hasattr(tensor_parallel, needed[1])
    reason = "tp, which fails in accelerate with transformers 5, but not in the engine transformers"
    assert unsupported(uniform("fsdp4-tp2", devices=8), ENGINES["accelerate"].capabilities) == (reason,)


def trainer_module(plan: Plan) -> types.ModuleType:
    module = types.ModuleType("steelyard_trainer")
    exec(text_of(plan, "transformers", ".py"), module.__dict__)
    return module


@pytest.mark.parametrize("plan", [FSDP, uniform("dp8", devices=8, remat="full"), uniform("fsdp4-tp2", devices=8)])
def test_transformers_takes_the_training_arguments(plan: Plan, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    view = UniformPlan.of(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, **trainer_module(plan).training_arguments | {"bf16": False}
        )
    assert arguments.per_device_train_batch_size == view.microbatch_per_rank
    assert arguments.gradient_accumulation_steps == view.pipeline.num_microbatches


def test_transformers_and_axolotl_are_told_fp16() -> None:
    arguments = trainer_module(FP16).training_arguments
    assert (arguments["fp16"], arguments["bf16"]) == (True, False)
    content = yaml.safe_load(text_of(FP16, "axolotl", ".yaml"))
    assert (content["fp16"], content["bf16"]) == (True, False)


@pytest.mark.parametrize("to", ["transformers", "swift-sft"])
def test_transformers_has_no_fp16_where_its_own_sharding_computes_in_bf16(to: str) -> None:
    engine, plan = ENGINE_OF_TARGET[to], uniform("fsdp4-tp2", devices=8)
    is_trainer = to == "transformers"
    assert (not unsupported(plan, engine.running(NO_LEVERS, "bf16").capabilities)) is is_trainer
    means = engine.running(NO_LEVERS, "fp16").capabilities
    assert unsupported(plan, means) == ("fsdp with tp in one layer",)
    assert unsupported(FP16, means) == ()
    assert (not unsupported(uniform("tp8", devices=8), means)) is is_trainer


def test_transformers_takes_the_distributed_config() -> None:
    config = trainer_module(uniform("fsdp4-tp2", devices=8)).distributed_config
    assert (config.tp_size, config.fsdp_size, config.dp_size) == (2, 4, 4)
    config = trainer_module(uniform("dp2-fsdp2-tp2", devices=8)).distributed_config
    assert (config.tp_size, config.fsdp_size, config.dp_replicate_size, config.dp_size) == (2, 2, 2, 4)


@pytest.mark.parametrize(("parallel", "ep", "ranks"), [("fsdp8", 8, 8), ("dp2-fsdp4", 4, 4), ("fsdp4-tp2", 2, 4)])
def test_transformers_divides_experts(parallel: str, ep: int, ranks: int) -> None:
    plan = divided_experts("mixtral-8x22b", ep=ep, num_layers=56, parallel=parallel)
    assert unsupported(plan, ENGINES["transformers"].capabilities) == ()
    config = trainer_module(plan).distributed_config
    assert (config.ep_size, config.efsdp_size * config.ep_size * config.dp_replicate_size) == (ranks, 8)


def test_transformers_divides_experts_of_types_that_it_has_a_plan_for() -> None:
    from transformers import AutoConfig

    types = {chain.family.model_type for chain in map(load_model, model_names()) if has_experts(chain)}
    planned = {each for each in types if "ep_dispatch_experts" in (ep_plan(AutoConfig.for_model(each)) or {}).values()}
    known = ENGINES["transformers"].capabilities.experts_of
    assert known is not None
    assert planned <= known
    assert all("ep_dispatch_experts" in (ep_plan(AutoConfig.for_model(each)) or {}).values() for each in known)


def test_transformers_divides_no_matrices_of_types_that_it_has_no_plan_for() -> None:
    from transformers import AutoConfig

    types = {chain.family.model_type for chain in map(load_model, model_names())}
    never = ENGINES["transformers"].capabilities.never_divided
    assert {each for each in types if not AutoConfig.for_model(each).base_model_tp_plan} <= never
    assert not any(AutoConfig.for_model(each).base_model_tp_plan for each in never)
    plan = uniform("fsdp4-tp2", devices=8, model="gpt-oss-20b")
    assert unsupported(plan, ENGINES["transformers"].capabilities) == ("tp in a model of type gpt_oss",)


@pytest.mark.parametrize("name", ["accelerate", "transformers", "deepspeed"])
@pytest.mark.parametrize(("model", "seq_len"), [("bert-base", 512), ("t5-base", 512), ("vit-base", 197)])
def test_trainers_on_accelerate_shard_no_models_but_decoders(name: str, model: str, seq_len: int) -> None:
    sharded, copied = (uniform(each, devices=8, model=model, seq_len=seq_len) for each in ("fsdp8", "dp8"))
    means = ENGINES[name].capabilities
    type_name = sharded.chain().family.model_type
    assert unsupported(sharded, means) == (() if name == "deepspeed" else (f"fsdp in a model of type {type_name}",))
    assert unsupported(copied, means) == ()


def ep_plan(config: Any) -> dict[str, str] | None:
    return config.base_model_ep_plan


def has_experts(chain: ModelChain) -> bool:
    return any(layer_type.num_experts for layer_type in chain.layer_types)


def test_hybrid_sharding_without_tp_is_accelerates_in_transformers() -> None:
    sizes = trainer_module(HYBRID).training_arguments["parallelism_config"]
    assert (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.total_size) == (2, 4, 8)


# DeepSpeed


def test_deepspeed_gets_stage_and_batch() -> None:
    content = json.loads(text_of(FSDP, "deepspeed", ".json"))
    assert content["zero_optimization"]["stage"] == 3
    assert content["train_micro_batch_size_per_gpu"] == 2
    assert content["gradient_accumulation_steps"] == 4
    assert content["train_batch_size"] == 2 * 4 * 8


@pytest.mark.parametrize(
    ("parallel", "zero", "stage"), [("dp8", 3, 0), ("fsdp8", 2, 2), ("fsdp8", 3, 3), ("fsdp4-tp2", 3, 3)]
)
def test_deepspeed_shards_as_far_as_zero_says(parallel: str, zero: int, stage: int) -> None:
    changes = {"zero": zero} if "fsdp" in parallel else {}
    plan = uniform(parallel, devices=8, **changes)
    assert json.loads(text_of(plan, "deepspeed", ".json"))["zero_optimization"]["stage"] == stage


def test_deepspeed_scales_the_loss_of_fp16_dynamically() -> None:
    content = json.loads(text_of(FP16, "deepspeed", ".json"))
    assert content["bf16"] == {"enabled": False}
    assert (content["fp16"]["enabled"], content["fp16"]["loss_scale"]) == (True, 0)
    assert {"fp16", *content["fp16"]} <= known_names("deepspeed-0.19.8.txt")


def test_names_for_deepspeed_are_those_of_its_version() -> None:
    content = json.loads(text_of(uniform("fsdp4-tp2", devices=8, remat="full"), "deepspeed", ".json"))
    content |= json.loads(text_of(divided_experts("mixtral-8x22b", ep=8, num_layers=56), "deepspeed", ".json"))
    del content["_comment"]
    nested = {f"{key}.{inner}" for key, value in content.items() if isinstance(value, dict) for inner in value}
    assert set(content) | nested <= known_names("deepspeed-0.19.8.txt")


DEEPSPEED_CHECK = """
import json, sys
import deepspeed.comm
from deepspeed.runtime.config import DeepSpeedConfig
deepspeed.comm.get_rank = lambda *_: 0
deepspeed.comm.get_world_size = lambda *_: 8
from deepspeed.module_inject.auto_ep_config import validate_autoep_config
from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS
for path in sys.argv[1:]:
    config = DeepSpeedConfig(json.load(open(path)))
    tp = config.tensor_parallel_config.autotp_size
    if config.expert_parallel_config.enabled:
        validate_autoep_config(config.expert_parallel_config, 8, 1, tp, 1, zero_stage=config.zero_optimization_stage)
    print(config.zero_optimization_stage, config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu)
from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES
print(SUPPORTED_STYLES)
print({each: name for name, preset in PRESET_MODELS.items() for each in preset.hf_model_types})
"""


@pytest.mark.slow
def test_deepspeed_itself_reads_its_file(tmp_path: Path) -> None:
    from transformers import AutoConfig

    pytest.importorskip("deepspeed", exc_type=ImportError)
    experts = {"model": "mixtral-8x22b", "num_layers": 56}
    plans = {
        "fsdp": FSDP,
        "tp": uniform("fsdp4-tp2", devices=8),
        "fp16": FP16,
        "ep": divided_experts(**experts, ep=8),
    }
    for name, plan in plans.items():
        (tmp_path / f"{name}.json").write_text(text_of(plan, "deepspeed", ".json"))
    finished = subprocess.run(
        [sys.executable, "-c", DEEPSPEED_CHECK, *(str(tmp_path / f"{name}.json") for name in plans)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )
    *read, styles, presets = finished.stdout.splitlines()[-6:]
    assert read == ["3 4 2", "3 4 4", "3 4 2", "3 4 2"], finished.stderr
    assert PRESETS.items() <= ast.literal_eval(presets).items()
    never = ENGINES["deepspeed"].capabilities.never_divided
    types = {chain.family.model_type for chain in map(load_model, model_names())}
    planned = {each: {*(AutoConfig.for_model(each).base_model_tp_plan or {}).values()} for each in types | never}
    refused = {each for each, plan in planned.items() if plan - ast.literal_eval(styles)}
    assert refused == never - {"falcon", "gpt2"}


def test_deepspeed_says_which_transformers_its_experts_need_while_the_installed_one_fails() -> None:
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    with pytest.raises(TypeError):
        _CAN_RECORD_REGISTRY.get("model", None)  # as AutoEP's presets/base.py calls it
    needed = "with transformers 5.16: AutoEP fails"
    assert needed in text_of(divided_experts("mixtral-8x22b", ep=8, num_layers=56), "deepspeed", ".json")
    assert needed not in text_of(FSDP, "deepspeed", ".json")


# launch files


def test_torchrun_starts_one_process_for_every_device() -> None:
    content = text_of(FSDP, "torchrun", ".sh")
    assert "--standalone" in content
    assert "--nproc-per-node 8" in content


def test_torchrun_meets_on_several_hosts() -> None:
    plan = uniform("fsdp16", devices=16, cluster="2x8xa100-80gb")
    content = text_of(plan, "torchrun", ".sh")
    assert "--nnodes 2" in content
    assert "--rdzv-backend c10d" in content
    assert "--standalone" not in content


@pytest.mark.parametrize(
    ("target", "suffix"), [("torchrun", ".sh"), ("slurm", ".sbatch"), ("megatron", ".sh"), ("megatron-fsdp", ".sh")]
)
def test_scripts_are_valid_for_bash(target: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(text_of(FSDP, target, suffix))
    finished = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_the_torchrun_script_runs_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(text_of(FSDP, "torchrun", ".sh"))
    (tmp_path / "torchrun").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DATA": "some data", "PLAN": "p.json"}
    finished = subprocess.run(
        ["bash", "train.sh", "--steps", "3"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    words = ["--standalone", "--nproc-per-node", "8", "-m", "steelyard.train", "p.json", "--data", "some data"]
    assert finished.stdout.splitlines() == [*words, "--steps", "3"]


def test_the_torchrun_script_asks_for_the_data(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(text_of(FSDP, "torchrun", ".sh"))
    finished = subprocess.run(
        ["bash", "train.sh"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1
    assert "set DATA to the training data" in finished.stderr


def test_slurm_gets_nodes_and_devices() -> None:
    content = text_of(uniform("fsdp16", devices=16, cluster="2x8xa100-80gb"), "slurm", ".sbatch")
    options = [line.removeprefix("#SBATCH ") for line in content.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"} <= set(options)


OWN_DEVICE = """
version: 1
num_nodes: 1
devices_per_node: 4
device: {name: mine, kind: KIND, memory_GiB: 16}
intra_link: pcie-4
"""


@pytest.mark.parametrize(
    ("device_type", "asked"),
    [
        ("gpu, vendor: nvidia", {"limits": {"nvidia.com/gpu": 4}}),
        ("gpu, vendor: amd", {"limits": {"amd.com/gpu": 4}}),
        ("cpu", {"requests": {"cpu": 4}}),
    ],
)
def test_a_scheduler_is_asked_for_gpus_whether_or_not_their_rates_are_known(
    tmp_path: Path, device_type: str, asked: dict[str, Any]
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN_DEVICE.replace("KIND", device_type))
    plan = uniform("fsdp4", devices=4, cluster=str(path))
    assert ("--gpus-per-node=4" in text_of(plan, "slurm", ".sbatch")) is (device_type != "cpu")
    for target in ("kubeflow", "kubeflow-v1"):
        assert container_of(text_of(plan, target, ".yaml"))["resources"] == asked


def test_kubeflow_asks_whose_gpus_those_of_no_catalogue_are(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN_DEVICE.replace("KIND", "gpu"))
    with pytest.raises(UserError, match=r"device\.vendor: found nothing for 'mine'(.|\n)*nvidia or amd"):
        exported(uniform("fsdp4", devices=4, cluster=str(path)), "kubeflow")


def test_slurm_reads_its_options_before_the_first_command() -> None:
    lines = text_of(FSDP, "slurm", ".sbatch").splitlines()
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(index for index, line in enumerate(lines) if line.startswith("#SBATCH")) < first_command


def kubeflow(plan: Plan, target: str = "kubeflow") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(plan, target, ".yaml")))


@pytest.mark.parametrize("target", ["kubeflow", "kubeflow-v1"])
def test_kubeflow_carries_the_plan(target: str) -> None:
    content = json.loads(kubeflow(FSDP, target)[0]["data"]["plan.json"])
    assert parse_value(content, Plan, InvalidPlanError, what="plan") == FSDP


THREE_HOSTS = uniform("fsdp24", devices=24, cluster="3x8xa100-80gb", global_batch=96)


def test_kubeflow_gets_a_runtime_and_a_job_that_names_it() -> None:
    runtime, job = kubeflow(THREE_HOSTS)[1:]
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert {runtime["apiVersion"], job["apiVersion"]} == {"trainer.kubeflow.org/v1alpha1"}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3, "torch": {"numProcPerNode": 8}}
    assert job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == 3
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    container = container_of(text_of(THREE_HOSTS, "kubeflow", ".yaml"))
    assert (node["name"], container["name"]) == ("node", "node")
    assert '--nnodes 3 --nproc-per-node 8 --node-rank "$PET_NODE_RANK"' in container["command"][-1]


def test_the_first_kubeflow_gets_a_master_and_workers() -> None:
    specs = kubeflow(THREE_HOSTS, "kubeflow-v1")[1]["spec"]["pytorchReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in specs.items()} == {"Master": 1, "Worker": 2}
    container = specs["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_one_node_has_no_workers() -> None:
    assert list(kubeflow(FSDP, "kubeflow-v1")[1]["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_kubeflow_needs_an_image() -> None:
    with pytest.raises(UserError, match="--image: found nothing"):
        exported(FSDP, "kubeflow", image=None)


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubeflow", "kubeflow-v1"])
def test_launch_files_need_the_devices_of_the_plan(target: str) -> None:
    plan = FSDP.model_copy(update={"cluster": "1x4xa100-80gb"})
    with pytest.raises(UserError, match="4 devices"):
        exported(plan, target)


# divided experts


def test_torchtitan_divides_experts_of_blocks_that_have_some() -> None:
    plan = divided_experts("deepseek-v3", ep=8, num_layers=61, dense=3)
    assert unsupported(plan, ENGINES["torchtitan"].capabilities) == ()
    assert "expert_parallel_degree=8," in text_of(plan, "torchtitan", ".py")


def test_torchtitan_knows_qwen3_with_experts_by_flavor_and_by_name() -> None:
    plan = divided_experts("qwen3-30b-a3b", ep=8, num_layers=48)
    assert titan(plan)["model"] == {"name": "qwen3", "flavor": "30B-A3B"}
    assert "import qwen3_30b_a3b\n" in text_of(plan, "torchtitan", ".py")


@pytest.mark.parametrize(("parallel", "ep", "ranks"), [("fsdp8", 4, 4), ("fsdp4-tp2", 4, 8), ("dp8", 8, 8)])
def test_megatron_divides_whole_experts_over_the_ranks_of_ep_and_tp(parallel: str, ep: int, ranks: int) -> None:
    plan = divided_experts("mixtral-8x22b", ep=ep, num_layers=56, parallel=parallel, sp="tp" in parallel)
    name = "megatron-fsdp" if "fsdp" in parallel else "megatron"
    assert unsupported(plan, ENGINES[name].capabilities) == ()
    text = text_of(plan, name, ".sh")
    assert f"--expert-model-parallel-size {ranks}\n" in text
    assert "--expert-tensor-parallel-size 1\n" in text
    assert "--moe-token-dispatcher-type alltoall\n" in text
    assert "--num-experts 8\n" in text


def test_accelerate_says_that_it_cannot_divide_experts() -> None:
    plan = divided_experts("mixtral-8x22b", ep=8, num_layers=56)
    assert any("ep" in reason for reason in unsupported(plan, ENGINES["accelerate"].capabilities))


def test_deepspeed_divides_whole_experts_over_the_ranks_of_ep() -> None:
    plan = divided_experts("mixtral-8x22b", ep=4, num_layers=56)
    assert unsupported(plan, ENGINES["deepspeed"].capabilities) == ()
    content = json.loads(text_of(plan, "deepspeed", ".json"))["expert_parallel"]
    assert content == {"enabled": True, "autoep_size": 4, "preset_model": "mixtral"}


@pytest.mark.parametrize("model", ["mixtral-8x22b", "phi-3-mini", "olmo2-7b", "glm-4-9b-0414"])
def test_deepspeed_divides_no_matrices_of_types_that_it_refuses(model: str) -> None:
    plan = uniform("fsdp4-tp2", devices=8, model=model)
    reason = f"tp in a model of type {plan.chain().family.model_type}"
    assert reason in unsupported(plan, ENGINES["deepspeed"].capabilities)


def test_deepspeed_divides_no_experts_that_it_has_no_preset_for() -> None:
    plan = divided_experts("olmoe-1b-7b", ep=8, num_layers=16)
    assert "ep in a model of type olmoe" in unsupported(plan, ENGINES["deepspeed"].capabilities)
    whole = divided_experts("olmoe-1b-7b", ep=1, num_layers=16)
    assert unsupported(whole, ENGINES["deepspeed"].capabilities) == ()
    assert "expert_parallel" not in json.loads(text_of(whole, "deepspeed", ".json"))


# hybrid sharding


def test_a_plan_is_described_by_the_layers_that_divide_experts() -> None:
    assert describe_uniform(divided_experts("mixtral-8x22b", ep=8, num_layers=56)) == "uniform fsdp8 ep8"


HYBRID = uniform("dp2-fsdp4", devices=8)


def test_hybrid_sharding_is_two_degrees_in_torchtitan() -> None:
    content = titan(HYBRID)["parallelism"]
    assert content["data_parallel_replicate_degree"] == 2
    assert content["data_parallel_shard_degree"] == 4


def test_hybrid_sharding_is_two_instances_of_megatrons_optimizer_that_do_not_shard() -> None:
    script = text_of(HYBRID, "megatron-fsdp", ".sh")
    assert "--num-distributed-optimizer-instances 2\n" in script
    assert "--outer-dp-sharding-strategy no_shard\n" in script
    assert "--outer-dp-sharding-strategy" not in text_of(FSDP, "megatron-fsdp", ".sh")


def test_hybrid_sharding_is_two_sizes_in_accelerate() -> None:
    content = yaml.safe_load(text_of(HYBRID, "accelerate", ".yaml"))["parallelism_config"]
    assert content["parallelism_config_dp_replicate_size"] == 2
    assert content["parallelism_config_dp_shard_size"] == 4


def test_hybrid_sharding_and_context_parallelism_are_three_degrees_in_torchtitan() -> None:
    plan = uniform("dp2-fsdp2-cp2", devices=8)
    assert unsupported(plan, ENGINES["torchtitan"].capabilities) == ()
    content = titan(plan)["parallelism"]
    degrees = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree")
    assert [content[name] for name in degrees] == [2, 2, 2]
    text = text_of(plan, "torchtitan", ".py")
    assert all(f"{name}=2," in text for name in degrees)


def test_torchtitan_divides_experts_inside_the_shards_of_hybrid_sharding() -> None:
    means = ENGINES["torchtitan"].capabilities
    plan = divided_experts("deepseek-v3", ep=4, num_layers=61, dense=3, parallel="dp2-fsdp4")
    assert unsupported(plan, means) == ()
    assert "expert_parallel_degree=4," in text_of(plan, "torchtitan", ".py")
    across = divided_experts("deepseek-v3", ep=8, num_layers=61, dense=3, parallel="dp2-fsdp4")
    assert unsupported(across, means) == ("experts over 8 ranks, but only 4 shard the states of the other layers",)


def test_torchtitan_divides_experts_over_ranks_of_cp_too() -> None:
    plan = divided_experts("qwen3-30b-a3b", ep=8, num_layers=48, parallel="fsdp4-cp2")
    assert unsupported(plan, ENGINES["torchtitan"].capabilities) == ()
    text = text_of(plan, "torchtitan", ".py")
    assert "context_parallel_degree=2," in text
    assert "expert_parallel_degree=8," in text


def test_deepspeed_says_that_it_has_no_hybrid_sharding() -> None:
    assert "dp with fsdp in one layer" in unsupported(HYBRID, ENGINES["deepspeed"].capabilities)


def test_megatron_takes_no_zero_2_inside_replicas() -> None:
    plan = uniform("dp2-fsdp4", devices=8, zero=2)
    assert "zero 2 together with dp" in unsupported(plan, ENGINES["megatron-fsdp"].capabilities)


def test_the_trainer_of_transformers_divides_no_head() -> None:
    plan = uniform("fsdp2-tp16", devices=32, model="llama3-8b")
    assert "tp 16 over 8 key-value heads" in unsupported(plan, ENGINES["transformers"].capabilities)
    assert not any("heads" in reason for reason in unsupported(plan, ENGINES["megatron"].capabilities))
