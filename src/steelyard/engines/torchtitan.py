"""A plan for torchtitan: configuration functions for 0.3 and for main, and a TOML file for 0.2.

Names are those of ``torchtitan/config/configs.py``, ``distributed/activation_checkpoint.py`` and ``trainer.py`` of
0.3.0, the newest release; of ``config/parallelism.py`` (commit 15e2431) and ``config/training.py`` (f204eb6) on main;
and of ``config/job_config.py`` of 0.2.2. Version 0.3 replaced the TOML files of 0.2 by Python functions
(pytorch/torchtitan pull request 2386) and renamed the output projection ``output`` to ``lm_head``. Main counts tokens
instead of samples, configures a pipeline by the number of its microbatches instead of their size, and has another name
for the cuts. All versions shard states over the ranks of fsdp and cp together, and divide experts over these ranks and
those of tp, never over replicas (``distributed/parallel_dims.py``).
"""

import ast
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steelyard.engines import peft
from steelyard.engines.capabilities import Capabilities, dimensions_of
from steelyard.engines.config_entries import ANY, ROPE, Known, completed, refuse_entries
from steelyard.engines.engine import (
    BALANCED,
    BALANCING,
    Engine,
    Entries,
    FileSettings,
    Option,
    Reader,
    Settings,
    Taken,
    flattened,
    literal,
    options_in,
)
from steelyard.engines.execution import EAGER, Execution
from steelyard.engines.pytorch import other_export
from steelyard.engines.writing import Draft, PipelinePart, Request, Target, UniformPlan, refuse_untold
from steelyard.errors import UserError
from steelyard.levers.float8 import MXFP8, Float8
from steelyard.levers.weights import Weights
from steelyard.model.chain import ModelChain
from steelyard.model.family import ROUTER_LOSS
from steelyard.plan.dimensions.ep import DEGREE
from steelyard.plan.strategy import Remat
from steelyard.schedules import SCHEDULES, USUAL

CAPABILITIES = Capabilities(
    mixes_layers=False,
    dimensions=dimensions_of(
        *("dp", "fsdp", "dp+fsdp", "tp", "dp+tp", "fsdp+tp", "dp+fsdp+tp"),
        *("fsdp+cp", "fsdp+cp+tp", "dp+fsdp+cp", "dp+fsdp+cp+tp"),
        *("fsdp+ep", "fsdp+tp+ep", "dp+fsdp+ep", "dp+fsdp+tp+ep"),
        *("fsdp+cp+ep", "fsdp+cp+tp+ep", "dp+fsdp+cp+ep", "dp+fsdp+cp+tp+ep"),
    ),
    shares_heads=False,  # models/common/decoder.py, update_from_config, as for tied models
    experts_within_shards=True,
    modes={"zero": frozenset({2, 3}), "sp": frozenset({False, True}), "ep": frozenset(DEGREE.texts)},
    modes_piped={"zero": frozenset({1})},  # torch's PipelineStage, backward_maybe_with_nosync
    pipes_tied=False,
    remats=frozenset(Remat),
    remats_split=frozenset({Remat.NONE}),  # a tenth of the speed with remat (torchtitan issue 773)
    levers_unsplit=frozenset({Float8.name}),  # which compiles blocks, see `_compiling`
    schedules=frozenset(each.name for each in SCHEDULES.values() if each.torchtitan_name is not None),
)

