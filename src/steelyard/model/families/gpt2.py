"""GPT-2: learned positions, and matrices that are stored transposed (Conv1D), query, key and value in one.

The matrices of query, key and value are stored apart, so that each rank keeps the columns of its own heads.

Source: ``models/gpt2`` of transformers 5.
"""

from steelyard.model.decoder import Keys, decoder
from steelyard.model.family import Context, Layer, Sizes, Tensor


def _embed(layer: Layer, ids: Tensor, context: Context) -> Tensor:
    return layer.dropout(layer.embedding(ids) + layer.positions(context.side.position_ids))


def _block(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.block(hidden)


def _ffn(sizes: Sizes, keys: Keys) -> tuple[tuple[str, int], ...]:
    return (("feed-forward width", sizes.size("n_inner", default=4 * sizes.size(keys.hidden))),)


FAMILY = decoder(
    "gpt2",
    keys=Keys(
        hidden="n_embd", heads="n_head", blocks="n_layer", positions="n_positions", kv_heads=None, default_tied=True
    ),
    body="transformer",
    embedding="wte",
    more_embedding={"positions": "wpe", "dropout": "drop"},
    blocks="h",
    final_norm="ln_f",
    block_tp={
        "attn": "gather_fused:c_attn",
        "attn.c_proj": "conv_rows",
        "mlp": "gather",
        "mlp.c_fc": "conv_columns",
        "mlp.c_proj": "conv_rows",
        "ln_1": "sequence",
        "ln_2": "sequence",
    },
    apart={"attn.c_attn": 3},
    run={"embedding": _embed, "block": _block},
    rotary=None,
    ffn=_ffn,
    attention_dropout={"attn_pdrop": 0.1},
    no_sp_embedding="learned positions are added to whole sequences",
)
