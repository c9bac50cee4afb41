"""Swin, trained to classify images: attention within windows, in stages of ever fewer and wider tokens.

A layer of the chain is one block. Between two stages a layer of its own merges four neighbouring patches into one of
twice the width. Tensor and sequence parallelism are refused. Attention with a
learned bias is traced step by step, as the CPU runs it: a GPU kernel that makes the gradient of a bias keeps less.

Source: ``models/swin`` of transformers 5,
``SwinForImageClassification``.
"""

from collections.abc import Iterator, Mapping

from steelyard.errors import InvalidModelError
from steelyard.model.family import Context, Family, Layer, LayerKind, LayerRole, Layout, Sizes, Task, Tensor
from steelyard.model.vision import image_of, num_labels, patch_grid

NO_TP = "the table of positions in a window, which all heads share, is not divided"
NO_SP = "windows cut the sequence of patches another way"


def _layout(sizes: Sizes) -> Layout:
    depths, heads, width = sizes.sizes("depths"), sizes.sizes("num_heads"), sizes.size("embed_dim")
    if len(heads) != len(depths):
        raise InvalidModelError(
            field="num_heads", found=f"{len(heads)} entries", expected=f"one for each of the {len(depths)} stages"
        )
    grid = patch_grid(sizes)
    kinds = [_kind("embedding", LayerRole.EMBEDDING, grid, width)]
    layers = [0]
    for stage, depth in enumerate(depths):
        kinds.append(_kind(f"stage {stage} block", LayerRole.BLOCK, grid, width))
        layers += [len(kinds) - 1] * depth
        if stage < len(depths) - 1:
            grid, width = ((grid[0] + 1) // 2, (grid[1] + 1) // 2), 2 * width
            kinds.append(_kind(f"stage {stage} merge", LayerRole.BLOCK, grid, width))
            layers.append(len(kinds) - 1)
    kinds.append(_kind("head", LayerRole.HEAD, grid, width))
    rows, columns = patch_grid(sizes)
    return Layout(
        kinds=tuple(kinds),
        layers=(*layers, len(kinds) - 1),
        hidden_size=sizes.size("embed_dim"),
        vocab_size=num_labels(sizes),
        max_seq_len=rows * columns,
        image=image_of(sizes),
    )


def _kind(name: str, role: LayerRole, grid: tuple[int, int], width: int) -> LayerKind:
    return LayerKind(name=name, role=role, no_tp=NO_TP, no_sp=NO_SP, hidden=(grid[0] * grid[1], width))


def _modules(chain: Layout, layer: int) -> Mapping[str, str]:
    if layer == 0:
        return {"embeddings": "swin.embeddings"}
    if layer == len(chain.layers) - 1:
        return {"norm": "swin.layernorm", "output": "classifier"}
    stage, block = list(_places(chain))[layer - 1]
    part = "downsample" if block is None else f"blocks.{block}"
    return {"block": f"swin.encoder.layers.{stage}.{part}"}


def _places(chain: Layout) -> Iterator[tuple[int, int | None]]:
    """For every layer between embedding and head its stage and its place there; None for a merge."""
    stage = block = 0
    for kind in (chain.kinds[index] for index in chain.layers[1:-1]):
        if kind.name.endswith("merge"):
            yield stage, None
            stage, block = stage + 1, 0
        else:
            yield stage, block
            block += 1


def _embed(layer: Layer, images: Tensor, _context: Context) -> Tensor:
    hidden, _ = layer.embeddings(images)
    return hidden


def _block(layer: Layer, hidden: Tensor, context: Context) -> Tensor:
    grid = _grid(context, hidden.shape[1])
    if layer.kind.name.endswith("merge"):
        return layer.block(hidden, grid)
    hidden, _ = layer.block(hidden, grid)
    return hidden


def _grid(context: Context, num_patches: int) -> tuple[int, int]:
    """Rows and columns of the hidden state, which the stages before have halved."""
    image, patch = context.config.image_size, context.config.patch_size
    height, width = (image, image) if isinstance(image, int) else image
    rows, columns = (
        (height // patch, width // patch) if isinstance(patch, int) else (height // patch[0], width // patch[1])
    )
    while rows * columns > num_patches:
        rows, columns = (rows + 1) // 2, (columns + 1) // 2
    return rows, columns


def _classify(layer: Layer, hidden: Tensor, _context: Context) -> Tensor:
    return layer.output(layer.norm(hidden).mean(dim=1))


FAMILY = Family(
    model_type="swin",
    task=Task.IMAGE_CLASSIFICATION,
    layout=_layout,
    modules=_modules,
    run={"embedding": _embed, "block": _block, "head": _classify},
)
