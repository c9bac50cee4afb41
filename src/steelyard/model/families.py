"""What steelyard has to know about each family of Hugging Face models: where its parts and its sizes are.

A family says which keys of ``config.json`` hold the sizes that strategies must divide, and which attributes of the
unmodified ``transformers`` module hold the embedding, the blocks, the final norm and the output projection. How a
block is tensor-parallel comes from the model's own ``base_model_tp_plan``. A new decoder family is one more row.

Source: the module definitions of transformers 5 (``models/<family>/modeling_<family>.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.errors import InvalidModelError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of decoder-only models. Attribute names are those of the ``…ForCausalLM`` module."""

    model_type: str
    """``model_type`` of the config file."""
    body: str
    """Attribute of the model that holds embedding, blocks and final norm."""
    embedding: str
    blocks: str
    final_norm: str
    output: str
    """Attribute of the model (not of the body) that projects to the vocabulary."""
    attention: str
    """Attribute of a block that attends."""
    attention_keyword: str | None = None
    """Name by which the block passes the normed hidden state to attention; None where it is passed by position."""
    mlp: str
    block_norms: tuple[str, ...]
    """Norms of a block that run on the hidden state, which sequence parallelism shards."""
    ffn_width_key: str = "intermediate_size"
    kv_heads_key: str | None = "num_key_value_heads"
    """Absent where every query head has a key and value head of its own."""


def _llama_like(model_type: str) -> Family:
    return Family(
        model_type=model_type,
        body="model",
        embedding="embed_tokens",
        blocks="layers",
        final_norm="norm",
        output="lm_head",
        attention="self_attn",
        attention_keyword="hidden_states",
        mlp="mlp",
        block_norms=("input_layernorm", "post_attention_layernorm"),
    )


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        _llama_like("llama"),
        _llama_like("mistral"),
        _llama_like("qwen2"),
        _llama_like("qwen3"),
        Family(
            model_type="gpt_neox",
            body="gpt_neox",
            embedding="embed_in",
            blocks="layers",
            final_norm="final_layer_norm",
            output="lm_head",
            attention="attention",
            mlp="mlp",
            block_norms=("input_layernorm", "post_attention_layernorm"),
            kv_heads_key=None,
        ),
    )
}


def family_of(model_type: str) -> Family:
    """The family of a config's ``model_type``; raises `InvalidModelError` for one that is not known."""
    if model_type not in FAMILIES:
        raise InvalidModelError(
            field="model_type",
            found=repr(model_type),
            expected="one of " + ", ".join(sorted(FAMILIES)),
            hint=nearest(model_type, FAMILIES) + "; a new family is one row in steelyard/model/families.py",
        )
    return FAMILIES[model_type]
