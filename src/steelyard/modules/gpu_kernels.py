"""Kernels that run on GPUs and not on CPUs, on fake tensors.

Fake tensors are on the CPU, where torch takes some functions apart that are one kernel on GPUs:

- attention that drops entries at random, which on CPUs saves all scores; on GPUs it keeps the state of a random
  generator and no mask, so that it holds and moves as much as attention without dropout;
- attention with a trained bias (T5, Swin, BEiT), which on CPUs runs step by step in fp32 and saves all scores; on GPUs
  the memory-efficient kernel reads the bias and writes its gradient, one entry per score, which torch then sums;
- dropout, whose mask on CPUs has the dtype of its input, and is of one byte per entry on GPUs;
- `torch.nn.functional.rms_norm`, which is one operation as below.

For linear attention, state-space scans and causal convolutions transformers calls flash-linear-attention, mamba_ssm and
causal_conv1d where they are installed, and otherwise reference code, which takes several times as long and holds many
times as much memory. Training on GPUs takes the kernels, which do not run on fake tensors. `as_kernels` therefore
replaces the functions that have both by one operation each, whose results are those of the reference code:

- forward reads the arguments, writes the results, and saves the arguments for backward;
- the kernels of one call read and write the factors and results of the batched products of the reference code, in the
  dtype of the first argument, and hold the results while the call runs;
- backward does `BACKWARD_FACTOR` times this work, and holds as many gradients.

For the gated delta rule with heads of 128 these are 6.3 KB per token and head: forward 1.13 to 1.37 and backward 0.95
times the time that flash-linear-attention 0.5 takes in short runs on an H200 (`tests/modules/test_gpu_kernels.py`). Not
modelled: kernels that fuse more, such as FlashQLA's or those of mamba_ssm for a whole layer; the matrix of each chunk
that flash-linear-attention keeps for backward; these kernels in compiled blocks, which are traced from reference code.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.integrations import hub_kernels

BACKWARD_FACTOR = 2.5
"""Work of a backward pass relative to forward: the gradients of both factors of each product, and half of the forward
pass again, from the matrix of each chunk that is kept (flash-linear-attention, gated_delta_rule/chunk.py)."""


@contextmanager
def as_kernels(*, run: bool = True) -> Iterator[set[str]]:
    """Run functions as one kernel each, as on GPUs, in this context: those of torch named above, and those of loaded
    models of transformers that have kernels. Yield the names of those called outside compiled blocks so far.

    The latter, and ``rms_norm``, then run on fake tensors only. Functions that a compiled block or tensors of several
    ranks enter stay as they are. Without ``run`` all run as on CPUs.
    """
    found: set[str] = set()

    def chosen(module: Any, name: str, own: Any, kernel: Callable[..., Callable[[], Any] | None]) -> Any:
        @wraps(own)
        def either(*places: Any, **names: Any) -> Any:
            call = kernel(*places, **names)
            if call is None:
                return own(*places, **names)
            if not torch.compiler.is_compiling():
                found.add(name)
            return call() if run else own(*places, **names)

        return mock.patch.object(module, name, either)

    with ExitStack() as stack:
        for own, kernel in (
            (functional.scaled_dot_product_attention, _attention),
            (functional.dropout, _dropout),
            (functional.rms_norm, _one_operation(functional.rms_norm)),
        ):
            stack.enter_context(chosen(functional, own.__name__, own, kernel))
        for module in [each for name, each in sys.modules.items() if name.startswith("transformers.models.")]:
            for name, reference in _references(module):
                own = reference if run else getattr(module, name)
                stack.enter_context(chosen(module, name, own, _one_operation(reference)))
        yield found


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **names: Any,
) -> Callable[[], Tensor] | None:
    """Return a call as GPUs run it, or None if CPUs run it likewise."""
    if attn_mask is not None and attn_mask.requires_grad and not isinstance(query, DTensor):
        bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return lambda: kernel(query, key, value, bias, True, 0.0, is_causal, scale=names.get("scale"))[0]
    if dropout_p > 0:
        attention = functional.scaled_dot_product_attention
        return partial(attention, query, key, value, attn_mask, 0.0, is_causal, **names)
    return None


def _dropout(
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Callable[[], Tensor] | None:
    return (lambda: torch.native_dropout(input, p, training)[0]) if training and 0 < p < 1 and not inplace else None


def as_reference() -> AbstractContextManager[Any]:
    """Let reference code run in this context without transformers' advice to install its kernels."""
    return mock.patch.object(hub_kernels.logger, "warning_once")


