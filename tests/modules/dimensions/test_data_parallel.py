"""Tests that a replicated layer uses its own parameters, sums over ranks, and shows the optimizer what it expects.

The ranks are those of a fake process group, over which a reduction changes nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from steelyard.modules.replicated import Replica, Replicas, replicate_over
from steelyard.precision import Precision

NUM_PARAMS = 7 * 5 + 5


class Layer(nn.Module):
    """A layer that computes as those of a chain do."""

    def __init__(self, *, idle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(7, 5)
        self.idle = nn.Linear(2, 2) if idle else None
        self.compute: Callable[..., Tensor] = lambda inputs, _context: self.linear(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.compute(inputs, None)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    yield init_device_mesh("cpu", (3,))
    dist.destroy_process_group()


def replicated(layer: Layer, mesh: DeviceMesh, precision: Precision = "fp32") -> Replica:
    return replicate_over(layer, mesh, precision)  # type: ignore[arg-type]


def passes(layer: Layer, count: int = 1) -> None:
    for number in range(count):
        inputs = torch.arange(14.0).reshape(2, 7) + number
        layer(inputs).float().square().sum().backward()


def step(layers: list[Layer], replicas: Replicas, count: int = 1) -> None:
    replicas.begin_step(count)
    for layer in reversed(layers):
        passes(layer, count)
    replicas.end_step()


def gradients(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found if each is not None]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def reductions() -> AbstractContextManager[mock.Mock]:
    return mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_are_those_of_the_layer_alone_to_the_bit(mesh: DeviceMesh, count: int) -> None:
    alone, layer = Layer(), Layer()
    passes(alone, count)
    step([layer], Replicas([replicated(layer, mesh)]), count)
    assert equal(gradients(alone), gradients(layer))


def test_gradients_of_two_steps_add_up(mesh: DeviceMesh) -> None:
    alone, layer = Layer(), Layer()
    replicas = Replicas([replicated(layer, mesh)])
    for _ in range(2):
        passes(alone)
        step([layer], replicas)
    assert equal(gradients(alone), gradients(layer))


def test_gradients_of_bf16_add_up_in_fp32(mesh: DeviceMesh) -> None:
    alone = [Layer().bfloat16() for _ in range(3)]
    for number, each in enumerate(alone):
        each((torch.arange(14.0).reshape(2, 7) + number).bfloat16()).float().square().sum().backward()
    sums = [sum(each.float() for each in made) for made in zip(*map(gradients, alone), strict=True)]
    layer = Layer()
    step([layer], Replicas([replicated(layer, mesh, "bf16")]), 3)
    assert equal(sums, gradients(layer))


def test_a_parameter_without_a_gradient_here_takes_part_with_zero(mesh: DeviceMesh) -> None:
    alone, layer = Layer(), Layer(idle=True)
    passes(alone, 2)
    step([layer], Replicas([replicated(layer, mesh)]), 2)
    assert equal([*gradients(alone), torch.zeros(2, 2), torch.zeros(2)], gradients(layer))


def test_a_frozen_parameter_has_no_gradient(mesh: DeviceMesh) -> None:
    layer = Layer()
    layer.linear.bias.requires_grad_(False)
    step([layer], Replicas([replicated(layer, mesh)]))
    assert layer.linear.bias.grad is None
    assert layer.linear.weight.grad is not None


def test_a_layer_without_trained_parameters_reduces_nothing(mesh: DeviceMesh) -> None:
    layer = Layer().requires_grad_(False)
    replicas = Replicas([replicated(layer, mesh)])
    with reductions() as reduce:
        replicas.begin_step(1)
        layer(torch.ones(1, 7))
        replicas.end_step()
    assert reduce.call_count == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_optimizer_sees_replicated_parameters_in_fp32(mesh: DeviceMesh, precision: Precision) -> None:
    layer = Layer()
    step([layer], Replicas([replicated(layer, mesh, precision)]))
    for parameter in layer.parameters():
        for seen in (parameter, parameter.grad):
            assert isinstance(seen, DTensor)
            assert (seen.dtype, seen.placements, seen.device_mesh) == (torch.float32, (Replicate(),), mesh)


def test_a_forward_pass_sees_what_the_optimizer_wrote(mesh: DeviceMesh) -> None:
    for precision in ("fp32", "bf16"):
        layer = Layer()
        replicas = Replicas([replicated(layer, mesh, precision)])
        step([layer], replicas)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.to_local().fill_(2.0)
        replicas.begin_step(1)
        assert torch.equal(layer(torch.ones(1, 7)).float(), torch.full((1, 5), 16.0))


def test_in_fp32_nothing_is_copied_to_compute(mesh: DeviceMesh) -> None:
    layer = Layer()
    replica = replicated(layer, mesh)
    used: list[Tensor] = []
    layer.linear.register_forward_hook(lambda module, *_: used.extend(module.parameters()))
    layer(torch.ones(1, 7))
    seen = [parameter.to_local().data_ptr() for parameter in layer.parameters()]
    assert [parameter.data_ptr() for parameter in used] == seen
    assert replica.copies() == []


def test_in_bf16_the_copy_lives_until_the_last_backward_pass(mesh: DeviceMesh) -> None:
    layer = Layer()
    replica = replicated(layer, mesh, "bf16")
    replicas = Replicas([replica])
    replicas.begin_step(2)
    assert replica.copies() == []
    passes(layer)
    assert sum(copy.nbytes for copy in replica.copies()) == 2 * NUM_PARAMS
    passes(layer)
    assert replica.copies() == []


def test_the_copy_goes_before_the_graph_that_used_it(mesh: DeviceMesh) -> None:
    layer = Layer()
    replica = replicated(layer, mesh, "bf16")
    replicas = Replicas([replica])
    replicas.begin_step(1)
    loss = layer(torch.ones(1, 7)).float().sum()
    copies = replica.copies()
    loss.backward()
    assert loss.grad_fn is not None
    assert [copy.untyped_storage().nbytes() for copy in copies] == [0, 0]


def test_the_optimizer_reads_the_buffer_that_was_reduced(mesh: DeviceMesh) -> None:
    layer = Layer()
    replicas = Replicas([replicated(layer, mesh, "bf16")])
    with reductions() as reduce:
        step([layer], replicas, 3)
    (reduced,) = (call.args[0] for call in reduce.call_args_list)
    assert (reduced.numel(), reduced.dtype) == (NUM_PARAMS, torch.float32)
    assert {each.untyped_storage().data_ptr() for each in gradients(layer)} == {reduced.untyped_storage().data_ptr()}


def test_gradients_are_reduced_in_the_last_backward_pass_and_not_before(mesh: DeviceMesh) -> None:
    layer = Layer()
    replicas = Replicas([replicated(layer, mesh)])
    replicas.begin_step(2)
    with reductions() as reduce:
        passes(layer)
        assert reduce.call_count == 0
        passes(layer)
        assert reduce.call_count == 1


def test_layers_are_reduced_from_the_last_to_the_first_whichever_is_done_first(mesh: DeviceMesh) -> None:
    layers = [Layer(), Layer(), Layer(idle=True)]
    replicas = Replicas([replicated(layer, mesh) for layer in layers])
    replicas.begin_step(1)
    with reductions() as reduce:
        for layer in (layers[0], layers[1], layers[2]):
            passes(layer)
        replicas.end_step()
    sizes = [call.args[0].numel() for call in reduce.call_args_list]
    assert sizes == [NUM_PARAMS + 6, NUM_PARAMS, NUM_PARAMS]


def test_a_parameter_with_a_mesh_of_its_own_is_summed_over_the_ranks_of_that_mesh() -> None:
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    mesh = init_device_mesh("cpu", (3, 2, 1), mesh_dim_names=("outer", "inner", "one"))
    layer = Layer(idle=True)
    others = {layer.linear.bias: mesh["inner"], layer.idle.weight: mesh["one"], layer.idle.bias: mesh["one"]}  # type: ignore[union-attr]
    replicas = Replicas([Replica(layer, mesh["outer"], torch.float32, others)])  # type: ignore[arg-type]
    with reductions() as reduce:
        step([layer], replicas, 2)
    summed = [(call.args[0].numel(), call.kwargs["group"].size()) for call in reduce.call_args_list]
    dist.destroy_process_group()
    assert summed == [(7 * 5, 3), (5, 2)]


def test_steps_do_not_share_a_buffer(mesh: DeviceMesh) -> None:
    layer = Layer()
    replicas = Replicas([replicated(layer, mesh)])
    step([layer], replicas)
    kept, values = gradients(layer), [each.clone() for each in gradients(layer)]
    layer.zero_grad()
    step([layer], replicas)
    assert equal(kept, values)
    assert {each.untyped_storage().data_ptr() for each in kept}.isdisjoint(
        each.untyped_storage().data_ptr() for each in gradients(layer)
    )


def test_layers_that_share_a_parameter_each_have_a_copy(mesh: DeviceMesh) -> None:
    first, second = Layer(), Layer()
    second.linear.weight = first.linear.weight
    for layer in (first, second):
        replicated(layer, mesh)
    with torch.no_grad():
        first.linear.weight.to_local().zero_()
    assert second.linear.weight.to_local().count_nonzero()


def test_a_failing_pass_leaves_what_the_optimizer_sees(mesh: DeviceMesh) -> None:
    layer = Layer()
    replicated(layer, mesh)
    with pytest.raises(RuntimeError, match="shapes"):
        layer(torch.ones(1, 3))
    assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())
