"""A model as Megatron-LM's arguments: which types of transformers' models its GPT is, and the flags that say so.

Names are those of megatron-core 0.19.2. Every entry of a config is carried by a flag, has no effect, or is refused
(`steelyard.engines.config_entries`).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steelyard.engines.config_entries import ANY, ROPE, WINDOW, Known, completed, refuse_entries
from steelyard.engines.pytorch import other_export
from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.model.family import ROUTER_LOSS

Flags = list[str]
"""Options, each with its value after a space, which the script quotes."""
_GPT2 = "gpt2"


def model_flags(
    chain: ModelChain,
    seq_len: int,
    *,
    target: str = "megatron",
    lacking: Iterable[str] = (),
    others: Iterable[str] = (),
) -> Flags:
    """Return the flags of a model for ``seq_len`` tokens.

    Raises `UserError` if Megatron cannot build the model. ``lacking`` are model types of Megatron-LM's script that
    ``target`` does not build, ``others`` those that it builds without these flags.
    """
    model_type = chain.family.model_type
    types = {_GPT2, *_FAMILIES} - {*lacking}
    if model_type not in types:
        raise UserError(
            field="--to",
            found=f"{target} for {chain.name} ({model_type})",
            expected="a model of " + ", ".join(sorted({*types, *others})),
            hint=other_export(chain),
        )
    config = completed(chain, seq_len)
    sizes = [
        "--use-mcore-models",
        f"--num-layers {chain.num_layers - 2}",
        f"--hidden-size {chain.hidden_size}",
        f"--max-position-embeddings {max(chain.max_seq_len, seq_len)}",
        *([] if config["tie_word_embeddings"] else ["--untie-embeddings-and-output-weights"]),
    ]
    return sizes + (_gpt2 if model_type == _GPT2 else _llama)(target, chain, config)


def _gpt2(target: str, chain: ModelChain, config: Mapping[str, Any]) -> Flags:
    """Return the flags of GPT-2's blocks, which have Megatron's default norm, positions, biases and activation.

    The activation is the approximation of GELU by tanh, which Megatron's kernel with the bias computes
    (``core/fusions/fused_bias_gelu.py``).
    """
    refuse_entries(target, chain, config, {**_OF_GPT2, "embd_pdrop": (config["resid_pdrop"],)})
    return [
        f"--num-attention-heads {config['n_head']}",
        f"--ffn-hidden-size {config['n_inner'] or 4 * chain.hidden_size}",
        "--position-embedding-type learned_absolute",
        f"--attention-dropout {config['attn_pdrop']:g}",
        f"--hidden-dropout {config['resid_pdrop']:g}",
        "--normalization LayerNorm",
        f"--norm-epsilon {config['layer_norm_epsilon']:g}",
    ]


def _llama(target: str, chain: ModelChain, config: Mapping[str, Any]) -> Flags:
    """Return the flags of blocks like Llama's: rotary positions, RMS norms and a gated activation."""
    known, special = _FAMILIES[chain.family.model_type]
    together = {"attention_bias": (config.get("mlp_bias", False),), "rope_theta": (round(config["rope_theta"]),)}
    refuse_entries(target, chain, config, {**_COMMON, **known, **together})
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] or heads
    flags = [
        f"--num-attention-heads {heads}",
        f"--ffn-hidden-size {config['intermediate_size']}",
        *_rope_flags(target, chain, config),
        f"--attention-dropout {config['attention_dropout']:g}",
        "--hidden-dropout 0",
        "--normalization RMSNorm",
        f"--norm-epsilon {config['rms_norm_eps']:g}",
        "--swiglu",
    ]
    if kv_heads != heads:
        flags += ["--group-query-attention", f"--num-query-groups {kv_heads}"]
    if config["head_dim"]:
        flags.append(f"--kv-channels {config['head_dim']}")
    if config[WINDOW] is not None:
        flags.append(f"--window-size {config[WINDOW] - 1},0")
    if not config.get("mlp_bias"):
        flags.append("--disable-bias-linear")
    return flags + special(config)


