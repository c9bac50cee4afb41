"""AdamW with moments in host memory against torch's, and what of it a meter of the device sees."""

from typing import Any

import pytest
import torch

from steelyard.levers.offload import CHUNK, Offload
from steelyard.levers.optimizer import Optimizer as Lever
from steelyard.modules.host_memory import is_on_host, zeros_on_host
from steelyard.modules.levers import offload
from steelyard.modules.levers.optimizer import make_optimizer
from steelyard.runtime.peak_memory import LiveStorages
from tests.modules.levers.test_optimizer import BETAS, DECAY, SHAPES, parameters, trained

SLOTS = ("exp_avg", "exp_avg_sq")


def made(word: str, *shapes: tuple[int, ...]) -> Any:
    groups = [{"params": parameters(*shapes), "weight_decay": DECAY}]
    return make_optimizer(Lever(), groups, offload=Offload(word), lr=0.01, betas=BETAS)


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


def test_zeros_on_host_are_marked_before_a_meter_sees_them() -> None:
    with LiveStorages([]) as meter:
        made = zeros_on_host(torch.empty(3, 5, device="meta"))
        made.add_(1)
    assert made.sum() == 15
    assert meter.peak_bytes == 0


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    optimizer = made("optimizer", (3, 4), (5,))
    first, second = optimizer.param_groups[0]["params"]
    before, first.grad = second.detach().clone(), torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state
