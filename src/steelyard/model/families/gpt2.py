"""GPT-2: learned positions, and matrices that are stored transposed (Conv1D), query, key and value in one.

The matrices of query, key and value are stored apart, so that each rank keeps the columns of its own heads.

Source: ``models/gpt2`` of transformers 5.
"""

from collections.abc import Mapping

from steelyard.model.family import (
    Context,
    Family,
    Layer,
    LayerKind,
    LayerRole,
    Layout,
    SharedWeight,
    Sizes,
    Task,
    Tensor,
)

NO_SP_EMBEDDING = "learned positions are added to whole sequences"
NO_CP = "attention drops entries at random, which ranks with parts of a sequence cannot do alike"
_DROPOUT, _DROPOUT_SHARE = "attn_pdrop", 0.1


def _layout(sizes: Sizes) -> Layout:
    hidden, blocks, vocab = (sizes.size(key) for key in ("n_embd", "n_layer", "vocab_size"))
    heads = sizes.divisor("n_head", sizes.size("n_head"), ("n_embd", hidden))
    divides = (("attention heads", heads), ("feed-forward width", sizes.size("n_inner", default=4 * hidden)))
    vocabulary = (("vocabulary", vocab),)
    tied = sizes.flag("tie_word_embeddings", default=True)
    no_cp = NO_CP if sizes.config.get(_DROPOUT, _DROPOUT_SHARE) else ""
    copies = SharedWeight(copies=((0, "embedding.weight"), (blocks + 1, "output.weight")))
    return Layout(
        kinds=(
            LayerKind(
                name="embedding",
                role=LayerRole.EMBEDDING,
                tp_divides=vocabulary,
                no_sp=NO_SP_EMBEDDING,
                no_cp=no_cp,
            ),
            LayerKind(name="block", role=LayerRole.BLOCK, tp_divides=divides, no_cp=no_cp),
            LayerKind(name="head", role=LayerRole.HEAD, tp_divides=vocabulary, no_cp=no_cp),
        ),
        layers=(0, *([1] * blocks), 2),
        hidden_size=hidden,
        vocab_size=vocab,
        max_seq_len=sizes.size("n_positions"),
        tied_embeddings=tied,
        learned_positions=True,
        shared=(copies,) if tied else (),
    )


def _modules(chain: Layout, layer: int) -> Mapping[str, str]:
    if layer == 0:
        return {"embedding": "transformer.wte", "positions": "transformer.wpe", "dropout": "transformer.drop"}
    if layer == len(chain.layers) - 1:
        return {"norm": "transformer.ln_f", "output": "lm_head"}
    return {"block": f"transformer.h.{layer - 1}"}


def _embed(layer: Layer, ids: Tensor, context: Context) -> Tensor:
    return layer.dropout(layer.embedding(ids) + layer.positions(context.side.position_ids))


def _block(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.block(hidden)


def _project(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.output(layer.norm(hidden))


FAMILY = Family(
    model_type="gpt2",
    task=Task.CAUSAL_LM,
    layout=_layout,
    modules=_modules,
    run={"embedding": _embed, "block": _block, "head": _project},
    tp={
        "embedding": {"embedding": "vocabulary"},
        "block": {
            "block.attn": "gather_fused:c_attn",
            "block.attn.c_proj": "conv_rows",
            "block.mlp": "gather",
            "block.mlp.c_fc": "conv_columns",
            "block.mlp.c_proj": "conv_rows",
            "block.ln_1": "sequence",
            "block.ln_2": "sequence",
        },
        "head": {"norm": "sequence", "output": "logits"},
    },
    apart={"block.attn.c_attn": 3},
)