WHOLE_LOSS = "whole-loss"
"""Option of a loss over the whole sequence at once, as before May 2026 and with `CrossEntropyLoss`."""
COMPILED = "compile"
"""Option of compiled blocks and loss (`CompileConfig`)."""
ASYNC_TP = "async-tp"
"""Option of tensor parallelism whose collectives run beside the products, in compiled blocks."""
_FORCED = "debug.moe_force_load_balance"
DEEPEP = "deepep"
"""Option of experts whose tokens DeepEP sends and puts in order."""
_ASYNC_TP_ENTRY = "enable_async_tensor_parallel"
_ROTATION, _GATHERED = "context_parallel_rotate_method", "allgather"
_LLAMA3 = {
    **{"num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
}
_TIED = {"tie_word_embeddings": True}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Scaling of every Llama 3 flavor. A configuration function can turn it off or change its factor, the TOML cannot."""
_QWEN3 = {
    **{"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-6},
    **{"tie_word_embeddings": False, "attention_bias": False},
}
_DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flavor:
    """A model that torchtitan defines: its folder, its name there, and its config in the form of transformers."""

    model_type: str
    folder: str
    name: str
    entries: Mapping[str, Any]
    rope: tuple[Mapping[str, Any] | None, ...] = (None,)
    """Supported scalings of the rotary embedding, the flavor's own first; Llama 3's with any factor."""
    like: str = ""
    """Flavor with the configuration function that is used; its own if empty."""
    changes: tuple[str, ...] = ()
    """Lines of Python that set the values of ``entries`` in which the flavor differs."""


def _sizes(width: int, blocks: int, heads: int, ffn: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    } | others


_FLAVORS = (
    *(
        _Flavor(
            model_type="llama",
            folder="llama3",
            name=name,
            entries=_LLAMA3 | sizes,
            rope=(_LLAMA3_ROPE, None),
            like=like,
        )
        for name, sizes, like in (
            ("1B", _sizes(2048, 16, 32, 8192, **_TIED), "8B"),
            ("3B", _sizes(3072, 28, 24, 8192, **_TIED), "8B"),
            ("8B", _sizes(4096, 32, 32, 14336), ""),
            ("70B", _sizes(8192, 80, 64, 28672), ""),
            ("405B", _sizes(16384, 126, 128, 53248), ""),
        )
    ),
    *(
        _Flavor(model_type="qwen3", folder="qwen3", name=name, entries=_QWEN3 | sizes, like=like)
        for name, sizes, like in (
            ("0.6B", _sizes(1024, 28, 16, 3072, **_TIED), ""),
            ("1.7B", _sizes(2048, 28, 16, 6144, **_TIED), ""),
            ("4B", _sizes(2560, 36, 32, 9728, **_TIED), "14B"),
            ("8B", _sizes(4096, 36, 32, 12288), "14B"),
            ("14B", _sizes(5120, 40, 40, 17408), ""),
            ("32B", _sizes(5120, 64, 64, 25600), ""),
        )
    ),
    *(
        _Flavor(
            model_type="qwen3_moe",
            folder="qwen3",
            name=name,
            entries={
                **(_QWEN3 | sizes),
                **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
                **{"decoder_sparse_step": 1, "mlp_only_layers": []},
            },
            like=like,
        )
        for name, sizes, like in (
            ("30B-A3B", _sizes(2048, 48, 32, 6144, num_key_value_heads=4, moe_intermediate_size=768), ""),
            (
                "235B-A22B",
                _sizes(4096, 94, 64, 12288, num_key_value_heads=4, moe_intermediate_size=1536, rope_theta=5000000),
                "30B-A3B",
            ),
        )
    ),
    _Flavor(
        model_type="deepseek_v3",
        folder="deepseek_v3",
        name="671B",
        entries={
            **_sizes(7168, 61, 128, 18432, moe_intermediate_size=2048, num_key_value_heads=128, vocab_size=129280),
            **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
            **{"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "qk_head_dim": 192, "head_dim": 64, "rope_theta": 10000, "rope_interleave": True},
            **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False},
        },
        rope=(_DEEPSEEK_ROPE,),
        changes=(
            "for block in config.model_spec.model.layers:",
            "    inner = (block.attention.q_norm, block.attention.kv_norm)",
            "    for norm in (block.attention_norm, *inner, block.ffn_norm):",
            "        norm.eps = 1e-06",
            "config.model_spec.model.norm.eps = 1e-06",
        ),
    ),
)
"""Models that 0.3 defines. Those without a configuration function take the one of a model that is ``like`` them."""
_SAME: Known = {
    **{"hidden_act": ("silu", "swish"), "attention_dropout": (0,), ROUTER_LOSS: ANY, "router_aux_loss_coef": ANY},
    "num_nextn_predict_layers": ANY,  # transformers does not train the multi-token prediction layers either
}


def _refuse(chain: ModelChain, seq_len: int) -> None:
    refuse_untold("torchtitan", chain)
    flavor_of(chain, seq_len)


def _write(request: Request) -> Draft:
    view, float8 = UniformPlan.of(request.plan), request.plan.chosen_levers.value(Float8)
    flavor, config = flavor_of(request.plan.chain(), view.seq_len)
    changes = changes_of(flavor, config)
    is_in_toml = not changes and not flavor.like
    has_functions = float8.is_default or str(float8) in _CONVERTERS
    if not is_in_toml and not has_functions:
        raise UserError(
            field="--to",
            found=f"torchtitan for a plan with --float8 {float8}, which only 0.2 supports, but it has no flavor that "
            "is the model",
            expected="row scales, which 0.3 supports",
            hint="plan with --float8 rowwise",
        )
    idle = (DEEPEP, BALANCED) if view.ranks_of_experts == 1 else ()
    options = [each for each in options_in(request.plan.engine) if each not in idle]
    is_whole, is_async = WHOLE_LOSS in options, ASYNC_TP in options
    is_compiled = COMPILED in options or is_async or not float8.is_default
    compiling = {"enable": True} if is_compiled else {}
    compiling |= {_ASYNC_TP_ENTRY: True} if is_async else {}
    left_out = {
        "initial weights, data and optimizer: set by torchtitan's own configuration"
        + (f" of {flavor.like}" if flavor.like else ""): True,
        "exact selective remat: torchtitan 0.3 also recomputes every second matrix product (included in the "
        "price); main keeps the regions that its models declare (not included)": view.remat is Remat.SELECTIVE,
        "order of prefetching: torchtitan uses FSDP's own": view.shards > 1,
        "exact gathering of keys and values: torchtitan uses PyTorch's own context parallelism": view.cp > 1,
        "tp without sp in the .toml: 0.2 always shards the sequence with tp": view.tp > 1 and not view.sp,
        "a .toml for torchtitan 0.2: it has no flavor that is the model": not is_in_toml,
        f"configuration functions for 0.3 and main, which do not support --float8 {float8}": not has_functions,
        "sums of gradients in bf16: torchtitan sums over ranks in fp32": view.is_narrow,
        "the chunked loss in the .toml: 0.2 computes the loss at once and needs more memory": not is_whole
        and is_in_toml,
    }
    lines = [*changes, *["config.loss = config.loss.loss_fn  # of the whole sequence at once"] * is_whole]
    lines += [f"config.{_FORCED} = True"] * (BALANCED in options)
    name = "steelyard_" + re.sub(r"[^a-z0-9]+", "_", request.plan.model.name.lower())
    start = f"{request.torchrun} -m torchtitan.train"
    of_functions = f"{start} --module {name} --config {name}"
    of_toml = f"{start} --job.config_file {name}.toml"
    functions = tuple(
        (f"{each}.py", _configuration(view, version, flavor, float8, lines, each, compiling, options))
        for each, version in ((name, RELEASE), (f"{name}_main", MAIN))
    )
    usages = (f"torchtitan 0.3: put {name}.py on PYTHONPATH; on main: the same with {name}_main",)
    return Draft(
        files=(
            *(functions if has_functions else ()),
            *([(f"{name}.toml", _toml(view, flavor, float8, compiling, options))] if is_in_toml else ()),
        ),
        left_out=tuple(line for line, holds in left_out.items() if holds),
        launch=of_functions if has_functions else of_toml,
        usage=(*(usages if has_functions else ()), *((f"torchtitan 0.2: {of_toml}",) if is_in_toml else ())),
    )


def flavor_of(chain: ModelChain, seq_len: int) -> tuple[_Flavor, dict[str, Any]]:
    """Return the flavor that is identical to the model, and the config's entries. Raises `UserError` if none is."""
    config = completed(chain, seq_len)
    key = (chain.family.model_type, chain.hidden_size, chain.num_layers - 2)
    for flavor in _FLAVORS:
        if key == (flavor.model_type, flavor.entries["hidden_size"], flavor.entries["num_hidden_layers"]):
            known: dict[str, tuple[Any, ...]] = {name: (value,) for name, value in flavor.entries.items()}
            known.setdefault("head_dim", (None, chain.hidden_size // flavor.entries["num_attention_heads"]))
            is_llama3 = _LLAMA3_ROPE in flavor.rope and {**(config.get(ROPE) or {}), "factor": 8.0} == _LLAMA3_ROPE
            rope = (*flavor.rope, config[ROPE]) if is_llama3 else flavor.rope
            refuse_entries("torchtitan", chain, config, {**_SAME, **known, "rope_theta": ANY, ROPE: rope})
            return flavor, config
    raise UserError(
        field="--to",
        found=f"torchtitan for {chain.name} ({chain.family.model_type}, {chain.num_layers - 2} blocks of width "
        f"{chain.hidden_size}, {chain.vocab_size} tokens)",
        expected="a model that torchtitan defines: "
        + ", ".join(f"{flavor.folder} {flavor.name}" for flavor in _FLAVORS),
        hint=other_export(chain),
    )


def changes_of(flavor: _Flavor, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return lines of Python that turn the flavor into the model in a configuration function; empty if identical."""
    rope, theta = config.get(ROPE), config["rope_theta"]
    changed = [f"theta = {theta!r}"] if theta != flavor.entries["rope_theta"] else []
    if rope != flavor.rope[0]:
        changed.append('scaling = "none"' if rope is None else f"scaling_factor = {rope['factor']!r}")
    of_blocks = [f"    block.attention.rope.{each}" for each in changed]
    return (*(["for block in config.model_spec.model.layers:"] if changed else []), *of_blocks, *flavor.changes)


def _fqns(part: PipelinePart, output: str) -> list[str]:
    names = ["tok_embeddings"] * part.has_embedding
    names += [f"layers.{block}" for block in part.blocks]
    return names + ["norm", output] * part.has_head


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """A version that is configured by a function: the place of its classes, and its names of batch sizes."""

    parallelism: str
    """Module of ``ParallelismConfig``."""
    cuts: str
    """Key of the modules of each part of a pipeline."""
    counts_tokens: bool
    """Whether batch sizes are numbers of tokens, and a pipeline is configured by its number of microbatches."""


RELEASE = _Version(parallelism="torchtitan.config", cuts="module_fqns_per_model_part", counts_tokens=False)
MAIN = _Version(
    parallelism="torchtitan.config.parallelism", cuts="pipeline_parallel_module_fqns_per_model_part", counts_tokens=True
)


def _training(view: UniformPlan, version: _Version) -> dict[str, Any]:
    has_stages = view.pipeline.num_stages > 1
    # samples of one data rank in one forward pass: all microbatches of a pipeline, or one without a pipeline
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
    sizes |= {"enable_cpu_offload": True} if view.on_host else {}
    sizes |= {"dtype": "bfloat16"} if view.is_narrow else {}
    is_refused = has_stages or view.ranks_of_experts > 1  # with graphs: `Trainer.Config._validate_cuda_graphs`
    return sizes | ({"disable_cuda_graphs": True} if is_refused else {})


def _parallelism(view: UniformPlan, version: _Version) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": view.dp,
        "data_parallel_shard_degree": view.fsdp,
        "tensor_parallel_degree": view.tp,
        "pipeline_parallel_degree": view.pipeline.num_stages,
    }
    if view.shards > 1:
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


_CONVERTERS = {
    "rowwise": "Float8LinearConverter.Config(recipe_name='rowwise', filter_fqns=['lm_head', 'router.gate'], ",
    "mxfp8": "MXFP8LinearConverter.Config(fqns=['attention', 'feed_forward'], ",
}
"""Converters of linear layers of blocks in the configuration of a model, by float8 recipe."""


def _configuration(
    view: UniformPlan,
    version: _Version,
    flavor: _Flavor,
    float8: Float8,
    changes: Sequence[str],
    function: str,
    compiling: Mapping[str, bool],
    options: Sequence[str],
) -> str:
    converter = _CONVERTERS.get(str(float8))
    folder, size = flavor.folder, re.sub(r"[.-]", "_", (flavor.like or flavor.name).lower())
    wrapper = {Remat.NONE: None, Remat.SELECTIVE: "SelectiveAC", Remat.FULL: "FullAC"}[view.remat]
    lines = [
        "from torchtitan.config import CompileConfig",
        f"from {version.parallelism} import ParallelismConfig",
        *([f"from torchtitan.components.quantization import {converter.partition('.')[0]}"] if converter else []),
        *([f"from torchtitan.distributed.activation_checkpoint import {wrapper}"] if wrapper else []),
        f"from torchtitan.models.{folder} import model_registry",
        f"from torchtitan.models.{folder}.config_registry import {folder}_{size}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        f"def {function}() -> Trainer.Config:",
        f"    config = {folder}_{size}()",
        f"    config.model_spec = model_registry({flavor.name!r}"
        + f", moe_comm_backend={DEEPEP!r}" * (DEEPEP in options)
        + (f", converters=[{converter}model_compile_enabled=True)])" if converter else ")"),
        f"    config.compile = CompileConfig({', '.join(f'{name}={value}' for name, value in compiling.items())})",
        *(f"    {line}" for line in changes),
        *(f"    config.training.{key} = {value!r}" for key, value in _training(view, version).items()),
        f"    config.activation_checkpoint = {f'{wrapper}.Config()' if wrapper else None}",
        "    config.parallelism = ParallelismConfig(",
        *(f"        {key}={value!r}," for key, value in _parallelism(view, version).items()),
        "    )",
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _toml(
    view: UniformPlan, flavor: _Flavor, float8: Float8, compiling: Mapping[str, bool], options: Sequence[str]
) -> str:
    parallelism = _parallelism(view, RELEASE)
    parallelism.pop("enable_sequence_parallel", None)
    if view.cp > 1:
        parallelism[_ROTATION] = _GATHERED
    if RELEASE.cuts in parallelism:
        parallelism[RELEASE.cuts] = [_fqns(part, "output") for part in view.parts]
    training = _training(view, RELEASE)
    training.pop("disable_cuda_graphs", None)
    checkpoint = {"mode": str(view.remat)} | ({"selective_ac_option": "op"} if view.remat is Remat.SELECTIVE else {})
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": flavor.folder, "flavor": flavor.name},
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": checkpoint,
    }
    if compiling:
        sections["compile"] = {"enable": True}
    if _ASYNC_TP_ENTRY in compiling:
        sections["parallelism"][_ASYNC_TP_ENTRY] = True
    if DEEPEP in options:
        sections["parallelism"]["expert_parallel_comm_backend"] = DEEPEP
    if BALANCED in options:
        section, _, entry = _FORCED.partition(".")
        sections[section] = {entry: True}
    if not float8.is_default:
        name, recipe = ("mx", "mxfp8_cublas") if str(float8) == MXFP8 else ("float8", str(float8))
        sections["model"]["converters"] = [f"quantize.linear.{name}"]
        filtered = {"filter_fqns": ["output", "router.gate"]}
        sections[f"quantize.linear.{name}"] = {"recipe_name": recipe} | filtered
    # numbers, strings and lists of strings have the same form in JSON and TOML
    written = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())])
        for name, entries in sections.items()
    ]
    return "\n\n".join(written) + "\n"


def _values(text: str) -> Mapping[str, Any]:
    """Return the values in a TOML file of 0.2, or in a configuration function of 0.3 or main as written here."""
    return _toml_values(text) if re.search(r"^\s*\[\w+\]\s*$", text, re.MULTILINE) else _function_values(text)


def _read(entries: Entries, chain: ModelChain, num_devices: int) -> FileSettings:
    entries.get("compile", "parallelism.num_pp_microbatches")
    _check_flavor(entries, chain)
    parallel, is_old = "parallelism.", bool(entries.get(_TOML))
    tp, cp, pp, replicas = (
        entries.number(*_degrees(kind)) for kind in ("tensor", "context", "pipeline", "data_parallel_replicate")
    )
    data = num_devices // (tp * cp * pp)
    shards = entries.number_or_none(*_degrees("data_parallel_shard")) or data // replicas
    if replicas * shards != data:
        raise UserError(
            field="--cluster",
            found=f"{num_devices} devices for degrees of {replicas * shards * tp * cp * pp}",
            expected="the product of the degrees of the file",
            hint="pass the cluster that runs the file",
        )
    keeps = str(entries.get(f"{parallel}fsdp_reshard_after_forward", default="default"))
    parts = entries.get(*(f"{parallel}{version.cuts}" for version in (RELEASE, MAIN)))
    if parts and not (isinstance(parts, list) and all(isinstance(part, list) for part in parts)):
        raise ValueError("the modules of the pipeline parts are not lists of names")
    schedule = str(entries.get(f"{parallel}pipeline_parallel_schedule", default=USUAL.torchtitan_name))
    local = entries.number("training.local_batch_size", "training.batch_size", default=8 if is_old else 1)
    micro_batch = entries.number(f"{parallel}pipeline_parallel_microbatch_size") if pp > 1 else local
    batch = entries.number_or_none("training.global_batch_size") or local * data
    usual_len = 2048 if is_old else None
    seq_len = entries.number_or_none("training.seq_len", "training.max_context_length") or usual_len
    if seq_len and "training.num_tokens_per_train_step" in entries.values:  # main counts tokens
        batch = entries.number("training.num_tokens_per_train_step") // seq_len
        micro_batch = entries.number("training.num_tokens_per_microbatch_per_dp_rank") // seq_len
    named = {each.torchtitan_name: each for each in SCHEDULES.values() if each.torchtitan_name}
    if schedule not in named:
        raise UserError(
            field=f"{parallel}pipeline_parallel_schedule",
            found=schedule,
            expected=" or ".join(named),
            hint="change it in the file",
        )
    mode = str(entries.get("activation_checkpoint.mode", default="selective" if is_old else "none"))
    remats = {"none": Remat.NONE, "selective": Remat.SELECTIVE, "full": Remat.FULL}
    if mode not in remats:
        raise UserError(
            field="activation_checkpoint.mode", found=mode, expected=" or ".join(remats), hint="change it in the file"
        )
    dtype = str(entries.get("training.mixed_precision_param", default="bfloat16"))
    levers = {"offload": "parameters"} if entries.get("training.enable_cpu_offload") else {}
    if told := _float8(entries):
        levers[Float8.name] = told
    is_compiled = bool(entries.get("compile.enable", "training.compile"))
    is_compiled &= "model" in entries.get("compile.components", default="model")
    is_async = bool(entries.get(*(f"{part}.{_ASYNC_TP_ENTRY}" for part in ("compile", "parallelism", "experimental"))))
    is_whole = is_old or "Chunked" not in str(entries.get("loss", default="Chunked"))
    chosen = {WHOLE_LOSS: is_whole, COMPILED: is_compiled and (is_old or not told), ASYNC_TP: is_async and tp > 1}
    backend = entries.get("parallelism.expert_parallel_comm_backend", "model_spec.moe_comm_backend")
    chosen = {DEEPEP: backend in (DEEPEP, "hybridep"), BALANCED: bool(entries.get(_FORCED))} | chosen
    options = tuple(name for name, is_on in chosen.items() if is_on)  # blocks in float8 are compiled anyway
    entries.skip_like(_OF_TRAINING)
    rotation = f"{parallel}{_ROTATION}"
    entries.skip(*[rotation] * (entries.values.get(rotation) == _GATHERED))
    unlike = _unlike(entries, chain, is_old=is_old, is_compiled=is_compiled)
    if entries.get("training.dtype") == "bfloat16" and levers:
        unlike.append("training.dtype bfloat16 (priced in float32)")
    elif entries.get("training.dtype") == "bfloat16":
        levers = {Weights.name: "bf16"}
    return FileSettings(
        settings=Settings(
            tp=tp,
            cp=cp,
            pp=pp,
            vpp=len(parts) // pp if parts else 2 if pp > 1 and named[schedule].takes_chunks else 1,
            schedule=named[schedule].name if pp > 1 else None,
            ep=entries.number(f"{parallel}expert_parallel_degree"),
            replicas=replicas,
            zero=(2 if keeps == "never" else 3) if shards * cp > 1 else 0,  # states are divided over cp, too
            sp=bool(entries.get(f"{parallel}enable_sequence_parallel", default=True)),
            remat=remats[mode],
            blocks=tuple(sum(str(name).startswith("layers.") for name in part) for part in parts) if parts else None,
        ),
        micro_batch=micro_batch,
        global_batch=batch,
        seq_len=seq_len,
        precision={"bfloat16": "bf16", "float32": "fp32"}.get(dtype, dtype),
        levers=levers,
        options=options,
        unread=(*entries.unread, *unlike),
    )


def _unlike(entries: Entries, chain: ModelChain, *, is_old: bool, is_compiled: bool) -> list[str]:
    """Return names and values of entries that are priced differently, and skip those with the usual value."""
    found, names = [], {each.name for each in _FLAVORS}
    if entries.get("compile.enable") and not is_compiled:
        found.append(f"compile.components {entries.get('compile.components')} (priced without compilation)")
    if (flavor := entries.get("model.flavor", "model_spec.flavor")) is not None and flavor not in names:
        found.append(f"model.flavor {flavor} (priced as {chain.name})")
    every = entries.get("activation_checkpoint.selective_ac_option", default="2" if is_old else "op")
    mode = entries.get("activation_checkpoint.mode", default="selective" if is_old else "none")
    if mode == "selective" and every != "op":
        found.append(f"activation_checkpoint.selective_ac_option {every} (priced as op)")
    entries.skip(*(name for name, usual in _USUAL.items() if entries.values.get(name) in usual))
    return found


def _check_flavor(entries: Entries, chain: ModelChain) -> None:
    """Raise `UserError` if the file names another model that torchtitan defines."""
    folder, flavor = entries.get("model.name"), entries.get("model.flavor", "model_spec.flavor")
    own, _ = flavor_of(chain, 1)
    known = {(each.folder, each.name) for each in _FLAVORS}
    if (folder or own.folder, flavor) in known - {(own.folder, own.name)}:
        raise UserError(
            field="--from",
            found=" ".join(filter(None, (folder, flavor))),
            expected=f"{own.folder} {own.name}, which is {chain.name}",
            hint="pass the model that the file trains",
        )


def _float8(entries: Entries) -> str:
    """Return the recipe of float8 in a file, empty without float8."""
    if entries.get("float8.enable_float8_linear") is False:
        return ""
    converters = (
        ("model.converters", "converters", "model_spec.converters", "model_converters.converters"),
        ("quantize.linear",),
    )
    old = ("float8.recipe_name",), ("float8.enable_float8_linear",)
    told = "".join(str(each) for each in [entries.get(*names) for names in (*converters, *old)] if each)
    usual = "rowwise" if "Converter" in told else "tensorwise"  # of 0.3, and of 0.2
    word = MXFP8 if "mx" in told.lower() else next((each for each in Float8.values[1:] if each in told), usual)
    return word if told else ""


def _degrees(kind: str) -> tuple[str, ...]:
    """Return the entries of a degree, at first in the sections of 2024."""
    name = kind if kind.startswith("data") else f"{kind}_parallel"
    return tuple(f"{section}.{name}_degree" for section in ("parallelism", "training", "experimental"))


_TOML = "toml"
"""Name under which the values of a TOML file, of 0.2 or before, say that they are."""


def _toml_values(text: str) -> dict[str, Any]:
    sections = tomllib.loads(text)
    if {"training", "parallelism", "activation_checkpoint"}.isdisjoint(sections):
        raise ValueError("none of the sections training, parallelism and activation_checkpoint")
    return {_TOML: True} | flattened(sections)


def _function_values(text: str) -> dict[str, Any]:
    """Return the values that a configuration function assigns or returns, by path below ``config``; expressions stay
    code."""
    given: list[tuple[str, ast.expr]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("config."):
            given.append((ast.unparse(node.targets[0]).removeprefix("config."), node.value))
        elif isinstance(node, ast.Return | ast.Assign) and isinstance(node.value, ast.Call):
            given += [(each.arg, each.value) for each in node.value.keywords if each.arg]
    found: dict[str, Any] = {}
    for path, value in given:
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if path == "activation_checkpoint" and called != _OLD_CHECKPOINTS:
            found["activation_checkpoint.mode"] = ast.unparse(value).partition("AC")[0].lower()
        elif path == "model_spec" and isinstance(value, ast.Call) and value.args:
            found["model_spec.flavor"] = literal(value.args[0])
            found |= {f"model_spec.{each.arg}": literal(each.value) for each in value.keywords}
        elif isinstance(value, ast.Call) and value.keywords:
            found |= {f"{path}.{each.arg}": literal(each.value) for each in value.keywords}
        else:
            found[path] = literal(value)
        if called == _OLD_CHECKPOINTS:
            found.setdefault("loss", "of the whole sequence")
    return found


_OLD_CHECKPOINTS = "ActivationCheckpointConfig"
"""Class of configuration functions before 0.3, and before losses in pieces."""
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "optimizer.name": ("AdamW", "Adam"),
    "model.norm_type": ("rmsnorm",),
    "parallelism.expert_tensor_parallel_degree": (1,),
    "training.data_parallel_degree": (-1,),
    "training.fp8_linear": ("",),
}
"""Values of older entries with which the trainer is as priced."""
_OF_TRAINING = (
    r"(job|dataloader|validator|metrics|checkpoint|lr_scheduler|profiling|validation|comm|debug|dataset)\..*|hf_assets_path|model\.(hf_assets_path|tokenizer_path)|"
    r"model_spec\.model\.norm\.eps|"
    r"training\.(steps|epochs|warmup_steps|max_norm|dataset|dataset_path|seed|gc_freq|deterministic|mixed_precision_reduce|"
    r"disable_cuda_graphs)|"
    r"optimizer\.(lr|eps|beta1|beta2|weight_decay|implementation|fused)|activation_checkpoint\."
    r"per_op_sac_force_recompute_mm_shapes_by_fqns"
)
"""Entries of TOML files about data, learning rates, checkpoints and logs."""
_KERNELS = replace(EAGER, selective="half of the matmuls", keeps_gathered=True, eager_routing=True)


def _compiled(execution: Execution) -> Execution:
    """Return the execution with compiled blocks; without them casts cost more than 8-bit products gain."""
    assert execution.kernels is not None, "of torchtitan"
    return replace(execution, kernels=replace(execution.kernels, norm=True, rotary=True, activation=True, loss=True))


def _compiling(engine: Engine) -> Engine:
    """Return the engine with compiled blocks, routing included, and loss (distributed/compile.py, components/loss.py).

    torch cannot split the backward pass of compiled blocks (pytorch issue 161904).
    """
    means, whole = engine.capabilities, {name for name, each in SCHEDULES.items() if not each.splits_backward}
    capabilities = replace(means, schedules=means.schedules & whole)
    found = replace(engine, capabilities=capabilities, execution=_compiled(engine.execution))
    return found.with_kernels(loss_bytes=(4, 2), eager_routing=False)


_SHARDED = dimensions_of("fsdp", "fsdp+tp", "fsdp+cp", "fsdp+cp+tp") - dimensions_of()
TORCHTITAN = Engine(
    name="torchtitan",
    capabilities=CAPABILITIES,
    execution=Execution(
        buffers_every_microbatch=True,
        splits_whole=True,
        shares_head=True,
        kernels=replace(_KERNELS, loss_pieces=8),
    ),
    precisions=("bf16", "fp32"),
    options={
        WHOLE_LOSS: Option(change=lambda engine: engine.with_kernels(loss_pieces=1)),
        COMPILED: Option(change=_compiling, result="rounding"),
        ASYNC_TP: Option(change=lambda engine: _compiling(engine).executing(hidden_collectives=0.5), result="rounding"),
        DEEPEP: Option(
            change=lambda engine: engine.executing(dispatcher="deep").with_kernels(eager_routing=False), result="exact"
        ),
        BALANCED: BALANCING,
    },
    refuse=_refuse,
    levers={
        "offload": replace(peft.OFFLOAD, dimensions=_SHARDED),
        "float8": Taken(execution=_compiled),
        "weights": Taken(),
    },
    reader=Reader(suffixes=(".toml", ".py"), values=_values, read=_read),
    targets=(
        Target(
            name="torchtitan",
            software="torchtitan 0.3.0 (.py), main (_main.py) and 0.2.2 (.toml)",
            summary="configuration functions and a TOML file: degrees, pipeline split, schedule, activation "
            "checkpointing, batch",
            write=_write,
            weights="checkpoint.initial_load_path with initial_load_in_hf reads the Hugging Face format, "
            "checkpoint.last_save_in_hf writes it; or use scripts/checkpoint_conversion/convert_from_hf.py "
            "and convert_to_hf.py",
            routers="the auxiliary loss of routers: torchtitan adjusts router biases instead",
        ),
    ),
)
"""FSDP2 as in our runtime and torch's unchanged stages; checkpoints do not stop early
(distributed/activation_checkpoint.py). Float8 runs with compiled blocks, as in torchtitan's own configurations. Every
configuration of 0.3.0 computes the loss in 8 pieces of the sequence, each with its part of the head and its backward
pass (`ChunkedLossWrapper`, pull request 2937 of April 2026)."""
