"""Implementation of tensor parallelism: `parallelize_module` with the styles of a split.

Without sequence parallelism the hidden state is replicated over the tensor-parallel ranks: attention and MLP each end
in an all-reduce, and begin with one in the backward pass. With it, the hidden state between them is sharded over the
sequence: an all-gather before, a reduce-scatter after, and norms run on a shard.

`Family.tp` defines the style of each module. PyTorch's own styles serve modules that compute on DTensors. The styles
below serve other modules: they compute on plain tensors of one rank (`on_local_parameters`), with explicit placements
where tensors enter and leave.

| name                             | effect on the module                                                             |
|----------------------------------|----------------------------------------------------------------------------------|
| ``vocabulary``                   | an embedding divided by tokens                                                   |
| ``logits``                       | a projection divided by tokens, whose result stays divided                       |
| ``enter:KEYWORD:NAMES:HEADS:LENT`` | a region begins: the input (or the argument KEYWORD) is whole on every rank    |
|                                  | (so are arguments after a plus sign, such as an encoder's output);               |
|                                  | the module's numbers NAMES (separated by commas) are divided, and its            |
|                                  | parameters HEADS by the first dim; LENT are read from uncalled submodules        |
| ``region:KEYWORD:NAMES:HEADS:LENT`` | like ``enter``; the result, a part of a sum on every rank, is summed          |
| ``columns``, ``rows``            | in a region, matrices divided by outputs, or by inputs, which ends the region    |
| ``columns_entering``             | divided by outputs, and a region begins                                          |
| ``columns_gathered``             | divided by outputs, which are gathered                                           |
| ``rows_of_whole``                | like ``rows``, for inputs that are whole on every rank                           |
| ``rows_partial``                 | like ``rows``, if the region continues with a part of the sum                    |
| ``whole:NAMES:HEADS``            | in a region, computed identically on every rank; NAMES and HEADS as above        |
| ``own_experts``                  | in a region, experts, divided by experts                                         |
| ``on_part``                      | under sp, a module outside of regions, on this rank's part of the sequence       |
| ``positions``                    | under sp, a table of positions, of whose rows this rank takes its part           |

In a region all tensors are plain and every rank's gradients are parts of a sum, so sums of gradients are right whether
a rank computes with parts or with whole tensors.

Source: Shoeybi et al. 2019; Korthikanti et al. 2022, section 4.2.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils.stateless import _reparametrize_module
from transformers.pytorch_utils import Conv1D

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.modules.layers import ChainLayer
from steelyard.modules.prepared import ApartConv1D


def between_blocks(sp: bool) -> Replicate | Shard:
    """Placement of the hidden state [B, S, H] over the tensor-parallel ranks between attention and MLP."""
    return Shard(1) if sp else Replicate()


def on_local_parameters(
    module: nn.Module, used: Mapping[str, Callable[[Tensor], Tensor]], *arguments: Any, **named: Any
) -> Any:
    """Run the module on plain tensors; ``used`` maps names of parameters to functions that convert the DTensors."""
    local = {name: make(module.get_parameter(name)) for name, make in used.items()}
    with _reparametrize_module(module, local):
        return type(module).forward(module, *arguments, **named)


def _store(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Convert parameters to DTensors of one axis, in place; all ranks must hold equal values."""
    for path, placement in placements.items():
        owner_path, _, name = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        whole = owner.get_parameter(name)
        stored = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        owner.register_parameter(name, nn.Parameter(stored, requires_grad=whole.requires_grad))


