"""Whether a change of the code leaves every plan and prediction the same to the last bit.

Plans and solves a fixed bank of problems (all families and packaged models, all schedules, several devices, one node
and many, tight and roomy memory, pins, restrictions, frameworks' means, measured profiles, problem files, plans
written by hand) and writes what came out as one JSON file. Of two such files it says what differs.

What is written survives renames in the code: strategies and settings as text, seconds and bytes by the names that
users see. Identities of profiles, dates, versions and certificates are left out. Floats are written so that they read
back as the same bits. All that this file knows of the package stands in the section *The package*: who renames
something there changes a line here.

Run: python benchmarks/same_results.py OUT.json [--only WORD ...]
     python benchmarks/same_results.py --compare BEFORE.json AFTER.json

The second form prints problem, field, before and after, and exits with 1 if anything differs. Models are traced once
and kept as the package keeps them; with XDG_CACHE_HOME naming an empty folder the tracer is compared as well.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from galvatron.cells import Cell, problem

from steelyard.cost.execution import Execution, StateBytes
from steelyard.cost.predict import predict, predict_memory
from steelyard.cost.setting import Job, Setting
from steelyard.cost.simulator import StageTimes, Timeline, simulate
from steelyard.cost.switching import switch_table
from steelyard.cost.tables import CostTables
from steelyard.errors import UserError
from steelyard.export import TARGETS
from steelyard.model.read import chain_from_config, load_model, model_names
from steelyard.plan.choices import Explanation, Rival, TradeOffs
from steelyard.plan.plan import Plan, StagePlan, fold_runs
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.planning import (
    PlanningResult,
    PlanOptions,
    explain_plan,
    find_trade_offs,
    grow_batch,
    make_job,
    make_problem,
    parse_pin,
    pin_error,
    plan_fewest_devices,
    plan_job,
    plan_within,
    uniform_plan,
    why_not,
    with_fallbacks,
    with_price,
)
from steelyard.planning.assemble import assemble_plan
from steelyard.profiles.profile import CollectiveProfile, LayerProfile, MeasuredTime, Profile, ShardingTime
from steelyard.schedules import PipelineConfig, find_schedule
from steelyard.search import (
    Problem,
    SearchResult,
    SpaceOptions,
    cost_graph,
    enumerate_levels,
    enumerate_strategies,
    graph_frontier,
    parse_problem,
    sampled_frontier,
    solve_problem,
)
from tests.problems.patterned import deep_settings
from tests.problems.random_tables import random_tables
from tests.problems.transformer import LLAMA3_8B, decoder_settings
from tests.runtime.models import FAMILY_CONFIGS

Record = Any
"""What JSON can hold."""
Question = Callable[[], Record]

GB = 10**9
GIB = 2**30
DOCUMENT = Path(__file__).parents[1] / "docs" / "problem-files.md"


# --- The package: what is asked of it, and what of its answers is kept ---------------------------------------------


@cache
def _job(model: str, cluster: str, batch: int, seq_len: int, precision: str = "bf16", memory: str | None = None) -> Job:
    """The job of a packaged model, or of a small one of a family."""
    chain = load_model(model) if model in model_names() else chain_from_config(_small_config(model), name=model)
    return make_job(
        chain,
        cluster,
        global_batch=batch,
        seq_len=seq_len or chain.max_seq_len,
        precision=precision,
        memory=memory,
        profile=None,
    )


def _options(job: Job, *, remats: Sequence[str] = (), pins: Sequence[str] = (), **others: Any) -> PlanOptions:
    options = PlanOptions(**others)
    if remats:
        options = replace(options, remats=tuple(Remat(each) for each in remats))
    return replace(options, pins=tuple(_pin(text, job) for text in pins))


def _pin(text: str, job: Job) -> Any:
    return parse_pin(text, option="--pin", num_layers=job.chain.num_layers, with_settings=True)


def _plan(job: Job, stages: Sequence[str], microbatches: int, schedule: str = "1f1b", chunks: int = 1) -> Plan:
    """A plan as one would write it: every part of the pipeline as in ``fsdp4*3, dp2-tp2+sp``, layer after layer."""
    num_stages = len(stages) // chunks
    size, parts, first = job.cluster.num_devices // num_stages, [], 0
    for index, text in enumerate(stages):
        strategies = []
        for term in text.split(","):
            name, _, count = term.strip().partition("*")
            strategies += [parse_strategy(name)] * int(count or 1)
        rank = index % num_stages * size
        parts.append(StagePlan(ranks=(rank, rank + size - 1), runs=fold_runs(first, tuple(strategies))))
        first += len(strategies)
    return assemble_plan(job, _pipeline(num_stages, microbatches, schedule, chunks), tuple(parts))


def _pipeline(num_stages: int, microbatches: int, schedule: str, chunks: int = 1) -> PipelineConfig:
    return PipelineConfig(
        num_stages=num_stages,
        num_chunks=chunks,
        num_microbatches=microbatches,
        schedule=find_schedule(schedule),
    )


def _plan_record(plan: Plan) -> Record:
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
            for part in plan.stages
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


def _outcome_record(result: PlanningResult) -> Record:
    """The plan, or the nearest miss."""
    return _plan_record(result.plan) if result.plan is not None else {"miss": result.miss_text}


def _search_record(found: SearchResult) -> Record:
    return {
        "status": found.status,
        "ranked": [
            {
                "setting": _setting_text(each.tables),
                "samples": each.samples,
                "step_s": each.solution.step_s,
                "peak_bytes": each.solution.peak_bytes,
                "boundaries": list(each.solution.boundaries),
                "strategies": _folded(str(each.tables.strategies[index]) for index in each.solution.strategies),
            }
            for each in found.ranked
        ],
        "reasons": [f"{_setting_text(each.tables)}: {each.reason}" for each in found.settings],
        "missing_bytes": found.nearest_miss.miss_bytes if found.nearest_miss else None,
    }


def _setting_text(tables: CostTables) -> str:
    pipeline = tables.pipeline
    chunks = f" x{pipeline.num_chunks}" if pipeline.num_chunks > 1 else ""
    return f"{pipeline.num_stages}{chunks} stages, {pipeline.num_microbatches} microbatches, {pipeline.schedule}"


def _tables_record(problem: Problem) -> Record:
    """Of every setting the strategies, and sums and digests of the numbers."""
    return [
        {
            "setting": _setting_text(each),
            "kinds": list(each.kinds),
            "strategies": _digest(" | ".join(map(str, each.strategies)).encode()),
            "legal": int(each.legal.sum()),
            "transfer_s": each.transfer_s,
            "overhead_bytes": each.overhead_bytes,
            "time_s": _array_record(each.time_s),
            "static_bytes": _array_record(each.static_bytes),
            "activation_bytes": _array_record(each.activation_bytes),
            "transient_bytes": _array_record(each.transient_bytes),
            "switch_s": _array_record(each.switch_s),
            "side_s": [_array_record(side.seconds) for side in each.side_inputs],
        }
        for each in problem.settings
    ]


def _rival_record(rival: Rival) -> Record:
    return [rival.step_time_s, rival.slowdown, rival.missing_bytes, rival.setting, rival.strategies]


def _explanation_record(found: Explanation) -> Record:
    return {
        "binds": found.binds,
        "rivals": {each.name: _rival_record(each) for each in found.rivals},
        "budgets": {each.name: _rival_record(each) for each in found.budgets},
        "notes": list(found.notes),
        "excluded": [[each.what, each.values, each.reason] for each in found.excluded],
        "verdicts": [[each.kind, each.strategy, each.verdict, each.reason] for each in found.verdicts],
    }


def _trade_offs_record(found: TradeOffs) -> Record:
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


def _timeline_record(timeline: Timeline) -> Record:
    return {
        "step_s": timeline.step_time_s,
        "bubble_share": timeline.bubble_share(),
        "stages": [
            [[each.kind, each.chunk, each.microbatch, each.start_s, each.end_s] for each in stage]
            for stage in timeline.stages
        ],
        "bubbles": [
            [[each.reason, each.microbatch, each.start_s, each.end_s] for each in timeline.bubbles(stage)]
            for stage in range(timeline.pipeline.num_stages)
        ],
    }


def _error_record(error: UserError) -> Record:
    return {"error": [error.field, error.found, error.expected, error.hint]}


def _measured_profile(job: Job) -> Profile:
    """A profile as measured on CPU processes that share cores: made-up seconds for the layers that were traced."""
    count = job.cluster.num_devices
    groups = [size for size in range(2, count + 1) if count % size == 0]
    rates = {"all_reduce": 1.1e9, "all_gather": 1.7e9, "reduce_scatter": 1.3e9, "all_to_all": 0.9e9, "send_recv": 2.9e9}
    return Profile(
        identity=job.profile.identity.model_copy(update={"method": "measured", "device": "cpu", "num_devices": count}),
        layers=tuple(_measured_layer(each) for each in job.profile.layers),
        collectives=tuple(
            CollectiveProfile(
                kind=kind,
                group_size=size,
                strided=strided,
                latency_s=(2e-4 + 1e-4 * strided) * size,
                bytes_per_s=rate / size,
                max_relative_error=0.1,
            )
            for kind, rate in rates.items()
            for size in groups
            for strided in (False, True)
            if not (strided and size == count)
        ),
        optimizer_s_per_param=3.1e-9,
        step_overhead_s=2.3e-3,
        sharding=tuple(ShardingTime(group_size=size, seconds=3.7e-4 * size) for size in groups),
        busy_speeds=tuple(1.0 + 0.6 * (count - busy) / count for busy in range(1, count + 1)),
    )


def _measured_layer(layer: LayerProfile) -> LayerProfile:
    choices = {each.remat for each in layer.recomputations}
    per_sample_s = layer.forward.matmul_flop.per_sample / 9.7e10 + 1e-4
    times = tuple(
        MeasuredTime(
            samples=samples,
            forward_s=3e-4 + per_sample_s * samples**0.98,
            backward_s=5e-4 + 2.1 * per_sample_s * samples**0.97,
            selective_s=0.2 * per_sample_s * samples if "selective" in choices else None,
            full_s=1.02 * per_sample_s * samples if "full" in choices else None,
        )
        for samples in (1, 2, 4, 8, 16)
    )
    return layer.model_copy(update={"times": times})


EXECUTIONS: Mapping[str, Execution] = {
    "states of its own": Execution(
        states=StateBytes(parameters=2, gradients=4, optimizer=12, zero=1), accumulates_apart=True, overlaps_data=False
    ),
    "states of its own, sharded": Execution(
        states=StateBytes(parameters=2, gradients=2, optimizer=12, zero=3),
        accumulates_late=True,
        transfer="whole",
        kept_transfers=2,
        bucket_bytes=2 * GB,
        step_shard_bytes=6,
        gathered_bytes=2,
    ),
    "tensor parallelism hidden": Execution(hidden_tp=0.5, overlaps_transfers=False, reduce_bytes=2),
}
"""Frameworks that work otherwise than this project's runtime."""


