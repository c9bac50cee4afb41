"""Tests of reading engine files as settings: exported files round-trip; users' settings are read or named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.cost.job import layer_precision
from steelyard.engines import ENGINES, TARGETS, engine_of
from steelyard.engines.megatron_arguments import SWITCHES
from steelyard.engines.writing import Request, export_plan
from steelyard.errors import UserError
from steelyard.hardware import parse_cluster
from steelyard.plan.strategy import Remat
from steelyard.planning.job import job_of
from steelyard.planning.price import with_price
from steelyard.planning.request import make_request
from steelyard.planning.settings import Settings, plan_of_file, price_settings
from steelyard.precision import Precision

CLUSTER, BLACKWELL = "1x8xh100-80gb", "1x8xb200-180gb"
FEW_TRACED = "2x2xh100-80gb"
"""For levers without packaged traces: layers are traced for each divisor of a node's devices."""
MODELS = {
    "torchtitan": "llama3.1-8b",
    "torchtitan+deepep+balanced": "qwen3-30b-a3b",
    "recipe of experts": "qwen3-30b-a3b",
    "recipe of a model without arguments": "gpt-oss-20b",
    "AutoEP": "qwen3-30b-a3b",
}
WRITTEN = {
    "degrees": ("megatron", Settings(tp=2, cp=2, micro_batch=2)),
    "uneven stages": ("megatron", Settings(pp=2, blocks=(17, 15))),
    "chunks": ("megatron", Settings(pp=4, vpp=2, sp=False, tp=2)),
    "full remat": ("megatron", Settings(remat=Remat.FULL)),
    "remat of some blocks": ("megatron", Settings(pp=2, tp=2, remat_blocks=3)),
    "heads exchanged for the sequence": ("megatron", Settings(tp=2, cp=2, cp_method="ulysses")),
    "shards": ("megatron-fsdp", Settings(zero=3, tp=2)),
    "shards over cp alone": ("megatron-fsdp", Settings(zero=3, tp=4, cp=2)),
    "hybrid shards": ("megatron-fsdp", Settings(zero=3, replicas=2)),
    "FSDP": ("torchtitan", Settings(zero=3, remat=Remat.SELECTIVE, micro_batch=2)),
    "FSDP over cp": ("torchtitan", Settings(zero=3, cp=2)),
    "FSDP that keeps parameters": ("torchtitan", Settings(zero=2, tp=2, replicas=2)),
    "FSDP in a pipeline": ("torchtitan", Settings(zero=1, pp=2, tp=2, blocks=(18, 14), remat=Remat.FULL)),
    "weight passes": ("torchtitan", Settings(zero=1, pp=2, vpp=4, schedule="interleaved-zero-bubble")),
    "chunks in a V": ("torchtitan", Settings(pp=2, vpp=2, tp=2, schedule="zb-v")),
    "experts sent by DeepEP": ("torchtitan+deepep+balanced", Settings(zero=3, ep=8)),
    "data parallelism": ("torchtitan", Settings(zero=0, tp=4)),
    "recipe": ("megatron-bridge", Settings(tp=2, cp=2, micro_batch=2)),
    "recipe of uneven stages": ("megatron-bridge", Settings(pp=2, blocks=(17, 15), remat=Remat.SELECTIVE)),
    "recipe of chunks": ("megatron-bridge", Settings(pp=2, tp=2, vpp=2, remat_blocks=3)),
    "recipe in 8 bits": ("megatron-bridge", Settings(tp=2, remat=Remat.FULL)),
    "recipe of experts": ("megatron-bridge", Settings(ep=8, sp=False)),
    "recipe of a model without arguments": ("megatron-bridge", Settings(ep=8, sp=False)),
    "ZeRO-3": ("deepspeed", Settings(zero=3, sp=False, remat=Remat.FULL, micro_batch=2)),
    "AutoEP": ("deepspeed", Settings(zero=3, ep=8, sp=False)),
    "ZeRO-2 beside tp": ("deepspeed", Settings(zero=2, sp=False, tp=2)),
    "ZeRO-1": ("deepspeed", Settings(zero=1, sp=False)),
}
PRECISIONS: dict[str, Precision] = {
    **{"degrees": "fp16", "ZeRO-2 beside tp": "fp16"},
    **{"full remat": "mxfp8", "shards": "fp8-block", "remat of some blocks": "nvfp4"},
    **{"recipe of chunks": "fp16", "recipe in 8 bits": "fp8"},
}
"""Precision of the files that are not in bf16."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_for_an_engine_is_read_again(name: str, tmp_path: Path) -> None:
    engine, settings = WRITTEN[name]
    plain = engine.partition("+")[0]
    model = MODELS.get(name) or MODELS.get(engine, "llama3-8b")
    precision = PRECISIONS.get(name, "bf16")
    request = make_request(model, BLACKWELL, global_batch=64, seq_len=4096, precision=layer_precision(precision))
    plan, _ = price_settings(request, engine_of(engine), precision, settings)
    asked = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(BLACKWELL))
    for file, content in export_plan(TARGETS[plain], asked).files:
        (tmp_path / file).write_text(content)
        again, notes = plan_of_file(tmp_path / file, model, BLACKWELL, engine=plain, seq_len=4096)
        assert again.stages == plan.stages
        assert (again.num_microbatches, again.schedule) == (plan.num_microbatches, plan.schedule)
        assert (again.global_batch, again.precision) == (plan.global_batch, plan.precision)
        assert again.engine == (f"{engine}+whole-loss" if file.endswith(".toml") else engine)
        expected, _ = price_settings(request, engine_of(again.engine), precision, settings)
        assert again.prediction == expected.prediction
        assert not any(note.startswith("Not read") for note in notes)


@pytest.mark.slow
def test_weight_passes_in_torchtitan_keep_all_saved_tensors() -> None:
    engine = ENGINES["torchtitan"]
    less = replace(engine, execution=replace(engine.execution, splits_whole=False))
    request = make_request("llama3.1-8b", CLUSTER, global_batch=64, seq_len=4096)
    settings = Settings(zero=1, pp=4, vpp=2, schedule="interleaved-zero-bubble")
    whole, operands = (price_settings(request, each, "bf16", settings)[0].prediction for each in (engine, less))
    assert whole.step_time_s == operands.step_time_s
    saved, kept = ([stage.total_bytes for stage in each.stages] for each in (operands, whole))
    assert all(more > one for more, one in zip(kept, saved, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remat": Remat.FULL}, "full remat under zb-v"),
        ({"schedule": "dualpipe-v"}, "the dualpipe-v schedule"),
    ],
)
def test_weight_passes_are_refused_in_torchtitan_where_torch_cannot_split(
    changes: dict[str, Any], message: str
) -> None:
    request = make_request("llama3.1-8b", CLUSTER, global_batch=64, seq_len=4096)
    settings = replace(Settings(pp=2, vpp=2, cp=4, schedule="zb-v"), **changes)
    with pytest.raises(UserError, match=message):
        price_settings(request, ENGINES["torchtitan"], "bf16", settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 1, "vpp": 1}, "zb-v with --pp 1 --vpp 1"),
        ({"vpp": 1}, "zb-v with --pp 2 --vpp 1"),
        ({"vpp": 4}, "4 under zb-v"),
        ({"schedule": "1f1b"}, "1f1b with --pp 2 --vpp 2"),
        ({"schedule": "zbv"}, "did you mean zb-v"),
    ],
)
def test_a_schedule_of_other_stages_or_chunks_is_an_error(changes: dict[str, Any], message: str) -> None:
    request = make_request("llama3.1-8b", CLUSTER, global_batch=64, seq_len=4096)
    settings = replace(Settings(pp=2, vpp=2, cp=4, schedule="zb-v"), **changes)
    with pytest.raises(UserError, match=message):
        price_settings(request, ENGINES["torchtitan"], "bf16", settings)


LORA = "lora:r=4,alpha=16,targets=q_proj+k_proj+v_proj,dropout=0.1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "levers", "settings", "file"),
    [
        ("megatron-bridge", {"train": LORA}, Settings(tp=2), "bridge_recipe.py"),
        ("deepspeed", {"offload": "parameters"}, Settings(zero=3, sp=False), "ds_config.json"),
        *(("deepspeed", {"offload": "optimizer"}, Settings(zero=z, sp=False), "ds_config.json") for z in (1, 2, 3)),
        ("torchtitan", {"weights": "bf16"}, Settings(zero=3), "steelyard_llama3_8b.py"),
        ("torchtitan", {"offload": "parameters"}, Settings(zero=3), "steelyard_llama3_8b.py"),
        ("torchtitan", {"float8": "rowwise"}, Settings(zero=3, tp=2), "steelyard_llama3_8b.py"),
    ],
)
def test_levers_of_a_file_are_read_again(
    engine: str, levers: dict[str, str], settings: Settings, file: str, tmp_path: Path
) -> None:
    asked = {"global_batch": 16, "seq_len": 4096, "levers": levers}
    request = make_request("llama3-8b", FEW_TRACED, engine=engine, **asked)  # type: ignore[arg-type]
    plan, _ = price_settings(request, ENGINES[engine], "bf16", settings)
    written = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(FEW_TRACED))
    path = tmp_path / file
    path.write_text(dict(export_plan(TARGETS[engine], written).files)[file])
    again, notes = plan_of_file(path, "llama3-8b", FEW_TRACED, seq_len=4096)
    assert not any("offload" in note for note in notes)
    assert again.chosen_levers == plan.chosen_levers
    assert again.prediction == plan.prediction


@pytest.mark.parametrize(
    ("model", "settings", "engine"),
    [
        ("qwen3-30b-a3b", Settings(ep=8, sp=False), "megatron-bridge+bf16-moments+ep-overlap+cuda-graphs"),
        ("llama3-8b", Settings(tp=2), "megatron-bridge+no-tp-overlap"),
    ],
)
def test_options_of_a_recipe_are_read_again(model: str, settings: Settings, engine: str, tmp_path: Path) -> None:
    request = make_request(model, CLUSTER, global_batch=64, seq_len=4096)
    plan, _ = price_settings(request, engine_of(engine), "bf16", settings)
    plain, _ = price_settings(request, ENGINES["megatron-bridge"], "bf16", settings)
    asked = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(CLUSTER))
    ((file, content),) = export_plan(TARGETS["megatron-bridge"], asked).files
    (tmp_path / file).write_text(content)
    again, notes = plan_of_file(tmp_path / file, model, CLUSTER)
    assert again.engine == engine
    assert again.prediction == plan.prediction != plain.prediction
    assert not any("overlap" in note or "exp_avg" in note or "cuda" in note for note in notes)


@pytest.mark.parametrize(
    ("more", "precision"),
    [("", "bf16"), ("model.fp16=true", "fp16"), ("mixed_precision=bf16_with_mxfp8_mixed", "mxfp8")],
)
def test_overrides_of_a_recipe_have_its_precision_unless_they_say_another(
    more: str, precision: Precision, tmp_path: Path
) -> None:
    path = tmp_path / "mine.args"
    path.write_text(
        "model.tensor_model_parallel_size=2 model.sequence_parallel=True train.micro_batch_size=1 "
        f"train.global_batch_size=64 model.seq_length=4096 {more}"
    )
    plan, _ = plan_of_file(path, "llama3-8b", BLACKWELL, engine="megatron-bridge")
    assert plan.precision == precision


@pytest.mark.parametrize("engine", ["megatron", "megatron-bridge"])
def test_megatron_divides_experts_over_ranks_of_cp_too(engine: str, tmp_path: Path) -> None:
    request = make_request("qwen3-30b-a3b", CLUSTER, global_batch=64, seq_len=8192)
    plan, _ = price_settings(request, ENGINES[engine], "bf16", Settings(cp=4, ep=8))
    assert str(plan.strategies[1]) == "dp2-cp4 ep8"
    asked = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(CLUSTER))
    ((file, content),) = export_plan(TARGETS[engine], asked).files
    (tmp_path / file).write_text(content)
    assert plan_of_file(tmp_path / file, "qwen3-30b-a3b", CLUSTER)[0].stages == plan.stages


USERS_RECIPE = """
from megatron.bridge.recipes.common import _pretrain_common
def config():
    cfg = _pretrain_common()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 4096
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    cfg.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
    cfg.ddp.use_distributed_optimizer = True
    cfg.model.tp_comm_overlap = overlap
    return cfg
