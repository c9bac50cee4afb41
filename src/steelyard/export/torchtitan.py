"""A plan for torchtitan: a configuration function for 0.3, and the TOML of 0.2 for those who stay with it.

Names are those of ``torchtitan/config/configs.py``, ``distributed/activation_checkpoint.py`` and ``trainer.py`` of
0.3.0, and of ``config/job_config.py`` of 0.2.2. Between the two the TOML files gave way to Python functions
(pytorch/torchtitan pull request 2386), and the output projection ``output`` became ``lm_head``. Both always shard
states over the ranks of cp as well, together with those of fsdp, and divide experts over these ranks and those of tp,
never over replicas (``distributed/parallel_dims.py``).
"""

from steelyard.errors import UserError
from steelyard.export.target import Draft, Request, Target
from steelyard.export.uniform import PipelinePart, UniformPlan
from steelyard.model.chain import ModelChain
from steelyard.plan.capabilities import Capabilities, kinds_of
from steelyard.plan.kinds.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.schedules import SCHEDULES

MEANS = Capabilities(
    mixes_layers=False,
    kinds=kinds_of(
        *("dp", "fsdp", "dp+fsdp", "tp", "dp+tp", "fsdp+tp", "dp+fsdp+tp"),
        *("fsdp+cp", "fsdp+cp+tp", "dp+fsdp+cp", "dp+fsdp+cp+tp"),
        *("fsdp+ep", "fsdp+tp+ep", "dp+fsdp+ep", "dp+fsdp+tp+ep"),
    ),
    experts_within_shards=True,
    variants={"zero": frozenset({2, 3}), "sp": frozenset({False, True}), "ep": frozenset(DEGREE.texts)},
    remats=frozenset(Remat),
    pipeline="any cuts",
    schedules=frozenset(each.name for each in SCHEDULES.values() if each.torchtitan_name is not None),
)

_MODELS = {
    ("llama", 4096, 32): ("llama3", "8B"),
    ("llama", 8192, 80): ("llama3", "70B"),
    ("llama", 16384, 126): ("llama3", "405B"),
    ("qwen3", 1024, 28): ("qwen3", "0.6B"),
    ("qwen3", 2048, 28): ("qwen3", "1.7B"),
    ("qwen3", 5120, 40): ("qwen3", "14B"),
    ("qwen3", 5120, 64): ("qwen3", "32B"),
    ("qwen3_moe", 2048, 48): ("qwen3", "30B-A3B"),
    ("deepseek_v3", 7168, 61): ("deepseek_v3", "671B"),
}
"""By model type, width and blocks: the folder in torchtitan/models and the flavor there, of those for which 0.3 has a
configuration (Qwen3's 235B-A22B is a flavor without one)."""
_LLAMA3_VOCABULARY = 128256
"""Llama 2 has the same widths as Llama 3 and is not in torchtitan any more."""


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    folder, flavor = _model(request.plan.chain())
    left_out = [
        "first weights, data and optimizer: those of torchtitan's own configuration",
    ]
    if view.remat is Remat.SELECTIVE:
        left_out.append("selective remat to the letter: torchtitan also recomputes every second matrix product")
    if view.fsdp > 1:
        left_out.append("communication hidden otherwise: torchtitan prefetches by FSDP's own order")
    if view.cp > 1:
        left_out.append("how keys and values are gathered, to the letter: torchtitan takes PyTorch's own attention")
    if view.tp > 1 and not view.sp:
        left_out.append("tp without sp in the .toml: 0.2 always shards the sequence beside tp")
    files = [(f"{_function(request)}.py", _configuration(view, folder, flavor, _function(request)))]
    files.append((f"{_function(request)}.toml", _toml(view, folder, flavor)))
    return Draft(
        files=tuple(files),
        carried=view.carried,
        left_out=tuple(left_out),
        usage=(
            "torchtitan 0.3: put the .py file on PYTHONPATH, then torchrun --nproc-per-node DEVICES "
            f"-m torchtitan.train --module {_function(request)} --config {_function(request)}",
            "torchtitan 0.2: torchrun --nproc-per-node DEVICES -m torchtitan.train --job.config_file FILE.toml",
        ),
    )


def _model(chain: ModelChain) -> tuple[str, str]:
    key = (chain.family.model_type, chain.hidden_size, chain.num_layers - 2)
    known = _MODELS.get(key)
    if known is None or (known[0] == "llama3" and chain.vocab_size != _LLAMA3_VOCABULARY):
        raise UserError(
            field="--to",
            found=f"torchtitan for {chain.name} ({chain.family.model_type}, {chain.num_layers - 2} blocks of width "
            f"{chain.hidden_size}, {chain.vocab_size} tokens)",
            expected="a model that torchtitan defines: llama3 8B, 70B, 405B, qwen3 0.6B, 1.7B, 14B, 32B, "
            "30B-A3B, or deepseek_v3 671B",
            hint="export --to pytorch, which builds any of our decoder models with transformers",
        )
    return known


def _function(request: Request) -> str:
    name = "".join(letter if letter.isalnum() else "_" for letter in request.plan.model.name.lower())
    return f"steelyard_{name}"


