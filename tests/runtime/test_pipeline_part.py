"""Tests that pipeline buffers are held while in use, in two processes, for two microbatch counts."""

import pytest

from tests.runtime.pipeline_part_worker import COUNTS, SAMPLES, SEQ_LEN, STAGES
from tests.runtime.processes import run_ranks

Found = dict[str, list[list[list[int]]]]

ACTIVATION_BYTES = SAMPLES * SEQ_LEN * 64 * 4
MORE = COUNTS[1] - COUNTS[0]
MORE_TOKEN_BYTES = 8 * MORE * SAMPLES * (SEQ_LEN + 1)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks("tests.runtime.pipeline_part_worker:bytes_by_part_and_schedule", 2, tmp_path_factory.mktemp("two"))


def growth(found: Found, schedule: str, part: str) -> list[tuple[int, int]]:
    """Growth of live bytes with more microbatches, by rank: in the last backward pass, and after the step."""
    few, many = found[f"{schedule} {part}"]
    return [(then[0] - now[0], then[1] - now[1]) for now, then in zip(few, many, strict=True)]


@pytest.mark.processes
@pytest.mark.parametrize("schedule", STAGES)
def test_more_microbatches_take_no_more_memory_than_their_tokens(found: Found, schedule: str) -> None:
    for in_last_pass, after in growth(found, schedule, "ours"):
        assert max(in_last_pass, after) < MORE_TOKEN_BYTES + ACTIVATION_BYTES / 2


@pytest.mark.processes
@pytest.mark.parametrize("schedule", STAGES)
def test_the_stages_of_torch_take_a_buffer_or_more_for_each(found: Found, schedule: str) -> None:
    """So the test above can fail."""
    for in_last_pass, after in growth(found, schedule, "stock"):
        assert in_last_pass >= MORE * ACTIVATION_BYTES
        assert after >= MORE * ACTIVATION_BYTES
