"""BERT, trained to fill in masked tokens: norms after each part of a block, attention to the whole sequence.

Source: ``models/bert`` of transformers 5, ``BertForMaskedLM``. Not here: decoders made of BERT, segment ids.
"""

from collections.abc import Mapping

from steelyard.errors import InvalidModelError
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

NO_SP = "its norms run on what the matrices of a block return, not on what enters it"


def _layout(sizes: Sizes) -> Layout:
    if sizes.flag("is_decoder"):
        raise InvalidModelError(field="is_decoder", found="true", expected="false: BERT as an encoder")
    hidden, vocab, blocks = (sizes.size(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    heads = sizes.divisor("num_attention_heads", sizes.size("num_attention_heads"), ("hidden_size", hidden))
    divides = (("attention heads", heads), ("feed-forward width", sizes.size("intermediate_size")))
    vocabulary = (("vocabulary", vocab),)
    tied = sizes.flag("tie_word_embeddings", default=True)
    copies = SharedWeight(copies=((0, "embeddings.word_embeddings.weight"), (blocks + 1, "output.weight")))
    return Layout(
        kinds=(
            LayerKind(name="embedding", role=LayerRole.EMBEDDING, tp_divides=vocabulary, no_sp=NO_SP),
            LayerKind(name="block", role=LayerRole.BLOCK, tp_divides=divides, no_sp=NO_SP),
            LayerKind(name="head", role=LayerRole.HEAD, tp_divides=vocabulary, no_sp=NO_SP),
        ),
        layers=(0, *([1] * blocks), 2),
        hidden_size=hidden,
        vocab_size=vocab,
        max_seq_len=sizes.size("max_position_embeddings"),
        tied_embeddings=tied,
        learned_positions=True,
        shared=(copies,) if tied else (),
    )


def _modules(chain: Layout, layer: int) -> Mapping[str, str]:
    if layer == 0:
        return {"embeddings": "bert.embeddings"}
    if layer == len(chain.layers) - 1:
        return {"transform": "cls.predictions.transform", "output": "cls.predictions.decoder"}
    return {"block": f"bert.encoder.layer.{layer - 1}"}


def _embed(layer: Layer, ids: Tensor, _context: Context) -> Tensor:
    return layer.embeddings(ids)


def _block(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.block(hidden)


def _project(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.output(layer.transform(hidden))


FAMILY = Family(
    model_type="bert",
    task=Task.MASKED_LM,
    layout=_layout,
    modules=_modules,
    run={"embedding": _embed, "block": _block, "head": _project},
    tp={
        "embedding": {"embeddings.word_embeddings": "vocabulary"},
        "block": {
            "block.attention.self": "gather",
            "block.attention.self.query": "colwise",
            "block.attention.self.key": "colwise",
            "block.attention.self.value": "colwise",
            "block.attention.output.dense": "rowwise",
            "block.intermediate.dense": "colwise",
            "block.output.dense": "rowwise",
        },
        "head": {"output": "logits"},
    },
)
