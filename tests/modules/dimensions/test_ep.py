"""Tests that divided experts compute what one process does, exchange what they state, and are stored unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.modules.build import build_meta_model, prepare_model
from steelyard.modules.dimensions.ep import apply_expert_parallel, expert_degree
from steelyard.modules.dimensions.tp import apply_tensor_parallel
from steelyard.modules.experts import routed_experts
from steelyard.modules.layers import ChainLayer, build_layer
from steelyard.modules.updates import local_part
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.tracer.layer import CountedLayer, TracedLayer, fake_layer, fake_world, run_layer, shared_inputs
from tests.modules.dimensions.ep_ranks import CONFIGS, LEAST_GAP, NIGHTLY, OF_EIGHT, OF_FOUR, RESUMED
from tests.runtime.processes import run_ranks
from tests.sample import asked, sampled

TOLERANCE = 1e-5
SPARSE, SAMPLES, SEQ_LEN = 1, 2, 16
NUM_PAIRS = SAMPLES * SEQ_LEN * CONFIGS["mixtral"]["num_experts_per_tok"]
PAIR_BYTES, COUNT_BYTES = 4 * CONFIGS["mixtral"]["hidden_size"], 4

Found = dict[str, Any]


@cache
def chain() -> ModelChain:
    """The model, which is split when a test first asks for it."""
    return chain_from_config(CONFIGS["mixtral"], name="test")


# four and eight processes


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found: Found = run_ranks("tests.modules.dimensions.ep_ranks:of_four", 4, tmp_path_factory.mktemp("four"))
    return found


@pytest.fixture(scope="module")
def parity(request: pytest.FixtureRequest, four: Found, tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = dict(four["parity"])
    for work, num_processes in (
        (("of_four_nightly", 4), ("of_eight", 8)) if NIGHTLY.intersection(asked(request)) else ()
    ):
        of = run_ranks(f"tests.modules.dimensions.ep_ranks:{work}", num_processes, tmp_path_factory.mktemp(work))
        found |= of["parity"]
    return found


DIVISIONS = OF_FOUR | OF_EIGHT
SAMPLE = DIVISIONS.keys() - NIGHTLY
RIGHT = [name for name, each in DIVISIONS.items() if each.sums_experts and each.precision == "fp32"]
FAULTY = [name for name, each in DIVISIONS.items() if not each.sums_experts]
ROUNDED = [name for name, each in DIVISIONS.items() if each.precision == "bf16"]


@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(RIGHT, SAMPLE))
def test_loss_and_all_gradients_are_those_of_one_process(parity: Found, name: str) -> None:
    found = parity[name]
    assert found["loss_error"] < TOLERANCE
    assert found["gradient_error"] < TOLERANCE, found["gradient"]


@pytest.mark.processes
@pytest.mark.parametrize("name", FAULTY)
def test_a_missing_sum_over_the_outer_ranks_would_be_found(parity: Found, name: str) -> None:
    assert parity[name]["gradient_error"] > 1e3 * TOLERANCE
    assert ".experts." in parity[name]["gradient"]


@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(ROUNDED, SAMPLE))
def test_bf16_gives_the_loss_of_one_process_but_for_rounding(parity: Found, name: str) -> None:
    assert parity[name]["loss_error"] < 1e-3


@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(RIGHT, SAMPLE))
def test_no_token_of_the_samples_chooses_between_experts_that_are_nearly_equal(parity: Found, name: str) -> None:
    assert parity[name]["least_gap"] > LEAST_GAP


@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(RIGHT, SAMPLE))
def test_the_norm_counts_each_expert_once_where_copies_are_what_placements_say(parity: Found, name: str) -> None:
    assert parity[name]["norm_error"] < TOLERANCE


@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(RIGHT, SAMPLE))
def test_parts_are_where_their_placements_say(parity: Found, name: str) -> None:
    assert parity[name]["weights_error"] == 0.0


@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(RIGHT, SAMPLE))
def test_a_rank_stores_its_share_of_the_experts_and_no_padding(parity: Found, name: str) -> None:
    each = DIVISIONS[name]
    shards = each.data // each.replicas if each.zero else each.ep
    assert parity[name]["num_experts_entries"] == 1 / (shards * each.tp)


@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(RIGHT, SAMPLE))
def test_the_busiest_rank_has_more_than_the_mean_and_less_than_all(parity: Found, name: str) -> None:
    assert parity[name]["imbalance"]
    assert all(1.0 < ratio < DIVISIONS[name].ep for ratio in parity[name]["imbalance"].values())


@pytest.mark.processes
@pytest.mark.parametrize("name", sampled(RIGHT, SAMPLE))
def test_the_counter_of_pairs_begins_again_when_it_is_read(parity: Found, name: str) -> None:
    assert set(parity[name]["imbalance_of_nothing"].values()) == {1.0}


@pytest.mark.processes
@pytest.mark.parametrize("name", RESUMED)
def test_weights_are_read_under_another_division(four: Found, name: str) -> None:
    assert four["resumed"][name] == 0.0


@pytest.mark.processes
def test_ranks_without_tokens_or_without_work_compute_as_one_process(four: Found) -> None:
    assert all(error < 1e-6 for error in four["extremes"].values()), four["extremes"]
    assert len(four["extremes"]) == 4


# fake tensors


def observe(*, ep: int, tp: int = 1, remat: Remat = Remat.NONE) -> CountedLayer:
    """One forward and backward pass of a block on fake tensors."""
    with divided(ep=ep, tp=tp) as (layer, setting):
        layer.remat = remat
        return run_layer(setting, layer, SAMPLES, shared_inputs(setting, layer))


@contextmanager
def divided(*, ep: int, tp: int = 1) -> Iterator[tuple[ChainLayer, TracedLayer]]:
    """A block on fake tensors."""
    model = build_meta_model(chain())
    prepare_model(model, chain())
    with fake_world(tp * ep):
        mesh = init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))
        setting = TracedLayer(
            chain=chain(),
            layer=SPARSE,
            seq_len=SEQ_LEN,
            precision="fp32",
            mesh=mesh["tp"],
            strategy=parse_strategy(f"tp{tp}" if tp > 1 else "single"),
            model=model,
        )
        with fake_layer(setting) as layer:
            if ep > 1:
                apply_expert_parallel(layer, mesh["ep"])
            yield layer, setting


def test_forward_exchanges_counts_and_sends_pairs_there_and_back() -> None:
    sent = observe(ep=2).forward.collectives["all_to_all"]
    assert sent == [4 * COUNT_BYTES, NUM_PAIRS * PAIR_BYTES, NUM_PAIRS * PAIR_BYTES]


def test_backward_sends_gradients_there_and_back() -> None:
    assert observe(ep=2).backward.collectives["all_to_all"] == [NUM_PAIRS * PAIR_BYTES] * 2


def test_full_remat_exchanges_all_again() -> None:
    plain, full = observe(ep=2), observe(ep=2, remat=Remat.FULL)
    again = full.backward.beyond(plain.backward).collectives["all_to_all"]
    assert sorted(again) == sorted(plain.forward.collectives["all_to_all"])
    assert plain.needed.collectives["all_to_all"] == plain.forward.collectives["all_to_all"]


def test_selective_remat_exchanges_nothing_again() -> None:
    plain, selective = observe(ep=2), observe(ep=2, remat=Remat.SELECTIVE)
    assert selective.backward.collectives["all_to_all"] == plain.backward.collectives["all_to_all"]


def test_selective_remat_holds_less_than_none() -> None:
    assert observe(ep=2, remat=Remat.SELECTIVE).saved_bytes < observe(ep=2).saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
def test_even_routing_gives_every_rank_the_work_of_as_many_pairs_as_it_sends(ep: int) -> None:
    alone, one_of_several = observe(ep=1), observe(ep=ep)
    assert one_of_several.forward.matmul_flop == alone.forward.matmul_flop
    assert one_of_several.backward.matmul_flop == alone.backward.matmul_flop


def test_under_tp_a_rank_exchanges_the_pairs_of_its_slice_of_the_experts() -> None:
    sent = observe(ep=2, tp=2).forward.collectives["all_to_all"]
    assert sent == [2 * COUNT_BYTES, *[NUM_PAIRS // 2 * PAIR_BYTES] * 2]


@pytest.mark.parametrize("ep", [1, 2])
def test_a_layer_tells_its_degree(ep: int) -> None:
    with divided(ep=ep) as (layer, _):
        assert expert_degree(layer) == ep


def test_a_rank_holds_its_experts_alone() -> None:
    with divided(ep=4) as (layer, _):
        for parameter in routed_experts(layer)[0].parameters():
            own = local_part(parameter)
            assert own.shape[0] == 1
            assert own.untyped_storage().nbytes() == own.nbytes == parameter.nbytes // 4


# errors


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(6) as mesh:
        yield mesh


def layer_of(index: int) -> ChainLayer:
    model = build_meta_model(chain())
    prepare_model(model, chain())
    return build_layer(model, chain(), index, Remat.NONE)


def test_a_degree_that_does_not_divide_the_experts_is_an_error(mesh: DeviceMesh) -> None:
    with pytest.raises(InvalidPlanError, match="ep6 for 4 experts\n  expected: a divisor of 4"):
        apply_expert_parallel(layer_of(SPARSE), mesh)


def test_a_degree_that_does_not_divide_what_tp_leaves_is_an_error() -> None:
    model = build_meta_model(chain())
    prepare_model(model, chain())
    layer = build_layer(model, chain(), SPARSE, Remat.NONE)
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("ep", "tp"))
        apply_tensor_parallel(layer, chain(), mesh["tp"], sp=False)
        with pytest.raises(InvalidPlanError, match="ep4 for 4 experts, 2 per tp rank"):
            apply_expert_parallel(layer, mesh["ep"])


def test_a_layer_without_experts_is_an_error(mesh: DeviceMesh) -> None:
    with pytest.raises(InvalidModelError, match="ep for the embedding layers"):
        apply_expert_parallel(layer_of(0), mesh)
