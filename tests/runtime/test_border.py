"""Tests of the boundary between two stages: every entry arrives, sent equals received, nothing is sent twice."""

import pytest
import torch

from steelyard.plan.plan import Plan
from steelyard.runtime.pipeline_part import border, received_pieces, sent_pieces
from tests.runtime.models import make_plan

SAMPLES, TOKENS = 12, 32
PAIRS = [
    ("fsdp4", "tp2", (4, 2)),
    ("tp2", "fsdp3", (2, 3)),
    ("tp2+sp", "fsdp2-cp2", (2, 4)),
    ("cp4", "fsdp2", (4, 2)),
    ("single", "dp3", (1, 3)),
    ("fsdp2-tp2", "fsdp3-tp2", (4, 6)),
]


def plan_of(before: str, after: str, sizes: tuple[int, int], samples: int = SAMPLES) -> Plan:
    stages = (f"{before}, {before}", f"{after}, {after}")
    return make_plan("llama-tied", *stages, sizes=sizes, num_microbatches=2, global_batch=2 * samples, seq_len=TOKENS)


def sizes_of(where: tuple[slice, slice]) -> tuple[int, int]:
    return where[0].stop - where[0].start, where[1].stop - where[1].start


@pytest.mark.parametrize(("before", "after", "sizes"), PAIRS)
def test_every_rank_gets_its_whole_part_and_each_entry_crosses_once(
    before: str, after: str, sizes: tuple[int, int]
) -> None:
    source, target = border(plan_of(before, after, sizes), 1)
    shape = (SAMPLES, TOKENS, 1)
    received = 0
    for rank in target.ranks:
        part = torch.zeros(target.local_shape(shape))
        for piece in received_pieces(rank, source, target, shape):
            part[piece.where] += 1
        assert (part == 1).all()
        received += part.numel()
    assert received == SAMPLES * TOKENS


@pytest.mark.parametrize("samples", [SAMPLES, 3])
@pytest.mark.parametrize(("before", "after", "sizes"), [("single", "tp2", (1, 2)), ("tp2", "dp3", (2, 3))])
def test_what_is_sent_is_what_is_received(before: str, after: str, sizes: tuple[int, int], samples: int) -> None:
    source, target = border(plan_of(before, after, sizes, samples), 1)
    shape = (samples, TOKENS, 1)
    for one, other in ((source, target), (target, source)):
        for sender in one.ranks:
            for receiver in other.ranks:
                sent = [p.where for p in sent_pieces(sender, one, other, shape) if p.peer == receiver]
                got = [p.where for p in received_pieces(receiver, one, other, shape) if p.peer == sender]
                assert [sizes_of(each) for each in sent] == [sizes_of(each) for each in got]