# --- The questions -------------------------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1408,
    "moe_intermediate_size": 384,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "sliding_window": 512,
}
_OTHER_SIZES = {
    "gpt2": {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 2048},
    "t5": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_decoder_layers": 4, "num_heads": 8},
    "vit": {"image_size": 224, "patch_size": 16},
    "swin": {"image_size": 224, "patch_size": 4, "embed_dim": 96, "depths": [2, 2, 6], "num_heads": [4, 8, 16]}
    | {"window_size": 7},
}

PACKAGED = {
    "gpt-neox-20b": ("2x8xa100-40gb", 64, 2048, "bf16"),
    "llama-demo": ("1x4xa10", 16, 256, "fp32"),
    "llama2-13b": ("1x8xa100-pcie-80gb", 32, 4096, "bf16"),
    "llama2-70b": ("4x8xa100-80gb", 64, 4096, "bf16"),
    "llama2-7b": ("1x8xv100-32gb", 32, 2048, "fp32"),
    "llama3-405b": ("16x8xh100-80gb", 128, 8192, "bf16"),
    "llama3-70b": ("8x8xh100-80gb", 128, 8192, "bf16"),
    "llama3-8b": ("1x8xa100-80gb", 64, 4096, "bf16"),
    "llama3.2-1b": ("1x4xrtx-4090", 32, 2048, "bf16"),
    "llama3.2-3b": ("1x8xl40s", 32, 4096, "bf16"),
    "mistral-7b": ("1x8xh200-141gb", 64, 8192, "bf16"),
    "pythia-1.4b": ("1x6xa10", 48, 2048, "bf16"),
    "pythia-6.9b": ("2x8xl4", 64, 2048, "bf16"),
    "qwen2.5-0.5b": ("1x2xrtx-3090", 16, 2048, "fp32"),
    "qwen2.5-72b": ("2x8xmi300x", 32, 8192, "bf16"),
    "qwen2.5-7b": ("1x8xb200-180gb", 64, 8192, "bf16"),
}
"""A cluster, batch, sequence length and precision for every packaged model."""