"""


def test_a_users_own_recipe_is_read_and_the_rest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USERS_RECIPE)
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    request = make_request("llama3-8b", CLUSTER, global_batch=64, seq_len=4096)
    expected, _ = price_settings(request, ENGINES["megatron-bridge"], "fp8", Settings(tp=2, pp=2))
    assert plan.prediction == expected.prediction
    assert notes == ("Not read of mine.py: tp_comm_overlap.",)
    path.write_text(USERS_RECIPE.replace("fp8_current_scaling", "my_scaling"))
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    assert (plan.precision, notes) == ("bf16", ("Not read of mine.py: mixed_precision, tp_comm_overlap.",))
    path.write_text(USERS_RECIPE.replace("= overlap", "= False"))
    assert plan_of_file(path, "llama3-8b", CLUSTER)[0].engine == "megatron-bridge+no-tp-overlap"


def test_an_unknown_schedule_in_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "[training]\nlocal_batch_size = 8\nseq_len = 4096\n"
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "LoopedBFS"\n'
    )
    with pytest.raises(UserError, match="LoopedBFS"):
        plan_of_file(path, "llama3.1-8b", CLUSTER, engine="torchtitan")


SCRIPT = """
TP=2
export MICRO=1
torchrun --nproc-per-node 8 pretrain_gpt.py \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP:-2} \\
    --sequence-parallel --use-distributed-optimizer --micro-batch-size "$MICRO" \\
    --global-batch-size 64 --seq-length 4096 --bf16 --lr 3e-4 --delay-wgrad-compute  # a comment
