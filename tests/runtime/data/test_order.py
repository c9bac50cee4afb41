"""Tests of the sample order: every epoch a permutation, and the same global batches for every plan."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from steelyard.runtime.data.order import SampleOrder, rank_samples

seeds = st.integers(0, 2**40)


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    order = SampleOrder(num_samples=num_samples, seed=seed)
    return [order.data_sample(epoch * num_samples + place) for place in range(num_samples)]


@given(st.integers(1, 300), seeds, st.integers(0, 5))
def test_an_epoch_reads_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(num_samples, seed, epoch)) == list(range(num_samples))


@given(st.integers(30, 300), seeds)
def test_epochs_and_seeds_have_orders_of_their_own(num_samples: int, seed: int) -> None:
    orders = [epoch_order(num_samples, *pair) for pair in ((seed, 0), (seed, 1), (seed + 1, 0))]
    assert len({tuple(order) for order in orders}) == 3


def test_the_order_looks_like_no_order() -> None:
    order = epoch_order(10_000, 0, 0)
    ascents = sum(left < right for left, right in pairwise(order))
    assert 4_700 < ascents < 5_300
    fixed_points = sum(place == sample for place, sample in enumerate(order))
    assert fixed_points < 10
    in_first_half = sum(sample < 5_000 for sample in order[:1_000])
    assert 400 < in_first_half < 600


def test_a_corpus_of_a_trillion_samples_costs_no_memory() -> None:
    order = SampleOrder(num_samples=10**12, seed=3)
    assert len({order.data_sample(sample) for sample in range(1_000)}) == 1_000


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, int, int]:
    """Global batch, microbatches and data-parallel degree."""
    degree, num_microbatches, share = (draw(st.integers(1, 6)) for _ in range(3))
    return degree * num_microbatches * share, num_microbatches, degree


@given(shares())
def test_the_ranks_of_any_plan_read_every_sample_of_the_global_batch_once(plan: tuple[int, int, int]) -> None:
    global_batch, num_microbatches, degree = plan
    read = [
        sample
        for index in range(degree)
        for sample in rank_samples(
            global_batch=global_batch, num_microbatches=num_microbatches, degree=degree, index=index
        )
    ]
    assert sorted(read) == list(range(global_batch))


@given(shares())
def test_a_microbatch_holds_the_same_samples_at_every_degree(plan: tuple[int, int, int]) -> None:
    global_batch, num_microbatches, degree = plan
    share = global_batch // num_microbatches // degree
    ranks = [
        rank_samples(global_batch=global_batch, num_microbatches=num_microbatches, degree=degree, index=index)
        for index in range(degree)
    ]
    for microbatch in range(num_microbatches):
        mine = [sample for rank in ranks for sample in rank[microbatch * share : (microbatch + 1) * share]]
        first = microbatch * share * degree
        assert mine == list(range(first, first + share * degree))