LESS_MEMORY = {
    "llama3-8b": ("20GiB", "17GiB", "10GiB"),
    "llama2-70b": ("40GiB", "30GiB"),
    "llama2-7b": ("18GiB",),
    "pythia-1.4b": ("8GiB", "5GiB"),
    "llama3-405b": ("40GiB",),
    "qwen2.5-72b": ("90GiB",),
}
"""Budgets below what the devices have, down to some in which nothing fits."""

CHOSEN: Mapping[str, Mapping[str, Any]] = {
    "one stage": {"num_stages": 1},
    "2 stages, 1f1b alone": {"num_stages": 2, "schedules": ("1f1b",)},
    "4 stages, gpipe": {"num_stages": 4, "num_microbatches": 2, "schedules": ("gpipe",)},
    "interleaved alone": {"schedules": ("interleaved-1f1b",)},
    "8 microbatches": {"num_microbatches": 8},
    "without remat": {"remats": ("none",)},
    "full remat alone": {"remats": ("full",)},
    "zero 2": {"zero_stages": (2,)},
    "zero 3": {"zero_stages": (3,)},
    "without tp": {"max_tp": 1},
    "tp up to 2": {"max_tp": 2},
    "even cuts": {"partition": "even"},
    "memory-balanced cuts": {"partition": "memory-balanced"},
    "cuts of Galvatron-BMW": {"partition": "bmw"},
    "pinned blocks": {"pins": ("blocks 0-7: tp=2, sp=on", "blocks 20-27: remat=full")},
    "pinned ends": {"pins": ("embedding: fsdp8", "head: tp=4", "stages=1")},
    "pinned setting": {"pins": ("stages=2, microbatches=8", "schedule=interleaved-1f1b")},
    "pinned to what is impossible": {"pins": ("blocks 0-3: tp=3",)},
    "a wrong number of stages": {"num_stages": 3},
}
"""Decisions taken beforehand, for one model."""