"""
QUOTED = """
TP=${TP:-1}
SIZES="--tensor-model-parallel-size $(($TP * 2)) --pipeline-model-parallel-size 2 \\
    --seq-length $((8192/2)) --sequence-parallel"
# --tensor-model-parallel-size 8
export ARGS=" \\
    --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 64 --bf16 --delay-wgrad-compute
"
sh -c "torchrun pretrain_gpt.py ${SIZES} ${ARGS}"
"""
ARRAYS = """
PARALLEL=(
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer
    --sequence-parallel
)
BATCH=(--micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --delay-wgrad-compute --bf16)
torchrun pretrain_gpt.py "${PARALLEL[@]}" "${BATCH[@]}"
"""
RECIPE = """
model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=2 model.sequence_parallel=True
train.micro_batch_size=1 train.global_batch_size=64 model.seq_length=4096 --bf16 --use-distributed-optimizer
--lr=3e-4 comm_overlap.delay_wgrad_compute=True
"""


@pytest.mark.parametrize("text", [SCRIPT, QUOTED, ARRAYS, RECIPE])
def test_a_users_own_arguments_are_read_and_the_rest_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(text)
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    expected = price_settings(
        make_request("llama3-8b", CLUSTER, global_batch=64, seq_len=4096),
        ENGINES["megatron"],
        "bf16",
        Settings(tp=2, pp=2),
    )[0]
    assert plan.stages == expected.stages
    assert notes == ("Not read of mine.sh: delay_wgrad_compute.",)


def test_a_script_of_megatron_fsdp_is_told_by_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.replace("--use-distributed-optimizer", "--use-megatron-fsdp").replace("${PP:-2}", "1"))
    plan, _ = plan_of_file(path, "llama3-8b", CLUSTER)
    assert (plan.engine, {strategy.state_shards for strategy in plan.strategies}) == ("megatron-fsdp", {4})


def test_gradients_that_megatron_keeps_in_fp16_are_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.replace("--bf16", "--fp16 --loss-scale-window 500"))
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    assert plan.precision == "fp16"
    assert "gradients in fp16 (priced in fp32" in notes[0]
    path.write_text(SCRIPT.replace("--bf16", "--fp16 --accumulate-allreduce-grads-in-fp32"))
    assert plan_of_file(path, "llama3-8b", CLUSTER)[1] == ("Not read of mine.sh: delay_wgrad_compute.",)


@pytest.mark.parametrize(("module", "unread"), [("layernorm", ""), ("core_attn", "recompute_modules, ")])
def test_modules_that_are_recomputed_are_those_that_are_priced_or_named(
    module: str, unread: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.replace("--bf16", f"--bf16 --recompute-granularity selective --recompute-modules {module}"))
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    assert {str(strategy.remat) for strategy in plan.strategies[1:-1]} == {"selective"}
    assert notes == (f"Not read of mine.sh: {unread}delay_wgrad_compute.",)


CLUSTERED = """#!/bin/bash
#SBATCH --gpus-per-node=2
PARALLEL=(--tensor-model-parallel-size $SLURM_GPUS_PER_NODE --pipeline-model-parallel-size 2 --sequence-parallel)
FP8=${FP8:-0}; RECOMPUTE=none
if [ "$FP8" -eq 1 ]; then PARALLEL+=(--fp8-format hybrid); else PARALLEL+=(--bf16); fi
case $RECOMPUTE in full) PARALLEL+=(--recompute-granularity full) ;; esac
UNUSED="--use-megatron-fsdp"
CMD="torchrun --nnodes 1 pretrain_gpt.py ${PARALLEL[@]} --micro-batch-size 1 --global-batch-size 64 --seq-length 4096"
srun bash -c "$CMD --use-distributed-optimizer --delay-wgrad-compute"
"""
IN_YAML = """
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --micro-batch-size: 1
  --global-batch-size: 64
  --seq-length: 4096
  --bf16: true
  --fp16: false
  --delay-wgrad-compute: true
