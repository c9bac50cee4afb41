"""Tests of fp16: devices and engines that support it, advice in errors, and the same price as bf16."""

import re
from dataclasses import replace
from typing import get_args

import pytest

from steelyard.cost.compute import UNSCALING_BYTES
from steelyard.cost.job import LINEAR_PEAKS, Job
from steelyard.cost.predict import predict
from steelyard.engines import ENGINES
from steelyard.engines.engine import Engine
from steelyard.errors import UserError
from steelyard.hardware import devices
from steelyard.hardware.values import Device
from steelyard.levers import Effects
from steelyard.plan.plan import Plan
from steelyard.planning.complete import find_plan
from steelyard.planning.job import job_of
from steelyard.planning.request import check_precision, request_of_plan
from steelyard.precision import Precision

GPUS = [device for device in devices() if not device.needs_profile]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: str(engine.name))
@pytest.mark.parametrize("device", GPUS, ids=lambda device: str(device.name))
def test_a_precision_that_an_error_advises_is_one_of_the_device_and_the_engine(device: Device, engine: Engine) -> None:
    refused = 0
    for precision in get_args(Precision):
        try:
            check_precision(engine, precision)
            device.peak(LINEAR_PEAKS.get(precision, precision), engine.precisions)
        except UserError as error:
            refused += 1
            advised = re.findall(r"--precision (\S+)", error.hint)
            others = re.findall(r"--engine (\S+)", error.hint)
            assert advised or others
            for each in advised:
                check_precision(engine, each)
                device.peak(each, engine.precisions)
            for each in others:
                check_precision(ENGINES[each], precision)
    assert refused < len(get_args(Precision))


def test_engines_that_have_fp16_and_those_that_do_not() -> None:
    without = {name for name, engine in ENGINES.items() if "fp16" not in engine.precisions}
    assert without == {"torchtitan", "megatron-fsdp", "automodel"}


@pytest.fixture(scope="module")
def planned() -> Plan:
    return find_plan("llama3.2-1b", "1x2xv100-32gb", global_batch=16, seq_len=2048, precision="fp16")


def job_in(plan: Plan, precision: Precision, cluster: str) -> tuple[Plan, Job]:
    """The plan in another precision, and its job, on a cluster whose devices compute in fp16 as fast as in bf16."""
    same = plan.model_copy(update={"precision": precision, "cluster": cluster, "prediction": None})
    return same, job_of(request_of_plan(same))


@pytest.mark.slow
def test_a_v100_trains_in_fp16_several_times_as_fast_as_in_fp32(planned: Plan) -> None:
    in_fp32 = find_plan("llama3.2-1b", "1x2xv100-32gb", global_batch=16, seq_len=2048, precision="fp32")
    assert planned.precision == "fp16"
    assert planned.prediction is not None
    assert in_fp32.prediction is not None
    assert planned.prediction.step_time_s < in_fp32.prediction.step_time_s / 3


def test_fp16_is_priced_as_bf16_but_for_unscaling_gradients(planned: Plan) -> None:
    (narrow, of_narrow), (plan, job) = (job_in(planned, each, "1x2xa100-80gb") for each in ("fp16", "bf16"))
    ours, theirs = predict(narrow, of_narrow), predict(plan, job)
    assert [stage.memory_bytes for stage in ours.stages] == [stage.memory_bytes for stage in theirs.stages]
    for mine, other in zip(ours.stages, theirs.stages, strict=True):
        assert mine.time_s.keys() == other.time_s.keys()
        for term, seconds in mine.time_s.items():
            more = 1 + UNSCALING_BYTES / Effects().update_bytes if term == "optimizer" else 1
            assert seconds == pytest.approx(more * other.time_s[term], rel=1e-9), term
    assert replace(of_narrow, precision="bf16").compute_bytes == of_narrow.compute_bytes == 2
