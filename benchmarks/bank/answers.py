"""The questions that the bank asks of the package, each answered as a record.

A job is passed as a function that makes it, so that naming the questions traces nothing.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from galvatron.cells import Cell, problem
from galvatron.inputs import ModelName
from galvatron.tables import Space

from bank.made_up import measured_profile
from bank.records import (
    Record,
    config_text,
    digest,
    error_record,
    explanation_record,
    outcome_record,
    plan_record,
    search_record,
    tables_record,
    timeline_record,
    trade_offs_record,
)
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.predict import predict, predict_memory
from steelyard.cost.simulator import StageTimes, simulate
from steelyard.cost.switching import switch_table
from steelyard.cost.tables import CostTables
from steelyard.engines import ENGINE_OF_TARGET
from steelyard.engines.execution import Execution, StateBytes
from steelyard.engines.native import NATIVE
from steelyard.model.read import chain_from_config, load_model, model_names
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import Remat, parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.complete import with_fallbacks
from steelyard.planning.engine_fit import fit_plan
from steelyard.planning.explain import explain_plan
from steelyard.planning.frontier import find_trade_offs
from steelyard.planning.pins import parse_pin
from steelyard.planning.price import assemble_plan, uniform_plan, with_price
from steelyard.planning.problem import make_tables, problem_of
from steelyard.planning.sizes import fewest_devices, largest_batch
from steelyard.planning.variants import Study
from steelyard.planning.why_not import pin_error, why_not
from steelyard.schedules import PipelineConfig, find_schedule
from steelyard.search import SpaceOptions, enumerate_levels, enumerate_strategies
from steelyard.search.problem import Problem, parse_problem, solve_problem
from steelyard.search.tradeoff import sampled_frontier
from tests.jobs import make_job, request_of
from tests.problems.patterned import deep_configs
from tests.problems.random_tables import random_tables
from tests.problems.transformer import LLAMA3_8B, decoder_configs
from tests.runtime.models import FAMILY_CONFIGS

GB = 10**9
DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "problem-files.md"

FAMILIES = tuple(FAMILY_CONFIGS)
"""Small models, one of every family."""
FRAMEWORKS = tuple(ENGINE_OF_TARGET)
"""What a plan can be exported to."""


class Written(NamedTuple):
    """A plan as one would write it: its parts of the pipeline in order, and how they are run."""

    parts: tuple[str, ...]
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1


EXECUTIONS: Mapping[str, Execution] = {
    "states of its own": Execution(
        states=StateBytes(parameters=2, gradients=4, optimizer=12, zero=1), overlaps_data=False
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
    "tensor parallelism hidden": Execution(hidden_collectives=0.5, overlaps_transfers="never", reduce_bytes=2),
}
"""Frameworks that work otherwise than this project's runtime."""


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
"""In place of those of a family's smallest model, where its config has such a key."""

_OTHER_SIZES = {
    "deepseek_v3": {"num_key_value_heads": 8},
    "gpt2": {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 2048},
    "t5": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_decoder_layers": 4, "num_heads": 8},
    "vit": {"image_size": 224, "patch_size": 16},
    "swin": {
        **{"image_size": 224, "patch_size": 4, "embed_dim": 96},
        **{"depths": [2, 2, 6], "num_heads": [4, 8, 16], "window_size": 7},
    },
}
"""Of the families whose configs have other names or whose sizes hang together."""


def _small_config(family: str) -> dict[str, Any]:
    """A small model of a family: large enough that strategies differ in time."""
    config = FAMILY_CONFIGS[family]
    return config | {key: _SIZES[key] for key in config if key in _SIZES} | _OTHER_SIZES.get(family, {})


@cache
def job_of(
    model: str, cluster: str, batch: int, seq_len: int, precision: str = "bf16", memory: str | None = None
) -> Job:
    """The job of a packaged model, or of a small one of a family; ``seq_len`` 0 stands for the model's own."""
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


@cache
def measured(model: str, batch: int, seq_len: int, memory: str) -> Job:
    """The job on 4 CPU processes, by a profile with made-up seconds."""
    job = job_of(model, "1x4xcpu", batch, seq_len, "fp32", memory)
    return job.on(profile=measured_profile(job))