"""
OF_PRIMUS = """
exp_name: ${NAME:mine}
modules:
  pre_trainer:
    framework: megatron
    overrides:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      sequence_parallel: true
      use_distributed_optimizer: true
      micro_batch_size: 1
      global_batch_size: 64
      seq_length: 4096
      recompute_granularity: null
      delay_wgrad_compute: true
"""


@pytest.mark.parametrize(("file", "text"), [("job.sbatch", CLUSTERED), ("a.yaml", IN_YAML), ("a.yml", OF_PRIMUS)])
def test_files_with_branches_for_slurm_and_in_yaml_are_read_as_they_run(file: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text(text)
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    request = make_request("llama3-8b", CLUSTER, global_batch=64, seq_len=4096)
    expected, _ = price_settings(request, ENGINES["megatron"], "bf16", Settings(tp=2, pp=2))
    assert (plan.stages, plan.precision, plan.prediction) == (expected.stages, "bf16", expected.prediction)
    assert notes == (f"Not read of {file}: delay_wgrad_compute.",)


@pytest.mark.parametrize(
    ("flags", "remat"),
    [
        ("--checkpoint-activations", "full"),
        ("--activations-checkpoint-method uniform", "full"),
        ("--recompute-granularity selective --checkpoint-activations", "selective"),
    ],
)
def test_arguments_of_recomputation_before_2022_are_read(flags: str, remat: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.replace("--bf16", f"--bf16 {flags}"))
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    assert {str(strategy.remat) for strategy in plan.strategies[1:-1]} == {remat}
    assert notes == ("Not read of mine.sh: delay_wgrad_compute.",)


def test_an_argument_under_an_open_condition_is_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    more = 'if [ -d data ]; then MORE="--recompute-activations --save here"; fi\n'
    path.write_text(more + SCRIPT.replace("--bf16", "--bf16 $MORE"))
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    assert {str(strategy.remat) for strategy in plan.strategies[1:-1]} == {"selective"}
    assert notes[0].endswith(
        "delay_wgrad_compute, recompute_activations (under a condition that the file leaves open)."
    )


def test_a_model_that_another_engine_reads_from_the_same_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(MOE_SCRIPT)
    with pytest.raises(UserError, match="add --engine megatron-bridge"):
        plan_of_file(path, "deepseek-v3", CLUSTER)


MOE_SCRIPT = """
    --expert-model-parallel-size 8 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 64
    --seq-length 4096 --bf16 --moe-grouped-gemm
"""


@pytest.mark.parametrize(
    ("text", "model", "engine", "precision"),
    [
        (SCRIPT.replace("--bf16", '--bf16 "--fp8-format hybrid"'), "llama3-8b", "megatron", "fp8"),
        (SCRIPT.replace("--bf16", "--bf16 --grad-reduce-in-bf16"), "llama3-8b", "megatron+bf16-gradients", "bf16"),
        (
            SCRIPT.replace("--bf16", "--bf16 --fp8-format hybrid --fp8-param-gather --cross-entropy-loss-fusion"),
            "llama3-8b",
            "megatron+fp8-parameters+fused-loss",
            "fp8",
        ),
        (SCRIPT.replace("--bf16", "--bf16 --tp-comm-overlap"), "llama3-8b", "megatron+tp-overlap", "bf16"),
        (
            SCRIPT.replace("--bf16", "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16")
            + "--exp-avg-sq-dtype bf16 --cuda-graph-impl transformer_engine --cross-entropy-loss-fusion "
            "--cross-entropy-fusion-impl te",
            "llama3-8b",
            "megatron+bf16-moments+cuda-graphs",
            "bf16",
        ),
        (MOE_SCRIPT, "mixtral-8x7b", "megatron+allgather", "bf16"),  # Megatron's default
        (MOE_SCRIPT + "--moe-token-dispatcher-type alltoall", "mixtral-8x7b", "megatron", "bf16"),
        (
            MOE_SCRIPT + "--moe-token-dispatcher-type flex --moe-router-force-load-balancing",
            "mixtral-8x7b",
            "megatron+deepep+balanced",
            "bf16",
        ),
    ],
)
def test_switches_of_megatron_are_options_of_the_engine_with_their_price(
    text: str, model: str, engine: str, precision: Precision, tmp_path: Path
) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(text)
    plan, notes = plan_of_file(path, model, CLUSTER)
    assert (plan.engine, plan.precision) == (engine, precision)
    assert not any("moe" in note or "grad_reduce" in note or "fp8" in note for note in notes)
    request = make_request(model, CLUSTER, global_batch=64, seq_len=4096)
    settings = Settings(tp=2, pp=2) if model == "llama3-8b" else Settings(ep=8, sp=False)
    expected, _ = price_settings(request, engine_of(engine), precision, settings)
    plain, _ = price_settings(request, ENGINES["megatron"], "bf16", settings)
    assert plan.prediction == expected.prediction
    assert (plan.prediction == plain.prediction) == (engine == "megatron" and precision == "bf16")


@pytest.mark.parametrize(
    ("lines", "engine", "levers", "unread"),
    [
        ("[model]\nflavor = '8B'\nconverters = []", "torchtitan+whole-loss", {}, ""),
        (
            "[model]\nflavor = '8B'\nconverters = ['float8']\n[float8]\nrecipe_name = 'rowwise'",
            "torchtitan+whole-loss",
            {"float8": "rowwise"},
            "",
        ),
        ("[compile]\nenable = true\n[optimizer]\nlr = 0.1", "torchtitan+whole-loss+compile", {}, ""),
        (
            "compile = true\n[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true",
            "torchtitan+whole-loss+compile+async-tp",
            {},
            "",
        ),
        ("[compile]\nenable = false", "torchtitan+whole-loss", {}, ""),
        ("[compile]\nenable = true\ncomponents = ['loss']", "torchtitan+whole-loss", {}, "components ['loss'] (priced"),
        ("[optimizer]\nname = 'AdamW'", "torchtitan+whole-loss", {}, ""),
        ("[optimizer]\nname = 'Muon'", "torchtitan+whole-loss", {}, "optimizer.name"),
        ("[model]\nflavor = '8B-mine'", "torchtitan+whole-loss", {}, "flavor 8B-mine (priced as llama3.1-8b)"),
        ("[float8]\nenable_float8_linear = false", "torchtitan+whole-loss", {}, ""),
        ("[activation_checkpoint]\nselective_ac_option = '2'", "torchtitan+whole-loss", {}, "ac_option 2 (priced"),
        ("dtype = 'bfloat16'", "torchtitan+whole-loss", {"weights": "bf16"}, ""),
        (
            "dtype = 'bfloat16'\nenable_cpu_offload = true",
            "torchtitan+whole-loss",
            {"offload": "parameters"},
            "training.dtype bfloat16 (priced in float32)",
        ),
        ("enable_cpu_offload = true", "torchtitan+whole-loss", {"offload": "parameters"}, ""),
    ],
)
def test_what_a_torchtitan_file_switches_on_is_priced_or_named(
    lines: str, engine: str, levers: dict[str, str], unread: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    given = "" if "checkpoint" in lines else "[activation_checkpoint]\nmode = 'none'\n"
    path.write_text(f"{given}[training]\nbatch_size = 1\nseq_len = 4096\n{lines}\n")
    plan, notes = plan_of_file(path, "llama3.1-8b", FEW_TRACED)
    assert plan.engine == engine
    assert plan.levers == levers
    assert unread in notes[0] if unread else not notes


RETURNED = """
from torchtitan.trainer import Trainer
LENGTH: int = 4096

