"""Compare the entries of a model's config with the model that a framework builds: carried, without effect, or refused.

Megatron and torchtitan build the model themselves. If an export loses an entry of the config, they silently train
another model. Therefore every entry is one of three: its writer carries it; it does not change training (`NO_EFFECT`);
or it must have a value for which both models are identical, and every other value is refused. `DEFAULTS` are the values
that transformers 5.23 uses for missing entries. Entries that neither the table nor the writer knows are refused.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from steelyard.engines.pytorch import other_export
from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.model.family import ROUTER_LOSS

NO_EFFECT: Mapping[str, frozenset[str]] = {
    "names, and who wrote the file": frozenset(
        {"_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "unsloth_version"}
    ),
    "the plan has its own precision": frozenset({"dtype", "torch_dtype", "use_bfloat16"}),
    "for generating text, not for training": frozenset(
        {
            *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "task_specific_params"),
            *("tokenizer_class", "use_cache"),
        }
    ),
    "further results of forward": frozenset(
        {"output_attentions", "output_hidden_states", "return_dict", "use_return_dict"}
    ),
    "for tasks other than language modelling": frozenset(
        {
            *("classifier_dropout", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type"),
            *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
            "summary_use_proj",
        }
    ),
    "initial weights, which every export leaves to the user": frozenset({"initializer_factor", "initializer_range"}),
    "the result is the same": frozenset({"chunk_size_feed_forward", "pretraining_tp", "torchscript"}),
    "a decoder has no encoder": frozenset({"is_decoder", "is_encoder_decoder", "tie_encoder_decoder"}),
    "the plan has its own sequence length": frozenset({"max_position_embeddings"}),
}
"""Entries that do not change training, by the reason."""
_WITHOUT_EFFECT = frozenset().union(*NO_EFFECT.values())
_UNWRITTEN = (
    *("_name_or_path", "auto_map", "task_specific_params", "tokenizer_class"),
    *("transformers_version", "unsloth_version"),
)

_DENSE: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "head_dim": None,
    "num_key_value_heads": None,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_WINDOW: Mapping[str, Any] = {"use_sliding_window": False, "sliding_window": None}
_ROUTED: Mapping[str, Any] = {"num_experts_per_tok": 8, ROUTER_LOSS: False, "router_aux_loss_coef": 0.001}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        **{"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None},
        **{"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True},
    },
    "llama": {**_DENSE, "attention_bias": False, "mlp_bias": False},
    "mistral": {**_DENSE, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_DENSE, **_WINDOW, "num_key_value_heads": 32},
    "qwen3": {**_DENSE, **_WINDOW, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    "mixtral": {
        **{**_DENSE, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "sliding_window": None},
        **{**_ROUTED, "num_experts_per_tok": 2, "num_local_experts": 8, "router_jitter_noise": 0.0},
    },
    "qwen3_moe": {
        **{**_DENSE, **_WINDOW, **_ROUTED, "num_key_value_heads": 4, "attention_bias": False},
        **{"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128},
    },
    "deepseek_v3": {
        **{**_DENSE, "attention_bias": False, "rope_interleave": True, "norm_topk_prob": True},
        **{"head_dim": 64, "qk_head_dim": 192, ROUTER_LOSS: False, "num_nextn_predict_layers": 0},
        **{"n_group": 8, "num_experts_per_tok": 8, "q_lora_rank": 1536},
    },
    "glm4_moe": {
        **{**_DENSE, "attention_bias": False, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, ROUTER_LOSS: False},
        **{"n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        **{**_DENSE, "attention_bias": True, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64},
        **{"rope_theta": 150000.0, "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        **{ROUTER_LOSS: False, "router_aux_loss_coef": 0.001},
    },
}
"""Defaults of transformers by model type; sizes that every config has are not listed."""
_ALIASES = {"qwen3_moe": {"num_local_experts": "num_experts"}, "mixtral": {"num_experts": "num_local_experts"}}
ROPE = "rope_scaling"
"""The entry that scales the frequencies of the rotary embedding; absent if they are not scaled."""
WINDOW = "sliding_window"
ANY = None
"""Placeholder for supported values: the writer carries every value."""
Known = Mapping[str, Collection[Any] | None]


def completed(chain: ModelChain, seq_len: int) -> dict[str, Any]:
    """Return the entries of a model's config, with the defaults of transformers for missing ones.

    The rotary embedding is ``rope_theta`` and ``rope_scaling``, as before transformers 5. A window of ``seq_len``
    tokens or more has no effect and is None.
    """
    model_type = chain.family.model_type
    aliases = _ALIASES.get(model_type, {})
    given = {aliases.get(key, key): value for key, value in chain.config.items()}
    rope = {**(given.pop("rope_parameters", None) or {}), **(given.pop(ROPE, None) or {})}
    given |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if given.get("partial_rotary_factor") == 1:
        del given["partial_rotary_factor"]
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    found = {**DEFAULTS.get(model_type, {}), **given}
    if rope != {"rope_type": "default"}:
        found[ROPE] = rope
    window = found.get(WINDOW) if found.pop("use_sliding_window", True) else None
    found[WINDOW] = window if window is not None and window < seq_len else None
    found.pop("max_window_layers", None)
    if found[WINDOW] is None or set(found.get("layer_types") or ()) == {"full_attention"}:
        found.pop("layer_types", None)
    return found


def hub_config(chain: ModelChain) -> dict[str, Any]:
    """Return the config of a model in Hugging Face's format, without names, code and templates of its author.

    Rotary embeddings that are the same in all layers are written as in transformers 4, which version 5 reads too.
    """
    found = {key: value for key, value in chain.config.items() if key not in _UNWRITTEN}
    rope = dict(found.get("rope_parameters") or {})
    if "rope_theta" in rope:
        del found["rope_parameters"]
        found |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        if rope != {"rope_type": "default"}:
            found[ROPE] = rope
    return found


def refuse_entries(target: str, chain: ModelChain, config: Mapping[str, Any], known: Known) -> None:
    """Raise `UserError` for the first entry of a `completed` config that the target's model does not support.

    ``known`` maps the entries that the target has to the values it supports, or to `ANY`.
    """
    for key, value in config.items():
        values = known.get(key, (None,))
        if key in _WITHOUT_EFFECT or values is ANY or value in values:
            continue
        wanted = " or ".join(json.dumps(each) for each in values if each is not None)
        raise UserError(
            field="--to",
            found=f"{target} for {chain.name}, whose config says {key} = {json.dumps(value)}",
            expected=f"{key} = {wanted}, the value of {target}'s model"
            if wanted
            else f"a config without {key}, which {target}'s model does not have",
            hint=f"{other_export(chain)}; or remove the entry from the config if the model is the same without it",
        )