def _options(job: Job, *, remats: Sequence[str] = (), pins: Sequence[str] = (), **others: Any) -> Decisions:
    chosen = {"remats": tuple(Remat(each) for each in remats)} if remats else {}
    return Decisions(space="paper", pins=tuple(pins), **chosen, **others)


def _pin(text: str, job: Job) -> Any:
    return parse_pin(text, option="--pin", num_layers=job.chain.num_layers)


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
        parts.append(StagePart(ranks=(rank, rank + size - 1), runs=fold_runs(first, tuple(strategies))))
        first += len(strategies)
    return assemble_plan(job, _pipeline(num_stages, microbatches, schedule, chunks), tuple(parts))


def _pipeline(num_stages: int, microbatches: int, schedule: str = "1f1b", chunks: int = 1) -> PipelineConfig:
    return PipelineConfig(
        num_stages=num_stages,
        num_chunks=chunks,
        num_microbatches=microbatches,
        schedule=find_schedule(schedule),
    )


def planned(job: Callable[[], Job], **options: Any) -> Record:
    """The plan under these options, or the nearest miss, with what is said of pins that cannot be met."""
    of = job()
    chosen = _options(of, **options)
    result = plan_job(of, chosen)
    record = outcome_record(result)
    return (
        record | error_record(pin_error(request_of(of, chosen), of)) if result.plan is None and chosen.pins else record
    )


def planned_with_fallbacks(job: Callable[[], Job]) -> Record:
    """The plan, and those to go on with where memory runs out."""
    of = job()
    options = _options(of)
    result = plan_job(of, options)
    if result.plan is None:
        return outcome_record(result)
    plan = with_fallbacks(result.plan, Study(request_of(of, options), of, tables=result.tables), num_fallbacks=3)
    fallbacks = [plan_record(plan.fallback_plan(index)) for index in range(len(plan.fallbacks))]
    return plan_record(plan) | {"fallbacks": fallbacks}


def explained(job: Callable[[], Job], *, everything: bool = False) -> Record:
    """Return what binds the best plan, and its baselines."""
    of, options = job(), _options(job())
    plan = plan_job(of, options).plan
    assert plan is not None, "baselines are asked for where something fits"
    return explanation_record(explain_plan(plan, Study(request_of(of, options), of), everything=everything))


def tabled(job: Callable[[], Job]) -> Record:
    """The cost tables that are searched."""
    return tables_record(problem_of(job(), make_tables(job(), _options(job()))))


def traded_off(job: Callable[[], Job]) -> Record:
    """Time against memory and against devices."""
    of = job()
    return trade_offs_record(
        find_trade_offs(request_of(of, _options(of)), of, max_searches=9, price_per_device_hour=2.5)
    )


def fitted(job: Callable[[], Job], target: str) -> Record:
    """The best plan that a framework can run."""
    of = job()
    plan = plan_job(of, _options(of)).plan
    assert plan is not None, "frameworks are asked for where something fits"
    found = fit_plan(plan, of, replace(ENGINE_OF_TARGET[target], execution=NATIVE.execution))
    return plan_record(found.plan) | {"beyond": list(found.reasons), "slowdown": found.slowdown}


def insisted(job: Callable[[], Job], pin: str) -> Record:
    """What it costs to insist on a pin."""
    found = why_not(request_of(job(), _options(job())), job(), _pin(pin, job()))
    plan = plan_record(found.plan) if found.plan is not None else None
    return {"asked": found.asked, "plan": plan, "reasons": list(found.reasons)}


def fewest(job: Callable[[], Job]) -> Record:
    """The fewest devices that do."""
    found = fewest_devices(Study(request_of(job(), _options(job()), num_alternatives=3), job()))
    tried = [note.partition(": does not fit: ")[::2] for note in found.notes]
    return outcome_record(found) | {"tried": [[int(devices.split()[0]), reason] for devices, reason in tried]}


def grown(job: Callable[[], Job]) -> Record:
    """The global batch that is worth its size."""
    found = largest_batch(Study(request_of(job(), _options(job()), num_alternatives=3), job()))
    trials = [[each.size, each.tokens_per_s] for each in found.tried]
    return outcome_record(found.result) | {"trials": trials, "stopped": found.stopped}


