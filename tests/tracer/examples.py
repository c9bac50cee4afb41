"""Small models whose layers the tracer tests count by hand."""

from typing import Any

from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, SEQ_LEN = 64, 160, 8, 4, 256, 32
HEAD_DIM = HIDDEN // HEADS

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "layer_norm_eps": 1e-5,
    "rotary_pct": 0.25,
    "hidden_act": "gelu",
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
}


def llama(**changes: Any) -> ModelChain:
    return chain_from_config(_LLAMA | changes, name="llama")


def gpt_neox(**changes: Any) -> ModelChain:
    return chain_from_config(_NEOX | changes, name="gpt_neox")