def mine(**more):
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=10),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )

def in_8_bits():
    config = mine()
    config.model_converters = ModelConvertersContainer.Config(converters=[Float8LinearConverter.Config()])
    return config

def larger():
    config = mine()
    config.training.local_batch_size = 4
    return config
"""
RECIPES = """
from megatron.bridge.recipes.common import _pretrain_common
LENGTH = 4096
def small():
    cfg = _pretrain_common()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = LENGTH
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 64
    return cfg
def large():
    cfg = _pretrain_common()
    cfg.model.pipeline_model_parallel_size = 4
    return cfg
"""


@pytest.mark.parametrize(
    ("text", "name", "model", "engine", "strategy"),
    [
        (RETURNED, "larger", "llama3.1-8b", "torchtitan+whole-loss", "fsdp4-tp2+sp remat=full"),
        (RETURNED, "in_8_bits", "llama3.1-8b", "torchtitan+whole-loss", "fsdp4-tp2+sp remat=full"),
        (RECIPES, "small", "llama3-8b", "megatron-bridge", "dp4-tp2+sp"),
    ],
)
def test_one_function_of_a_python_file_is_read_with_those_that_it_calls(
    text: str, name: str, model: str, engine: str, strategy: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    plan, _ = plan_of_file(tmp_path / f"mine.py:{name}", model, CLUSTER, engine=engine.partition("+")[0])
    assert (plan.engine, str(plan.strategies[1]), plan.seq_len) == (engine, strategy, 4096)
    assert plan.global_batch == {"larger": 16, "in_8_bits": 8, "small": 64}[name]
    assert plan.levers == ({"float8": "rowwise"} if name == "in_8_bits" else {})
    with pytest.raises(UserError, match=f"name one of .*{name}"):
        plan_of_file(path, model, CLUSTER)
    with pytest.raises(UserError, match=f"did you mean .*{name}"):
        plan_of_file(tmp_path / f"mine.py:{name}s", model, CLUSTER)


AXOLOTL = """
base_model: meta-llama/Meta-Llama-3-8B
adapter: qlora
load_in_4bit: true
load_in_8bit: false
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
wandb_project:
"""
LORA_OF_AXOLOTL = "lora:r=32,alpha=16,targets=q_proj+v_proj,dropout=0.05"


@pytest.mark.slow
def test_axolotls_yaml_is_read_as_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "lora.yml"
    path.write_text(AXOLOTL)
    plan, notes = plan_of_file(path, "llama3-8b", "1x1xrtx-4090")
    assert (plan.engine, plan.precision, plan.global_batch, plan.seq_len) == ("accelerate", "bf16", 8, 2048)
    assert plan.levers == {"train": LORA_OF_AXOLOTL, "base": "nf4", "optimizer": "adamw-8bit"}
    assert {str(strategy) for strategy in plan.strategies} == {"single", "single remat=full"}
    assert notes == ("Not read of lora.yml: optimizer adamw_bnb_8bit (priced as adamw-8bit).",)
    full = AXOLOTL.partition("adapter")[0] + AXOLOTL.partition("dropout: 0.05")[2].replace("sample_packing: true", "")
    path.write_text(full.replace("adamw_bnb_8bit", "adamw_torch") + "fsdp_config: {reshard_after_forward: false}\n")
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    assert str(plan.strategies[1]) == "fsdp8 zero2 remat=full"
    assert (plan.levers, plan.global_batch) == ({}, 64)
    assert "sample_packing, which is off (priced with full sequences)" in notes[0]


@pytest.mark.slow
def test_names_of_layers_that_a_model_lacks_are_left_out_as_by_peft(tmp_path: Path) -> None:
    path = tmp_path / "lora.yml"
    path.write_text(AXOLOTL.replace("[q_proj, v_proj]", "[q_proj, c_attn, v_proj, w1]"))
    plan, notes = plan_of_file(path, "llama-demo", "1x1xrtx-4090")
    assert plan.levers["train"] == LORA_OF_AXOLOTL
    assert "the targets c_attn, w1 of adapters (no such layers)" in notes[0]
    with pytest.raises(UserError, match=r"targets=c_attn, which is not the end"):  # a mistake where the user says it
        plan_of_file(path, "llama-demo", "1x1xrtx-4090", levers={"train": "lora:r=32,targets=q_proj+c_attn"})
    path.write_text(AXOLOTL.replace("[q_proj, v_proj]", "[c_attn, w1]"))
    with pytest.raises(UserError, match=r"targets=c_attn\+w1, which is not the end"):
        plan_of_file(path, "llama-demo", "1x1xrtx-4090")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("levers", "cluster", "settings"),
    [
        ({}, CLUSTER, Settings(zero=3, sp=False, remat=Remat.FULL, micro_batch=2)),
        ({"offload": "parameters"}, CLUSTER, Settings(zero=3, sp=False)),
        ({"weights": "bf16"}, CLUSTER, Settings(zero=0, sp=False)),
        ({"train": LORA_OF_AXOLOTL, "base": "nf4", "optimizer": "adamw-8bit"}, "1x1xrtx-4090", Settings(zero=0)),
    ],
)
def test_what_is_written_for_axolotl_is_read_again(
    levers: dict[str, str], cluster: str, settings: Settings, tmp_path: Path
) -> None:
    request = make_request("llama3-8b", cluster, global_batch=16, seq_len=2048, levers=levers, engine="accelerate")
    plan, _ = price_settings(request, ENGINES["accelerate"], "bf16", settings)
    written = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(cluster))
    path = tmp_path / "axolotl.yaml"
    path.write_text(dict(export_plan(TARGETS["axolotl"], written).files)["axolotl.yaml"])
    again, notes = plan_of_file(path, "llama3-8b", cluster)
    assert not notes
    assert again.chosen_levers == plan.chosen_levers
    assert again.prediction == plan.prediction


def test_levers_that_a_file_cannot_say_are_given_with_it_or_named(tmp_path: Path) -> None:
    levers = {"train": "lora:r=16,alpha=32,targets=all-linear", "optimizer": "sgd"}
    request = make_request("llama-demo", FEW_TRACED, global_batch=16, seq_len=256, levers=levers, engine="deepspeed")
    plan, _ = price_settings(request, ENGINES["deepspeed"], "bf16", Settings(zero=2, sp=False))
    written = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(FEW_TRACED))
    path = tmp_path / "ds_config.json"
    path.write_text(dict(export_plan(TARGETS["deepspeed"], written).files)["ds_config.json"])
    told, notes = plan_of_file(path, "llama-demo", FEW_TRACED, seq_len=256, levers=levers)
    assert (told.prediction, notes) == (plan.prediction, ())
    _, notes = plan_of_file(path, "llama-demo", FEW_TRACED, seq_len=256, levers={"train": levers["train"]})
    assert "Assumed, because ds_config.json cannot say it: --optimizer adamw." in notes


@pytest.mark.parametrize(
    ("entries", "micro_batch", "batch"),
    [
        ({"train_batch_size": 32}, 4, 32),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 2, 32),
        ({"train_micro_batch_size_per_gpu": 2}, 2, 16),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 2, 64),
        ({"train_micro_batch_size_per_gpu": 1, "train_batch_size": 32, "gradient_accumulation_steps": "auto"}, 1, 32),
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, 1, 24),
    ],
)
def test_batches_follow_from_each_other_as_in_deepspeed(
    entries: dict[str, Any], micro_batch: int, batch: int, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **entries}))
    asked = {"micro_batch": 1, "global_batch": 24} if batch == 24 else {}
    plan, _ = plan_of_file(path, "llama-demo", CLUSTER, seq_len=256, **asked)
    assert (plan.global_batch, plan.num_microbatches) == (batch, batch // 8 // micro_batch)


COMMENTED = """{ // of the cluster
  "train_micro_batch_size_per_gpu": 1, # "bf16": {"enabled": true},
  "fp16": {"enabled": "auto"}, /* or
  bf16 */ "zero_optimization": {"stage": 2, "cpu_offload": true, "offload_param": {"device": "cpu"},},
}"""


def test_jsons_comments_and_older_entries_of_deepspeed_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(COMMENTED)
    plan, notes = plan_of_file(path, "llama-demo", CLUSTER, seq_len=256)
    assert (plan.precision, plan.levers, str(plan.strategies[1])) == ("fp16", {"offload": "optimizer"}, "fsdp8 zero2")
    assert notes[0] == "Not read of mine.json: the precision, which is auto (priced in fp16)."


def test_what_a_trainer_fills_in_later_is_said_or_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    content = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": '
    path.write_text(content + '"none"}}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}')
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER, global_batch=16, seq_len=2048)
    assert plan.precision == "bf16"
    assert notes == (
        "Not read of mine.json: the precision, which is auto (priced in bf16).",
        "Assumed, because mine.json cannot say it: --train full, --optimizer adamw.",
    )
    path.write_text(content + '"cpu"}}}')
    with pytest.raises(UserError, match="param on cpu, optimizer on none"):
        plan_of_file(path, "llama3-8b", CLUSTER, global_batch=16, seq_len=2048)


def _offloading(stage: int, **parts: Any) -> str:
    zero = {"stage": stage, **{f"offload_{name}": part for name, part in parts.items()}}
    return json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": True}})


def test_a_part_of_offload_that_changes_its_price_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(_offloading(3, param=None, optimizer={"device": "cpu", "pin_memory": True, "ratio": 0.3}))
    plan, notes = plan_of_file(path, "llama-demo", CLUSTER, global_batch=16, seq_len=256)
    assert plan.levers == {"offload": "optimizer"}
    assert notes[0] == "Not read of mine.json: zero_optimization.offload_optimizer.ratio."


@pytest.mark.parametrize(
    ("stage", "parts", "found"),
    [
        (2, {"optimizer": "nvme"}, "param on none, optimizer on nvme with ZeRO 2"),
        (3, {"param": "nvme", "optimizer": "cpu"}, "param on nvme, optimizer on cpu with ZeRO 3"),
        (3, {"param": "cpu"}, "param on cpu, optimizer on none with ZeRO 3"),
        (0, {"optimizer": "cpu"}, "param on none, optimizer on cpu with ZeRO 0"),
    ],
)
def test_offload_without_a_price_is_refused(stage: int, parts: dict[str, str], found: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(_offloading(stage, **{name: {"device": device} for name, device in parts.items()}))
    with pytest.raises(UserError) as error:
        plan_of_file(path, "llama-demo", "1x1xa100-40gb", global_batch=1, seq_len=256)
    assert error.value.found == found
    assert error.value.field == f"zero_optimization.offload_{next(iter(parts))}.device"


def test_an_optimizer_that_a_file_replicates_is_said_with_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.replace("--use-distributed-optimizer", ""))
    _, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    assert any("replicates the optimizer" in note and "GiB per device" in note for note in notes)


@pytest.mark.parametrize(
    ("file", "text", "field"),
    [
        ("mine.yaml", "", "--from"),
        ("mine.yaml", "step_scheduler: {local_batch_size: 1}", "--from"),
        ("mine.yaml", "a: [", "--from"),
        ("mine.yaml", "- 1", "--from"),
        ("mine.yaml", "sequence_len: 8\ndeepspeed: zero3.json", "deepspeed"),
        ("mine.yaml", "sequence_len: 8\nload_in_8bit: true", "load_in_8bit"),
        ("mine.yaml", "sequence_len: auto\nmicro_batch_size: 1", "sequence_len"),
        ("mine.txt.other", "", "--from"),
        ("mine.sh", "--global-batch-size 64", "--seq-len"),
        ("mine.sh", "--seq-length 4096", "--global-batch"),
        ("mine.sh", "--tensor-model-parallel-size $TP", "tensor_model_parallel_size"),
        ("mine.sh", "--num-layers 80", "--from"),
        ("mine.sh", "--ffn-hidden-size 11008", "--from"),
        ("mine.sh", "--num-experts 8", "--from"),
        ("mine.sh", "--vocab-size 32000", "--from"),
        ("mine.sh", "--tensor-model-parallel-size 2 --optimizer-cpu-offload", "--from"),
        ("mine.sh", "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6", "--from"),
        ("mine.sh", "--moe-token-dispatcher-type other", "moe_token_dispatcher_type"),
        ("mine.sh", "--tensor-model-parallel-size 2 --zero-stage 3", "--from"),
        ("mine.sh", "--tensor-model-parallel-size 2 --use-torch-fsdp2", "--from"),
        ("mine.sh", "--seq-length 8 --recompute-granularity $AC", "recompute_granularity"),
        ("mine.sh", "--seq-length 8 --global-batch-size 8", "--micro-batch"),
        ("mine.sh", "TP=2 GBS=64 bash ./other.sh --recompute-granularity full", "--from"),
        ("mine.yaml", "a:\n  tensor_model_parallel_size: ${TP}", "tensor_model_parallel_size"),
        ("mine.json", '{"train_batch_size": 20}', "train_batch_size"),
        ("mine.json", '{"sequence_parallel_size": 2}', "sequence_parallel_size"),
        ("mine.sh", "if A; then\nTP=2\nelse\nTP=4\nfi\n--tensor-model-parallel-size $TP", "tensor_model_parallel_size"),
        ("mine.sh", "--global-batch-size $((64/0)) --seq-length 8", "global_batch_size"),
        ("mine.toml", "[training]\nmixed_precision_param = 'float16'", "--precision"),
        ("mine.toml", "[training", "--from"),
        ("mine.toml", "[activation_checkpoint]\nmode = 'some'", "activation_checkpoint.mode"),
        ("mine.toml", "[parallelism]\ntensor_parallel_degree = 0", "parallelism.tensor_parallel_degree"),
        ("mine.toml", "[parallelism]\ndata_parallel_shard_degree = 4", "--cluster"),
        ("mine.toml", "[project]\nname = 'other'", "--from"),
        ("mine.toml", "[model]\nflavor = '70B'\n[training]\nseq_len = 8", "--from"),
        ("mine.toml", "[model]\nname = 'qwen3'\nflavor = '8B'\n[training]\nseq_len = 8", "--from"),
        ("mine.toml", "x = 1\n[parallelism]\nmodule_fqns_per_model_part = [1]", "--from"),
        ("mine.json", "{", "--from"),
        ("mine.json", "[]", "--from"),
        ("mine.json", '{"train_micro_batch_size_per_gpu": "auto"}', "--global-batch"),
        ("absent.sh", None, "--from"),
        ("mine.py", "import other\n", "--from"),
        ("mine.sh", "torchrun --nproc-per-node 8 train.py --lr 3e-4", "--from"),
        ("mine.json", '{"optimizer": {"type": "Adam"}}', "--from"),
        ("mine.py", "import megatron.bridge\nx = LoRA(dim=8)\n", "--from"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(file: str, text: str | None, field: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError) as error:
        plan_of_file(tmp_path / file, "llama3.1-8b" if file.endswith("toml") else "llama3-8b", CLUSTER)
    assert error.value.field == field


def test_an_engine_without_a_reader_says_which_have_one(tmp_path: Path) -> None:
    (tmp_path / "mine.sh").write_text("")
    with pytest.raises(UserError, match=r"torchtitan: \.toml or \.py; .*megatron: \.sh"):
        plan_of_file(tmp_path / "mine.sh", "llama3-8b", CLUSTER, engine="accelerate")


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        ("--pipeline-model-parallel-layout 'Et*7|(t*8|)*2t*9mL'", (7, 8, 8, 9)),
        ("--pipeline-model-parallel-layout Et\\*7\\|t\\*8\\|t\\*8\\|t\\*9L", (7, 8, 8, 9)),
        ("--pipeline-model-parallel-layout 'Et*7|t*8|t*8|t*8tm*2L'", (7, 8, 8, 9)),
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7", (7, 9, 9, 7)),
        ("--decoder-last-pipeline-num-layers 5", (9, 9, 9, 5)),
        ("--decoder-last-pipeline-num-layers 8 --num-virtual-stages-per-pipeline-rank 2", (4,) * 8),
    ],
)
def test_uneven_stages_of_a_script_are_read(flags: str, blocks: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.replace("${PP:-2}", "4").replace("--bf16", f"--bf16 {flags}"))
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    found = [len(part.layers) for part in plan.parts]
    assert tuple(each - (place in (0, len(found) - 1)) for place, each in enumerate(found)) == blocks
    assert notes == ("Not read of mine.sh: delay_wgrad_compute.",)


def test_blocks_that_count_an_end_as_one_leave_it_room(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.replace("${PP:-2}", "3").replace("$TP", "1") + "--account-for-loss-in-pipeline-split")
    plan, _ = plan_of_file(path, "llama3-8b", "1x3xh100-80gb", global_batch=6)
    assert [len(part.layers) for part in plan.parts] == [12, 11, 11]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SWITCHES, "allgather", "deepep", "balanced"])
def test_a_switch_of_megatron_is_written_and_read_again(name: str, tmp_path: Path) -> None:
    has_experts = name in ("ep-overlap", "allgather", "deepep", "balanced")
    model = "mixtral-8x7b" if has_experts else "llama3-8b"
    precision: Precision = "fp8" if name == "fp8-parameters" else "bf16"
    settings = Settings(ep=8, sp=False) if has_experts else Settings(tp=2)
    request = make_request(model, CLUSTER, global_batch=16, seq_len=4096)
    plan, _ = price_settings(request, engine_of(f"megatron+{name}"), precision, settings)
    written = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(CLUSTER))
    path = tmp_path / "megatron.sh"
    path.write_text(dict(export_plan(TARGETS["megatron"], written).files)["megatron.sh"])
    again, notes = plan_of_file(path, model, CLUSTER)
    assert (again.engine, again.prediction) == (plan.engine, plan.prediction)
    assert not any("overlap" in note or "moe" in note for note in notes)


@pytest.mark.parametrize(
    ("flags", "ranks", "told"),
    [
        ("--expert-model-parallel-size 4", 8, "expert_tensor_parallel_size 2 (priced as whole experts over as many"),
        ("--expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 4, ""),
        ("--expert-model-parallel-size 8", 8, "expert_tensor_parallel_size 2 (priced as 1)"),
    ],
)
def test_experts_are_divided_over_tp_unless_a_script_says_otherwise(
    flags: str, ranks: int, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(
        MOE_SCRIPT.replace("--expert-model-parallel-size 8", f"{flags} --tensor-model-parallel-size 2")
        + "--sequence-parallel --moe-token-dispatcher-type alltoall"
    )
    plan, notes = plan_of_file(path, "mixtral-8x7b", "2x8xh100-80gb")
    assert {strategy.expert_degree for strategy in plan.strategies[1:-1]} == {ranks // 2}
    assert told in notes[0] if told else not notes


def test_a_switch_with_another_value_is_not_on_but_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    moments = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16"
    path.write_text(SCRIPT.replace("--bf16", f"--bf16 {moments}"))
    plan, notes = plan_of_file(path, "llama3-8b", CLUSTER)
    assert plan.engine == "megatron"
    assert "exp_avg_dtype" in notes[0]


def test_a_switch_that_a_plan_leaves_without_effect_is_not_written() -> None:
    engine = engine_of("megatron+tp-overlap+ep-overlap+fp8-parameters")
    request = make_request("llama3-8b", CLUSTER, global_batch=16, seq_len=4096)
    plan, _ = price_settings(request, engine, "bf16", Settings(pp=2, vpp=2))
    written = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(CLUSTER))
    text = dict(export_plan(TARGETS["megatron"], written).files)["megatron.sh"]
    assert not any(flag in text for name in engine.name.split("+")[1:] for flag in SWITCHES[name].flags)
    assert Remat.FULL not in engine.capabilities.remats
    with pytest.raises(UserError, match="1f1b"):
        price_settings(request, engine, "bf16", Settings(pp=2))


@pytest.mark.parametrize("option", ["whole-loss", "compile", "async-tp"])
def test_an_option_of_torchtitan_is_written_and_read_again(option: str, tmp_path: Path) -> None:
    request = make_request("llama3.1-8b", CLUSTER, global_batch=16, seq_len=4096)
    engine = engine_of(f"torchtitan+{option}")
    plan, _ = price_settings(request, engine, "bf16", Settings(tp=2, zero=3))
    written = Request(plan=plan, headline="", unsupported=(), cluster=parse_cluster(CLUSTER))
    for file, content in export_plan(TARGETS["torchtitan"], written).files:
        path = tmp_path / file
        path.write_text(content)
        again, notes = plan_of_file(path, "llama3.1-8b", CLUSTER)
        assert (again.prediction == plan.prediction) or path.suffix == ".toml"
        assert not notes


def test_experts_in_8_bits_have_one_price_as_settings_and_as_a_plan() -> None:
    asked: dict[str, Any] = {"global_batch": 64, "seq_len": 4096}
    settings = Settings(ep=8, sp=False)
    plan, _ = price_settings(make_request("qwen3-30b-a3b", CLUSTER, **asked), ENGINES["megatron"], "fp8", settings)
    as_planned = make_request("qwen3-30b-a3b", CLUSTER, engine="megatron", precision="fp8", **asked)
    assert with_price(plan, job_of(as_planned)).prediction == plan.prediction
