"""Implementation of compiled blocks: each block as one function of `torch.compile`, and its effect on fake tensors.

A block is compiled when it is divided (tp, cp, ep) and before its states are sharded, so that FSDP's hooks run outside,
as in torchtitan. Selective remat is inside, where the partitioner follows its policy; full remat is outside and runs
the compiled forward pass again.

Nothing can be compiled on fake tensors. A separate backend therefore replaces inductor: it runs the forward and
backward graphs of `torch.compile` as kernels. An operation with its own inductor kernel (matrix products, attention,
collectives, sorting) is one kernel; other operations are fused into kernels, each a custom operation that reads its
inputs and writes its outputs. Counters of work and memory thus see the operations of a compiled block.

Dependent operations between the same kernels are fused into one. A sum over rows, such as for a norm's weight, is a
separate kernel, which recomputes the operations before it from the same inputs.

Not modelled: fused operations that inductor splits (it fuses at most 64) or keeps separate because their sizes differ;
matrix product templates with an epilogue (max-autotune only); buffer reuse.
"""

import logging
import math
import operator
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import is_fake
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from steelyard.errors import InvalidModelError
from steelyard.levers.compiled_blocks import CompiledBlocks
from steelyard.modules.remat import compiled_policy
from steelyard.plan.strategy import Remat

_aten = torch.ops.aten
_CANNOT = (torch._dynamo.exc.TorchDynamoException, AssertionError, NotImplementedError)
"""Errors for blocks that cannot be compiled; an assertion fails for states of random generators together with
meshes."""
Values = dict[fx.Node, Any]


def change_layer(_lever: CompiledBlocks, layer: Any) -> None:
    """Compile the block of a layer, in place; a layer without one stays unchanged."""
    if hasattr(layer, "block"):
        layer.compiled = _Compiled(layer)


