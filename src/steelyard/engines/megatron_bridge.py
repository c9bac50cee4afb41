"""A plan as a Megatron-Bridge recipe: a Python file whose model comes from its Hugging Face config (`AutoBridge`).

Names are those of the package megatron-bridge 0.3.1 and of NVIDIA-NeMo/Megatron-Bridge on GitHub since (2026-06:
``training/config.py`` at 003e863, ``recipes/common.py`` at 0eca073, ``models/conversion/auto_bridge.py`` at 00b2fbf,
``training/mixed_precision.py`` at 0509780, ``training/flex_dispatcher_backend.py`` at 183c5c0).

The bridge reads the config entries that `steelyard.engines.megatron_models` carries as flags, but not every version
reads all of them: biases of every linear layer, windows, interpolated rotary embeddings, and the scoring and balancing
of a router. The recipe sets these afterwards, by the same flags, and refuses the models that Megatron-LM's script
refuses, and those without a bridge in 0.3.1.
Models for which that script has no flags here come from the bridges of 0.3.1 in ``models/deepseek``, ``models/glm`` and
``models/gpt_oss``: entries that these read are carried, others must have the values that they assume, and the recipe
sets what transformers does otherwise (`_BRIDGED`).

Adapters are those of ``peft/canonical_lora.py``, one for each of the matrices that Megatron-Core fuses into one
(``linear_qkv``, ``linear_fc1``), as in peft; ``peft/lora.py`` has one for all of these, which is another model.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from steelyard.engines import megatron
from steelyard.engines.config_entries import ANY, ROPE, WINDOW, Known, completed, hub_config, refuse_entries
from steelyard.engines.engine import Entries, FileSettings, Option, Reader, Taken, literal, options_in
from steelyard.engines.megatron_arguments import (
    FLAGS,
    FLEXIBLE,
    IN_BF16,
    OPTIONS,
    SCRIPTS,
    SWITCHES,
    arguments,
    own_arguments,
    read,
    read_switches,
)
from steelyard.engines.megatron_models import model_flags
from steelyard.engines.peft import refuse_kind, whole_if_so
from steelyard.engines.writing import Draft, Request, Target, UniformPlan, refuse_untold
from steelyard.errors import UserError
from steelyard.levers.train import ALL_LINEAR, Train
from steelyard.model.chain import ModelChain
from steelyard.model.family import ROUTER_LOSS
from steelyard.precision import Precision

_NO_BRIDGE = ("gpt2", "mixtral")
_OF_GRADIENTS = frozenset({"use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce"})
"""Flags of `DistributedDataParallelConfig`; all other parallel flags belong to the model."""
_SET_AFTERWARDS = ("--moe-", "--window-size", "--rotary-seq-len-interpolation-factor")
"""Prefixes of model flags that the recipe sets regardless of the bridge's reading of the config."""
_MARK = "megatron.bridge"
"""Package that every recipe imports."""
_READ = ("TrainingConfig", "DistributedDataParallelConfig", "CommOverlapConfig")
"""Configurations whose keywords are read, in addition to attributes that are set."""
_BESIDE, _NO_OVERLAP = "tp_comm_overlap", "no-tp-overlap"
_SWITCHES = {name: SWITCHES[name] for name in ("bf16-moments", "ep-overlap", "cuda-graphs")}
_EXPERTS_BESIDE = "overlap_moe_expert_parallel_comm"
_OF_OPTIMIZER = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPES = {"bf16": "torch.bfloat16"}
_DISPATCHES = "apply_flex_dispatcher_backend"
_RENAMED = {"rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor"}
_PRECISIONS: Mapping[Precision, str] = {
    "bf16": "bf16_mixed()",
    "fp16": "fp16_mixed()",
    "fp8": "bf16_with_fp8_current_scaling_mixed()",
    "fp8-block": "bf16_with_fp8_subchannel_scaling_mixed()",
    "mxfp8": "bf16_with_mxfp8_mixed()",
    "nvfp4": "bf16_with_nvfp4_mixed()",
    "fp32": "MixedPrecisionConfig(fp32=True, params_dtype=torch.float32, pipeline_dtype=torch.float32)",
}