def packages_of(model: nn.Module) -> tuple[str, ...]:
    """Return the packages that have the kernels of a model of transformers, by the names under which they install."""
    modules = filter(None, {sys.modules.get(type(each).__module__) for each in model.modules()})
    found = {
        inspect.getclosurevars(getattr(module, name)).nonlocals["package"]
        for module in modules
        for name, _ in _references(module)
    }
    return tuple(sorted(hub_kernels._PACKAGE_TO_DISTRIBUTION.get(each, each) for each in found))


def _references(module: ModuleType) -> list[tuple[str, Callable[..., Any]]]:
    """Return the names of a module's functions that have kernels, with their reference code."""
    file = hub_kernels.use_kernel_func_from_hub_with_fallback.__code__.co_filename
    wrapped = ((name, each) for name, each in vars(module).items() if hasattr(each, "__wrapped__"))
    return [(name, each.__wrapped__) for name, each in wrapped if _file_of(each) == file]


def _file_of(function: Any) -> str:
    return function.__code__.co_filename if hasattr(function, "__code__") else ""


def _one_operation(reference: Callable[..., Any]) -> Callable[..., Callable[[], Any] | None]:
    """Return the function that returns a call as one operation, or None if the call stays as it is."""

    def chosen(*places: Any, **names: Any) -> Callable[[], Any] | None:
        leaves, spec = tree_flatten((places, names))
        is_whole = not torch.compiler.is_compiling() and not any(isinstance(each, DTensor) for each in leaves)
        return partial(_run_as_one, reference, leaves, spec) if is_whole else None

    return chosen


def _run_as_one(reference: Callable[..., Any], leaves: list[Any], spec: TreeSpec) -> Any:
    call = _Call(reference, spec, tuple(None if isinstance(each, Tensor) else (each,) for each in leaves))
    if call not in _numbers:
        _numbers[call] = len(_calls)
        _calls.append(call)
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    *results, _scratch = torch.ops.steelyard.kernel(tensors, _numbers[call])
    found, form = iter(results), _work[call, _shapes(tensors)]
    return tree_unflatten([next(found) if is_tensor else None for is_tensor in form.are_tensors], form.spec)


class KernelWork(NamedTuple):
    """Work of the forward pass of a call, and the form of its result."""

    flop: float
    """FLOP of the batched products."""
    product_bytes: int
    """Bytes of the factors and results of the batched products."""
    scratch_bytes: int
    """Bytes of their results alone."""
    spec: TreeSpec
    are_tensors: tuple[bool, ...]
    """Whether each part of the result is a tensor; the others are None, as where there is no reference code."""


