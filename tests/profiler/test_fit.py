from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.profiler.collectives import LinearFit, fit_latency_and_rate

SIZES = (2**14, 2**16, 2**18, 2**20, 2**22, 2**24)


def seconds(fit: LinearFit, size: int) -> float:
    return fit.latency_s + size / fit.bytes_per_s


@settings(deadline=None)
@given(latency_s=st.floats(1e-7, 1e-1), bytes_per_s=st.floats(1e6, 1e12))
def test_an_exact_line_is_found_again(latency_s, bytes_per_s):
    fit = fit_latency_and_rate(SIZES, [latency_s + size / bytes_per_s for size in SIZES])
    for size in SIZES:
        assert seconds(fit, size) == pytest.approx(latency_s + size / bytes_per_s, rel=1e-6)
    assert fit.max_relative_error < 1e-6


@settings(deadline=None)
@given(times_s=st.lists(st.floats(1e-7, 10.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_more_bytes_are_never_cheaper_and_nothing_is_negative(times_s):
    fit = fit_latency_and_rate(SIZES, times_s)
    assert fit.latency_s >= 0
    assert fit.bytes_per_s > 0
    assert all(seconds(fit, low) <= seconds(fit, high) for low, high in pairwise(SIZES))


@settings(deadline=None)
@given(
    times_s=st.lists(st.floats(1e-6, 1.0), min_size=len(SIZES), max_size=len(SIZES)),
    latency_s=st.floats(0, 1.0),
    s_per_byte=st.floats(1e-12, 1e-4),
)
def test_no_other_line_has_a_smaller_relative_misfit(times_s, latency_s, s_per_byte):
    def misfit(alpha, beta):
        return sum(((alpha + beta * size - time) / time) ** 2 for size, time in zip(SIZES, times_s, strict=True))

    fit = fit_latency_and_rate(SIZES, times_s)
    assert misfit(fit.latency_s, 1 / fit.bytes_per_s) <= misfit(latency_s, s_per_byte) * (1 + 1e-9) + 1e-9


def test_times_that_scale_leave_the_relative_error_alone():
    times_s = [1e-3, 1.2e-3, 1.1e-3, 3e-3, 9e-3, 40e-3]
    slow = fit_latency_and_rate(SIZES, [10 * time for time in times_s])
    fast = fit_latency_and_rate(SIZES, times_s)
    assert slow.max_relative_error == pytest.approx(fast.max_relative_error)
    assert slow.latency_s == pytest.approx(10 * fast.latency_s)


def test_a_falling_line_becomes_latency_alone():
    fit = fit_latency_and_rate((1024, 2048), (2e-3, 1e-3))
    assert seconds(fit, 1024) == pytest.approx(seconds(fit, 2048))


@pytest.mark.parametrize(
    ("sizes", "times"), [((), ()), ((1,), (1.0,)), ((1, 1), (1.0, 1.0)), ((1, 2), (1.0,)), ((1, 2), (1.0, 0.0))]
)
def test_too_little_to_fit_is_an_error(sizes, times):
    with pytest.raises(ValueError, match=r"sizes|seconds"):
        fit_latency_and_rate(sizes, times)
