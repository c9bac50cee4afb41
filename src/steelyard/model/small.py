"""Small configs: the same model type, blocks and switches, with sizes that any machine computes quickly."""

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from steelyard.model.family import KV_HEADS, QUERY_HEADS, TOP_K_KEYS

_HEADS, _HEAD_DIM, _EXPERTS, _CHOSEN = 4, 16, 4, 2
WIDTH_KEYS = (
    *("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"),
    *("attention_hidden_size", "emb_dim"),
)
_TOWER_KEYS = ("audio_hidden_size", "pooler_output_size", "out_hidden_size")
"""Widths that a config repeats: of a tower, given in another part, or of the pooled output."""
_PROJECTED_KEYS = ("embedding_size", "word_embed_proj_dim")
"""Widths of embeddings that are projected to the hidden state if they differ from it."""
_HEAD_KEYS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "linear_num_value_heads", "linear_num_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_KV_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "linear_num_key_heads", "n_head_kv")
_HEAD_DIM_KEYS = (
    *("head_dim", "d_head", "kv_channels", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "rotary_dim"),
    "hidden_size_per_layer_input",
)
_FFN_KEYS = (
    *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"),
    *("expert_ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "shared_intermediate_size"),
    *("shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "mlp_hidden_size", "conv_channels"),
)
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
_TOKEN_KEYS = (
    *("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"),
    *("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"),
)
_WINDOW_KEYS = ("sliding_window",)
_OF_WINDOWS = ("image_size", "patch_size", "window_size")
_PATCH, _WINDOW = 2, 4
_MERGED, _SECTIONS = "spatial_merge_size", "mrope_section"
_PADDED_KEYS = ("attention_window", "block_size")
"""Config keys for the number of tokens to a multiple of which models pad their samples."""
_EXPANSIONS = (
    ("expand", "num_heads", "head_dim"),
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("mamba_expand", "mamba_num_heads", "mamba_head_dim"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
)
"""Config keys of state-space layers: inner width over hidden width, number of heads, width of a head."""
_NAMES = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
_NUMBERS = {
    **{"initializer_range": 0.02, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5},
    **{"rms_norm_eps": 1e-6, "rope_theta": 10_000.0},
}
_FEW_MERGED = 3
_JITTER_IS_A_THRESHOLD = ("phimoe",)
"""Model types whose routers use as a threshold the jitter that others scale their noise by."""
_FIRST_AND_LAST = ("bos_token_id", "eos_token_id")
TOKENS = 256
"""Number of tokens of the vocabulary, and of positions."""
PADDED_TO = 2 * _HEAD_DIM
"""Number of tokens to a multiple of which a small model pads its samples, if the full model pads."""


def small_config(
    config: Mapping[str, Any], *, degree: int = 1, expert_degree: int = 1, widths: Collection[int] = ()
) -> dict[str, Any]:
    """Return the config with small sizes, all divisible by ``degree``.

    The number of experts is divisible by ``degree * expert_degree``. Scalings of rotary positions are left out, because
    they are made for one width. A special token outside the small vocabulary becomes its first token, and the padding
    token its last. Configs of a model's parts are made small too. Any other entry whose value is in ``widths`` becomes
    the small width.
    """
    given = {key: value for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)}
    heads, tokens = multiple(_HEADS, 2 * degree), multiple(TOKENS, degree)
    width = heads * _HEAD_DIM
    sizes = {
        **{key: width for key, value in given.items() if value in widths},
        **dict.fromkeys(WIDTH_KEYS + _TOWER_KEYS, width),
        **dict.fromkeys(_HEAD_KEYS, heads),
        **dict.fromkeys(_HEAD_DIM_KEYS, _HEAD_DIM),
        "qk_head_dim": 2 * _HEAD_DIM,
        **dict.fromkeys(_FFN_KEYS, 2 * width),
        **dict.fromkeys(_EXPERT_KEYS, multiple(_EXPERTS, degree * expert_degree)),
        **{key: min(_CHOSEN, value) for key, value in given.items() if key in TOP_K_KEYS},
        **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_num_shared_experts", "n_shared_experts"), 1),
        **dict.fromkeys(_TOKEN_KEYS, tokens),
        **dict.fromkeys(_WINDOW_KEYS, _HEAD_DIM),
        **dict.fromkeys(_PADDED_KEYS, PADDED_TO),
        "num_filters": 2,  # of the first of the convolutions of a tower, each of which has twice as many
    }
    found = {key: value for key, value in config.items() if not _is_made_for_a_width(key, value)}
    found |= {key: value for key, value in sizes.items() if given.get(key)}  # size 0 means absent
    by_stage = {key: config[key] for key in _HEAD_KEYS if isinstance(config.get(key), list)}
    found |= {key: [max(1, heads * each // stages[0]) for each in stages] for key, stages in by_stage.items()}
    found |= {key: [PADDED_TO] * len(config[key]) for key in _PADDED_KEYS if isinstance(config.get(key), list)}
    hidden = given.get("hidden_size")
    found |= {key: width // 2 for key in _PROJECTED_KEYS if key in given and hidden not in (None, given[key])}
    abreast = given.get("attention_hidden_size", 0) // (hidden or 1)
    if abreast > 1 and "attention_head_dim" in given:  # attention over several hidden states side by side
        found |= {"attention_hidden_size": width * abreast, "attention_head_dim": _HEAD_DIM * abreast}
    found |= {key: _heads_of(given, key, heads) for key in _KV_KEYS if key in given}
    for times, count, size in _EXPANSIONS:
        if times in given and count in given and size in config:
            found |= {count: heads * given[times], size: _HEAD_DIM}
            found |= {key: width * given[times] for key in ("mamba_d_ssm",) if key in given}
    if given.get("head_dim", 0) > given.get("qk_rope_head_dim", math.inf):  # of what is rotated and what is not
        found["head_dim"] = 2 * _HEAD_DIM
    parts = {key: value for key, value in config.items() if isinstance(value, Mapping) and is_part(key, value)}
    found |= _few_patches(given) | _few_merged(config)
    rotary = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    turned = {key: value for key, value in rotary.items() if isinstance(value.get(_SECTIONS), list)}
    found |= {key: _fewer_turned(value, given) for key, value in turned.items()}
    layers = parts.pop("per_layer_config", {})
    part = partial(small_config, degree=degree, expert_degree=expert_degree, widths=widths)
    found |= {key: part(value) for key, value in parts.items()}
    if layers:
        found["per_layer_config"] = {
            key: part(value) | _windows_in_ratio(value, given) for key, value in layers.items()
        }
    found |= {
        key: tokens - 1 if key == "pad_token_id" else 0 for key, value in config.items() if _is_outside(key, value)
    }
    return found


def with_entries(config: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with entries replaced, in its parts too."""
    parts = {key: with_entries(config[key], each) for key, each in entries.items() if isinstance(each, Mapping)}
    return {**config, **entries, **parts}


def _few_patches(given: Mapping[str, int]) -> dict[str, int]:
    """Return sizes of small images with as many windows of patches, if patches and windows divide the image."""
    image, *sizes = (given.get(key, 0) for key in _OF_WINDOWS)
    if _MERGED in given or not all((image, *sizes)) or image % math.prod(sizes):
        return {}
    return dict(zip(_OF_WINDOWS, (image // math.prod(sizes) * _PATCH * _WINDOW, _PATCH, _WINDOW), strict=True))


def _few_merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes of small images whose patches are merged in squares: 1.5 windows, if there are windows."""
    patch, merge, size = (config.get(key) for key in ("patch_size", _MERGED, "image_size"))
    if not (isinstance(patch, int) and merge and size):
        return {}
    window = config.get("window_size") or 0
    most = patch * merge * max(_FEW_MERGED, 3 * (window // (patch * merge)) // 2)
    return {"image_size": min(size, most) if isinstance(size, int) else [min(side, most) for side in size]}


def _fewer_turned(rotary: Mapping[str, Any], given: Mapping[str, int]) -> dict[str, Any]:
    """Return the rotary entry of a config with the sections of a head scaled to the small head width."""
    heads = next((given[key] for key in _HEAD_KEYS if key in given), 1)
    before, of = given.get("head_dim") or given["hidden_size"] // heads, rotary[_SECTIONS]
    ends = [sum(of[: place + 1]) * _HEAD_DIM // before for place in range(len(of))]
    return {**rotary, _SECTIONS: [end - start for start, end in zip([0, *ends], ends, strict=False)]}


def patches_of(config: Mapping[str, Any]) -> int:
    """Number of patches of a square image; 1 if the config does not give it."""
    image, patch = (config.get(key) for key in _OF_WINDOWS[:2])
    return (image // patch) ** 2 if isinstance(image, int) and isinstance(patch, int) else 1


def without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without randomness, in its parts too: no dropout, and no noise before routers."""
    words = ("drop",) if config.get("model_type") in _JITTER_IS_A_THRESHOLD else ("drop", "jitter")
    found = {key: without_dropout(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    return found | {k: 0.0 for k, each in config.items() if isinstance(each, float) and any(w in k for w in words)}


def structure_of(small: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small config without entries that change only numbers, so that models of one structure share it."""
    found = {
        key: structure_of(value) if isinstance(value, Mapping) else _NUMBERS.get(key, value)
        for key, value in small.items()
        if key not in _NAMES
    }
    token = int(small.get("pad_token_id") == 0)  # some models mask padding in attention
    return found | {key: token for key, value in small.items() if key in _FIRST_AND_LAST and isinstance(value, int)}


def widths_of(config: Mapping[str, Any]) -> set[int]:
    """Return the widths of a model and its parts."""
    found = {value for key, value in config.items() if key in WIDTH_KEYS and isinstance(value, int)}
    return found.union(*(widths_of(value) for value in config.values() if isinstance(value, Mapping)))


def heads_in(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of attention and key-value heads, under the names of sizes that tp divides."""
    keys = {QUERY_HEADS: _HEAD_KEYS, KV_HEADS: _KV_KEYS}
    return {
        name: config[key] for name, each in keys.items() for key in reversed(each) if isinstance(config.get(key), int)
    }


def sizes_of(before: Mapping[str, Any], config: Mapping[str, Any]) -> dict[int, int]:
    """Map widths, head counts and head widths of one config to those of another with the same keys, in parts too."""
    found: dict[int, int] = {}
    for key, value in before.items():
        if isinstance(value, Mapping) and key in config:
            found |= sizes_of(value, config[key])
        elif key in (*WIDTH_KEYS, *_HEAD_KEYS, *_KV_KEYS, *_HEAD_DIM_KEYS) and isinstance(value, int) and key in config:
            found[value] = config[key]
    return found


def is_part(key: str, value: Mapping[str, Any]) -> bool:
    """Return whether a config entry describes a part of the model: a tower, an encoder, or single layers."""
    return key.endswith("_config") or "model_type" in value


def _windows_in_ratio(layer: Mapping[str, Any], given: Mapping[str, int]) -> dict[str, int]:
    """Return the small windows of a layer, in the same ratio to the model's window as in the full config."""
    both = (key for key in _WINDOW_KEYS if isinstance(layer.get(key), int) and given.get(key))
    return {key: _HEAD_DIM * max(1, layer[key] // given[key]) for key in both}


def _heads_of(given: Mapping[str, int], key: str, heads: int) -> int:
    """Number of key-value heads: 1 if the model has 1, as many as query heads if it has as many, or half of them."""
    queries = max((given[each] for each in _HEAD_KEYS if each in given), default=0)
    if given[key] == 1:
        return 1
    return heads if given[key] == queries else heads // 2


def multiple(least: int, of: int) -> int:
    """Return the smallest multiple of ``of`` that is at least ``least``."""
    return -(-least // of) * of


def _is_made_for_a_width(key: str, value: object) -> bool:
    lists = [each for each in value.values() if isinstance(each, list | tuple)] if isinstance(value, Mapping) else []
    return key.startswith("rope_") and bool(lists)


def _is_outside(key: str, value: object) -> bool:
    """Return whether a special token is outside the small vocabulary; True for a list of tokens."""
    is_other = isinstance(value, list) or (isinstance(value, int) and value >= TOKENS)
    return key.endswith(("_token_id", "_token_index")) and is_other
