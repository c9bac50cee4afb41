"""Tests of a run whose plan runs out of memory."""

from pathlib import Path

import pytest

from steelyard.plan.file import read_plan, write_plan
from steelyard.plan.plan import Fallback, Plan
from steelyard.processes.failure import Failure, RankFailedError
from steelyard.runtime import launch as launching
from steelyard.runtime.launch import OUT_OF_MEMORY
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.peak_memory import MemoryExceededError
from tests.runtime.models import make_plan

FIRST, SECOND, THIRD = "dp2, dp2, dp2, dp2", "fsdp2, fsdp2, fsdp2, fsdp2", "tp2, tp2, tp2, tp2"


def plan(strategies: str, *fallbacks: str) -> Plan:
    made = make_plan("llama-tied", strategies, num_devices=2)
    others = (make_plan("llama-tied", each, num_devices=2) for each in fallbacks)
    return made.model_copy(
        update={"fallbacks": tuple(Fallback(num_microbatches=4, stages=other.stages) for other in others)}
    )


def out_of_memory(kind: str = OUT_OF_MEMORY) -> RankFailedError:
    failure = Failure(rank=1, exit_code=1, time_s=0.0, error_type=kind, message="memory ran out", traceback="")
    return RankFailedError("rank 1 failed: memory ran out\nTraceback", failure)


def launch(folder: Path, monkeypatch: pytest.MonkeyPatch, made: Plan, *failures: RankFailedError) -> list[str]:
    """Launches with processes that fail so, one launch after another; the strategies that were tried."""
    left, tried = list(failures), []

    def run(_module: str, arguments: list[str], **_how: object) -> None:
        tried.append(str(read_plan(arguments[0]).strategies[0]))
        raise left.pop(0)

    monkeypatch.setattr(launching, "run_processes", run)
    write_plan(made, folder / "plan.json")
    (folder / "text.txt").write_text("to be or not to be " * 1000)
    with pytest.raises(RankFailedError) as raised:
        launching.launch(folder / "plan.json", folder / "text.txt", TrainOptions())
    tried.append(str(raised.value))
    return tried


def test_fallbacks_are_tried_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(FIRST, SECOND, THIRD)
    *tried, _ = launch(tmp_path, monkeypatch, made, out_of_memory(), out_of_memory(), out_of_memory())
    assert tried == ["dp2", "fsdp2", "tp2"]


def test_without_a_fallback_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, said = launch(tmp_path, monkeypatch, plan(FIRST), out_of_memory())
    assert said == (
        "rank 1 failed: memory ran out\n"
        "  to fix: the plan has no fallback; plan again with less --memory, or add fallbacks with --fallbacks"
    )


def test_no_fallback_is_tried_after_another_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *tried, _ = launch(tmp_path, monkeypatch, plan(FIRST, SECOND), out_of_memory("ValueError"))
    assert tried == ["dp2"]


def test_ranks_report_the_error_that_the_launcher_looks_for() -> None:
    assert MemoryExceededError.__name__ == OUT_OF_MEMORY
