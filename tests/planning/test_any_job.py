"""Tests of plans for random models, clusters, batches and engines: none crashes, and nothing priced beside it wins."""

import random
from typing import Any

import pytest

from steelyard.engines import ENGINES
from steelyard.errors import UserError
from steelyard.plan.decisions import Decisions
from steelyard.plan.strategy import Remat
from steelyard.planning.choose import plan_request
from steelyard.planning.complete import complete
from steelyard.planning.job import job_of
from steelyard.planning.price import peak_bytes
from steelyard.planning.request import make_request
from steelyard.planning.settings import Settings, price_settings

MODELS = (
    *("llama3-8b", "llama3.2-1b", "llama3-70b", "llama2-13b", "qwen3-8b", "qwen3-32b", "qwen2.5-0.5b", "gemma2-9b"),
    *("mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt-neox-20b", "falcon-7b", "phi-4"),
)
CLUSTERS = ("1x2xh100-80gb", "1x4xa100-40gb", "1x8xa100-80gb", "1x8xb200-180gb", "2x8xh100-80gb", "8x8xh100-80gb")
DECISIONS = (
    *(Decisions(num_stages=count) for count in (1, 2, 4)),
    *(Decisions(num_microbatches=count) for count in (1, 4)),
    *(Decisions(remats=(remat,)) for remat in (Remat.NONE, Remat.FULL)),
    Decisions(schedules=("1f1b",)),
    Decisions(max_degrees={"tp": 1}),
    Decisions(max_degrees={"cp": 1}),
    Decisions(uniform=True),
    Decisions(space="paper"),
)


def settings_of(draw: random.Random) -> Settings:
    stages = draw.choice((1, 1, 2, 4))
    return Settings(
        tp=draw.choice((1, 2, 4, 8)),
        cp=draw.choice((1, 1, 2)),
        pp=stages,
        vpp=draw.choice((1, 2, 4)) if stages > 1 else 1,
        ep=draw.choice((1, 2, 8)),
        micro_batch=draw.choice((1, 2, 4)),
        zero=draw.choice((0, 1, 2, 3)),
        sp=draw.random() < 0.8,
        remat=draw.choice(tuple(Remat)),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_of_any_job_is_at_least_as_fast_as_what_may_stand_beside_it(seed: int) -> None:
    draw = random.Random(seed)
    engine = draw.choice(("native", *ENGINES))
    asked: dict[str, Any] = {"global_batch": draw.choice((8, 32, 96, 256)), "seq_len": draw.choice((512, 2048, 8192))}
    asked["levers"] = {"train": "lora:r=8"} if draw.random() < 0.2 else {}
    job = draw.choice(MODELS), draw.choice(CLUSTERS)
    try:
        request = make_request(*job, engine=engine, simplify=0.0, **asked)
    except UserError:
        return  # the engine does not have the model or the lever
    try:
        free = complete(request).plan
    except UserError:
        with pytest.raises(UserError):
            plan_request(request, job_of(request))  # no plan is legal: only the search itself may say so
        return
    if free is None:
        return
    within = job_of(request)
    budget = within.budget_bytes + within.margin_bytes * (peak_bytes(free) > within.budget_bytes)
    proven_s = free.prediction.lower_bound_s * (1 - 1e-9)  # type: ignore[union-attr]
    as_ours = make_request(*job, simplify=0.0, **asked)
    for _ in range(40):
        try:
            plan, _ = price_settings(as_ours, ENGINES[engine], "bf16", settings_of(draw))
        except UserError:
            continue
        assert peak_bytes(plan) > budget or plan.step_s >= proven_s, str(plan.strategies[1])
    for decided in draw.sample(DECISIONS, 2):
        try:
            narrow = complete(make_request(*job, engine=engine, simplify=0.0, decisions=decided, **asked)).plan
        except UserError:
            continue
        assert narrow is None or peak_bytes(narrow) > budget or narrow.step_s >= proven_s, str(decided)