class SharedHeads(ParallelStyle):
    """Projection to fewer key or value heads than there are ranks; every rank computes the one head that it reads.

    The matrix is stored whole; its gradient is summed over the ranks in every backward pass.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _store(module, device_mesh, {name: Replicate() for name, _ in module.named_parameters()})
        mine = device_mesh.get_local_rank() * self._num_heads // device_mesh.size()

        def own(parameter: Tensor) -> Tensor:
            summed = _SumGradient.apply(parameter.to_local(), device_mesh)
            return summed.unflatten(0, (self._num_heads, -1))[mine]

        used = {name: own for name, _ in module.named_parameters()}
        module.forward = lambda inputs: on_local_parameters(
            module, used, inputs.to_local(grad_placements=[Partial()]) if isinstance(inputs, DTensor) else inputs
        )
        return module


class _SumGradient(torch.autograd.Function):
    """Identity on a tensor that is whole on every rank of a mesh; sums its gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = DTensor.from_local(gradient, ctx.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local(), None


def share_heads(layer: nn.Module, num_heads: int, ranks: int, divided: Collection[str]) -> dict[str, SharedHeads]:
    """Return the styles of the projections to key and value heads that are fewer than the ranks, by path.

    They are among those ``divided`` by outputs. The attention module is told how many of a rank's query heads a head
    serves. A module that gathers its heads computes with all of them.
    """
    found: dict[str, SharedHeads] = {}
    for path, attention in layer.named_modules():
        served, head_dim = (getattr(attention, name, None) for name in ("num_key_value_groups", "head_dim"))
        if isinstance(served, int) and isinstance(head_dim, int):
            of_heads = (
                f"{path}.{name}"
                for name, child in attention.named_children()
                if getattr(child, "out_features", None) == num_heads * head_dim
            )
            if shared := {name: SharedHeads(num_heads) for name in of_heads if name in divided}:
                attention.num_key_value_groups = served * num_heads // ranks
                found |= shared
    return found


def _own_share(parameter: DTensor) -> Tensor:
    """Return a whole parameter; this rank computes a part of its gradient."""
    return parameter.to_local(grad_placements=[Partial()])


def _own_part(parameter: DTensor) -> Tensor:
    return parameter.to_local()


class InRegion(ParallelStyle):
    """Style of a module that computes on plain tensors with its own parameters, whole or divided.

    ``dims`` gives the divided dim of a parameter, None for a whole one; its gradient is a part of a sum either way.
    ``lent`` are parameters of submodules that the module reads without calling them. ``before`` processes the
    arguments, ``after`` the result.
    """

    def __init__(
        self,
        dims: Callable[[nn.Module, str], int | None] = lambda _module, _name: None,
        *,
        before: Callable[[tuple[Any, ...], dict[str, Any], DeviceMesh], tuple[tuple[Any, ...], dict[str, Any]]]
        | None = None,
        after: Callable[[Any, DeviceMesh], Any] | None = None,
        numbers: str = "",
        lent: str = "",
        adds_up: bool = False,
    ) -> None:
        super().__init__()
        self._dims, self._before, self._after = dims, before, after
        self._lent = [path for path in lent.split(",") if path]
        self._numbers = [name for name in numbers.split(",") if name]
        self._adds_up = adds_up

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        dims = {name: self._dims(module, name) for name, _ in module.named_parameters(recurse=False)}
        dims |= dict.fromkeys(self._lent)
        _store(module, device_mesh, {name: Replicate() if dim is None else Shard(dim) for name, dim in dims.items()})
        used: dict[str, Callable[[Tensor], Tensor]] = {
            name: _own_share if dim is None else _own_part for name, dim in dims.items()
        }
        if isinstance(module, Conv1D) and dims["weight"] == 1:
            module.nf //= ranks
        if self._adds_up and "bias" in used:
            used["bias"] = lambda bias: _own_share(bias) / ranks
        for name in self._numbers:
            setattr(module, name, max(1, getattr(module, name) // ranks))  # of heads that ranks share, one

        def forward(*arguments: Any, **named: Any) -> Any:
            if self._before is not None:
                arguments, named = self._before(arguments, named, device_mesh)
            outputs = on_local_parameters(module, used, *arguments, **named)
            return outputs if self._after is None else self._after(outputs, device_mesh)

        module.forward = forward
        return module


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _begin(sp: bool, keyword: str = "") -> Callable[[tuple[Any, ...], dict[str, Any], DeviceMesh], _Arguments]:
    """Return a hook that makes the hidden state whole; each rank computes a partial sum of its gradient."""

    def whole(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
        return _Moved.apply(hidden, mesh, (between_blocks(sp), Replicate()), (Partial(), between_blocks(sp)))

    def before(arguments: tuple[Any, ...], named: dict[str, Any], mesh: DeviceMesh) -> _Arguments:
        first, *others = keyword.split("+")
        named = named | {name: whole(named[name], mesh) for name in ([first] if first else []) + others}
        return arguments if first else (whole(arguments[0], mesh), *arguments[1:]), named

    return before


def _end(sp: bool) -> Callable[[Any, DeviceMesh], Any]:
    """Return a hook that sums the ranks' outputs, or the first of several outputs."""

    def after(outputs: Any, mesh: DeviceMesh) -> Any:
        if isinstance(outputs, tuple):
            return (after(outputs[0], mesh), *outputs[1:])
        return _Moved.apply(outputs, mesh, (Partial(), between_blocks(sp)), (between_blocks(sp), Replicate()))

    return after


class _Moved(torch.autograd.Function):
    """Redistribution of a plain tensor over the ranks, and of its gradient from one placement to another.

    Does not use DTensor's own operations, because their results are views into which models may not write.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, mesh: DeviceMesh, there: tuple[Placement, Placement], back: tuple[Placement, Placement]
    ) -> Tensor:
        ctx.mesh, ctx.back = mesh, back
        return _moved(local, mesh, *there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _moved(gradient, ctx.mesh, *ctx.back), None, None, None


def _moved(local: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    if source == target:
        return local.view_as(local)
    given = DTensor.from_local(local.detach(), mesh, [source], run_check=False)
    moved = given.redistribute(placements=[target]).to_local()
    return moved.wait() if isinstance(moved, AsyncCollectiveTensor) else moved


def _outputs_dim(module: nn.Module, name: str) -> int:
    return module.get_parameter(name).ndim - 1 if isinstance(module, Conv1D | nn.Embedding) else 0


def _inputs_dim(module: nn.Module, name: str) -> int | None:
    return None if name == "bias" else 0 if isinstance(module, Conv1D) else 1


def _heads_dim(heads: str) -> Callable[[nn.Module, str], int | None]:
    return lambda _module, name: 0 if name in heads.split(",") else None


class ColumnsGathered(InRegion):
    """Style of a matrix divided by outputs (or by those of each separately stored part) whose results are gathered."""

    def __init__(self, numbers: str = "") -> None:
        super().__init__(_outputs_dim, numbers=numbers)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parts = module.weight.shape[-2] if isinstance(module, ApartConv1D) else 1

        def gathered(output: Tensor, mesh: DeviceMesh) -> Tensor:
            columns = Shard(output.ndim)
            apart = output.unflatten(-1, (parts, -1))
            return _Moved.apply(apart, mesh, (columns, Replicate()), (Partial(), columns)).flatten(-2)

        self._after = gathered
        return super()._apply(module, device_mesh)


def _own_columns(arguments: tuple[Any, ...], named: dict[str, Any], mesh: DeviceMesh) -> _Arguments:
    """Replace the first argument, whole on every rank, by this rank's part of its last dim."""
    return (arguments[0].chunk(mesh.size(), dim=-1)[mesh.get_local_rank()], *arguments[1:]), named


class OwnExperts(InRegion):
    """Style of experts that are divided over ranks."""

    def __init__(self) -> None:
        super().__init__(lambda _module, _name: 0)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.num_all_experts = module.num_experts
        module.num_experts //= device_mesh.size()
        module.first_expert = module.num_experts * device_mesh.get_local_rank()
        return super()._apply(module, device_mesh)


STYLES: Mapping[str, Callable[..., ParallelStyle | None]] = {
    "vocabulary": lambda sp: RowwiseParallel(input_layouts=Replicate(), output_layouts=between_blocks(sp)),
    "logits": lambda sp: ColwiseParallel(
        input_layouts=between_blocks(sp), output_layouts=Shard(-1), use_local_output=False
    ),
    "enter": lambda sp, keyword="", numbers="", heads="", lent="": InRegion(
        _heads_dim(heads), before=_begin(sp, keyword), numbers=numbers, lent=lent
    ),
    "region": lambda sp, keyword="", numbers="", heads="", lent="": InRegion(
        _heads_dim(heads), before=_begin(sp, keyword), after=_end(sp), numbers=numbers, lent=lent
    ),
    "columns": lambda sp, numbers="": InRegion(_outputs_dim, numbers=numbers),
    "columns_entering": lambda sp, numbers="": InRegion(_outputs_dim, before=_begin(sp), numbers=numbers),
    "columns_gathered": lambda sp, numbers="": ColumnsGathered(numbers),
    "rows": lambda sp: InRegion(_inputs_dim, after=_end(sp), adds_up=True),
    "rows_of_whole": lambda sp: InRegion(_inputs_dim, before=_own_columns, after=_end(sp), adds_up=True),
    "rows_partial": lambda sp: InRegion(_inputs_dim, adds_up=True),
    "whole": lambda sp, numbers="", heads="": InRegion(_heads_dim(heads), numbers=numbers),
    "own_experts": lambda sp: OwnExperts(),
    "on_part": lambda sp: InRegion() if sp else None,
    "positions": lambda sp: (
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between_blocks(sp)) if sp else None
    ),
}
"""Styles by the first word of their name, called with the words after its colons."""


def adapter_styles(name: str, path: str, *, sp: bool) -> dict[str, ParallelStyle]:
    """Return the styles of a linear layer of this style with adapters $A$ and $B$, by path.

    Divided by outputs: every rank computes its part from the whole low-rank state between $A$ and $B$. Divided by
    inputs: that state is summed, and $B$ runs like a norm between regions. Whole: all parts are whole.
    """
    word, *arguments = name.split(":")
    down, up = {"columns": ("whole", "columns"), "rows": ("rows", "on_part")}.get(word, (word, word))
    found = {
        f"{path}.base_layer": STYLES[word](sp, *arguments),
        f"{path}.lora_A.*": STYLES[down](sp),
        f"{path}.lora_B.*": STYLES[up](sp),
    }
    return {part: chosen for part, chosen in found.items() if chosen is not None}


def apply_tensor_parallel(layer: ChainLayer, chain: ModelChain, mesh: DeviceMesh, *, sp: bool) -> None:
    """Shard the layer's parameters over the one axis of ``mesh``, in place.

    Raises `InvalidModelError` if its layer type cannot be divided, or if a style is unknown.
    """
    if layer.layer_type.no_tp:
        raise InvalidModelError(
            field="tp", found=f"tp for the {layer.layer_type.name} layers", expected=f"no tp: {layer.layer_type.no_tp}"
        )
    styles: dict[str, ParallelStyle] = {}
    named = chain.family.styles(layer.layer_type)
    for path, name in named.items():
        word, *arguments = name.split(":")
        if word not in STYLES:
            raise InvalidModelError(
                field=f"style of {path}",
                found=repr(name),
                expected="one of " + ", ".join(STYLES),
                hint="plan without tp (--max-tp 1), or add the style in steelyard/modules/dimensions/tp.py",
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
