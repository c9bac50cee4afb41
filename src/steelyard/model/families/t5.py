"""T5: an encoder, then a decoder each of whose blocks reads the encoder's output too.

The chain is one after the other: embedding, encoder blocks, the decoder's embedding (which also norms the encoder's
output), decoder blocks, head. Behind the decoder's embedding two hidden states flow: that of the decoder, and the
encoder's output, which every block passes on. Both sequences are as long as the plan says.

The bias of attention for relative positions belongs to the first block of each stack, and the others are given its
result. Here every block holds a copy of that small table (buckets × heads) and makes the bias itself, so that nothing
but hidden states flows between layers; copies share their gradient.

Attention with a learned bias is traced step by step, as the CPU runs it: a GPU kernel that makes the gradient of a bias
keeps less. Source: ``models/t5`` of transformers 5, ``T5ForConditionalGeneration``.
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

NO_SP = "two sequences flow along the decoder"
_BIAS = "block.layer.0.SelfAttention.relative_attention_bias.weight"
_LONGEST = 4096
"""T5 has no longest sequence of its own: positions are relative. More is unheard of for it."""


def _layout(sizes: Sizes) -> Layout:
    hidden, heads, vocab = (sizes.size(key) for key in ("d_model", "num_heads", "vocab_size"))
    num_encoder = sizes.size("num_layers")
    num_decoder = sizes.size("num_decoder_layers", default=num_encoder)
    divides = (("attention heads", heads), ("feed-forward width", sizes.size("d_ff")))
    vocabulary = (("vocabulary", vocab),)
    between, last = 1 + num_encoder, 2 + num_encoder + num_decoder

    def kind(name: str, role: LayerRole, sizes: tuple[tuple[str, int], ...], streams: int = 1) -> LayerKind:
        return LayerKind(name=name, role=role, tp_divides=sizes, no_sp=NO_SP, num_streams=streams)

    return Layout(
        kinds=(
            kind("embedding", LayerRole.EMBEDDING, vocabulary),
            kind("encoder block", LayerRole.BLOCK, divides),
            kind("decoder embedding", LayerRole.EMBEDDING, vocabulary, 2),
            kind("decoder block", LayerRole.BLOCK, divides, 2),
            kind("head", LayerRole.HEAD, vocabulary),
        ),
        layers=(0, *([1] * num_encoder), 2, *([3] * num_decoder), 4),
        hidden_size=hidden,
        vocab_size=vocab,
        max_seq_len=sizes.size("n_positions", default=_LONGEST),
        tied_embeddings=True,
        shared=(
            SharedWeight(copies=((0, "embedding.weight"), (between, "embedding.weight"), (last, "output.weight"))),
            SharedWeight(copies=tuple((layer, _BIAS) for layer in range(1, between))),
            SharedWeight(copies=tuple((layer, _BIAS) for layer in range(between + 1, last))),
        ),
    )


def _modules(chain: Layout, layer: int) -> Mapping[str, str]:
    kind = chain.kinds[chain.layers[layer]].name
    if kind == "embedding":
        return {"embedding": "shared", "dropout": "encoder.dropout"}
    if kind == "encoder block":
        return {"block": f"encoder.block.{layer - 1}"}
    if kind == "decoder embedding":
        return {
            "norm": "encoder.final_layer_norm",
            "norm_dropout": "encoder.dropout",
            "embedding": "decoder.embed_tokens",
            "dropout": "decoder.dropout",
        }
    if kind == "decoder block":
        return {"block": f"decoder.block.{layer - 1 - chain.layers.index(2)}"}
    return {"norm": "decoder.final_layer_norm", "dropout": "decoder.dropout", "output": "lm_head"}


def _embed(layer: Layer, ids: Tensor, _context: Context) -> Tensor:
    return layer.dropout(layer.embedding(ids))


def _encode(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.block(hidden)[0]


def _embed_decoder(layer: Layer, encoded: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    return layer.dropout(layer.embedding(context.decoder_ids)), layer.norm_dropout(layer.norm(encoded))


def _decode(layer: Layer, state: tuple[Tensor, Tensor], _context: Context) -> tuple[Tensor, Tensor]:
    hidden, encoded = state
    return layer.block(hidden, encoder_hidden_states=encoded)[0], encoded.view_as(encoded)


def _project(layer: Layer, state: tuple[Tensor, Tensor], context: Context) -> Tensor:
    hidden, encoded = state
    hidden = (
        layer.dropout(layer.norm(hidden)) + encoded[:0].sum()
    )  # the encoder's output ends here, with a gradient of 0
    if context.config.scale_decoder_outputs:
        hidden = hidden * context.config.d_model**-0.5
    return layer.output(hidden)


def _attention(path: str) -> dict[str, str]:
    return {f"{path}.{name}": "colwise" for name in ("q", "k", "v")} | {f"{path}.o": "rowwise"}


_SELF = {
    "block.layer.0.SelfAttention": "gather_heads:n_heads",
    "block.layer.0.SelfAttention.relative_attention_bias": "colwise",
}
_CROSS = {"block.layer.1.EncDecAttention": "gather_heads:n_heads:key_value_states:0"}


def _feed_forward(path: str) -> dict[str, str]:
    """T5 has one inner matrix or, gated, two: those that a model lacks are passed over."""
    inner = {f"{path}.{name}?": "colwise" for name in ("wi", "wi_0", "wi_1")}
    return {path: "gather", **inner, f"{path}.wo": "rowwise"}


FAMILY = Family(
    model_type="t5",
    task=Task.SEQ2SEQ_LM,
    layout=_layout,
    modules=_modules,
    run={
        "embedding": _embed,
        "encoder block": _encode,
        "decoder embedding": _embed_decoder,
        "decoder block": _decode,
        "head": _project,
    },
    tp={
        "embedding": {"embedding": "vocabulary"},
        "encoder block": _SELF
        | _attention("block.layer.0.SelfAttention")
        | _feed_forward("block.layer.1.DenseReluDense"),
        "decoder block": _SELF
        | _CROSS
        | _attention("block.layer.0.SelfAttention")
        | _attention("block.layer.1.EncDecAttention")
        | _feed_forward("block.layer.2.DenseReluDense"),
        "head": {"output": "logits"},
    },
)
