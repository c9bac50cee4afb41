"""A plan for torchtitan: configuration functions for 0.3 and for main, and the TOML of 0.2 for those who stay with it.

Names are those of ``torchtitan/config/configs.py``, ``distributed/activation_checkpoint.py`` and ``trainer.py`` of
0.3.0, the newest release; of ``config/parallelism.py`` (commit 15e2431) and ``config/training.py`` (f204eb6) on main;
and of ``config/job_config.py`` of 0.2.2. From 0.2 to 0.3 the TOML files gave way to Python functions
(pytorch/torchtitan pull request 2386), and the output projection ``output`` became ``lm_head``. Main counts tokens
where 0.3 counts samples, gives a pipeline the number of its microbatches instead of their size, and has another name
for the cuts. All of them shard states over the ranks of cp as well, together with those of fsdp, and divide experts
over these ranks and those of tp, never over replicas (``distributed/parallel_dims.py``).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.cost.execution import TORCHTITAN
from steelyard.errors import UserError
from steelyard.export.target import Draft, PipelinePart, Request, Target, UniformPlan
from steelyard.model.chain import ModelChain
from steelyard.plan.capabilities import Capabilities, dimensions_of
from steelyard.plan.dimensions.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.schedules import SCHEDULES

CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of(
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
        left_out.append(
            "selective remat to the letter: torchtitan 0.3 also recomputes every second matrix product, which the "
            "price counts; main keeps the regions that its models declare, which it does not"
        )
    if view.fsdp > 1:
        left_out.append("communication hidden otherwise: torchtitan prefetches by FSDP's own order")
    if view.cp > 1:
        left_out.append("how keys and values are gathered, to the letter: torchtitan takes PyTorch's own attention")
    if view.tp > 1 and not view.sp:
        left_out.append("tp without sp in the .toml: 0.2 always shards the sequence beside tp")
    name = "steelyard_" + re.sub(r"[^a-z0-9]+", "_", request.plan.model.name.lower())
    start, size = request.torchrun, re.sub(r"[.-]", "_", flavor.lower())
    return Draft(
        files=(
            (f"{name}.py", _configuration(view, RELEASE, folder, size, name)),
            (f"{name}_main.py", _configuration(view, MAIN, folder, size, f"{name}_main")),
            (f"{name}.toml", _toml(view, folder, flavor)),
        ),
        carried=view.carried,
        left_out=tuple(left_out),
        usage=(
            f"torchtitan 0.3: put {name}.py on PYTHONPATH, then on every host {start} "
            f"-m torchtitan.train --module {name} --config {name}",
            f"torchtitan on main: the same with {name}_main",
            f"torchtitan 0.2: on every host {start} -m torchtitan.train --job.config_file {name}.toml",
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
            hint="export --to pytorch, which builds any of our models with transformers",
        )
    return known


def _fqns(part: PipelinePart, output: str) -> list[str]:
    names = ["tok_embeddings"] * part.has_embedding
    names += [f"layers.{block}" for block in part.blocks]
    return names + ["norm", output] * part.has_head


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """A version that is configured by a function: where its classes are, and what it calls the sizes of a batch."""

    parallelism: str
    """The module of ``ParallelismConfig``."""
    cuts: str
    """The key of the modules of each part of a pipeline."""
    counts_tokens: bool
    """Whether sizes of batches are tokens, and a pipeline has a number of microbatches."""


RELEASE = _Version(parallelism="torchtitan.config", cuts="module_fqns_per_model_part", counts_tokens=False)
MAIN = _Version(
    parallelism="torchtitan.config.parallelism",
    cuts="pipeline_parallel_module_fqns_per_model_part",
    counts_tokens=True,
)


def _training(view: UniformPlan, version: _Version) -> dict[str, Any]:
    has_stages = view.pipeline.num_stages > 1
    # samples that one data rank takes in one forward: all microbatches of a pipeline, one of them without
    sizes: dict[str, Any] = {
        "local_batch_size": view.microbatch_per_rank * (view.pipeline.num_microbatches if has_stages else 1),
        "global_batch_size": view.global_batch,
        "seq_len": view.seq_len,
    }
    if version.counts_tokens:
        sizes = {
            "num_tokens_per_microbatch_per_dp_rank": view.microbatch_per_rank * view.seq_len,
            "num_tokens_per_train_step": view.global_batch * view.seq_len,
            "max_context_length": view.seq_len,
        }
    sizes["mixed_precision_param"] = "bfloat16" if view.precision == "bf16" else "float32"
    return sizes | ({"disable_cuda_graphs": True} if has_stages else {})


def _parallelism(view: UniformPlan, version: _Version) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": view.dp,
        "data_parallel_shard_degree": view.fsdp,
        "tensor_parallel_degree": view.tp,
        "pipeline_parallel_degree": view.pipeline.num_stages,
    }
    if view.fsdp > 1:
        found["fsdp_reshard_after_forward"] = "always" if view.zero == 3 else "never"
    if view.cp > 1:
        found["context_parallel_degree"] = view.cp
    if view.tp > 1:
        found["enable_sequence_parallel"] = view.sp
    if view.has_experts:
        found["expert_parallel_degree"] = view.ranks_of_experts
    if view.pipeline.num_stages > 1:
        found["pipeline_parallel_schedule"] = view.pipeline.schedule.torchtitan_name
        if version.counts_tokens:
            found["num_pp_microbatches"] = view.pipeline.num_microbatches
        else:
            found["pipeline_parallel_microbatch_size"] = view.microbatch_per_rank
        found[version.cuts] = [_fqns(part, "lm_head") for part in view.parts]
    return found


def _configuration(view: UniformPlan, version: _Version, folder: str, size: str, function: str) -> str:
    wrapper = {Remat.NONE: None, Remat.SELECTIVE: "SelectiveAC", Remat.FULL: "FullAC"}[view.remat]
    lines = [
        f"from {version.parallelism} import ParallelismConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {wrapper}"] if wrapper else []),
        f"from torchtitan.models.{folder}.config_registry import {folder}_{size}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        f"def {function}() -> Trainer.Config:",
        f"    config = {folder}_{size}()",
        *(f"    config.training.{key} = {value!r}" for key, value in _training(view, version).items()),
        f"    config.activation_checkpoint = {f'{wrapper}.Config()' if wrapper else None}",
        "    config.parallelism = ParallelismConfig(",
        *(f"        {key}={value!r}," for key, value in _parallelism(view, version).items()),
        "    )",
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _toml(view: UniformPlan, folder: str, flavor: str) -> str:
    parallelism = _parallelism(view, RELEASE)
    parallelism.pop("enable_sequence_parallel", None)
    if view.cp > 1:
        parallelism["context_parallel_rotate_method"] = "allgather"
    if RELEASE.cuts in parallelism:
        parallelism[RELEASE.cuts] = [_fqns(part, "output") for part in view.parts]
    training = _training(view, RELEASE)
    training.pop("disable_cuda_graphs", None)
    checkpoint = {"mode": str(view.remat)} | ({"selective_ac_option": "op"} if view.remat is Remat.SELECTIVE else {})
    sections: Mapping[str, Mapping[str, Any]] = {
        "model": {"name": folder, "flavor": flavor},
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": checkpoint,
    }
    # numbers, texts and lists of texts are written alike in JSON and TOML
    written = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())])
        for name, entries in sections.items()
    ]
    return "\n\n".join(written) + "\n"


TARGET = Target(
    name="torchtitan",
    software="torchtitan 0.3.0 (.py), main (_main.py) and 0.2.2 (.toml)",
    summary="configuration functions and a TOML file: degrees, cuts, schedule, activation checkpointing, batch",
    capabilities=CAPABILITIES,
    write=_write,
    execution=TORCHTITAN,
    routers="the auxiliary loss of routers: torchtitan moves their biases instead",
)
