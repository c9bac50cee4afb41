"""Makes one layer tensor-parallel with `parallelize_module`, from the model's own ``base_model_tp_plan``.

Without sequence parallelism the hidden state is replicated over the tensor-parallel ranks: each of attention and MLP
ends in one all-reduce, and begins with one in the backward pass. With it the hidden state is sharded over the
sequence between them: an all-gather before, a reduce-scatter after, and the norms run on a shard.

The styles of the plan's names (``colwise``, ``rowwise``) are PyTorch's own. Source: Shoeybi et al. 2019;
Korthikanti et al. 2022, section 4.2; transformers ``integrations/tensor_parallel.py`` for the names.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.modules.layers import ChainLayer

_HEAD_DIM_OF_LOCAL_HEADS = 2
"""Query and key norms see [B, S, heads, head_dim]: their samples differ per rank along the heads."""


def apply_tensor_parallel(
    layer: ChainLayer, model: PreTrainedModel, chain: ModelChain, role: LayerRole, mesh: DeviceMesh, *, sp: bool
) -> None:
    """Shards the layer's parameters over the one axis of ``mesh``, in place.

    Raises `InvalidModelError` if the model's config has no tensor-parallel plan or one with a style not known here.
    """
    if role is LayerRole.EMBEDDING:
        styles = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=_between_blocks(sp))}
    elif role is LayerRole.BLOCK:
        styles = _block_styles(model, chain, sp=sp)
    else:
        styles = _head_styles(sp=sp)
    parallelize_module(layer, mesh, styles)


def _between_blocks(sp: bool) -> Replicate | Shard:
    """Placement of the hidden state [B, S, H] over the tensor-parallel ranks between attention and MLP."""
    return Shard(1) if sp else Replicate()


def _gathered_input(sp: bool, *, keyword: str | None = None) -> PrepareModuleInput:
    """Full sequence on entry; as one DTensor, so that backward reduces the gradients of all its readers at once."""
    given, wanted = _between_blocks(sp), Replicate()
    if keyword is None:
        return PrepareModuleInput(input_layouts=(given,), desired_input_layouts=(wanted,), use_local_output=False)
    return PrepareModuleInput(
        input_kwarg_layouts={keyword: given}, desired_input_kwarg_layouts={keyword: wanted}, use_local_output=False
    )


def _head_styles(*, sp: bool) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        "output": ColwiseParallel(input_layouts=_between_blocks(sp), output_layouts=Shard(-1), use_local_output=False)
    }
    if sp:
        styles["norm"] = SequenceParallel()
    return styles


def _block_styles(model: PreTrainedModel, chain: ModelChain, *, sp: bool) -> dict[str, ParallelStyle]:
    family = chain.family
    styles: dict[str, ParallelStyle] = {
        f"block.{family.attention}": _gathered_input(sp, keyword=family.attention_keyword),
        f"block.{family.mlp}": _gathered_input(sp),
    }
    for path, name in _model_tp_plan(model, chain).items():
        styles[f"block.{path}"] = _style(name, path, sp=sp)
    if sp:
        styles.update({f"block.{norm}": SequenceParallel() for norm in family.block_norms})
    return styles


def _model_tp_plan(model: PreTrainedModel, chain: ModelChain) -> dict[str, str]:
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise InvalidModelError(
            field="base_model_tp_plan",
            found=f"none in the {chain.family.model_type} config",
            expected="a config class of transformers with a tensor-parallel plan",
            hint="plan without tp (--max-tp 1)",
        )
    prefix = f"{chain.family.blocks}.*."
    return {path.removeprefix(prefix): name for path, name in plan.items() if path.startswith(prefix)}


def _style(name: str, path: str, *, sp: bool) -> ParallelStyle:
    if name == "colwise":
        return ColwiseParallel()
    if name == "rowwise":
        return RowwiseParallel(output_layouts=_between_blocks(sp))
    if name == "replicated_with_grad_allreduce":
        return SequenceParallel(sequence_dim=_HEAD_DIM_OF_LOCAL_HEADS, use_local_output=True)
    raise InvalidModelError(
        field=f"base_model_tp_plan.{path}",
        found=repr(name),
        expected="colwise, rowwise or replicated_with_grad_allreduce",
        hint="plan without tp (--max-tp 1), or add the style in steelyard/modules/tensor_parallel.py",
    )