def _small_config(family: str) -> dict[str, Any]:
    """A small model of a family: large enough that strategies differ in time."""
    config = FAMILY_CONFIGS[family]
    sizes = _SIZES if family not in ("vit", "swin") else {**_SIZES, "num_attention_heads": 8, "num_hidden_layers": 6}
    return config | {key: sizes[key] for key in config if key in sizes} | _OTHER_SIZES.get(family, {})


def planning_questions() -> Iterator[tuple[str, Question]]:
    """A plan for every packaged model, for small ones of every family, in less memory and under decisions."""
    for name in model_names():
        for memory in (None, *LESS_MEMORY.get(name, ())):
            job = partial(_job, name, *PACKAGED[name], memory)
            yield f"plan {name}, memory {memory or 'all'}", partial(_planned, job)
    for family in FAMILY_CONFIGS:
        for cluster, precision in (("1x4xa100-40gb", "bf16"), ("2x4xv100-16gb", "fp32")):
            seq_len = 0 if family in ("vit", "swin") else 1024
            job = partial(_job, family, cluster, 32, seq_len, precision)
            yield f"plan small {family} on {cluster}", partial(_planned_with_fallbacks, job)
    job = partial(_job, "llama3.2-3b", "1x8xa100-40gb", 32, 4096, "bf16", "16GiB")
    for name, options in CHOSEN.items():
        yield f"plan llama3.2-3b, {name}", partial(_planned, job, **options)


