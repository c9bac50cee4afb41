"""The twin of tensor parallelism: `parallelize_module` by the family's styles and the config's own plan.

Without sequence parallelism the hidden state is replicated over the tensor-parallel ranks: each of attention and MLP
ends in one all-reduce, and begins with one in the backward pass. With it the hidden state is sharded over the
sequence between them: an all-gather before, a reduce-scatter after, and the norms run on a shard.

Which module gets which style is said by the family (`Family.tp`), and where the family says so by the
``base_model_tp_plan`` of the model's config; what the styles do is in `steelyard.modules.styles`.
"""

from collections.abc import Iterator

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.modules.kinds.twin import Division, Twin
from steelyard.modules.layers import ChainLayer
from steelyard.modules.styles import STYLES, share_heads, style

_FROM_CONFIG = "*"
_HANDLED_BY_EXPERTS = "mlp.experts"
"""What transformers does with experts is for its own runtime: the family's style for the whole part takes its place."""


def apply_tensor_parallel(
    layer: ChainLayer, model: PreTrainedModel, chain: ModelChain, mesh: DeviceMesh, *, sp: bool
) -> None:
    """Shards the layer's parameters over the one axis of ``mesh``, in place.

    Raises `InvalidModelError` if a layer of its kind cannot be divided, or the config lacks the plan that the family
    relies on, or one of the two names a style that is not known here.
    """
    if layer.kind.no_tp:
        raise InvalidModelError(
            field="tp", found=f"tp for the {layer.kind.name} layers", expected=f"no tp: {layer.kind.no_tp}"
        )
    styles: dict[str, ParallelStyle] = {}
    named = dict(_named_styles(layer, model, chain))
    for path, name in named.items():
        chosen = _style(path, name, sp=sp)
        if chosen is not None:
            styles[path] = chosen
    for name, size in layer.kind.tp_divides:
        if name in layer.kind.tp_shares and size < mesh.size():
            divided = {path for path, name in named.items() if name in ("colwise", "columns")}
            styles |= share_heads(layer, size, mesh.size(), divided)
    parallelize_module(layer, mesh, styles)


def _named_styles(layer: ChainLayer, model: PreTrainedModel, chain: ModelChain) -> Iterator[tuple[str, str]]:
    """The styles of the modules of a layer; those of the config come before what the family says of the same module."""
    own = chain.family.of_kind(chain.family.tp, layer.kind) or {}
    prefix = own.get(_FROM_CONFIG)
    found = dict(_config_plan(layer, model, chain, prefix)) if prefix is not None else {}
    for path, name in own.items():
        if path == _FROM_CONFIG:
            continue
        if not path.endswith("?") or _has(layer, path[:-1]):
            found[path.removesuffix("?")] = name
    yield from found.items()


def _config_plan(
    layer: ChainLayer, model: PreTrainedModel, chain: ModelChain, prefix: str
) -> Iterator[tuple[str, str]]:
    plan = getattr(model.config, "base_model_tp_plan", None)
    own = chain.family.of_kind(chain.family.tp, layer.kind) or {}
    if not plan:
        if any(name.split(":")[0] in ("conv_columns", "colwise") for name in own.values()):
            return
        raise InvalidModelError(
            field="base_model_tp_plan",
            found=f"none in the {chain.family.model_type} config",
            expected="a config class of transformers with a tensor-parallel plan",
            hint="plan without tp (--max-tp 1), or give the family styles of its own (docs/adding-a-model.md)",
        )
    for path, name in plan.items():
        local = f"block.{path.removeprefix(prefix)}"
        if path.startswith(prefix) and _HANDLED_BY_EXPERTS not in local and _has(layer, local):
            yield local, name


def _has(layer: ChainLayer, path: str) -> bool:
    """Whether the layer has the module: blocks of one model differ where some have experts."""
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def _style(path: str, name: str, *, sp: bool) -> ParallelStyle | None:
    if name.split(":", maxsplit=1)[0] not in STYLES:
        raise InvalidModelError(
            field=f"base_model_tp_plan.{path}",
            found=repr(name),
            expected="one of " + ", ".join(STYLES),
            hint="plan without tp (--max-tp 1), or add the style in steelyard/modules/styles.py",
        )
    return style(name, sp=sp)


def _divide(layer: ChainLayer, division: Division) -> None:
    sp = bool(division.strategy.variant("sp"))
    apply_tensor_parallel(layer, division.model, division.chain, division.mesh, sp=sp)


TWIN = Twin(divide=_divide)