def _rope_flags(target: str, chain: ModelChain, config: Mapping[str, Any]) -> Flags:
    """Return the flags of the rotary embedding. Raises `UserError` if Megatron's GPT does not have the scaling."""
    flags = ["--position-embedding-type rope", f"--rotary-base {config['rope_theta']:.0f}"]
    scaling = dict(config.get(ROPE) or {"rope_type": "default"})
    factor = scaling.pop("factor", 1.0)
    if scaling == _LLAMA3_ROPE:
        return [*flags, "--use-rope-scaling", f"--rope-scaling-factor {factor:g}"]
    if scaling == {"rope_type": "linear"} and float(factor).is_integer():
        return [*flags, f"--rotary-seq-len-interpolation-factor {factor:.0f}"]
    if scaling == {"rope_type": "default"}:
        return flags
    raise UserError(
        field="--to",
        found=f"{target} for {chain.name}, whose config says {ROPE} = {json.dumps(config[ROPE])}",
        expected=f"no scaling, linear scaling by a whole factor, or {json.dumps(_LLAMA3_ROPE)} with any factor",
        hint=other_export(chain),
    )


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants of megatron-core's ``RotaryEmbedding``: only the factor is an argument."""


def _mixtral(config: Mapping[str, Any]) -> Flags:
    return _experts(config["num_local_experts"], config["intermediate_size"], config["num_hidden_layers"], config)


def _qwen3_moe(config: Mapping[str, Any]) -> Flags:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or []
    sparse = [int(block not in dense and (block + 1) % step == 0) for block in range(config["num_hidden_layers"])]
    where = [] if all(sparse) else [f"--moe-layer-freq {sparse}"]
    whole = [] if config["norm_topk_prob"] else ["--moe-router-pre-softmax"]
    experts = _experts(config["num_experts"], config["moe_intermediate_size"], sum(sparse), config)
    return ["--qk-layernorm", *experts, *whole, *where]


def _experts(count: int, width: int, layers: int, config: Mapping[str, Any]) -> Flags:
    """Return the flags of dropless routed experts, with a balancing loss only if the config has one.

    Megatron's loss is the sum over the ``layers``, each divided by the experts of a token; that of transformers is
    computed over all layers.
    """
    top_k, balancing = config["num_experts_per_tok"], ["--moe-router-load-balancing-type none"]
    if config[ROUTER_LOSS]:
        coefficient = config["router_aux_loss_coef"] * top_k / layers
        balancing = ["--moe-router-load-balancing-type aux_loss", f"--moe-aux-loss-coeff {coefficient:g}"]
    return [
        f"--num-experts {count}",
        f"--moe-router-topk {top_k}",
        f"--moe-ffn-hidden-size {width}",
        *balancing,
        "--moe-grouped-gemm",
    ]


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_COMMON: Known = {
    **dict.fromkeys((*_SIZES, "head_dim", "vocab_size", "rms_norm_eps", "attention_dropout", ROPE), ANY),
    **{"tie_word_embeddings": (False, True), "hidden_act": ("silu", "swish")},
}
"""Entries that the flags of every family carry. `model_flags` also requires the same biases in attention and MLP, and a
whole base of the rotary embedding."""
_ROUTED: Known = dict.fromkeys(("num_experts_per_tok", ROUTER_LOSS, "router_aux_loss_coef"), ANY)
_FAMILIES: Mapping[str, tuple[Known, Callable[[Mapping[str, Any]], Flags]]] = {
    "llama": ({"mlp_bias": (False, True)}, lambda config: []),
    "mistral": ({WINDOW: ANY}, lambda config: []),
    "qwen2": ({}, lambda config: ["--add-qkv-bias"]),
    "qwen3": ({}, lambda config: ["--qk-layernorm"]),
    "mixtral": ({**_ROUTED, "num_local_experts": ANY, WINDOW: ANY, "router_jitter_noise": (0,)}, _mixtral),
    "qwen3_moe": (
        {
            **_ROUTED,
            **dict.fromkeys(("num_experts", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"), ANY),
            "norm_topk_prob": (False, True),
        },
        _qwen3_moe,
    ),
}
"""Entries carried in addition to the common ones, and the function that writes them, by model type."""

_OF_GPT2: Known = {
    **dict.fromkeys(("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "n_ctx", "vocab_size"), ANY),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "layer_norm_epsilon"), ANY),
    **{"tie_word_embeddings": (False, True), "activation_function": ("gelu_new", "gelu_pytorch_tanh")},
    **{"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    "reorder_and_upcast_attn": (False,),
}
"""Entries that the flags of GPT-2 carry."""