class _Compiled:
    """A block as one function, with or without selective remat inside."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._name = layer, layer.layer_type.name
        block = layer.block
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
        is_fake_block = any(map(is_fake, block.parameters()))
        options |= {"backend": _as_kernels()} if is_fake_block else {}
        self._any_samples = is_fake_block and not layer.drops
        """Whether one graph serves any number of samples; not if states of random generators are saved."""
        self._plain = torch.compile(partial(_run, block), **options)
        self._selective = torch.compile(partial(_run_selectively, block), **options)

    def __call__(self, *places: Any, **names: Any) -> Any:
        """Run the compiled block."""
        run = self._selective if self._layer.remat is Remat.SELECTIVE else self._plain
        places, names = tree_map_only(AsyncCollectiveTensor, _Waited.apply, (places, names))
        for each in tree_leaves((places, names)) if self._any_samples else ():
            if isinstance(each, Tensor) and each.requires_grad:
                torch._dynamo.maybe_mark_dynamic(each, 0)
        try:
            with _compiling():
                return run(*places, **names)
        except _CANNOT as error:
            raise InvalidModelError(
                field="--compile",
                found=f"blocks of {self._name}: {str(error).strip().splitlines()[0]:.200}",
                expected="blocks that torch.compile traces as one function",
                hint="leave --compile out",
            ) from error


class _Waited(torch.autograd.Function):
    """Completed result of a collective; a compiled function would return the gradient to the wrapper of the result."""

    @staticmethod
    def forward(_ctx: Any, result: AsyncCollectiveTensor) -> Tensor:
        return result.wait()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@contextmanager
def _compiling() -> Iterator[None]:
    """Allow any number of compiled functions, without warnings.

    CPU code allocates through an operation that memory meters see.
    """
    with (
        warnings.catch_warnings(),
        torch._dynamo.utils.disable_cache_limit(),
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", _empty_strided),
        mock.patch.object(logging.getLogger("torch._higher_order_ops.wrap"), "disabled", True),
    ):
        warnings.simplefilter("ignore")  # of PyTorch's own code
        yield


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _run(block: nn.Module, *places: Any, **names: Any) -> Any:
    return block(*places, **names)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(compiled_policy)


def _run_selectively(block: nn.Module, *places: Any, **names: Any) -> Any:
    return checkpoint(block, *places, use_reentrant=False, context_fn=_contexts, **names)


# on fake tensors

_groups: list["_Group"] = []


@torch.library.custom_op("steelyard::fused", mutates_args=())
def _fused(inputs: list[Tensor], sizes: list[int], group: int) -> list[Tensor]:
    """Run the operations of a group as one kernel and return their results; ``sizes`` are its numeric inputs."""
    return _groups[group].run(inputs, sizes)


@_fused.register_fake
def _(inputs: list[Tensor], sizes: list[int], group: int) -> list[Tensor]:
    return _groups[group].run(inputs, sizes)


@cache
def _as_kernels() -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=_kernels_of,
        bw_compiler=_kernels_of,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def _kernels_of(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return the graph as a function of a list of arguments, which it empties to free each as soon as possible."""
    kernels = _Kernels(graph_module)

    def run(arguments: list[Any]) -> Any:
        values = dict(zip(kernels.placeholders, arguments, strict=True))
        arguments.clear()
        return kernels.run(values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Group:
    def __init__(self, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
        self.nodes, self.outputs = nodes, outputs
        self.sizes = [node for node in inputs if isinstance(node.meta.get("val"), int | torch.SymInt)]
        self.inputs = [node for node in inputs if node not in self.sizes]
        self.number = len(_groups)
        _groups.append(self)

    def run(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return the output tensors."""
        values: Values = dict(zip((*self.inputs, *self.sizes), (*inputs, *sizes), strict=True))
        for node in self.nodes:
            values[node] = _result(node, values)
        return [values[each] for each in self.outputs]


class _Kernels:
    """A graph as a list of kernels."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._module, self._graph = graph_module, graph_module.graph
        self.placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._steps = self._made()
        last: dict[fx.Node, int] = {}
        for place, step in enumerate(self._steps):
            for each in (*step.inputs, *step.sizes) if isinstance(step, _Group) else step.all_input_nodes:
                last[each] = place
        self._freed: list[list[fx.Node]] = [[] for _ in self._steps]
        for node, place in last.items():
            self._freed[place].append(node)
        self._unread = [node for node in self.placeholders if node not in last]

    def run(self, values: Values) -> Any:
        """Return the results of the graph for the values of its placeholders."""
        for node in self._unread:
            del values[node]
        for step, freed in zip(self._steps, self._freed, strict=True):
            if isinstance(step, _Group):
                given = ([values[each] for each in nodes] for nodes in (step.inputs, step.sizes))
                found = torch.ops.steelyard.fused(*given, step.number)
                values |= dict(zip(step.outputs, found, strict=True))
                del found, given
            elif step.op == "output":
                return tree_map_only(fx.Node, values.__getitem__, step.args[0])
            else:
                values[step] = _result(step, values, self._module)
            for node in freed:
                del values[node]
        raise AssertionError("a graph ends in its output")

    def _made(self) -> list["_Group | fx.Node"]:
        """Return the kernels and the unfused operations, in an order in which each has its inputs."""
        groups = _grouped(self._graph)
        steps: list[_Group | fx.Node] = []
        made = set(self.placeholders)

        def need(node: fx.Node) -> None:
            if node not in made:
                step = groups.get(node, node)
                made.update(step.outputs if isinstance(step, _Group) else [step])
                for each in (*step.inputs, *step.sizes) if isinstance(step, _Group) else step.all_input_nodes:
                    need(each)
                steps.append(step)

        for node in self._graph.nodes:
            if not _is_fused(node) and not _is_view(node):
                need(node)
        return steps


def _grouped(graph: fx.Graph) -> dict[fx.Node, _Group]:
    """Return the groups of fused operations, by their output nodes."""
    _mark_cheap(graph)
    level = _levels(graph)
    joined: dict[fx.Node, list[fx.Node]] = {}
    sums = []
    for node in graph.nodes:
        if _sums_rows(node):
            sums.append(node)
        elif _is_fused(node):
            own = joined[node] = [node]
            for each in dict.fromkeys(map(_viewed, node.all_input_nodes)):
                if each in joined and level[each] == level[node] and joined[each] is not own:
                    own = joined[each] + own
                    joined |= dict.fromkeys(own, own)
    place = {node: number for number, node in enumerate(graph.nodes)}
    found: dict[fx.Node, _Group] = {}
    for nodes in {id(each): each for each in joined.values()}.values():
        inside = set(nodes)
        if outputs := [node for node in nodes if _is_written(node, inside)]:
            found |= dict.fromkeys(outputs, _group(sorted(nodes, key=place.__getitem__), outputs))
    written = {*found}
    for node in sums:
        found[node] = _group(sorted(_leading(node, joined.keys() - written), key=place.__getitem__), [node])
    return found


def _group(nodes: list[fx.Node], outputs: list[fx.Node]) -> _Group:
    """Return a group, including the operations that it recomputes from its inputs (views and `_is_cheap`)."""
    inside = set(nodes)
    run: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for each in node.all_input_nodes:
            _gather(each, inside, run, inputs)
        run[node] = None
    return _Group(list(run), list(inputs), outputs)


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of unfused kernels before each node, or before its first reader if it is fused or a view."""
    level: dict[fx.Node, int] = {}
    own: dict[fx.Node, int] = {}
    for node in graph.nodes:
        is_kernel = node.op == "call_function" and not _is_view(node) and (not _is_fused(node) or _sums_rows(node))
        own[node] = int(is_kernel)
        level[node] = own[node] + max((level[each] for each in node.all_input_nodes), default=0)
    for node in reversed(graph.nodes):
        if node.users and (_is_view(node) or _is_fused(node)) and not own[node]:
            level[node] = max(level[node], min(level[each] - own[each] for each in node.users))
    for node in graph.nodes:  # one kernel makes all results of an operation
        if node.target is operator.getitem and _is_fused(node):
            level[node] = level[node.all_input_nodes[0]]
    return level


def _gather(node: fx.Node, inside: set[fx.Node], run: dict[fx.Node, None], inputs: dict[fx.Node, None]) -> None:
    """Add an argument to the nodes that a group runs, if it is cheap or a view in the group, else to its inputs."""
    if node in inside or node in run or node in inputs:
        return
    if (_is_view(node) and (_viewed(node) in inside or _is_cheap(_viewed(node)))) or _is_cheap(node):
        for each in node.all_input_nodes:
            _gather(each, inside, run, inputs)
        run[node] = None
    else:
        inputs[node] = None


def _is_written(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Return whether a value of a group is read outside it: by an unfused kernel, or by a fused one.

    Fused sums over rows recompute the value, and all fused kernels recompute values that are `_is_cheap`.
    """
    read = list(node.users)
    is_again = _is_cheap(node)
    while read:
        user = read.pop()
        if _is_view(user):
            read += user.users
        elif user not in inside:
            if not _is_fused(user) or not (is_again or _sums_rows(user)):
                return True
        elif not is_again and _is_cheap(user) and _is_read_again(user, inside):
            return True
    return False


def _is_read_again(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Return whether a fused operation outside a group reads a recomputed result of a value of the group."""
    return any(
        _is_read_again(user, inside)
        if _is_view(user) or (user in inside and _is_cheap(user))
        else user not in inside and _is_fused(user) and not _sums_rows(user)
        for user in node.users
    )


def _leading(node: fx.Node, joined: Container[fx.Node]) -> set[fx.Node]:
    """Return a sum over rows and the fused operations before it."""
    found, reached = {node}, list(node.all_input_nodes)
    while reached:
        each = _viewed(reached.pop())
        if each in joined and each not in found:
            found.add(each)
            reached += each.all_input_nodes
    return found


def _viewed(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _result(node: fx.Node, values: Values, module: fx.GraphModule | None = None) -> Any:
    if node.op == "get_attr":
        assert module is not None
        assert isinstance(node.target, str)
        return getattr(module, node.target)
    args, kwargs = tree_map_only(fx.Node, values.__getitem__, (node.args, node.kwargs))
    if node.target is run_and_save_rng_state:  # what draws at random is drawn again from the same state
        operation, *args = args
        return torch.empty(0), operation(*args, **kwargs)
    if node.target is run_with_rng_state:
        _, operation, *args = args
        return operation(*args, **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


@cache
def _op_types() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def _is_view(node: fx.Node) -> bool:
    """Return whether a node creates no tensor; getting one of several results creates none."""
    target = node.target
    if target is operator.getitem:
        return not _is_fused(node)
    return node.op == "call_function" and (
        target in _VIEWS or (isinstance(target, torch._ops.OpOverload) and target.is_view)
    )


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return _is_fused(node.all_input_nodes[0])
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or _is_view(node):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in _FUSED or _op_types().is_fusible(node)


def _is_cheap(node: fx.Node) -> bool:
    """Return whether recomputing a value moves hardly more bytes than reading it, so that inductor does not write
    it."""
    return bool(node.meta.get("is_cheap"))


def _mark_cheap(graph: fx.Graph) -> None:
    """Mark results of pointwise operations whose sources have hardly more bytes than the result."""
    sources: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        read = {source for each in node.all_input_nodes for source in sources[each]}
        is_pointwise = _is_fused(node) and torch.Tag.pointwise in getattr(node.target, "tags", ())
        node.meta["is_cheap"] = is_pointwise and sum(map(_num_bytes, read)) <= 17 / 16 * _num_bytes(node)
        sources[node] = read if node.meta["is_cheap"] or _is_view(node) else {node}


def _num_bytes(node: fx.Node) -> int:
    """Bytes of a tensor at the traced number of samples."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    sizes = (each if isinstance(each, int) else each.node.hint for each in value.shape)
    return math.prod(sizes) * value.dtype.itemsize


def _sums_rows(node: fx.Node) -> bool:
    """Return whether an operation sums rows, which keeps the dim of stride 1, or takes the largest entry of all."""
    target = node.target
    if not (isinstance(target, torch._ops.OpOverload) and target.overloadpacket in _REDUCTIONS):
        return target is _aten.max.default
    read = node.all_input_nodes[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if target.overloadpacket is _aten.amax and not dims:
        return True
    return bool(dims) and read.ndim > 1 and not any(read.stride(dim) == 1 for dim in tree_leaves(dims))


_REDUCTIONS = {_aten.sum, _aten.mean, _aten.amax, _aten.amin}
_FUSED = {_aten.cat, _aten.slice_scatter, _aten.select_scatter, _aten.constant_pad_nd}
"""Fused operations in addition to those that PyTorch's partitioner treats as fusible."""
_VIEWS = {_aten._unsafe_view.default, _aten.detach.default, _aten.alias.default}
