"""What of the package's answers is kept, as JSON, so that it survives renames in the code.

Strategies and configurations are kept as text, seconds and bytes by the names that users see. Identities of profiles,
dates, versions and certificates are left out.
"""

import hashlib
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np

from steelyard.cost.simulator import Timeline
from steelyard.cost.tables import CostTables
from steelyard.errors import UserError
from steelyard.plan.choices import ComparedBaseline, Explanation, TradeOffs
from steelyard.plan.plan import Plan
from steelyard.planning.choose import PlanningResult
from steelyard.search import SearchResult
from steelyard.search.problem import Problem

Record = Any
"""What JSON can hold."""


def plan_record(plan: Plan) -> Record:
    prediction = plan.prediction
    assert prediction is not None, "only priced plans are recorded"
    return {
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "stages": [
            {
                "ranks": f"{part.ranks[0]}-{part.ranks[1]}",
                "runs": [f"{run.layers[0]}-{run.layers[1]} {run.strategy}" for run in part.runs],
            }
            for part in plan.parts
        ],
        "step_s": prediction.step_time_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "mfu": prediction.mfu,
        "budget_bytes": prediction.budget_bytes,
        "terms": [{"time_s": each.time_s, "memory_bytes": each.memory_bytes} for each in prediction.stages],
        "alternatives": [
            [each.description, each.reason, each.step_time_s, each.memory_bytes] for each in prediction.alternatives
        ],
    }


def outcome_record(result: PlanningResult) -> Record:
    """The plan, or the nearest miss."""
    return plan_record(result.plan) if result.plan is not None else {"miss": result.miss_text}


def search_record(found: SearchResult) -> Record:
    return {
        "status": found.status,
        "ranked": [
            {
                "setting": config_text(each.tables),
                "samples": each.samples,
                "step_s": each.solution.step_s,
                "peak_bytes": each.solution.peak_bytes,
                "boundaries": list(each.solution.boundaries),
                "strategies": folded(str(each.tables.strategies[index]) for index in each.solution.strategies),
            }
            for each in found.ranked
        ],
        "reasons": [f"{config_text(each.tables)}: {each.reason}" for each in found.configs],
        "missing_bytes": found.nearest_miss.miss_bytes if found.nearest_miss else None,
    }


def config_text(tables: CostTables) -> str:
    pipeline = tables.pipeline
    chunks = f" x{pipeline.num_chunks}" if pipeline.num_chunks > 1 else ""
    return f"{pipeline.num_stages}{chunks} stages, {pipeline.num_microbatches} microbatches, {pipeline.schedule}"


def tables_record(problem: Problem) -> Record:
    """Return the strategies of every configuration, and sums and digests of the numbers."""
    return [
        {
            "setting": config_text(each),
            "kinds": list(each.layer_types),
            "strategies": digest(" | ".join(map(str, each.strategies)).encode()),
            "legal": int(each.legal.sum()),
            "transfer_s": each.transfer_s,
            "overhead_bytes": each.overhead_bytes,
            "time_s": array_record(each.time_s),
            "static_bytes": array_record(each.static_bytes),
            "activation_bytes": array_record(each.activation_bytes),
            "transient_bytes": array_record(each.transient_bytes),
            "switch_s": array_record(each.switches),
            "side_s": [array_record(side.seconds) for side in each.cross_layer_inputs],
        }
        for each in problem.configs
    ]


def baseline_record(baseline: ComparedBaseline) -> Record:
    return [baseline.step_time_s, baseline.slowdown, baseline.missing_bytes, baseline.setting, baseline.strategies]


def explanation_record(found: Explanation) -> Record:
    return {
        "binds": found.binds,
        "rivals": {each.name: baseline_record(each) for each in found.rivals},
        "budgets": {each.name: baseline_record(each) for each in found.budgets},
        "notes": list(found.notes),
        "excluded": [[each.what, each.values, each.reason] for each in found.not_searched],
        "verdicts": [[each.kind, each.strategy, each.verdict, each.reason] for each in found.verdicts],
    }


def trade_offs_record(found: TradeOffs) -> Record:
    return {
        "points": [
            [each.memory_bytes, each.step_time_s, each.tokens_per_s, each.setting, each.strategies, each.is_chosen]
            for each in found.points
        ],
        "is_complete": found.is_complete,
        "devices": {
            each.num_devices: [
                *(each.step_time_s, each.tokens_per_s, each.memory_bytes, each.cost_per_billion_tokens),
                *(each.setting, each.strategies, each.reason),
            ]
            for each in found.devices
        },
    }


def timeline_record(timeline: Timeline) -> Record:
    return {
        "step_s": timeline.step_time_s,
        "bubble_share": timeline.bubble_share(),
        "stages": [
            [[each.work, each.chunk, each.microbatch, each.start_s, each.end_s] for each in stage]
            for stage in timeline.stages
        ],
        "bubbles": [
            [[each.reason, each.microbatch, each.start_s, each.end_s] for each in timeline.bubbles(stage)]
            for stage in range(timeline.pipeline.num_stages)
        ],
    }


def error_record(error: UserError) -> Record:
    return {"error": [error.field, error.found, error.expected, error.hint]}


def folded(texts: Iterable[str]) -> list[str]:
    """Equal neighbours as one, with their number."""
    return [f"{text} x{len(list(run))}" for text, run in groupby(texts)]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def array_record(values: Any) -> Record:
    """The sum, for whoever reads a difference, and a digest of every bit."""
    array = np.ascontiguousarray(values)
    return [array.sum().item(), digest(array.tobytes())]