def _local_batch(view: UniformPlan) -> int:
    """Samples that one data rank takes in one forward: all microbatches of a pipeline, one of them without."""
    return view.microbatch_per_rank * (view.pipeline.num_microbatches if view.pipeline.num_stages > 1 else 1)


def _fqns(part: PipelinePart, output: str) -> list[str]:
    names = ["tok_embeddings"] * part.has_embedding
    names += [f"layers.{block}" for block in part.blocks]
    return names + ["norm", output] * part.has_head


def _configuration(view: UniformPlan, folder: str, flavor: str, function: str) -> str:
    size = flavor.lower().replace(".", "_").replace("-", "_")
    remat = {Remat.NONE: "None", Remat.SELECTIVE: "SelectiveAC.Config()", Remat.FULL: "FullAC.Config()"}[view.remat]
    wrapper = {Remat.NONE: "", Remat.SELECTIVE: "SelectiveAC", Remat.FULL: "FullAC"}[view.remat]
    lines = [
        "from torchtitan.config import ParallelismConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {wrapper}"] if wrapper else []),
        f"from torchtitan.models.{folder}.config_registry import {folder}_{size}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        f"def {function}() -> Trainer.Config:",
        f"    config = {folder}_{size}()",
        f"    config.training.local_batch_size = {_local_batch(view)}",
        f"    config.training.global_batch_size = {view.global_batch}",
        f"    config.training.seq_len = {view.seq_len}",
        f'    config.training.mixed_precision_param = "{_dtype(view)}"',
        *(["    config.training.disable_cuda_graphs = True"] if view.pipeline.num_stages > 1 else []),
        f"    config.activation_checkpoint = {remat}",
        "    config.parallelism = ParallelismConfig(",
        f"        data_parallel_replicate_degree={view.dp},",
        f"        data_parallel_shard_degree={view.fsdp},",
        *([f'        fsdp_reshard_after_forward="{_reshard(view)}",'] if view.fsdp > 1 else []),
        *([f"        context_parallel_degree={view.cp},"] if view.cp > 1 else []),
        f"        tensor_parallel_degree={view.tp},",
        *([f"        enable_sequence_parallel={view.sp},"] if view.tp > 1 else []),
        *([f"        expert_parallel_degree={view.ranks_of_experts},"] if view.has_experts else []),
        *_pipeline_lines(view),
        "    )",
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _pipeline_lines(view: UniformPlan) -> list[str]:
    if view.pipeline.num_stages == 1:
        return ["        pipeline_parallel_degree=1,"]
    parts = "".join(f"            {_fqns(part, 'lm_head')!r},\n".replace("'", '"') for part in view.parts)
    return [
        f"        pipeline_parallel_degree={view.pipeline.num_stages},",
        f'        pipeline_parallel_schedule="{view.pipeline.schedule.torchtitan_name}",',
        f"        pipeline_parallel_microbatch_size={view.microbatch_per_rank},",
        f"        module_fqns_per_model_part=[\n{parts}        ],",
    ]


def _toml(view: UniformPlan, folder: str, flavor: str) -> str:
    lines = [
        "[model]",
        f'name = "{folder}"',
        f'flavor = "{flavor}"',
        "",
        "[training]",
        f"local_batch_size = {_local_batch(view)}",
        f"global_batch_size = {view.global_batch}",
        f"seq_len = {view.seq_len}",
        f'mixed_precision_param = "{_dtype(view)}"',
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {view.dp}",
        f"data_parallel_shard_degree = {view.fsdp}",
        *([f'fsdp_reshard_after_forward = "{_reshard(view)}"'] if view.fsdp > 1 else []),
        *(_context_lines(view) if view.cp > 1 else []),
        f"tensor_parallel_degree = {view.tp}",
        *([f"expert_parallel_degree = {view.ranks_of_experts}"] if view.has_experts else []),
        f"pipeline_parallel_degree = {view.pipeline.num_stages}",
    ]
    if view.pipeline.num_stages > 1:
        parts = ", ".join(str(_fqns(part, "output")).replace("'", '"') for part in view.parts)
        lines += [
            f'pipeline_parallel_schedule = "{view.pipeline.schedule.torchtitan_name}"',
            f"pipeline_parallel_microbatch_size = {view.microbatch_per_rank}",
            f"module_fqns_per_model_part = [{parts}]",
        ]
    lines += ["", "[activation_checkpoint]", f'mode = "{view.remat}"']
    if view.remat is Remat.SELECTIVE:
        lines.append('selective_ac_option = "op"')
    return "\n".join(lines) + "\n"


def _context_lines(view: UniformPlan) -> list[str]:
    return [f"context_parallel_degree = {view.cp}", 'context_parallel_rotate_method = "allgather"']


def _dtype(view: UniformPlan) -> str:
    return "bfloat16" if view.precision == "bf16" else "float32"


def _reshard(view: UniformPlan) -> str:
    return "always" if view.zero == 3 else "never"


TARGET = Target(
    name="torchtitan",
    software="torchtitan 0.3.0 (.py) and 0.2.2 (.toml)",
    summary="a configuration function and a TOML file: degrees, cuts, schedule, activation checkpointing, batch",
    capabilities=MEANS,
    write=_write,
)
