"""Tests of resharding collectives against DTensor's, for every pair of layouts of 4, 6 and 8 devices."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from steelyard.cost.communication import Group
from steelyard.cost.switching import moves, switch_table
from steelyard.model.read import chain_from_config
from steelyard.plan.strategy import mesh_axes, parse_strategy
from steelyard.search import SpaceOptions, enumerate_strategies
from tests.cost.examples import collective_s, config, job
from tests.runtime.models import FAMILY_CONFIGS

PLACEMENTS: dict[str, Placement] = {"B": Shard(0), "S": Shard(1), "R": Replicate()}
SHAPE = (24, 24, 2)
Call = tuple[str, int, int]
"""Collective, axis, and entries of the tensor that is gathered or of a rank's tensor that is exchanged."""


class Collectives(TorchDispatchMode):
    """Notes the all-gathers below DTensor, and through `all_to_all` what gloo has no operation for."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._axes = {mesh.get_group(axis).group_name: axis for axis in range(mesh.ndim)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name == "all_gather_into_tensor":
            self.calls.append(("all_gather", self._axes[args[2]], out.numel()))
        elif func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            raise AssertionError(f"DTensor called {name}")
        return out

    def all_to_all(self, tensor: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int) -> Tensor:
        self.calls.append(("all_to_all", axis, tensor.numel()))
        shape = list(tensor.shape)
        shape[gather_dim] *= mesh.size(axis)
        shape[shard_dim] //= mesh.size(axis)
        return tensor.new_zeros(shape)


@pytest.fixture(params=[4, 6, 8])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    try:
        sizes = mesh_axes(request.param)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"a{axis}" for axis in range(len(sizes))))
    finally:
        dist.destroy_process_group()


def _layouts(num_devices: int) -> list[str]:
    found = enumerate_strategies(num_devices, SpaceOptions(devices_per_node=num_devices))
    sizes = mesh_axes(num_devices)
    return list(dict.fromkeys(strategy.hidden.placements(sizes) for strategy in found))


def _issued(before: str, after: str, mesh: DeviceMesh) -> list[Call]:
    shape = list(SHAPE)
    for axis, letter in enumerate(before):
        if letter != "R":
            shape["BS".index(letter)] //= mesh.size(axis)
    whole = DTensor.from_local(torch.zeros(shape), mesh, [PLACEMENTS[letter] for letter in before], run_check=False)
    counter = Collectives(mesh)
    with mock.patch("torch.distributed.tensor.placement_types.shard_dim_alltoall", counter.all_to_all), counter:
        whole.redistribute(placements=[PLACEMENTS[letter] for letter in after])
    return counter.calls


def test_the_predicted_collectives_are_those_that_dtensor_issues_with_their_bytes(mesh: DeviceMesh) -> None:
    sizes = tuple(mesh.shape)
    whole = SHAPE[0] * SHAPE[1] * SHAPE[2]
    layouts = _layouts(mesh.size())
    assert len(layouts) >= 4
    for before, after in product(layouts, repeat=2):
        predicted = [
            (collective, axis, round(share * whole)) for collective, axis, share in moves(before, after, sizes)
        ]
        assert predicted == _issued(before, after, mesh), f"{before} → {after}"


def test_equal_layouts_switch_at_no_cost() -> None:
    strategies = tuple(parse_strategy(text) for text in ("fsdp8", "dp8", "fsdp8 remat=full"))
    assert not switch_table(strategies, config()).any()


def test_a_switch_pays_for_the_activation_and_for_its_gradient() -> None:
    strategies = tuple(parse_strategy(text) for text in ("dp8", "tp8"))
    where = config()
    table = switch_table(strategies, where)[1]
    gathered = [(2, 1, 0.25), (1, 2, 0.5), (0, 4, 1.0)]
    expected = sum(
        collective_s(
            "all_gather",
            share * where.activation_bytes,
            Group(size=2, stride=stride, span=8),
            where.job.cluster,
            where.job.profile,
            where.job.efficiency.links,
        )
        for _, stride, share in gathered
    )
    assert table[0, 1] == pytest.approx(expected)  # there; its gradient comes back as slices
    assert table[1, 0] == pytest.approx(expected)  # slices there; the gradient is gathered


def test_a_larger_microbatch_never_switches_faster() -> None:
    strategies = tuple(parse_strategy(text) for text in ("dp8", "tp8", "tp8+sp", "dp2-tp4+sp", "tp2-dp4"))
    small = switch_table(strategies, config(num_microbatches=2))
    assert (switch_table(strategies, config(job(), num_microbatches=1)) >= small).all()


@pytest.mark.slow
def test_every_switch_of_t5_moves_the_tensors_that_cross_it() -> None:
    """Between encoder blocks and into the decoder's embedding one hidden state, behind it the encoder's output too."""
    t5 = chain_from_config(FAMILY_CONFIGS["t5"], name="t5")
    where = config(replace(job(), chain=t5))
    strategies = tuple(parse_strategy(text) for text in ("dp8", "tp8"))
    state_bytes = where.microbatch_samples * where.job.seq_len * t5.hidden_size * where.job.compute_bytes
    each = sum(
        where.job.collective_s("all_gather", share * state_bytes, Group(size=2, stride=stride, span=8))
        for stride, share in ((1, 0.25), (2, 0.5), (4, 1.0))
    )
    crossing = {"encoder block": 1, "decoder embedding": 1, "decoder block": 2, "head": 2}
    paid = dict(
        zip((layer_type.name for layer_type in t5.layer_types), switch_table(strategies, where)[:, 0, 1], strict=True)
    )
    for layer_type, tensors in crossing.items():
        assert paid[layer_type] == pytest.approx(tensors * each), layer_type