def priced(job: Callable[[], Job], written: Written, execution: Execution | None = None) -> Record:
    """What a plan written by hand takes, run by a framework that works so."""
    of = replace(job(), engine=replace(NATIVE, execution=execution)) if execution else job()
    plan = _plan(of, *written)
    timeline = predict(plan, of).timeline
    memory = [dict(terms) for terms in predict_memory(plan, of)]
    return plan_record(with_price(plan, of)) | {"memory": memory, "bubble_share": timeline.bubble_share()}


def uniform(job: Callable[[], Job], text: str) -> Record:
    """The plan of one strategy everywhere."""
    return plan_record(uniform_plan(job(), text))


def scaled(job: Callable[[], Job]) -> Record:
    """The plan of two stages where a measured run has scaled all times."""
    return planned(lambda: job().on(time_factor=1.37), num_stages=2)


def _problem(configs: Sequence[CostTables]) -> Problem:
    return Problem(name="", budget_bytes=None, configs=tuple(configs), samples=(1,) * len(configs))


@cache
def decoder_problem() -> Problem:
    """All configurations of tables the size of a decoder of 34 layers."""
    space = SpaceOptions(max_degrees={"tp": 8}, devices_per_node=8)
    return _problem(
        decoder_configs(LLAMA3_8B, num_devices=8, global_batch=64, most_stages=8, most_microbatches=64, space=space)
    )


def deep_problem() -> Problem:
    """All configurations of 125 layers of four types."""
    return _problem(deep_configs(125, num_devices=64, global_batch=512))


def documented_problem() -> Problem:
    """The example of the documentation."""
    return parse_problem(json.loads(re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)[0]))


def published_problem(model: ModelName, gpus: int, memory_gb: int, space: Space) -> Problem:
    """A cell of the published table of predictions, as a problem file would hold it."""
    return problem(Cell(model=model, num_layers=32, num_gpus=gpus, memory_gb=memory_gb, space=space))


def solved(make: Callable[[], Problem], budget_bytes: int | None = None) -> Record:
    """What the search finds in a problem, within its own budget or another one."""
    return search_record(solve_problem(make(), budget_bytes))


def solved_random(seed: int) -> Record:
    """What it finds in random tables, within budgets from tight to ample."""
    tables = random_tables(np.random.default_rng(seed), interleaved=bool(seed % 2))
    return [search_record(solve_problem(_problem([tables]), budget)) for budget in (5, 20, 80, 10**6)]


def decoder_frontier() -> Record:
    """Time against memory of the decoder problem."""
    found = sampled_frontier(decoder_problem().configs, max_searches=12)
    points = [[each.peak_bytes, each.outcome.solution.step_s, config_text(each.outcome.tables)] for each in found.steps]
    return {"points": points, "is_complete": found.is_complete}


def played(schedule: str, chunks: int, way: Mapping[str, Any]) -> Record:
    """The timeline of four unlike stages and 8 microbatches."""
    parts = [
        StageTimes(
            forward_s=0.01 + 0.003 * (index % 3),
            backward_s=0.02 + 0.005 * (index % 4),
            once_s=0.004 * (index + 1),
            transfer_s=0.0015,
        )
        for index in range(4 * chunks)
    ]
    return timeline_record(simulate(parts, _pipeline(4, 8, schedule, chunks), **way))


def switches(cluster: str) -> Record:
    """Seconds from every strategy to every other, in the order of the strategies; those of layouts, remat aside."""
    job = measured("gpt2", 16, 1024, "3GiB") if cluster.endswith("cpu") else job_of("llama", cluster, 32, 2048)
    strategies = enumerate_strategies(job.cluster.num_devices, SpaceOptions(remats=(Remat.NONE,)))
    table = switch_table(strategies, JobConfig(job=job, pipeline=_pipeline(1, 2)))[1]
    return {str(before): row.tolist() for before, row in zip(strategies, table, strict=True)}


def counted(count: int) -> Record:
    """How many strategies so many devices have: in the papers, and in the search."""
    papers = SpaceOptions(modes={"zero": (3,), "sp": (False,)}, remats=(Remat.NONE,))
    everything = SpaceOptions(modes={}, devices_per_node=8)
    return {
        "levels, unpruned": len(enumerate_levels(count, papers.dimensions)),
        "of the papers": len(enumerate_strategies(count, papers)),
        "searched": digest("\n".join(map(str, enumerate_strategies(count, everything))).encode()),
        "number searched": len(enumerate_strategies(count, everything)),
    }
