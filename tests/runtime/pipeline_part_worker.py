"""Worker of two gloo processes that train a pipeline step and report the live bytes when the last backward pass
begins."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from steelyard.plan.plan import Plan
from steelyard.runtime import parallel_model
from steelyard.runtime.parallel_model import parallelize_plan
from steelyard.runtime.peak_memory import LiveStorages
from steelyard.runtime.pipeline_part import PipelinePart
from tests.runtime.models import make_plan

SEQ_LEN = 32
SAMPLES = 4
"""Number of samples of a microbatch."""
COUNTS = (8, 16)
STAGES = {
    "gpipe": ("single, single remat=full", "single, single"),
    "1f1b": ("single, single remat=full", "single, single"),
    "interleaved-1f1b": ("single", "single", "single remat=full", "single"),
}


class StockPart(PipelineStage):
    """A stage as torch has it."""

    def __init__(self, *arguments: Any, examples: tuple[Any, Any], group: Any, **_ours: Any) -> None:
        super().__init__(*arguments, *examples, group=group)

    def end_step(self) -> None:
        """Torch has waited for all sends."""


def bytes_by_part_and_schedule() -> dict[str, list[list[list[int]]]]:
    """Return, by part and schedule, for each number of microbatches and rank, bytes in the last backward pass and after
    it."""
    return {
        f"{schedule} {name}": [_on_all_ranks(_plan(schedule, count), part) for count in COUNTS]
        for name, part in (("ours", PipelinePart), ("stock", StockPart))
        for schedule in STAGES
    }


def _plan(schedule: str, count: int) -> Plan:
    return make_plan(
        "llama-tied",
        *STAGES[schedule],
        schedule=schedule,
        num_chunks=len(STAGES[schedule]) // 2,
        num_devices=2,
        num_microbatches=count,
        global_batch=SAMPLES * count,
        seq_len=SEQ_LEN,
    )


def _on_all_ranks(plan: Plan, kind: type[PipelineStage]) -> list[list[int]]:
    gathered: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, _on_this_rank(plan, kind))
    return gathered


def _on_this_rank(plan: Plan, kind: type[PipelineStage]) -> list[int]:
    lives: list[int] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def backward_one_chunk(self, *arguments: Any, **keywords: Any) -> None:
            lives.append(meter.live_bytes)
            super().backward_one_chunk(*arguments, **keywords)

    with mock.patch.object(parallel_model, "PipelinePart", Watched), LiveStorages([]) as meter:
        model = parallelize_plan(plan)
        tokens = torch.zeros((plan.global_batch, plan.seq_len + 1), dtype=torch.long)
        model.train_step(lambda samples: tokens[: len(samples)])
        return [lives[-1], meter.live_bytes]