def _planned(job: Callable[[], Job], **options: Any) -> Record:
    of = job()
    chosen = _options(of, **options)
    result = plan_job(of, chosen)
    record = _outcome_record(result)
    return record | _error_record(pin_error(of, chosen)) if result.plan is None and chosen.pins else record


def _planned_with_fallbacks(job: Callable[[], Job]) -> Record:
    of = job()
    options = _options(of)
    result = plan_job(of, options)
    if result.plan is None:
        return _outcome_record(result)
    plan = with_fallbacks(result.plan, of, options, num_fallbacks=3)
    fallbacks = [_plan_record(plan.fallback_plan(index)) for index in range(len(plan.fallbacks))]
    return _plan_record(plan) | {"fallbacks": fallbacks}


def around_questions() -> Iterator[tuple[str, Question]]:
    """What stands around a plan: rivals, frontiers, other devices and batches, what other frameworks can run."""
    tight = partial(_job, "llama3.2-3b", "1x8xa100-40gb", 32, 4096, "bf16", "16GiB")
    nodes = partial(_job, "llama2-7b", "2x4xa100-40gb", 32, 2048, "bf16", "26GiB")
    t5 = partial(_job, "t5", "1x4xa100-40gb", 32, 1024)
    for name, job in (("llama3.2-3b", tight), ("llama2-7b on two nodes", nodes), ("small t5", t5)):
        yield f"explain {name}", partial(_explained, job)
        yield f"tables {name}", partial(_tabled, job)
        yield f"frontier {name}", partial(_traded_off, job)
        for target in TARGETS:
            yield f"within {target}, {name}", partial(_fitted, job, target)
    for pin in ("tp=8", "blocks: remat=none", "stages=4", "stages=3", "head: dp8"):
        yield f"why not {pin}", partial(_insisted, tight, pin)
    yield "fewest devices", partial(_fewest, partial(_job, "llama3-8b", "2x8xa100-80gb", 32, 4096, "bf16", "40GiB"))
    yield "largest batch", partial(_grown, partial(_job, "llama3.2-1b", "1x4xa100-40gb", 4, 2048))


def _explained(job: Callable[[], Job]) -> Record:
    of, options = job(), _options(job())
    plan = plan_job(of, options).plan
    assert plan is not None, "rivals are asked for where something fits"
    return _explanation_record(explain_plan(plan, of, options, everything=True))


def _tabled(job: Callable[[], Job]) -> Record:
    return _tables_record(make_problem(job(), _options(job())))


def _traded_off(job: Callable[[], Job]) -> Record:
    return _trade_offs_record(find_trade_offs(job(), _options(job()), max_searches=9, price_per_device_hour=2.5))


def _fitted(job: Callable[[], Job], target: str) -> Record:
    of = job()
    plan = plan_job(of, _options(of)).plan
    assert plan is not None, "frameworks are asked for where something fits"
    fitted = plan_within(plan, of, TARGETS[target].means, framework=target)
    return _plan_record(fitted.plan) | {"beyond": list(fitted.reasons), "slowdown": fitted.slowdown}


def _insisted(job: Callable[[], Job], pin: str) -> Record:
    found = why_not(job(), _options(job()), _pin(pin, job()))
    plan = _plan_record(found.plan) if found.plan is not None else None
    return {"asked": found.asked, "plan": plan, "reasons": list(found.reasons)}


def _fewest(job: Callable[[], Job]) -> Record:
    found = plan_fewest_devices(job(), _options(job()), top=3)
    return _outcome_record(found.result) | {"tried": [list(each) for each in found.tried]}


def _grown(job: Callable[[], Job]) -> Record:
    grown = grow_batch(job(), _options(job()), top=3)
    trials = [[each.global_batch, each.tokens_per_s] for each in grown.trials]
    return _outcome_record(grown.result) | {"trials": trials, "stopped": grown.stopped}


class Written(NamedTuple):
    """A plan as one would write it: its parts of the pipeline in order, and how they are run."""

    parts: tuple[str, ...]
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1


UNLIKE = "fsdp8, dp8 remat=full, fsdp4-tp2+sp, dp2-tp4, tp4-dp2+sp, tp2-fsdp4 remat=selective, fsdp2-tp4 zero2, dp4-tp2"