class _Call(NamedTuple):
    """A function and its arguments other than tensors: (value,) for each, None in the place of a tensor."""

    reference: Callable[..., Any]
    spec: TreeSpec
    others: tuple[tuple[Any] | None, ...]

    def results(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors among the results of the reference code, and learn its work.

        Code that loops over chunks takes minutes for long sequences. It runs at three lengths that differ by `_STEP`
        instead, if its work grows by the same from the first to the second and from the second to the third.
        """
        length, run = _num_tokens(tensors), None
        if length > _COUNTED:
            short = _STEP + length % _STEP
            runs = [self._run(_cut(tensors, length, tokens)) for tokens in range(short, short + 3 * _STEP, _STEP)]
            run = _continued(runs, (length - short) // _STEP)
        found, _work[self, _shapes(tensors)] = run or self._run(tensors)
        return found

    def _run(self, tensors: list[Tensor]) -> "_Run":
        rest = iter(tensors)
        leaves = [next(rest) if other is None else other[0] for other in self.others]
        places, names = tree_unflatten(leaves, self.spec)
        with _Products(tensors[0].element_size()) as products:
            found, spec = tree_flatten(self.reference(*places, **names))
        are_tensors = tuple(isinstance(each, Tensor) for each in found)
        work = KernelWork(products.flop, products.total_bytes, products.result_bytes, spec, are_tensors)
        return [each for each in found if isinstance(each, Tensor)], work


_Run = tuple[list[Tensor], KernelWork]
"""Tensors among the results of reference code, and its work."""
_STEP = 256
"""Tokens of a whole number of chunks, whose sizes are powers of two."""
_COUNTED = 8 * _STEP
"""Tokens of the longest sequence that reference code always runs whole."""


def _num_tokens(tensors: list[Tensor]) -> int:
    """Return the size of dim 1 if several tensors have three dims or more and all of these agree; else 0."""
    sizes = [each.shape[1] for each in tensors if each.dim() > 2]
    return sizes[0] if len(sizes) > 1 and len({*sizes}) == 1 else 0


def _cut(tensors: list[Tensor], length: int, tokens: int) -> list[Tensor]:
    """Return the tensors with this many of ``length`` tokens in their dim 1."""
    return [each[:, :tokens] if each.dim() > 1 and each.shape[1] == length else each for each in tensors]


def _continued(runs: list[_Run], steps: int) -> _Run | None:
    """Return the run ``steps`` after the first of three, or None if its work does not grow by the same in each step."""
    (found, work), (longer, _), _ = runs
    sums = zip(*((each.flop, each.product_bytes, each.scratch_bytes) for _, each in runs), strict=True)
    lines = [(one, two - one) for one, two, three in sums if two - one == three - two]
    if len(lines) < 3:
        return None
    flop, product_bytes, scratch_bytes = (one + steps * more for one, more in lines)
    sizes = [
        [size + steps * (more - size) for size, more in zip(one.shape, other.shape, strict=True)]
        for one, other in zip(found, longer, strict=True)
    ]
    results = [each.new_empty(size) for each, size in zip(found, sizes, strict=True)]
    return results, work._replace(flop=flop, product_bytes=int(product_bytes), scratch_bytes=int(scratch_bytes))


_calls: list[_Call] = []
"""Calls by the number that stands for them in operations, which take no functions."""
_numbers: dict[_Call, int] = {}
_work: dict[tuple[_Call, tuple[Any, ...]], KernelWork] = {}
"""Work of each call that has run, by the shapes of its tensors."""


def _shapes(tensors: list[Tensor]) -> tuple[Any, ...]:
    return tuple((*each.shape, each.dtype) for each in tensors)


def kernel_work(tensors: list[Tensor], number: int) -> KernelWork:
    """Return the work of a ``steelyard::kernel`` that has run with these arguments."""
    return _work[_calls[number], _shapes(tensors)]


class _Products(TorchDispatchMode):
    """Counter of the batched products among the operations in its context, in numbers of ``width`` bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.flop, self.total_bytes, self.result_bytes, self._width = 0.0, 0, 0, width

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it if it is a batched product or solves triangular systems."""
        with self:  # ``matmul`` and others, which are seen whole below autograd
            parts = func.decompose(*args, **(kwargs or {})) if func.namespace == "aten" else NotImplemented
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in _BATCHED:
            tensors = [each for each in args if isinstance(each, Tensor)]
            self.result_bytes += out.numel() * self._width
            self.total_bytes += sum(each.numel() for each in (*tensors, out)) * self._width
            self.flop += _BATCHED[func._overloadpacket](*args, out=out)
        return out


def _product_flop(*args: Any, out: Tensor) -> float:
    return 2.0 * out.numel() * args[-2].shape[-1]


def _solution_flop(system: Tensor, _right: Tensor, *, out: Tensor) -> float:
    return float(out.numel() * system.shape[-1])


_BATCHED: dict[Any, Callable[..., float]] = {
    torch.ops.aten.bmm: _product_flop,
    torch.ops.aten.baddbmm: _product_flop,
    torch.ops.aten.linalg_solve_triangular: _solution_flop,
}


@torch.library.custom_op("steelyard::kernel", mutates_args=())
def _kernel(inputs: list[Tensor], number: int) -> list[Tensor]:
    """Return the results of a call and, last, the memory that it holds meanwhile; ``inputs`` are its tensors."""
    raise NotImplementedError("runs on fake tensors only")


@_kernel.register_fake
def _(inputs: list[Tensor], number: int) -> list[Tensor]:
    results = [torch.empty_like(each) for each in _calls[number].results(inputs)]
    return [*results, inputs[0].new_empty(kernel_work(inputs, number).scratch_bytes, dtype=torch.uint8)]


@torch.library.custom_op("steelyard::kernel_backward", mutates_args=())
def _kernel_backward(inputs: list[Tensor], gradients: list[Tensor], number: int) -> list[Tensor]:
    """Return the gradients of the inputs and, last, the memory that the call holds meanwhile."""
    raise NotImplementedError("runs on fake tensors only")


@_kernel_backward.register_fake
def _(inputs: list[Tensor], gradients: list[Tensor], number: int) -> list[Tensor]:
    scratch = 2 * kernel_work(inputs, number).scratch_bytes  # and of as many gradients
    return [*map(torch.empty_like, inputs), inputs[0].new_empty(scratch, dtype=torch.uint8)]


def _keep(ctx: Any, inputs: tuple[list[Tensor], int], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[0])
    ctx.number = inputs[1]
    ctx.set_materialize_grads(False)  # no zeros for what is held meanwhile


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor], None]:
    inputs = list(ctx.saved_tensors)
    found = torch.ops.steelyard.kernel_backward(inputs, [each for each in gradients if each is not None], ctx.number)
    return found[:-1], None


_kernel.register_autograd(_differentiate, setup_context=_keep)
