"""Reports of small plans that the tests of pages share; made without torch."""

from dataclasses import replace

from steelyard.cost.predict import predict
from steelyard.plan.choices import ComparedBaseline, DevicePoint, Explanation, FrontierPoint, PlanStudy, TradeOffs
from steelyard.plan.plan import Plan, PlanModel
from steelyard.plan.prediction import Alternative
from steelyard.planning.price import with_price
from steelyard.profiles.record import RankRecord, RunRecord, StepRecord
from steelyard.report.html import ReportContents
from tests.cost.examples import cluster, job, plan

HOSTILE = "<script>alert(1)</script>&\"'</title>"


def pipelined(*, num_microbatches: int = 8) -> ReportContents:
    """Two stages of different strategies, with baselines, a frontier, and texts that try to be markup."""
    of = job(cluster(2, 4))
    planned = plan(
        of,
        "fsdp4, fsdp4 remat=full, dp2-tp2+sp",
        "fsdp4 zero2, fsdp4 remat=selective, tp4",
        num_microbatches=num_microbatches,
    )
    planned = with_price(planned, of)
    assert planned.prediction is not None
    lost = (
        Alternative(description="4 stages", reason=HOSTILE, step_time_s=1.0, memory_bytes=2**30),
        *(Alternative(description=f"{count} stages", reason="does not fit") for count in range(5, 20)),
    )
    priced = planned.model_copy(update={"prediction": planned.prediction.model_copy(update={"alternatives": lost})})
    return ReportContents(
        plan=renamed(priced, HOSTILE),
        plan_file=HOSTILE,
        job=of,
        timeline=predict(planned, of).timeline,
        study=study(planned.prediction.step_time_s),
        notes=(HOSTILE,),
    )


def study(step_s: float) -> PlanStudy:
    points = tuple(
        FrontierPoint(
            memory_bytes=2**30 * factor,
            step_time_s=step_s * 8 / factor,
            tokens_per_s=1.0,
            num_stages=2,
            num_microbatches=8,
            setting="2 stages",
            strategies=HOSTILE,
        )
        for factor in (8, 4, 2)
    )
    baselines = (
        ComparedBaseline(
            name="without tp", step_time_s=2 * step_s, slowdown=1.0, setting="2 stages", strategies=HOSTILE
        ),
        ComparedBaseline(name="without fsdp", missing_bytes=2**20),
    )
    return PlanStudy(
        scope="plans of 2 stages",
        explanation=Explanation(binds="Memory binds.", rivals=baselines),
        points=points,
        left_out=("without remat",),
    )


def renamed(planned: Plan, name: str) -> Plan:
    model = PlanModel(name=name, config=planned.model.config, config_hash=planned.model.config_hash)
    return planned.model_copy(update={"model": model})


def single(*, with_job: bool = True) -> ReportContents:
    """One stage and one strategy, with nothing searched around it."""
    of = job(cluster(1, 4))
    planned = with_price(plan(of, "fsdp4, fsdp4, fsdp4, fsdp4, fsdp4, fsdp4", num_microbatches=4), of)
    nothing = PlanStudy(scope="", explanation=Explanation(binds=""))
    timeline = predict(planned, of).timeline if with_job else None
    return ReportContents(
        plan=planned, plan_file="plan.json", job=of if with_job else None, timeline=timeline, study=nothing
    )


def measured(found: ReportContents, *, num_ranks: int = 8) -> ReportContents:
    """Return the report after a run."""
    plan_of = found.plan
    record = RunRecord.model_validate(
        {
            "model_name": plan_of.model.name,
            "config_hash": "0",
            "device": HOSTILE,
            "num_devices": num_ranks,
            "strategies": tuple(str(strategy) for strategy in plan_of.strategies),
            "num_warmup_steps": 1,
            "median_step_s": found.prediction.step_time_s * 2,
            "tokens_per_s": 1000.0,
            "steps": tuple(StepRecord(step=step, loss=3 / step, time_s=0.1, grad_norm=1.0) for step in (1, 2, 3)),
            "ranks": tuple(
                RankRecord(
                    rank=rank,
                    stage=rank * plan_of.num_stages // num_ranks,
                    peak_bytes=2**20 * (rank + 1),
                    memory_method="counted",
                    num_params=1,
                    busy_s=0.05 * (rank + 1),
                )
                for rank in range(num_ranks)
            ),
        }
    )
    return replace(found, record=record)


def trade_offs() -> TradeOffs:
    """A frontier and three device counts, one of which holds no plan, with a price."""
    points = study(1.0).points
    chosen = (points[0].model_copy(update={"is_chosen": True}), *points[1:])
    devices = tuple(
        DevicePoint(
            num_devices=count,
            cluster=HOSTILE,
            step_time_s=16 / count,
            tokens_per_s=100.0 * count,
            memory_bytes=2**30,
            cost_per_billion_tokens=count * 10.0,
            num_stages=1,
            num_microbatches=1,
            setting="1 stage",
            strategies=HOSTILE,
        )
        for count in (4, 8)
    )
    return TradeOffs(
        model=HOSTILE,
        cluster=HOSTILE,
        seq_len=32,
        global_batch=64,
        precision="bf16",
        budget_bytes=2**33,
        price_per_device_hour=2.5,
        points=chosen,
        devices=(DevicePoint(num_devices=2, cluster=HOSTILE, reason=HOSTILE), *devices),
    )
