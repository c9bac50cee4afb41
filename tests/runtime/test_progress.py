"""Tests of the progress line, the metrics file, TensorBoard's files, and their clock."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler

from steelyard.errors import UserError
from steelyard.integrations.run import run_arguments, run_callbacks
from steelyard.plan.plan import Plan
from steelyard.profiles.record import SlowRank
from steelyard.runtime import checks
from steelyard.runtime.checks import check_outputs
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.progress import model_flop_utilisation, progress_line, step_metrics
from steelyard.runtime.stage_clock import StageClock
from tests.plan.examples import COST_SOURCE
from tests.runtime.models import make_plan
from tests.runtime.processes import one_process


def plan_with(mfu: float | None) -> Plan:
    """A plan for one device that is predicted to take 2 seconds a step."""
    plan = make_plan("llama-tied", "single, single, single, single", num_devices=1, global_batch=8, num_microbatches=1)
    prediction = {
        "step_time_s": 2.0,
        "tokens_per_s_per_device": 128.0,
        "mfu": mfu,
        "budget_bytes": 10,
        "stages": [{"time_s": {"compute": 2.0}, "memory_bytes": {"parameters": 1}}],
        "certificate": {"status": "optimal", "gap": 0.0},
        "lower_bound_s": 2.0,
        "profile": COST_SOURCE,
    }
    return Plan.model_validate({**plan.model_dump(mode="json"), "prediction": prediction})


def step(loss: float = 2.5, time_s: float = 4.0, memory_bytes: int | None = 3 << 20, **more: Any) -> dict[str, Any]:
    return {"loss": loss, "grad_norm": 0.5, "lr": 1e-3, "time_s": time_s, "memory_bytes": memory_bytes, **more}


def test_a_step_that_takes_twice_as_long_as_predicted_has_half_of_the_utilisation() -> None:
    assert model_flop_utilisation(plan_with(0.4), 4.0) == pytest.approx(0.2)


def test_without_a_known_peak_no_utilisation_is_claimed() -> None:
    assert model_flop_utilisation(plan_with(None), 4.0) is None
    hand_written = make_plan("llama-tied", "single, single, single, single", num_devices=1)
    assert model_flop_utilisation(hand_written, 4.0) is None


def test_the_line_says_step_loss_rate_utilisation_and_memory() -> None:
    line = progress_line(numbered(7, step(), plan_with(0.4)), 100, counts_tokens=True)
    assert line == "step   7/100  loss 2.5000  64 tokens/s  MFU 20.0%  grad norm 0.500  memory 3.00 MiB"


def test_the_line_leaves_out_what_is_not_known() -> None:
    line = progress_line(numbered(7, step(memory_bytes=None), plan_with(None)), 9, counts_tokens=False)
    assert line == "step 7/9  loss 2.5000  2 images/s  grad norm 0.500"


def test_the_line_says_the_loss_of_an_evaluation() -> None:
    line = progress_line(numbered(7, step(eval_loss=2.25), plan_with(None)), 9, counts_tokens=True)
    assert line.endswith("eval loss 2.2500")


def test_where_routers_are_trained_the_line_says_their_loss_and_the_main_one_apart() -> None:
    of_both = step(main_loss=2.25, router_loss=2.5)
    line = progress_line(numbered(7, of_both, plan_with(None)), 9, counts_tokens=True)
    assert line.startswith("step 7/9  loss 2.5000  main 2.2500  routers 2.500  64 tokens/s  ")


def test_where_experts_are_divided_the_line_says_how_uneven_the_routing_was() -> None:
    line = progress_line(numbered(7, step(imbalance=1.25), plan_with(None)), 9, counts_tokens=True)
    assert "  grad norm 0.500  imbalance 1.25  " in line


def test_in_fp16_the_line_says_the_loss_scale_and_whether_the_step_was_skipped() -> None:
    scaled = step(loss_scale=65536.0)
    line = progress_line(numbered(7, scaled, plan_with(None)), 9, counts_tokens=True)
    assert "  grad norm 0.500  loss scale 65,536  memory" in line
    skipped = numbered(7, scaled | {"skipped": True}, plan_with(None))
    assert "  loss scale 65,536, skipped: gradients overflow  " in progress_line(skipped, 9, counts_tokens=True)
    assert (skipped["loss_scale"], skipped["skipped"]) == (65536.0, True)


def numbered(number: int, of: dict[str, Any], plan: Plan) -> dict[str, Any]:
    return {"step": number, **step_metrics(plan, **of)}


def report(options: TrainOptions, num_done: int = 0) -> None:
    """What the callbacks of a run get of two steps and of Trainer's summary of it."""
    plan = plan_with(0.4)
    with one_process():
        args = run_arguments(plan, torch.device("cpu"), options)
        found = [
            *(each() for each in get_reporting_integration_callbacks(args.report_to)),
            *run_callbacks(plan, options, num_done=num_done),
        ]
    handler = CallbackHandler(found, None, None, None, None)
    state = TrainerState(is_world_process_zero=True, global_step=num_done)
    handler.on_train_begin(args, state, TrainerControl())
    for each in (step(2.5), step(2.25)):
        state.global_step += 1
        handler.on_log(args, state, TrainerControl(), step_metrics(plan, **each))
    handler.on_log(args, state, TrainerControl(), {"train_runtime": 8.0})
    handler.on_train_end(args, state, TrainerControl())


