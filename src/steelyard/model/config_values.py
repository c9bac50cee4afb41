"""Checks of the values of a config.json that no layout reads, but that the modules of transformers are built from.

Without these checks, a wrong value would show only while the model is built or traced, as an error in foreign code.
Keys that mean the same in every family are checked here, before anything is built. A key may be absent.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from steelyard.errors import InvalidModelError, nearest
from steelyard.limits import MOST_LAYERS, MOST_SIZE

ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
)
"""Names of activation functions in ``transformers.activations``."""
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_FLAGS = ("attention_bias", "mlp_bias", "norm_topk_prob", "qkv_bias", "use_cache", "use_parallel_residual")
_NUMBERS = (
    *("initializer_factor", "layer_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar", "rms_norm_eps"),
    *("rope_local_base_freq", "rope_theta", "rotary_emb_base", "routed_scaling_factor"),
)
_SHARES = (
    *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "drop_path_rate", "dropout_rate"),
    *("embd_pdrop", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "rotary_pct"),
)
_ACTIVATIONS = ("activation_function", "hidden_act")
_DTYPES = ("dtype", "torch_dtype")
_OBJECTS = ("id2label", "rope_parameters", "rope_scaling")
_LISTS = ("layer_types", "mlp_only_layers")
_HINT = "use the complete config that the model was published with"
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_TOP_K = "num_experts_per_tok"
_MOST = 1e15
_SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size"),
    *("head_dim", "n_embd", "n_head", "n_inner", "n_layer", "n_positions"),
    *("vocab_size", "max_position_embeddings", *_EXPERTS),
)
_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "depths")
"""Config keys for the number of layers."""
_POSITIONS = ("max_position_embeddings", "n_positions")
"""Sizes that some configs give as a float: in Music Flamingo's, 1200.0 is the base of its rotary embedding."""
_HEADS = ("num_attention_heads", "num_key_value_heads")
ROUTER_LOSS = "output_router_logits"
"""Key that, if true, makes models of transformers add the auxiliary loss of their routers to the loss."""


def check_values(config: Mapping[str, Any]) -> None:
    """Raise `InvalidModelError` naming the first key whose value no model can be built with."""
    for keys, is_right, expected in _RULES:
        for key in keys:
            if key in config and not is_right(config[key]):
                raise _wrong(key, config[key], expected)
    for key in _SIZES:
        value = config.get(key)
        if key in _POSITIONS and isinstance(value, float) and value.is_integer():
            value = int(value)
        is_known = value is None or isinstance(value, list) or (value == 0 and key in _EXPERTS)
        if not (is_known or (_is_count(value) and value <= (MOST_LAYERS if key in _LAYERS else MOST_SIZE))):
            raise wrong_size(key, value)
    heads, shared = (config.get(key) for key in _HEADS)
    if _is_count(heads) and _is_count(shared) and heads % shared:
        raise _wrong(_HEADS[1], shared, f"a divisor of {_HEADS[0]} {heads}")
    for keys, known in ((_ACTIVATIONS, ACTIVATIONS), (_DTYPES, DTYPES)):
        for key in keys:
            value = config.get(key, known[0])
            if not (value in known if isinstance(value, str) else value is None and keys is _DTYPES):
                raise _wrong(key, value, "one of " + ", ".join(known), nearest(str(value), known))
    experts = next((config[key] for key in _EXPERTS if _is_count(config.get(key))), None)
    top_k = config.get(_TOP_K)
    if top_k is not None and not (_is_count(top_k) and (experts is None or top_k <= experts)):
        most = "" if experts is None else f", at most the {experts} experts"
        raise _wrong(_TOP_K, top_k, f"a whole number of 1 or more{most}")


def sizes_in(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in a config by key, which every model of this config has."""
    return {key: config[key] for key in _SIZES if _is_count(config.get(key))}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_FLAGS, lambda value: isinstance(value, bool), "true or false"),
    ((ROUTER_LOSS,), lambda value: value is None or isinstance(value, bool), "true or false, or null"),
    (_NUMBERS, lambda value: _is_number(value) and 0 < value <= _MOST, "a number above 0"),
    (_SHARES, lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    (_OBJECTS, lambda value: value is None or isinstance(value, dict), "an object, or null"),
    (("tie_word_embeddings",), lambda value: value is None or isinstance(value, bool), "true or false"),
    (_LISTS, lambda value: value is None or isinstance(value, list), "a list, or null"),
    (
        ("architectures",),
        lambda value: value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value)),
        "a list of class names, or null",
    ),
)


def wrong_size(key: str, value: object) -> InvalidModelError:
    """Return the error for a missing or wrong size."""
    most = MOST_LAYERS if key in _LAYERS else MOST_SIZE
    found = "nothing" if value is None else repr(value)
    return InvalidModelError(
        field=key, found=found, expected=f"a whole number of 1 or more in config.json, at most {most}", hint=_HINT
    )


def _wrong(key: str, value: object, expected: str, hint: str = "") -> InvalidModelError:
    return InvalidModelError(
        field=key,
        found=repr(value),
        expected=f"{expected} in config.json",
        hint=hint or _HINT,
    )
