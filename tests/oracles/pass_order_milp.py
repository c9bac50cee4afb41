r"""Best order of the passes of a small pipeline as a mixed-integer linear program for HiGHS.

One start time per pass and one binary per pair of passes of a stage, which is 1 if the first of them comes first. All
microbatches are equal, so passes of one kind through one part are in the order of their microbatches: swapping names
in any other order does not make it slower. Limits are sums of binaries.
"""

from collections.abc import Sequence
from itertools import combinations

import highspy

from steelyard.cost.pass_order import StageLimit
from steelyard.cost.simulator import StageTimes, pass_table
from steelyard.schedules import Phase, PipelineConfig
from tests.oracles.milp import Rows, solve_rows

Pass = tuple[int, int, int]
"""Phase, part of the model, microbatch."""


def best_order_s(
    parts: Sequence[StageTimes], pipeline: PipelineConfig, limits: Sequence[StageLimit], time_limit_s: float
) -> tuple[float, float]:
    """Lower bound of the least step time in seconds, and the step time of the best order found."""
    count, num_stages, table = pipeline.num_microbatches, pipeline.num_stages, pass_table(parts, pipeline)

    def seconds(each: Pass) -> float:
        return table.duration_s[each[0] * len(parts) + each[1]]

    stages = [
        [(phase, part, m) for phase in Phase for part in range(stage, len(parts), num_stages) for m in range(count)]
        for stage in range(num_stages)
    ]
    pairs = [pair for stage in stages for pair in combinations(stage, 2)]
    column = {pair: place for place, pair in enumerate(pairs)}
    start = {each: len(pairs) + place for place, each in enumerate(x for stage in stages for x in stage)}
    end, horizon = len(pairs) + len(start), count * (sum(table.duration_s) + 2 * sum(table.transfer_s))
    rows = Rows()

    def after(one: Pass, other: Pass, lag_s: float = 0.0) -> None:
        rows.add({start[other]: 1.0, start[one]: -1.0}, seconds(one) + lag_s, highspy.kHighsInf)

    for one, other in pairs:
        at = column[one, other]
        gap = {start[other]: 1.0, start[one]: -1.0}
        rows.add({**gap, at: -horizon}, seconds(one) - horizon, highspy.kHighsInf)
        rows.add({**gap, at: -horizon}, -highspy.kHighsInf, -seconds(other))
        if one[:2] == other[:2] or (one[1:] == other[1:] and one[0] < other[0]):
            rows.add({at: 1.0}, 1.0, 1.0)
    for (phase, part, m), at in start.items():
        group = phase * len(parts) + part
        if table.consumer[group] >= 0:
            to_phase, to_part = divmod(table.consumer[group], len(parts))
            after((phase, part, m), (to_phase, to_part, m), table.transfer_s[group])
        once_s = table.duration_s[3 * len(parts) + part % num_stages :: num_stages]
        rows.add({end: 1.0, at: -1.0}, seconds((phase, part, m)) + sum(once_s), highspy.kHighsInf)
    for stage, limit in zip(stages, limits, strict=True):
        _add_limits(rows, column, stage, limit)
    cost = [0.0] * end + [1.0]
    return solve_rows(rows, cost, len(pairs), len(pairs), time_limit_s)


def _add_limits(rows: Rows, column: dict[tuple[Pass, Pass], int], stage: Sequence[Pass], limit: StageLimit) -> None:
    """Limit what is alive and what is pending when a forward or a backward pass of the stage begins."""
    for each in (one for one in stage if one[0] != Phase.WEIGHT):
        own = each[0] == Phase.FORWARD
        for most, up, down in (
            (limit.in_flight - own, Phase.FORWARD, Phase.BACKWARD),
            (limit.waiting, Phase.BACKWARD, Phase.WEIGHT),
        ):
            terms, constant = {}, 0.0
            for other in stage:
                sign = (other[0] == up) - (other[0] == down)
                if other == each or not sign:
                    continue
                if (other, each) in column:
                    terms[column[other, each]] = float(sign)
                else:
                    terms[column[each, other]] = -float(sign)
                    constant += sign
            rows.add(terms, -highspy.kHighsInf, most - constant)