HANDWRITTEN = {
    "dp": Written(("dp8*8",), 1),
    "fsdp, accumulating": Written(("fsdp8*8",), 4),
    "zero 2": Written(("fsdp8 zero2*8",), 4),
    "every layer its own": Written((UNLIKE,), 2),
    "two stages": Written(("fsdp4*4", "tp4+sp*3, dp4"), 8),
    "copies sent to a stage": Written(("tp4*4", "fsdp4 remat=full*4"), 4),
    "four stages, gpipe": Written(("dp2*2", "fsdp2*2", "tp2*2", "tp2+sp*2"), 4, "gpipe"),
    "four stages": Written(("fsdp2*2", "fsdp2 remat=full*2", "dp2*2", "fsdp2*2"), 8),
    "interleaved": Written(("fsdp4*2", "dp4*2", "fsdp4 remat=full*2", "tp4+sp*2"), 4, "interleaved-1f1b", 2),
    "interleaved, four chunks": Written(("fsdp4", "tp4+sp") * 4, 8, "interleaved-1f1b", 4),
    "interleaved, four stages": Written(("fsdp2", "dp2", "tp2", "fsdp2 zero2") * 2, 8, "interleaved-1f1b", 2),
}
"""Plans for eight layers on eight devices."""


def pricing_questions() -> Iterator[tuple[str, Question]]:
    """What plans written by hand take, in time and in memory, here and by other frameworks."""
    jobs = {
        "bf16": partial(_job, "llama", "1x8xa100-80gb", 32, 2048),
        "fp32 on two nodes": partial(_job, "gemma", "2x4xv100-32gb", 32, 1024, "fp32"),
        "experts": partial(_job, "mixtral", "1x8xh100-80gb", 32, 1024),
    }
    for name, written in HANDWRITTEN.items():
        for kind, job in jobs.items():
            yield f"price {name}, {kind}", partial(_priced, job, written)
        for kind, execution in EXECUTIONS.items():
            yield f"price {name}, {kind}", partial(_priced, jobs["bf16"], written, execution=execution)
    for text in ("dp8", "fsdp8 remat=full", "fsdp2-tp4+sp", "tp8"):
        yield f"uniform {text}", partial(_uniform, jobs["bf16"], text)


def _priced(job: Callable[[], Job], written: Written, execution: Execution | None = None) -> Record:
    of = replace(job(), execution=execution) if execution else job()
    plan = _plan(of, *written)
    timeline = predict(plan, of).timeline
    memory = [dict(terms) for terms in predict_memory(plan, of)]
    return _plan_record(with_price(plan, of)) | {"memory": memory, "bubble_share": timeline.bubble_share()}


def _uniform(job: Callable[[], Job], text: str) -> Record:
    return _plan_record(uniform_plan(job(), text))


def measured_questions() -> Iterator[tuple[str, Question]]:
    """Plans on CPU processes that share cores, by a profile with made-up seconds."""
    for model, batch, seq_len, memory in (("llama-demo", 16, 256, "2GiB"), ("llama-demo", 16, 256, "200MiB")):
        job = partial(_measured, model, batch, seq_len, memory)
        yield f"plan {model} as measured, {memory}", partial(_planned, job)
    job = partial(_measured, "gpt2", 16, 1024, "3GiB")
    yield "plan small gpt2 as measured", partial(_planned_with_fallbacks, job)
    yield "explain small gpt2 as measured", partial(_explained, job)
    yield "scaled times", partial(_scaled, job)


@cache
def _measured(model: str, batch: int, seq_len: int, memory: str) -> Job:
    job = _job(model, "1x4xcpu", batch, seq_len, "fp32", memory)
    return replace(job, profile=_measured_profile(job))


def _scaled(job: Callable[[], Job]) -> Record:
    return _planned(lambda: replace(job(), time_factor=1.37), num_stages=2)


