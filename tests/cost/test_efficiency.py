"""Tests of which rates are fitted and which are assumed, and that both are reported."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.compute import CACHE_BYTES_PER_S, work_s
from steelyard.cost.efficiency import SAME_FOR_EVERY_SHAPE, STAND_IN, catalogue_rates, efficiency_of
from steelyard.hardware import devices
from steelyard.profiles.profile import Affine, Work
from steelyard.profiles.shapes import AttentionCall
from tests.cost.examples import job


@pytest.mark.parametrize("device", [each for each in devices() if not each.needs_profile], ids=lambda each: each.name)
def test_every_device_of_the_catalogue_with_rates_has_a_generation(device) -> None:
    assert not catalogue_rates(device.name).is_stand_in


@pytest.mark.parametrize(
    ("device", "generation", "is_assumed"),
    [
        ("a100-80gb", "ampere", False),
        ("h100-80gb", "hopper", False),
        ("H100-80GB", "hopper", False),
        ("h20-141gb", "h20", True),
        ("v100-16gb", "volta", True),
        ("b200-180gb", "blackwell", True),
        ("mi300x", "cdna3", False),
        ("mi250x", "amd", True),
        ("gb200-186gb", "gb200", False),
        ("rtx-4090", "geforce", True),
        ("rtx-4070-ti-super", "geforce", True),
        ("l40", "geforce", True),
        ("l40s", "ada", True),
        ("rtx-6000-ada", "ada", True),
        ("a10g", "ampere", False),
        ("t4", "volta", True),
    ],
)
def test_a_generation_is_fitted_or_assumed(device: str, generation: str, is_assumed: bool) -> None:
    found = catalogue_rates(device)
    assert (found.generation, found.is_assumed, found.is_stand_in) == (generation, is_assumed, False)
    assert str(found).startswith("assumed" if is_assumed else "fitted")
    assert found.brief == f"{'assumed' if is_assumed else 'fitted'} ({generation})"


@pytest.mark.parametrize("device", ["round", "a1000", "l41", "h1", ""])
def test_the_rates_of_an_unknown_device_are_assumed_and_the_entry_is_named(device: str) -> None:
    found = catalogue_rates(device)
    assert (found.generation, found.is_assumed, found.is_stand_in) == (STAND_IN, True, True)
    assert "unknown device generation" in str(found)
    assert repr(STAND_IN) in str(found)
    assert efficiency_of(device, "") == efficiency_of("unheard-of", "")


def test_a_traced_job_says_which_rates_its_times_rest_on() -> None:
    assert job().cost_source().rates == catalogue_rates("round")
    assert "assumed" in str(job().cost_source())


def test_a_job_with_rates_of_its_own_names_no_entry() -> None:
    assert job().on(rates=efficiency_of("h100-80gb", "")).cost_source().rates is None


MIB = 2**20


def moved_s(per_sample: float, cache_bytes: float | None, *, constant: float = 0.0) -> float:
    """Seconds of ten kernels that only move bytes, on a device whose memory moves 1 TB/s."""
    whole = job()
    (group,) = whole.cluster.groups
    device = replace(group.device, cache_bytes=cache_bytes)
    cached = whole.on(cluster=replace(whole.cluster, groups=(replace(group, device=device),)))
    nothing, moved = Affine(), Affine(constant=constant, per_sample=per_sample)
    work = Work(matmul_flop=nothing, attention_flop=nothing, matmul_bytes=nothing, memory_bytes=moved, num_kernels=10)
    return float(work_s(work, 1, cached)) - 10 * cached.efficiency.ramp_s


def test_activations_far_smaller_than_the_cache_move_at_its_rate() -> None:
    assert moved_s(1e4, 1e12) == pytest.approx(moved_s(1e4, None) * 1e12 / CACHE_BYTES_PER_S)


def test_weights_and_activations_as_large_as_the_cache_move_at_the_memorys_rate() -> None:
    assert moved_s(0.0, 40 * MIB, constant=1e6) == pytest.approx(moved_s(1e6, None))
    assert moved_s(400 * MIB, 40 * MIB) == pytest.approx(moved_s(400 * MIB, None))


@given(st.floats(1e3, 1e10), st.floats(1, 2), st.floats(1e6, 1e9))
def test_more_activations_take_longer_and_a_larger_cache_never_does(moved: float, more: float, size: float) -> None:
    assert moved_s(moved * more, size) >= moved_s(moved, size) * (1 - 1e-9)
    assert moved_s(moved, size * more) <= moved_s(moved, size) * (1 + 1e-9)


FLASH = AttentionCall(heads=8, head_dim=128, queries=4096, keys=4096, is_causal=True)
GENERATIONS = ("a100-80gb", "h100-80gb", "l40s", "b200-180gb", "v100-16gb", "mi300x")
generations = pytest.mark.parametrize("device", GENERATIONS)


def attention_of(*calls: AttentionCall) -> Work:
    nothing = Affine()
    return Work(
        matmul_flop=nothing,
        attention_flop=Affine(per_sample=sum(call.flop(1) for call in calls)),
        matmul_bytes=nothing,
        memory_bytes=nothing,
        num_kernels=len(calls),
        attention=calls,
    )


def slowness(device: str, samples: float = 1, **changes: object) -> float:
    """Time of attention for its FLOP, relative to the usual shape."""
    work = attention_of(FLASH.model_copy(update=changes))
    return efficiency_of(device, "").attention_shape.flop(work, samples) / work.attention_flop.at(samples)


@generations
def test_attention_of_the_usual_shape_that_fills_the_device_takes_what_its_flop_take(device: str) -> None:
    assert slowness(device, heads=10**9) == pytest.approx(1)


@generations
def test_attention_whose_shape_was_not_counted_is_taken_as_of_the_usual_one(device: str) -> None:
    work = attention_of(FLASH).model_copy(update={"attention": ()})
    assert efficiency_of(device, "").attention_shape.flop(work, 3) == work.attention_flop.at(3)


@pytest.mark.parametrize("device", GENERATIONS[:4])
@pytest.mark.parametrize("smaller", [{"head_dim": 64}, {"keys": 1024, "queries": 1024}])
def test_small_heads_and_short_sequences_take_longer_for_their_flop(device: str, smaller: dict[str, int]) -> None:
    assert slowness(device, **smaller) > slowness(device)


@pytest.mark.parametrize("device", ["a100-80gb", "b200-180gb"])
def test_few_heads_leave_a_device_idle_and_backward_is_slower(device: str) -> None:
    assert slowness(device, heads=2) > slowness(device)
    assert slowness(device, backward=True) > slowness(device)


@pytest.mark.parametrize("device", ["v100-16gb", "mi300x"])
def test_a_generation_without_measured_kernels_takes_no_others_shape(device: str) -> None:
    assert efficiency_of(device, "").attention_shape == SAME_FOR_EVERY_SHAPE


@pytest.mark.slow
@generations
@given(
    samples=st.floats(min_value=1 / 64, max_value=512),
    more=st.floats(min_value=1, max_value=16),
    heads=st.integers(min_value=1, max_value=128),
)
def test_more_samples_and_more_heads_never_take_less_and_half_the_heads_never_less_than_half(
    device: str, samples: float, more: float, heads: int
) -> None:
    shape = efficiency_of(device, "").attention_shape

    def at(samples: float, heads: float) -> float:
        return shape.flop(attention_of(FLASH.model_copy(update={"heads": heads})), samples)

    least = at(samples, heads) * (1 - 1e-9)
    assert at(samples * more, heads) >= least
    assert at(samples, heads * more) >= least
    assert at(samples, heads / 2) >= least / 2