_MATRICES = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "down_proj": "linear_fc2",
}
"""Names of the linear layers of a block in `CanonicalLoRA`."""
_TOGETHER = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Fused matrices, of which all or none have adapters (`LoRALinearSplitQKV.forward`)."""


def _names(train: Train) -> list[str]:
    return list(_MATRICES) if train.targets == (ALL_LINEAR,) else list(train.targets)


def _refuse_part(train: Train) -> str | None:
    names = {*_names(train)}
    if not train.is_plain:
        return refuse_kind(train)
    if train.rslora:
        return "which scales adapters only by alpha / r"
    if not names <= _MATRICES.keys():
        return f"which has adapters only for {', '.join(_MATRICES)}"
    parted = next((each for each in _TOGETHER if 0 < len(each & names) < len(each)), None)
    return None if parted is None else f"which has adapters for all of {', '.join(sorted(parted))}, or for none"


def _adapters(train: Train) -> list[str]:
    if train.is_default:
        return []
    return [
        "        peft=CanonicalLoRA(",
        f"            target_modules={[_MATRICES[each] for each in _names(train)]!r},",
        f"            dim={train.r!r},",
        f"            alpha={whole_if_so(train.alpha)!r},",
        f"            dropout={train.dropout!r},",
        '            lora_A_init_method="kaiming",',
        "        ),",
    ]


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    chain = request.plan.chain()
    train = request.plan.chosen_levers.value(Train)
    options = options_in(request.plan.engine)
    of_plan = megatron.attributes([*megatron.parallel_flags(view, options), *megatron.remat_flags(view, chain)])
    model = {key: value for key, value in of_plan.items() if key not in _OF_GRADIENTS}
    gradients = {key: value for key, value in of_plan.items() if key in _OF_GRADIENTS}
    if "recompute_modules" in model:
        model["recompute_modules"] = model["recompute_modules"].split()
    if view.pipeline.num_chunks > 1:
        model["virtual_pipeline_model_parallel_size"] = view.pipeline.num_chunks
    model |= _set_afterwards(chain, view.seq_len) | {"seq_length": view.seq_len, "cross_entropy_fusion_impl": "te"}
    switched = megatron.attributes([*megatron.switch_flags(view, options)])
    overlap = {_BESIDE: view.sp and _NO_OVERLAP not in options}
    overlap |= {key: value for key, value in gradients.items() if key.startswith("overlap")}
    overlap |= {key: switched.pop(key) for key in (_EXPERTS_BESIDE,) if key in switched}
    optimizer = {key: switched.pop(key) for key in _OF_OPTIMIZER if key in switched}
    model |= switched | ({"use_te_rng_tracker": True} if "cuda_graph_impl" in switched else {})
    is_deep = view.has_experts and not {"alltoall", "allgather"} & set(options)
    recipe = _recipe(view, chain, model, gradients, overlap, optimizer, train, sends_deep=is_deep)
    return Draft(
        files=(("bridge_recipe.py", recipe),),
        left_out=(
            "tokenizer, data, learning rate and initial weights: set them in the recipe",
            *(() if train.is_default else ("base weights: put the imported checkpoint into the folder base",)),
            *((_UNBALANCED,) if chain.family.model_type in _BRIDGED else ()),
        ),
        launch=f"{request.torchrun} bridge_recipe.py",
        usage=("the data is synthetic until dataset.blend is set",),
    )


_UNBALANCED = (
    "balancing of experts: none, as in transformers; for pretraining set moe_router_load_balancing_type and "
    "moe_router_bias_update_rate in the recipe"
)


def _set_afterwards(chain: ModelChain, seq_len: int) -> dict[str, Any]:
    """Return what the recipe sets of a model regardless of the bridge's reading of the config.

    Raises `UserError` if Megatron-Bridge would train another model.
    """
    model_type = chain.family.model_type
    if model_type in _BRIDGED:
        config = completed(chain, seq_len)
        known, settings = _BRIDGED[model_type](config)
        refuse_entries("megatron-bridge", chain, config, {**_ROUTED, **known})
        return settings | {"make_vocab_size_divisible_by": 1, "moe_router_load_balancing_type": "none"}
    flags = model_flags(chain, seq_len, target="megatron-bridge", lacking=_NO_BRIDGE, others=_BRIDGED)
    found = megatron.attributes([flag for flag in flags if flag.startswith(_SET_AFTERWARDS)])
    biases = {"add_bias_linear": "--disable-bias-linear" not in flags}
    return {_RENAMED.get(key, key): value for key, value in found.items()} | biases


def _own_arguments(chain: ModelChain, seq_len: int) -> Mapping[str, str]:
    if chain.family.model_type in _BRIDGED:
        return {name: str(value) for name, value in _set_afterwards(chain, seq_len).items()}
    return own_arguments(chain, seq_len)


def _refuse(chain: ModelChain, seq_len: int) -> None:
    refuse_untold("megatron-bridge", chain)
    if chain.has_adapters and chain.has_experts:
        raise UserError(
            field="--to",
            found=f"megatron-bridge for adapters in {chain.name}, which has experts",
            expected="a model without experts, because Megatron-Bridge also adds adapters to the experts",
            hint="export --to automodel or transformers",
        )
    _set_afterwards(chain, seq_len)


_ROUTED: Known = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), ANY),
    **dict.fromkeys(("head_dim", "intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta"), ANY),
    **dict.fromkeys(("attention_dropout", "num_experts_per_tok", "router_aux_loss_coef"), ANY),
    **{"hidden_act": ("silu", "swish"), "tie_word_embeddings": (False,), ROUTER_LOSS: (False,)},
}
"""Entries of every model with routed experts that its bridge carries, or that it has one value of."""
_SIGMOID: Known = {
    **dict.fromkeys(("moe_intermediate_size", "n_routed_experts", "n_group", "topk_group"), ANY),
    **dict.fromkeys(("routed_scaling_factor", "first_k_dense_replace", "num_nextn_predict_layers"), ANY),
    **dict.fromkeys(("aux_loss_alpha", "seq_aux", "ep_size"), ANY),
    **{"norm_topk_prob": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
}
"""Entries of models whose router scores by a sigmoid. Those of published files that transformers does not read have the
values that it assumes, or none that is trained."""
_FIXED_ROUTER: Mapping[str, Any] = {
    **{"moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.0, "mtp_num_layers": None}
}
"""Settings of a router whose scores are sigmoids and whose biases stay, and no layers for further tokens, as in
transformers. DeepSeek-V3's bridge takes the scores from an entry that not every config has."""