def solving_questions() -> Iterator[tuple[str, Question]]:
    """Problem files: the one of the documentation, published tables, the sizes of real decoders, random ones."""
    example = json.loads(re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)[0])
    for budget in (None, 7 * GB, 6 * GB, 4 * GB):
        yield f"solve the documented example, {budget}", partial(_solved, partial(parse_problem, example), budget)
    for model, gpus, memory, space in (
        ("bert", 8, 8, "full"),
        ("vit", 8, 16, "full"),
        ("t5", 8, 8, "dp+pp"),
        ("swin", 8, 12, "full"),
    ):
        cell = Cell(model=model, num_layers=32, num_gpus=gpus, memory_gb=memory, space=space)
        yield f"solve {cell}", partial(_solved, partial(problem, cell))
    for budget in (24, 36, 80):
        yield f"solve 34 layers on 8 devices, {budget} GB", partial(_solved, _decoder_problem, budget * GB)
    yield "frontier of 34 layers on 8 devices", _decoder_frontier
    yield "solve 125 layers of four kinds, 24 GB", partial(_solved, _deep_problem, 24 * GB)
    for seed in range(10):
        yield f"solve random tables {seed}", partial(_solved_random, seed)
        yield f"graph of random tables {seed}", partial(_graphed, seed)


def _solved(make: Callable[[], Problem], budget_bytes: int | None = None) -> Record:
    return _search_record(solve_problem(make(), budget_bytes))


def _problem(settings: Sequence[CostTables]) -> Problem:
    return Problem(name="", budget_bytes=None, settings=tuple(settings), samples=(1,) * len(settings))


@cache
def _decoder_problem() -> Problem:
    space = SpaceOptions(max_tp=8, devices_per_node=8)
    return _problem(
        decoder_settings(LLAMA3_8B, num_devices=8, global_batch=64, most_stages=8, most_microbatches=64, space=space)
    )


def _decoder_frontier() -> Record:
    found = sampled_frontier(_decoder_problem().settings, most_bytes=80 * GB, budgets=(36 * GB,), max_searches=12)
    points = [
        [each.peak_bytes, each.outcome.solution.step_s, _setting_text(each.outcome.tables)] for each in found.steps
    ]
    return {"points": points, "is_complete": found.is_complete}


def _deep_problem() -> Problem:
    return _problem(deep_settings(125, num_devices=64, global_batch=512))


def _solved_random(seed: int) -> Record:
    tables = random_tables(np.random.default_rng(seed), interleaved=bool(seed % 2))
    return [_search_record(solve_problem(_problem([tables]), budget)) for budget in (5, 20, 80, 10**6)]


def _graphed(seed: int) -> Record:
    tables = random_tables(np.random.default_rng(100 + seed), num_stages=1)
    found = graph_frontier(cost_graph(tables, transient_bytes=10**6))
    return {
        "bytes": found.frontier.bytes.tolist(),
        "seconds": found.frontier.seconds.tolist(),
        "choices": found.choices.tolist(),
        "exact": found.exact,
    }


def part_questions() -> Iterator[tuple[str, Question]]:
    """The parts by themselves: timelines, switches between layouts, and the size of the strategy space."""
    schedules = (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2))
    ways: tuple[Mapping[str, Any], ...] = (
        {},
        {"overlap_sends": False},
        {"overlap_sync": True},
        {"speeds": (1.8, 1.5, 1.2, 1.0)},
    )
    for schedule, chunks in schedules:
        for way in ways:
            said = ", ".join(way) or "as usual"
            yield f"timeline {schedule}, {said}", partial(_played, schedule, chunks, way)
    for cluster in ("1x4xa100-80gb", "1x8xh100-80gb", "2x8xa100-40gb", "1x4xcpu"):
        yield f"switches on {cluster}", partial(_switches, cluster)
    for count in range(1, 65):
        yield f"strategies of {count} devices", partial(_counted, count)


def _played(schedule: str, chunks: int, way: Mapping[str, Any]) -> Record:
    parts = [
        StageTimes(
            forward_s=0.01 + 0.003 * (index % 3),
            backward_s=0.02 + 0.005 * (index % 4),
            once_s=0.004 * (index + 1),
            transfer_s=0.0015,
            latency_s=0.0001,
            sync_s=0.006 if index % 2 else 0.0,
        )
        for index in range(4 * chunks)
    ]
    return _timeline_record(simulate(parts, _pipeline(4, 8, schedule, chunks), **way))


