"""A replicated layer: its gradients are sums over ranks, copied once, into the buffer that is reduced.

The ranks are those of a fake process group, over which a reduction changes nothing.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steelyard.modules.data_parallel import replicate_over
from steelyard.plan.plan import Precision

NUM_PARAMS = 7 * 5 + 5


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    yield init_device_mesh("cpu", (3,))
    dist.destroy_process_group()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(7, 5)


def replicated(mesh: DeviceMesh, precision: Precision = "fp32") -> nn.Module:
    return replicate_over(linear(), mesh, precision)  # type: ignore[arg-type, return-value]


def work(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    inputs = torch.arange(14.0).reshape(2, 7).to(dtype).requires_grad_()
    module(inputs).square().sum().backward()


def gradients(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    return [each.to_local() if hasattr(each, "to_local") else each for each in found if each is not None]


class BuffersOfAllParameters(TorchDispatchMode):
    """Counts the storages that hold as many entries as the layer has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.held += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.numel() == NUM_PARAMS]
        return result

    def count(self) -> int:
        return len({tensor.untyped_storage().data_ptr() for tensor in self.held})


def test_gradients_are_those_of_the_layer_alone_to_the_bit(mesh: DeviceMesh) -> None:
    alone, wrapped = linear(), replicated(mesh)
    for module in (alone, wrapped):
        work(module)
    for expected, found in zip(gradients(alone), gradients(wrapped), strict=True):
        assert torch.equal(expected, found)


def test_gradients_of_two_backward_passes_add_up(mesh: DeviceMesh) -> None:
    alone, wrapped = linear(), replicated(mesh)
    for module in (alone, wrapped, alone, wrapped):
        work(module)
    for expected, found in zip(gradients(alone), gradients(wrapped), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_buffer_is_made_for_the_reduction(mesh: DeviceMesh, precision: Precision) -> None:
    wrapped = replicated(mesh, precision)
    with BuffersOfAllParameters() as buffers:
        work(wrapped, torch.bfloat16 if precision == "bf16" else torch.float32)
    assert buffers.count() == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_optimizer_reads_the_buffer_that_was_reduced(mesh: DeviceMesh, precision: Precision) -> None:
    wrapped = replicated(mesh, precision)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        work(wrapped, torch.bfloat16 if precision == "bf16" else torch.float32)
    (reduced,) = (call.args[0] for call in reduce.call_args_list)
    assert reduced.dtype == torch.float32
    assert {each.untyped_storage().data_ptr() for each in gradients(wrapped)} == {reduced.untyped_storage().data_ptr()}


def test_steps_do_not_share_a_buffer(mesh: DeviceMesh) -> None:
    wrapped = replicated(mesh)
    work(wrapped)
    first = [each.clone() for each in gradients(wrapped)]
    kept = gradients(wrapped)
    wrapped.zero_grad()
    work(wrapped)
    for before, after, again in zip(first, kept, gradients(wrapped), strict=True):
        assert torch.equal(before, after)
        assert again.untyped_storage().data_ptr() != after.untyped_storage().data_ptr()
