r"""Order of the passes of a pipeline for given times, with a lower bound of the step time over all orders.

A list schedule keeps the order of the forward passes and that of the backward passes of a stage, and takes from the
times which kind is next: a free stage starts a pass whose input has arrived, and a weight pass if there is none.
`best_order` returns the fastest of several such schedules and of the orders of the registered schedules, as the
simulator times them, all within the limits of the stages.

With limits $n_i$ and $k_i$, no order of split passes is faster than, for any stage $i$,

$$\max(r_i,\ e_i - n_i \max f) + F_i + B_i + \max(W_i - R_i + z_i,\ W_i + o_i), \qquad
R_i = \min(W_i, (1 + k_i) \max w)$$

Before its first gradient arrives, a stage can run $n_i$ forward passes at most; when its last backward pass begins,
$k_i$ weight passes are pending at most. Nor is one faster than $r_i + z_i + \sum a / n_i$, because the $n_i$ places of
a stage are taken for $a$ seconds, from each forward pass to the end of its backward pass.

| symbol           | unit | meaning                                                                              |
|------------------|------|--------------------------------------------------------------------------------------|
| $f, w$           | s    | a forward, a weight pass of the stage                                                |
| $F_i, B_i, W_i$  | s    | all forward, backward (without weight passes) and weight passes of the stage         |
| $r_i$            | s    | forward passes and transfers of a microbatch before the stage                        |
| $e_i$            | s    | forward and backward passes and transfers until the first gradient reaches the stage |
| $z_i$            | s    | backward passes and transfers after the stage, and what then follows on the first    |
| $o_i$            | s    | once-per-step work                                                                   |
| $n_i$, $k_i$     |      | `StageLimit`                                                                         |

Source: rules in the spirit of the automatic schedules of Qi et al. 2024 (arXiv 2401.10241), section 3; bounds by head,
body and tail of a machine as in Carlier 1982 (the one-machine sequencing problem). Not modelled: stages that share
processor cores, whose passes are faster while others idle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain, product
from math import inf
from typing import Any

import numpy as np

from steelyard.cost.shared_cores import PassTable, arrivals
from steelyard.cost.simulator import StageTimes, pass_table, simulate
from steelyard.schedules import SCHEDULES, PassOrder, Phase, PipelineConfig
from steelyard.schedules.pass_rows import write_row


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """Memory limit of a stage, in passes."""

    in_flight: int
    """Maximum number of passes whose activations are alive at once."""
    waiting: int
    """Maximum number of pending weight passes when a forward or a backward pass begins."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Rule by which a stage chooses between passes that it can start."""

    forward_first: bool
    """Whether a forward pass comes before a backward pass."""
    patience: float
    """Part of a weight pass for which a stage waits for a pass that arrives meanwhile."""


_RULES = [_Rule(*each) for each in product((True, False), (0.5, 0.0, 1.0))]
_NEAR = 1.001
"""Step time relative to the lower bound below which no more rules are tried."""


