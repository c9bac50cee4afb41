"""Orders of passes as rows of torch's CSV files for pipeline schedules, one row per stage.

An entry is the part of the model, the kind of pass and the microbatch: ``5I2`` is the backward pass, without weight
gradients, of microbatch 2 in part 5. `torch.distributed.pipelining` reads rows with the transfers that `with_transfers`
adds. It is then told in which order a rank begins sends and receives, which must suit the order of its neighbours.

Source: `_Action` and `_add_send_recv` of `torch.distributed.pipelining` 2.13, whose order of transfers is used.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from steelyard.errors import InvalidPlanError
from steelyard.schedules.pipeline import PassOrder, Phase, PipelineConfig

_LETTERS = {Phase.FORWARD: "F", Phase.BACKWARD: "I", Phase.WEIGHT: "W"}
_PHASES = {letter: phase for phase, letter in _LETTERS.items()}
_ENTRY = re.compile(r"(\d{1,6})([FIW]|SEND_[FB]|RECV_[FB])(\d{1,6})")


def write_row(order: PassOrder, parts: Sequence[int]) -> str:
    """Return the row of the passes of a stage that has these parts, with weight gradients in separate passes."""
    passes = zip(order.chunk.tolist(), order.phase.tolist(), order.microbatch.tolist(), strict=True)
    return ",".join(f"{parts[chunk]}{_LETTERS[Phase(phase)]}{microbatch}" for chunk, phase, microbatch in passes)


@lru_cache(maxsize=256)
def read_row(row: str, num_stages: int) -> PassOrder:
    """Return the passes of a row. Raises `InvalidPlanError` if an entry is not a pass."""
    entries = [_parsed(each) for each in row.split(",")]
    if others := {kind for _, kind, _ in entries} - _PHASES.keys():
        raise _refusal(", ".join(sorted(others)), "passes without transfers, which are added when the plan is run")
    found = np.array([(part, _PHASES[kind], microbatch) for part, kind, microbatch in entries])
    return PassOrder(phase=found[:, 1], chunk=found[:, 0] // num_stages, microbatch=found[:, 2])


def _parsed(entry: str) -> tuple[int, str, int]:
    """Return part, kind and microbatch of an entry."""
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise _refusal(repr(entry), "the part of the model, F, I or W, and the microbatch, as in 5I2")
    return int(found[1]), found[2], int(found[3])


def with_transfers(pipeline: PipelineConfig) -> tuple[list[str], ...]:
    """Return the entries of each stage's row with the transfers between stages.

    The passes are taken in rounds, one of every stage whose input was sent. A pass is followed by its send, and the
    receive follows the latest pass of the receiver. A stage sends nothing to itself. Raises `InvalidPlanError` if the
    orders wait for each other.
    """
    orders = [pipeline.passes(stage) for stage in range(pipeline.num_stages)]
    parts, num_parts = [pipeline.parts_of(stage) for stage in range(len(orders))], pipeline.num_parts
    rows: tuple[list[str], ...] = tuple([] for _ in orders)
    ahead = [zip(each.phase.tolist(), each.chunk.tolist(), each.microbatch.tolist(), strict=True) for each in orders]
    todo = [next(each, None) for each in ahead]
    sent: set[tuple[int, int, int]] = set()
    while any(todo):
        is_stuck = True
        for stage, taken in enumerate(todo):
            if taken is None:
                continue
            phase, chunk, microbatch = taken
            part = parts[stage][chunk]
            source, target = (part - 1, part + 1) if phase == Phase.FORWARD else (part + 1, part - 1)
            if phase != Phase.WEIGHT and 0 <= source < num_parts and (phase, part, microbatch) not in sent:
                continue
            rows[stage].append(f"{part}{_LETTERS[Phase(phase)]}{microbatch}")
            if phase != Phase.WEIGHT and 0 <= target < num_parts:
                kind, receiver = "F" if phase == Phase.FORWARD else "B", pipeline.stage_of(target)
                if receiver != stage:
                    rows[stage].append(f"{part}SEND_{kind}{microbatch}")
                    rows[receiver].append(f"{target}RECV_{kind}{microbatch}")
                sent.add((phase, target, microbatch))
            todo[stage], is_stuck = next(ahead[stage], None), False
        if is_stuck:
            stuck = ", ".join(f"stage {stage} at {taken}" for stage, taken in enumerate(todo) if taken is not None)
            raise _refusal(stuck, "passes whose inputs other stages have sent by then")
    return rows


def received_ahead(row: Sequence[str]) -> tuple[int, int]:
    """Return the most activations and gradients that a row with transfers has received when a pass that needs none of
    them runs."""
    held: dict[str, set[tuple[int, int]]] = {"F": set(), "I": set(), "W": set()}
    most = {"F": 0, "I": 0}
    for entry in row:
        part, kind, microbatch = _parsed(entry)
        if kind in ("RECV_F", "RECV_B"):
            held["F" if kind == "RECV_F" else "I"].add((part, microbatch))
        elif kind in held:
            held[kind].discard((part, microbatch))
            most = {each: max(count, len(held[each])) for each, count in most.items()}
    return most["F"], most["I"]


def check_rows(pipeline: PipelineConfig) -> None:
    """Raise `InvalidPlanError` unless its rows have every pass once, after the passes of all stages that it needs."""
    rows, num_stages = pipeline.pass_order, pipeline.num_stages
    num_chunks, num_microbatches = pipeline.num_chunks, pipeline.num_microbatches
    if len(rows) != num_stages:
        raise _refusal(f"{len(rows)} rows", f"a row for each of {num_stages} stages")
    places = {(chunk, microbatch) for chunk in range(num_chunks) for microbatch in range(num_microbatches)}
    orders = [read_row(row, num_stages) for row in rows]
    for stage, (row, order) in enumerate(zip(rows, orders, strict=True)):
        done: dict[int, set[tuple[int, int]]] = {phase: set() for phase in Phase}
        parts = pipeline.parts_of(stage)
        if write_row(order, parts) != row:
            raise _refusal(f"a part of another stage in row {stage}", f"parts {', '.join(map(str, parts))}")
        for phase, *place in zip(order.phase.tolist(), order.chunk.tolist(), order.microbatch.tolist(), strict=True):
            if (phase and tuple(place) not in done[phase - 1]) or tuple(place) in done[phase]:
                raise _refusal(
                    f"pass {_LETTERS[Phase(phase)]} of microbatch {place[1]} twice or too early in row {stage}",
                    "F, I and W of every microbatch and part once and in this order",
                )
            done[phase].add((place[0], place[1]))
        if done[Phase.WEIGHT] != places or done[Phase.FORWARD] != places:
            raise _refusal(
                f"row {stage} without some passes, or with more",
                f"three passes for each of {num_microbatches} microbatches and {num_chunks} chunks",
            )
    with_transfers(pipeline)


def _refusal(found: str, expected: str) -> InvalidPlanError:
    return InvalidPlanError(
        field="pass_order", found=found, expected=expected, hint="leave pass_order out, or plan again"
    )