def _switches(cluster: str) -> Record:
    """Seconds from every strategy to every other, in the order of the strategies; those of layouts, remat aside."""
    job = _measured("gpt2", 16, 1024, "3GiB") if cluster.endswith("cpu") else _job("llama", cluster, 32, 2048)
    strategies = enumerate_strategies(job.cluster.num_devices, SpaceOptions(remats=(Remat.NONE,)))
    table = switch_table(strategies, Setting(job=job, pipeline=_pipeline(1, 2, "1f1b")))
    return {str(before): row.tolist() for before, row in zip(strategies, table, strict=True)}


def _counted(count: int) -> Record:
    papers = SpaceOptions(sp=(False,), remats=(Remat.NONE,))
    everything = SpaceOptions(zero_stages=(3, 2), devices_per_node=8)
    return {
        "levels, unpruned": len(enumerate_levels(count, papers.kinds)),
        "of the papers": len(enumerate_strategies(count, papers)),
        "searched": _digest("\n".join(map(str, enumerate_strategies(count, everything))).encode()),
        "number searched": len(enumerate_strategies(count, everything)),
    }


BANK: tuple[Callable[[], Iterator[tuple[str, Question]]], ...] = (
    planning_questions,
    around_questions,
    pricing_questions,
    measured_questions,
    solving_questions,
    part_questions,
)


# --- Records and their comparison ----------------------------------------------------------------------------------


def _folded(texts: Iterator[str]) -> list[str]:
    """Equal neighbours as one, with their number."""
    return [f"{text} x{len(list(run))}" for text, run in groupby(texts)]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _array_record(values: Any) -> Record:
    """The sum, for whoever reads a difference, and a digest of every bit."""
    array = np.ascontiguousarray(values)
    return [array.sum().item(), _digest(array.tobytes())]


def run_bank(words: Sequence[str]) -> dict[str, Record]:
    """What came out of every problem, or of those whose name has one of the words; a `UserError` is an answer too."""
    records: dict[str, Record] = {}
    for name, question in (each for questions in BANK for each in questions()):
        if words and not any(word in name for word in words):
            continue
        start = time.process_time()
        try:
            records[name] = question()
        except UserError as error:
            records[name] = _error_record(error)
        print(f"{time.process_time() - start:7.2f} s  {name}", file=sys.stderr, flush=True)
    return records


def write(records: Mapping[str, Record], path: Path) -> None:
    """The records as JSON: keys sorted, floats in the shortest form that reads back as the same bits."""
    path.write_text(json.dumps(records, sort_keys=True, indent=1) + "\n")


def differences(before: Record, after: Record, place: str = "") -> Iterator[tuple[str, str, str]]:
    """Place, before and after of everything that is not the same text."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _item_differences(before, after, key, f"{place}.{key}" if place else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif json.dumps(before) != json.dumps(after):
        yield place, json.dumps(before), json.dumps(after)


def _item_differences(
    before: Mapping[str, Record], after: Mapping[str, Record], key: str, place: str
) -> Iterator[tuple[str, str, str]]:
    if key in before and key in after:
        yield from differences(before[key], after[key], place)
    else:
        yield place, "there" if key in before else "absent", "there" if key in after else "absent"


def compare(before: Path, after: Path) -> int:
    """Prints what differs between two files, problem by problem; the number of problems that do."""
    one, other = (json.loads(path.read_text()) for path in (before, after))
    changed = 0
    for name in sorted(one.keys() | other.keys()):
        found = list(_item_differences(one, other, name, ""))
        changed += bool(found)
        for place, was, now in found:
            print(f"{name}: {place or 'the problem'}\n  before {_shortened(was)}\n  after  {_shortened(now)}")
    print(f"{changed} of {len(one.keys() | other.keys())} problems differ")
    return changed


def _shortened(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def main() -> int:
    """Runs the bank, or compares two runs; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="the file to write")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="problems with one of these in their name"
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two files instead")
    given = parser.parse_args()
    if (given.out is None) == (given.compare is None):
        parser.error("give either a file to write or --compare BEFORE AFTER")
    if given.compare:
        return 1 if compare(*given.compare) else 0
    start = time.process_time()
    records = run_bank(given.only)
    write(records, given.out)
    print(f"{len(records)} problems in {time.process_time() - start:.0f} s of CPU time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