@dataclass(slots=True)
class _Stage:
    """Passes of a stage in a list schedule, as codes of `PassTable`."""

    forwards: list[int]
    backwards: list[int]
    limit: StageLimit
    weight_s: float
    codes: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Passes done, by phase."""
    free_s: float = 0.0

    def next_pass(self, arrival_s: Sequence[float], now_s: float, rule: _Rule, weight: int) -> tuple[float, int]:
        """Return the start and the code of the next pass; the start is infinite if none is known to arrive.

        The code of a weight pass is that of its backward pass plus ``weight``.
        """
        forward, backward, weights = self.done
        found = []
        if backward - weights <= self.limit.waiting:
            if backward < len(self.backwards):
                found.append((max(now_s, arrival_s[self.backwards[backward]]), self.backwards[backward]))
            if forward < len(self.forwards) and forward - backward < self.limit.in_flight:
                one = max(now_s, arrival_s[self.forwards[forward]]), self.forwards[forward]
                found.insert(0 if rule.forward_first else 1, one)
        start, code = min(found, key=lambda each: each[0], default=(inf, -1))
        if weights < backward and start > now_s and start >= now_s + rule.patience * self.weight_s:
            return now_s, self.backwards[weights] + weight
        return start, code


def best_order(
    parts: Sequence[StageTimes], pipeline: PipelineConfig, limits: Sequence[StageLimit], **options: Any
) -> tuple[str, ...]:
    """Return the rows of the fastest order found within the limits, which must leave room for the schedule's own order.

    It is no slower than any schedule with chunks in these places whose order is within the limits. ``options`` are
    those of `simulate`.
    """
    table, bound_s = pass_table(parts, pipeline), order_bound_s(parts, pipeline, limits)
    overlap_sends = bool(options.get("overlap_sends", True))
    ruled = (_list_schedule(table, pipeline, limits, rule, overlap_sends=overlap_sends) for rule in _RULES)
    best: tuple[str, ...] = ()
    best_s = inf
    for orders in chain(_known_orders(pipeline, limits), ruled):
        rows = tuple(write_row(order, pipeline.parts_of(stage)) for stage, order in enumerate(orders))
        step_s = simulate(parts, replace(pipeline, pass_order=rows), **options).step_time_s
        if step_s < best_s:
            best, best_s = rows, step_s
        if best_s <= _NEAR * bound_s:
            break
    return best


def _known_orders(pipeline: PipelineConfig, limits: Sequence[StageLimit]) -> Iterator[tuple[PassOrder, ...]]:
    """Yield the orders of the schedules that run this pipeline within the limits."""
    others = [each for each in SCHEDULES.values() if each.takes_chunks == (pipeline.num_chunks > 1)]
    for schedule in dict.fromkeys((pipeline.schedule, *others)):
        known = replace(pipeline, schedule=schedule, pass_order=())
        places = [[each.stage_of(part) for part in range(each.num_parts)] for each in (known, pipeline)]
        if schedule.refusal(known) is not None or places[0] != places[1]:
            continue
        orders = tuple(_split(known.passes(stage)) for stage in range(len(limits)))
        if all(
            order.in_flight() <= limit.in_flight and order.waiting() <= limit.waiting
            for order, limit in zip(orders, limits, strict=True)
        ):
            yield orders


def _split(order: PassOrder) -> PassOrder:
    """Return the order with a weight pass after each backward pass, if it has none."""
    if (order.phase == Phase.WEIGHT).any():
        return order
    again = np.repeat(np.arange(len(order.phase)), 1 + (order.phase == Phase.BACKWARD))
    phase = order.phase[again]
    phase[1:][again[1:] == again[:-1]] = Phase.WEIGHT
    return PassOrder(phase=phase, chunk=order.chunk[again], microbatch=order.microbatch[again])


def _list_schedule(
    table: PassTable, pipeline: PipelineConfig, limits: Sequence[StageLimit], rule: _Rule, *, overlap_sends: bool
) -> tuple[PassOrder, ...]:
    """Return the order of passes of every stage in which each stage takes the next pass by the rule."""
    count, num_parts = pipeline.num_microbatches, table.num_parts
    stages = []
    for place, limit in enumerate(limits):
        order, own = pipeline.passes(place), np.array(pipeline.parts_of(place))
        codes = ((order.phase * num_parts + own[order.chunk]) * count + order.microbatch).tolist()
        of_phase = [[code for code in codes if code // count // num_parts == phase] for phase in Phase]
        weight_s = max(table.duration_s[Phase.WEIGHT * num_parts + part] for part in pipeline.parts_of(place))
        stages.append(_Stage(of_phase[Phase.FORWARD], of_phase[Phase.BACKWARD], limit, weight_s))
    _play_by_rule(stages, table, count, rule, overlap_sends=overlap_sends)
    return tuple(_order_of(stage.codes, pipeline) for stage in stages)


def _play_by_rule(stages: Sequence[_Stage], table: PassTable, count: int, rule: _Rule, *, overlap_sends: bool) -> None:
    """Fill in the codes of every stage in the order of time."""
    arrival_s = arrivals(table, count, inf)
    link_free_s = [0.0] * len(stages) ** 2
    num_parts, duration_s, transfers_s = table.num_parts, table.duration_s, table.transfer_s
    events = [(0.0, place) for place in range(len(stages))]
    while events:
        now, place = heappop(events)
        stage = stages[place]
        if now < stage.free_s:
            continue
        start, code = stage.next_pass(arrival_s, now, rule, num_parts * count)
        if start > now:
            if start < inf:
                heappush(events, (start, place))
            continue
        group, microbatch = divmod(code, count)
        stage.codes.append(code)
        stage.done[group // num_parts] += 1
        end = sent = now + duration_s[group]
        target = table.consumer[group]
        if target >= 0:
            if transfers_s[group]:
                link = table.link[group]
                sent = max(link_free_s[link], end) + transfers_s[group]
                link_free_s[link] = sent
                end = end if overlap_sends else sent
            arrival_s[target * count + microbatch] = sent
            heappush(events, (sent, table.receiver[group]))
        stage.free_s = end
        heappush(events, (end, place))
    assert all(stage.done[Phase.WEIGHT] == len(stage.backwards) for stage in stages), "the limits leave no order"


def _order_of(codes: Sequence[int], pipeline: PipelineConfig) -> PassOrder:
    group, microbatch = np.divmod(np.array(codes), pipeline.num_microbatches)
    phase, part = np.divmod(group, pipeline.num_parts)
    return PassOrder(phase=phase, chunk=part // pipeline.num_stages, microbatch=microbatch)


def order_bound_s(
    parts: Sequence[StageTimes], pipeline: PipelineConfig, limits: Sequence[StageLimit] | None = None
) -> float:
    """Lower bound in seconds of the step time over all orders of split passes within the limits, if there are any."""
    endless = StageLimit(in_flight=pipeline.num_passes, waiting=pipeline.num_passes)
    limits = limits or [endless] * pipeline.num_stages
    table, count = pass_table(parts, pipeline), pipeline.num_microbatches
    forward, backward, weight, once = np.reshape(table.duration_s, (-1, len(parts)))
    sent, returned, *_ = np.reshape(table.transfer_s, (-1, len(parts)))
    before = np.cumsum(forward + sent) - (forward + sent)
    after = np.cumsum((backward + returned)[::-1])[::-1] - (backward + returned)
    """Seconds from the end of the last part's forward pass until a gradient reaches a part."""
    whole = float((forward + sent).sum())
    held = whole - before + after + backward
    """Seconds for which a microbatch takes a place of a part."""
    bound_s = 0.0
    for stage, limit in enumerate(limits):
        own = list(pipeline.parts_of(stage))
        forward_s, backward_s, weight_s = (float(each[own].sum()) * count for each in (forward, backward, weight))
        once_s, late_s = float(once[own].sum()), min(weight_s, (1 + limit.waiting) * float(weight[own].max()))
        begins_s = max(
            float(before[stage]), whole + float(after[own[-1]]) - limit.in_flight * float(forward[own].max())
        )
        ends_s = float(returned[: stage + 1].sum() + backward[:stage].sum())
        if stage:
            ends_s += float(weight[0] + once[list(pipeline.parts_of(0))].sum())
        in_work_s = begins_s + forward_s + backward_s + max(weight_s - late_s + ends_s, weight_s + once_s)
        in_places_s = before[stage] + ends_s + count * float(held[own].sum()) / limit.in_flight
        bound_s = max(bound_s, in_work_s, in_places_s)
    return bound_s
