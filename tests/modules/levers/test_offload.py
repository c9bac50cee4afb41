"""Tests of AdamW with moments in host memory against torch's, and of its metered device memory."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from steelyard.levers.offload import CHUNK, Offload
from steelyard.levers.optimizer import Optimizer as Lever
from steelyard.modules.host_memory import empty_on_host, is_on_host
from steelyard.modules.levers import offload
from steelyard.modules.levers.offload import saving_on_host
from steelyard.modules.levers.optimizer import make_optimizer
from steelyard.runtime.peak_memory import LiveStorages
from tests.modules.levers.test_optimizer import BETAS, DECAY, SHAPES, parameters, trained
from tests.runtime.processes import one_process

SLOTS = ("exp_avg", "exp_avg_sq")


def made(word: str, *shapes: tuple[int, ...]) -> Any:
    groups = [{"params": parameters(*shapes), "weight_decay": DECAY}]
    return make_optimizer(Lever(), groups, offload=Offload(word), matrices=(), lr=0.01, betas=BETAS)


@pytest.mark.parametrize("chunk", [CHUNK, 1000])
def test_updates_are_those_without_offload_bit_by_bit(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(offload, "CHUNK", chunk)
    ours, plain = made("optimizer", *SHAPES), made("none", *SHAPES)
    assert all(map(torch.equal, trained(ours), trained(plain)))
    for mine, other in zip(ours.state.values(), plain.state.values(), strict=True):
        assert all(torch.equal(mine[slot], other[slot]) for slot in SLOTS)
        assert mine["step"] == other["step"]


def test_moments_lie_in_host_memory_and_nothing_else_does() -> None:
    optimizer = made("optimizer", *SHAPES)
    for value in trained(optimizer):
        assert not is_on_host(value.untyped_storage())
    for state in optimizer.state.values():
        assert [name for name, each in state.items() if is_on_host(each.untyped_storage())] == list(SLOTS)


def test_a_meter_sees_the_chunks_and_no_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK", 1000)
    optimizer = made("optimizer", (512, 1024))
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        with LiveStorages([parameter, parameter.grad]) as meter:
            before = meter.live_bytes
            optimizer.step()
        assert 2 * 4 * 1000 <= meter.peak_bytes - before < 2 * 4 * 1000 + 100


def test_what_lies_on_the_host_is_marked_before_a_meter_sees_it() -> None:
    with LiveStorages([]) as meter:
        made = empty_on_host(torch.empty(3, 5, device="meta")).zero_()
        made.add_(1)
    assert made.sum() == 15
    assert (meter.peak_bytes, meter.host_bytes) == (0, 60)


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    optimizer = made("optimizer", (3, 4), (5,))
    first, second = optimizer.param_groups[0]["params"]
    before, first.grad = second.detach().clone(), torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state


class Layer(nn.Module):
    """Saves its input twice, two views of one storage, and a tensor that is shared; and its weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(6, 8)
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, inputs: Tensor, shared: Tensor) -> Tensor:
        left, right = self.first(inputs * shared).chunk(2, dim=-1)
        return self.second(left * right * self.scale).square()


def passed(layer: Layer, inputs: Tensor, shared: Tensor, *, on_host: bool) -> tuple[list[Tensor], LiveStorages]:
    """Gradients, and a meter of the forward pass."""
    layer.zero_grad()
    inputs = inputs.clone().requires_grad_()
    with LiveStorages([]) as meter, saving_on_host(layer, [shared]) if on_host else nullcontext():
        result = layer(inputs, shared)
    result.sum().backward()
    return [inputs.grad, *(each.grad for each in layer.parameters())], meter


def test_gradients_are_those_without_offload_and_each_storage_is_copied_once() -> None:
    torch.manual_seed(0)
    layer, inputs, shared = Layer(), torch.randn(5, 8), torch.randn(8)
    plain, _ = passed(layer, inputs, shared, on_host=False)
    found, meter = passed(layer, inputs, shared, on_host=True)
    assert all(map(torch.equal, found, plain))
    # what the first matrix multiplies, both halves of 12, what the second one multiplies, and what is squared
    assert meter.host_bytes == 4 * 5 * (8 + 12 + 6 + 8)


def test_nothing_is_left_on_the_host_after_the_backward_pass() -> None:
    layer, inputs, shared = Layer(), torch.randn(5, 8), torch.randn(8)
    _, meter = passed(layer, inputs, shared, on_host=True)
    assert meter.host_bytes > 0
    assert not meter._on_host


def test_a_dtensor_that_is_saved_comes_back_as_one() -> None:
    with one_process():
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
        with saving_on_host(nn.Module(), []):
            result = (weight * 2).square().sum()
        result.full_tensor().backward()
        assert torch.equal(weight.grad.full_tensor(), 8 * weight.full_tensor())


def test_a_tensor_is_saved_as_it_is_if_another_part_of_its_storage_was_saved_before() -> None:
    layer, inputs = nn.GRU(4, 4), torch.randn(3, 2, 4)  # on the CPU its gates share a storage that it changes in place

    def gradients(saving: AbstractContextManager[None]) -> list[Tensor]:
        layer.zero_grad()
        with saving:
            outputs, _ = layer(inputs)
        outputs.square().sum().backward()
        return [each.grad for each in layer.parameters() if each.grad is not None]

    expected = gradients(nullcontext())
    assert all(map(torch.equal, gradients(saving_on_host(layer, [])), expected))
