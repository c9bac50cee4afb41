"""Tests of the messages of a proof on two ranks, which are threads."""

import threading

import pytest
from torch.distributed.device_mesh import DeviceMesh

from steelyard.modules.two_ranks import on_two_ranks

REASONS = ("the gradient of a differs", "the gradient of b differs")


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("raises", [False, True])
def test_the_reason_is_the_first_ranks_whichever_ends_first(last: int, raises: bool) -> None:
    ranks: dict[int, threading.Thread] = {}
    started = threading.Barrier(2)

    def compared(mesh: DeviceMesh) -> str:
        rank = mesh.get_rank()
        ranks[rank] = threading.current_thread()
        started.wait()
        if rank == last:
            ranks[1 - rank].join()
        if raises:
            raise ValueError(REASONS[rank])
        return REASONS[rank]

    assert on_two_ranks(compared) == (f"it raises ValueError ({REASONS[0]})" if raises else REASONS[0])


def test_a_reason_of_the_second_rank_alone_is_told() -> None:
    assert on_two_ranks(lambda mesh: REASONS[1] if mesh.get_rank() else "") == REASONS[1]