def test_every_step_is_a_json_line(tmp_path: Path) -> None:
    report(TrainOptions(steps=2, metrics=tmp_path / "new" / "m.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "new" / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1] == {
        "step": 2,
        "loss": 2.25,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "time_s": 4.0,
        "tokens_per_s": 64.0,
        "samples_per_s": 2.0,
        "mfu": 0.2,
        "memory_bytes": 3 << 20,
    }


def test_a_resumed_run_adds_to_its_metrics(tmp_path: Path) -> None:
    options = TrainOptions(steps=4, metrics=tmp_path / "m.jsonl")
    report(options)
    report(options, num_done=2)
    steps = [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_a_device_that_is_full_is_one_message_about_metrics() -> None:
    with pytest.raises(UserError, match="--metrics: found /dev/full: No space left on device"):
        report(TrainOptions(steps=2, metrics=Path("/dev/full")))


@pytest.mark.parametrize("options", [{"metrics": "."}, {"record": "missing/record.json"}, {"export_hf": "file/out"}])
def test_what_a_run_will_write_is_tried_before_it(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    (name, path) = next(iter(options.items()))
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}: found "):
        check_outputs(TrainOptions(**{name: Path(path)}))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_folder_of_metrics_is_made_but_not_by_trying(tmp_path: Path) -> None:
    options = TrainOptions(steps=2, metrics=tmp_path / "new" / "m.jsonl")
    check_outputs(options)
    assert list(tmp_path.iterdir()) == []
    report(options)
    assert len((tmp_path / "new" / "m.jsonl").read_text().splitlines()) == 2


def test_a_new_run_replaces_old_metrics(tmp_path: Path) -> None:
    options = TrainOptions(steps=2, metrics=tmp_path / "m.jsonl")
    report(options)
    report(options)
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(TrainOptions(steps=2, tensorboard=tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [2.5, 2.25]
    assert [event.step for event in events.Scalars("train/mfu")] == [1, 2]


def test_tensorboard_that_is_not_installed_is_a_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    check_outputs(TrainOptions())
    with pytest.raises(UserError, match="no package tensorboard"):
        check_outputs(TrainOptions(tensorboard=tmp_path))


def test_the_clock_counts_work_once_and_nothing_else() -> None:
    clock = StageClock(torch.device("cpu"))
    started_s = time.perf_counter()
    with clock.working(), clock.working():
        time.sleep(0.02)
    inside_s = time.perf_counter() - started_s
    time.sleep(0.05)
    worked_s, own_s = clock.take_s()
    assert 0.02 <= worked_s <= inside_s
    assert own_s == worked_s
    assert clock.take_s() == (0, 0)


def test_the_clock_leaves_out_of_own_work_what_waits_for_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Work, "wait", lambda _: time.sleep(0.05))
    clock, work = StageClock(torch.device("cpu")), dist.Work.__new__(dist.Work)
    with clock.seeing_waits():
        work.wait()
        with clock.working():
            time.sleep(0.02)
            work.wait()
    worked_s, own_s = clock.take_s()
    assert worked_s - own_s >= 0.05
    assert own_s >= 0.02


def test_the_progress_line_names_slow_ranks() -> None:
    slow = SlowRank(rank=3, stage=1, host="node7", factor=1.84)
    line = progress_line(numbered(1, step(slow=str(slow)), plan_with(None)), 10, counts_tokens=True)
    assert line.endswith("slow: rank 3 (stage 1) on node7 computes 1.8 × as long")


def test_an_experiment_tracker_gets_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Tracker(TrainerCallback):
        def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
            told = args.to_dict()
            seen.append([os.environ["WANDB_PROJECT"], *(told[name] for name in ("lr_scheduler_type", "run_name"))])

        def on_log(self, _args: Any, state: TrainerState, _control: Any, logs: dict[str, Any], **_: Any) -> None:
            seen.append((state.global_step, logs.get("loss")))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Tracker)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    report(TrainOptions(steps=2, report_to="wandb"))
    assert seen == [["steelyard", "cosine_with_min_lr", "test on test"], (1, 2.5), (2, 2.25), (2, None)]


def test_a_tracker_that_is_unknown_or_missing_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--report-to: found 'wandv'"):
        TrainOptions(report_to="wandv")
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "mlflow" else True)
    with pytest.raises(UserError, match="pip install mlflow"):
        checks.check_outputs(TrainOptions(report_to="wandb,mlflow"))
