"""What ``steelyard profile`` decides before it measures."""

import pytest

from steelyard.cli.profile import MOST_MEASURED, SAMPLES, parse_samples
from steelyard.errors import UserError


@pytest.mark.parametrize("batch", [2, 3, 8, 16, 17, 2 * MOST_MEASURED])
def test_the_samples_for_a_batch_reach_from_one_sample_to_all_of_it(batch: int) -> None:
    sizes = parse_samples(None, batch)
    assert sizes[0] == 1
    assert 2 * sizes[-1] >= batch > sizes[-1] or sizes == (1, 2)


def test_a_batch_of_very_many_samples_is_measured_as_far_as_a_rank_may_hold() -> None:
    assert parse_samples(None, 10**6)[-1] == MOST_MEASURED


def test_without_samples_and_batch_the_usual_sizes_are_measured() -> None:
    assert ",".join(map(str, parse_samples(None))) == SAMPLES


def test_samples_are_sorted_and_each_is_there_once() -> None:
    assert parse_samples("4,1,4") == (1, 4)


@pytest.mark.parametrize(("text", "batch"), [("0", None), ("a", None), ("", None), ("1,2", 16)])
def test_other_samples_or_both_are_an_error(text: str, batch: int | None) -> None:
    with pytest.raises(UserError) as caught:
        parse_samples(text, batch)
    assert caught.value.field == "--samples"
