"""ViT, trained to classify images: patches as tokens behind one for the whole image, norms before each part of a block.

The sequence is one token per patch and one more: 197 for images of 224 × 224 and patches of 16 × 16. It is never
divided (197 is prime): no sequence parallelism.

Source: ``models/vit`` of transformers 5, ``ViTForImageClassification``.
"""

from collections.abc import Mapping

from steelyard.model.family import Context, Family, Layer, LayerKind, LayerRole, Layout, Sizes, Task, Tensor
from steelyard.model.vision import image_of, num_labels, patch_grid

NO_SP = "an image's sequence of patches is not divided"
NO_TP = "the embedding of patches is one small convolution"


def _layout(sizes: Sizes) -> Layout:
    hidden, blocks = sizes.size("hidden_size"), sizes.size("num_hidden_layers")
    heads = sizes.divisor("num_attention_heads", sizes.size("num_attention_heads"), ("hidden_size", hidden))
    divides = (("attention heads", heads), ("feed-forward width", sizes.size("intermediate_size")))
    rows, columns = patch_grid(sizes)
    return Layout(
        kinds=(
            LayerKind(name="embedding", role=LayerRole.EMBEDDING, no_sp=NO_SP, no_tp=NO_TP),
            LayerKind(name="block", role=LayerRole.BLOCK, tp_divides=divides, no_sp=NO_SP),
            LayerKind(name="head", role=LayerRole.HEAD, no_sp=NO_SP, no_tp="the classifier reads one token per image"),
        ),
        layers=(0, *([1] * blocks), 2),
        hidden_size=hidden,
        vocab_size=num_labels(sizes),
        max_seq_len=rows * columns + 1,
        image=image_of(sizes),
    )


def _modules(chain: Layout, layer: int) -> Mapping[str, str]:
    if layer == 0:
        return {"embeddings": "vit.embeddings"}
    if layer == len(chain.layers) - 1:
        return {"norm": "vit.layernorm", "output": "classifier"}
    return {"block": f"vit.layers.{layer - 1}"}


def _embed(layer: Layer, images: Tensor, _context: Context) -> Tensor:
    return layer.embeddings(images)


def _block(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.block(hidden)


def _classify(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.output(layer.norm(hidden)[:, 0])


FAMILY = Family(
    model_type="vit",
    task=Task.IMAGE_CLASSIFICATION,
    layout=_layout,
    modules=_modules,
    run={"embedding": _embed, "block": _block, "head": _classify},
    tp={
        "block": {
            "block.attention": "gather",
            "block.attention.q_proj": "colwise",
            "block.attention.k_proj": "colwise",
            "block.attention.v_proj": "colwise",
            "block.attention.o_proj": "rowwise",
            "block.mlp": "gather",
            "block.mlp.fc1": "colwise",
            "block.mlp.fc2": "rowwise",
        },
    },
)
