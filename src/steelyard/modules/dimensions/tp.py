"""The twin of tensor parallelism: `parallelize_module` by the styles of a split.

Without sequence parallelism the hidden state is replicated over the tensor-parallel ranks: each of attention and MLP
ends in one all-reduce, and begins with one in the backward pass. With it the hidden state is sharded over the
sequence between them: an all-gather before, a reduce-scatter after, and the norms run on a shard.

Which module gets which style is said by `Family.tp`; what the styles do is in `steelyard.modules.dimensions.styles`.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.modules.dimensions.styles import STYLES, SharedHeads, adapter_styles, share_heads
from steelyard.modules.layers import ChainLayer
from steelyard.plan.strategy import Strategy


def apply_tensor_parallel(layer: ChainLayer, chain: ModelChain, mesh: DeviceMesh, *, sp: bool) -> None:
    """Shards the layer's parameters over the one axis of ``mesh``, in place.

    Raises `InvalidModelError` if a layer of its type cannot be divided, or a style is not known here.
    """
    if layer.layer_type.no_tp:
        raise InvalidModelError(
            field="tp", found=f"tp for the {layer.layer_type.name} layers", expected=f"no tp: {layer.layer_type.no_tp}"
        )
    styles: dict[str, ParallelStyle] = {}
    named = chain.family.of_type(chain.family.tp, layer.layer_type) or {}
    for path, name in named.items():
        word, *arguments = name.split(":")
        if word not in STYLES:
            raise InvalidModelError(
                field=f"style of {path}",
                found=repr(name),
                expected="one of " + ", ".join(STYLES),
                hint="plan without tp (--max-tp 1), or add the style in steelyard/modules/dimensions/styles.py",
            )
        if (chosen := STYLES[word](sp, *arguments)) is not None:
            styles[path] = chosen
    for name, size in layer.layer_type.tp_divides:
        if name in layer.layer_type.tp_shares and size < mesh.size():
            divided = {path for path, name in named.items() if name == "columns"}
            styles |= share_heads(layer, size, mesh.size(), divided)
    for path, name in named.items():
        if hasattr(layer.get_submodule(path), "base_layer"):
            of_heads = styles.pop(path, None)
            beside = adapter_styles(name, path, sp=sp)
            if isinstance(of_heads, SharedHeads):
                beside |= dict.fromkeys((f"{path}.base_layer", f"{path}.lora_B.*"), of_heads)
            styles |= beside
    parallelize_module(layer, mesh, styles)


def divide(layer: ChainLayer, chain: ModelChain, strategy: Strategy, mesh: DeviceMesh) -> None:
    """Divides a layer as a strategy says, in place."""
    apply_tensor_parallel(layer, chain, mesh, sp=bool(strategy.mode("sp")))