def _deepseek_v3(config: Mapping[str, Any]) -> tuple[Known, dict[str, Any]]:
    """Return the known entries and the settings of DeepSeek-V3, whose groups of experts score by their best two."""
    rope = config.get(ROPE)
    is_yarn = rope is not None and rope["rope_type"] == "yarn" and rope.keys() <= _YARN and rope.get("truncate", True)
    known: Known = {
        **_SIGMOID,
        **dict.fromkeys(("n_shared_experts", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"), ANY),
        **dict.fromkeys(("qk_rope_head_dim", "qk_head_dim", "v_head_dim"), ANY),
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "topk_group": ANY if config["n_group"] == 1 else (config["num_experts_per_tok"] // 2,),
        ROPE: (rope,) if is_yarn else (None,),
    }
    return known, {**_FIXED_ROUTER, "q_lora_rank": config["q_lora_rank"]}


def _glm4_moe(config: Mapping[str, Any]) -> tuple[Known, dict[str, Any]]:
    known = dict.fromkeys(("attention_bias", "partial_rotary_factor", "use_qk_norm"), ANY)
    return {**_SIGMOID, **known, "n_shared_experts": (1,), "n_group": (1,)}, dict(_FIXED_ROUTER)


def _gpt_oss(config: Mapping[str, Any]) -> tuple[Known, dict[str, Any]]:
    """Return the known entries and the settings of gpt-oss, whose window here has one token less than its bridge's."""
    window = config[WINDOW]
    known: Known = {
        **dict.fromkeys(("num_local_experts", "initial_context_length"), ANY),
        "experts_per_token": (config.get("num_experts_per_tok"),),
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
        WINDOW: ANY,
        "layer_types": ([*("sliding_attention", "full_attention") * (config["num_hidden_layers"] // 2)],),
        ROPE: (None, _GPT_OSS_ROPE),
    }
    return known, {} if window is None else {"window_size": (window - 1, 0)}


_YARN = {
    *("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
    *("mscale", "mscale_all_dim"),
}
_GPT_OSS_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
_BRIDGED: Mapping[str, Callable[[Mapping[str, Any]], tuple[Known, dict[str, Any]]]] = {
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
}
"""Function that returns the entries that a bridge has and the settings that its recipe makes, by model type."""


def _recipe(
    view: UniformPlan,
    chain: ModelChain,
    model: Mapping[str, Any],
    gradients: Mapping[str, Any],
    overlap: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    train: Train,
    *,
    sends_deep: bool,
) -> str:
    name = "".join(part.capitalize() for part in chain.family.model_type.split("_"))
    config = hub_config(chain) | {"architectures": [f"{name}ForCausalLM"]}
    precision = _PRECISIONS[view.precision]
    start, base = ("pretrain", "") if train.is_default else ("finetune", ', pretrained_checkpoint="base"')
    lines = [
        "import json",
        "",
        "import torch",
        "from megatron.bridge import AutoBridge",
        *([] if train.is_default else ["from megatron.bridge.peft.canonical_lora import CanonicalLoRA"]),
        "from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing",
        "from megatron.bridge.training.comm_overlap import CommOverlapConfig",
        "from megatron.bridge.training.config import (",
        *(f"    {each}," for each in _CONFIGS),
        ")",
        f"from megatron.bridge.training.flex_dispatcher_backend import {_DISPATCHES}",
        "from megatron.bridge.training.gpt_step import forward_step",
        "from megatron.bridge.training.mixed_precision import (",
        *(f"    {each}," for each in dict.fromkeys(("MixedPrecisionConfig", precision.partition("(")[0]))),
        ")",
        f"from megatron.bridge.training.{start} import {start}",
        "from transformers import AutoConfig",
        "",
        f"HF_CONFIG = json.loads({json.dumps(config)!r})",
        "",
        "",
        "def recipe() -> ConfigContainer:",
        "    bridge = AutoBridge.from_hf_config(AutoConfig.for_model(**HF_CONFIG))",
        "    model = bridge.to_megatron_provider(load_weights=False)",
        *(f"    model.{key} = {value!r}" for key, value in model.items()),
        *([f'    {_DISPATCHES}(model, "deepep")'] if sends_deep else []),
        f"    precision = {precision}",
        "    precision.grad_reduce_in_fp32 = False",
        "    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(lr_warmup_iters=500, max_lr=3e-4)",
        *(f"    optimizer.{key} = {_DTYPES.get(value, value)}" for key, value in optimizer.items()),
        "    config = ConfigContainer(",
        "        model=model,",
        "        train=TrainingConfig(",
        "            train_iters=1000,",
        f"            global_batch_size={view.global_batch},",
        f"            micro_batch_size={view.microbatch_per_rank},",
        "        ),",
        "        optimizer=optimizer,",
        "        scheduler=scheduler,",
        "        ddp=DistributedDataParallelConfig(",
        "            grad_reduce_in_fp32=False,",
        "            average_in_collective=True,",
        *(f"            {key}={value!r}," for key, value in gradients.items()),
        "        ),",
        f"        comm_overlap=CommOverlapConfig({', '.join(f'{key}={value}' for key, value in overlap.items())}),",
        "        dataset=GPTDatasetConfig(",
        f"            seq_length={view.seq_len},",
        "            random_seed=1234,",
        "            reset_attention_mask=False,",
        "            reset_position_ids=False,",
        "            eod_mask_loss=False,",
        "            blend=None,",
        '            split="9999,8,2",',
        '            dataloader_type="single",',
        "        ),",
        "        logger=LoggerConfig(log_interval=10),",
        f'        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size={chain.vocab_size}),',
        f'        checkpoint=CheckpointConfig(save_interval=500, save="checkpoints", ckpt_format="torch_dist"{base}),',
        *_adapters(train),
        "        rng=RNGConfig(seed=1234),",
        "        dist=DistributedInitConfig(),",
        "        mixed_precision=precision,",
        "    )",
        '    getattr(config, "validation", config.train).eval_iters = 0  # where 0.3 has it, and where later versions',
        "    return config",
        "",
        "",
        'if __name__ == "__main__":',
        f"    {start}(recipe(), forward_step)",
    ]
    return "\n".join(lines) + "\n"


def _values(text: str) -> Mapping[str, Any]:
    """Return the settings that a recipe in Python assigns to attributes or passes by keyword to a configuration.

    Of any other text, its options (`arguments`). A precision that is unknown here is not read, and bf16, that
    of Megatron-Bridge's own recipes, is taken.
    """
    found = _assigned(text) if _MARK in text else dict(arguments(text))
    told = str(found.get("mixed_precision", text))
    precision = next((name for name, made in _PRECISIONS.items() if made.partition("(")[0] in told), None)
    if precision is not None:
        found.pop("mixed_precision", None)
    modules = found.get("recompute_modules")
    if isinstance(modules, list):
        found["recompute_modules"] = " ".join(map(str, modules))
    shown = {theirs: ours for ours, theirs in _DTYPES.items()}
    on = {name: shown.get(value, value) if isinstance(value, str) else value for name, value in found.items()}
    on = {name: value for name, value in on.items() if value is not None and (value is not False or name == _BESIDE)}
    return on | megatron.attributes(FLAGS[precision or ("fp16" if on.get("fp16") else "bf16")])


def _assigned(text: str) -> dict[str, Any]:
    """Return the values that a recipe in Python assigns to attributes or passes to configurations, by their names."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            found[node.targets[0].attr] = literal(node.value)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            given = {each.arg: literal(each.value) for each in node.keywords if each.arg}
            if called in ("LoRA", "DoRA"):
                raise ValueError(f"{called}, whose adapters belong to fused matrices; only CanonicalLoRA is read")
            found |= {"train": _lora(given)} if called == "CanonicalLoRA" else given if called in _READ else {}
            if called == _DISPATCHES and len(node.args) > 1:
                backend = str(literal(node.args[1]))
                backend = found.get(backend.rpartition(".")[2], backend)
                found |= {"moe_token_dispatcher_type": "flex"} if backend in FLEXIBLE else {}
                found["moe_flex_dispatcher_backend"] = backend
    return found


def _lora(given: Mapping[str, Any]) -> str:
    """Return the text of the lever `Train` for arguments of `CanonicalLoRA`, whose defaults are these."""
    ours = {theirs: name for name, theirs in _MATRICES.items()}
    names = [ours.get(each, each) for each in given.get("target_modules", ours)]
    parts = {
        "r": given.get("dim", 32),
        "alpha": given.get("alpha", 32),
        "targets": ALL_LINEAR if {*names} == {*_MATRICES} else "+".join(names),
        "dropout": given.get("dropout", 0.0),
    }
    return "lora:" + ",".join(f"{name}={value}" for name, value in parts.items())


def _read(entries: Entries, chain: ModelChain, num_devices: int) -> FileSettings:
    """Return the settings of a recipe, or of arguments for one."""
    train = entries.get("train")
    overlaps = entries.values.get(_BESIDE)
    entries.skip(*([_BESIDE] if isinstance(overlaps, bool) else []))
    switches = read_switches(_SWITCHES, entries)
    found = read(entries, chain, num_devices, _own_arguments)
    lacks = found.settings.tp > 1 and (overlaps is False or not found.settings.sp)
    options = (*found.options, *switches, *([_NO_OVERLAP] if lacks else []))
    return replace(found, levers={"train": train} if train else {}, options=options)


_CONFIGS = (
    *("CheckpointConfig", "ConfigContainer", "DistributedDataParallelConfig", "DistributedInitConfig"),
    *("GPTDatasetConfig", "LoggerConfig", "RNGConfig", "TokenizerConfig", "TrainingConfig"),
)
TE_SPEEDUP = 1.25
"""Rate of Transformer Engine's linear layers since Hopper over that of torch's in the same training loop. Fitted to
dgxc_benchmarking, whose 85 runs are all predicted 12 to 36 % too slow without it; so are the runs of megatron_bridge
and mlperf_training, to which nothing was fitted. Megatron-Core's runs on A100 are not. It does not apply to experts'
matmuls: with it the 18 runs of Grok in dgxc_benchmarking are predicted 19 % too fast, without it 10 %."""
_OVERLAPPING = SWITCHES["tp-overlap"].change(megatron.MEGATRON)
MEGATRON_BRIDGE = replace(
    _OVERLAPPING,
    name="megatron-bridge",
    execution=replace(
        _OVERLAPPING.execution,
        states=IN_BF16,
        reduce_bytes=2,
        accumulation_bytes=2,
        low_copies=0,  # its precisions gather parameters in 8 bits (training/mixed_precision.py)
        tuned_linear_speedup=TE_SPEEDUP,
        kernels=replace(megatron.KERNELS, expert_copies=0),
        dispatcher="deep",
    ),
    options={
        **OPTIONS,
        **_SWITCHES,
        _NO_OVERLAP: Option(
            change=lambda engine: replace(
                engine, capabilities=replace(engine.capabilities, modes=megatron.CAPABILITIES.modes)
            ).executing(hidden_collectives=0.0)
        ),
    },
    refuse=_refuse,
    levers={"train": Taken(refuse=_refuse_part)},
    reader=Reader(suffixes=(".py", *SCRIPTS), values=_values, read=_read, mark=re.compile(_MARK).search),
    targets=(
        Target(
            name="megatron-bridge",
            software="Megatron-Bridge 0.3.1",
            summary="bridge_recipe.py: a recipe whose model comes from its Hugging Face config",
            write=_write,
            weights="examples/conversion/convert_checkpoints.py import and export; set "
            "checkpoint.pretrained_checkpoint in the recipe to the imported checkpoint",
            routers=megatron.MEGATRON.targets[0].routers,
        ),
    ),
)
"""Recipes keep and reduce gradients in 16 bits (grad_sync_dtype, grad_reduce_in_fp32), compute with Transformer Engine,
whose user buffers hide half of tensor-parallel communication (tp_comm_overlap; fitted to dgxc_benchmarking), and send
tokens with DeepEP or HybridEP. Experts weigh tokens in the kernel of the activation, so that no tensor of a pair of a
token and an expert is kept to restore the order of tokens (megatron-core 0.16.1: `TEGroupedMLP`,
`weighted_bias_swiglu_impl`, `_DeepepManager`)."""
