"""Measurements by two gloo processes for every case of `tests.runtime.test_dry_run`."""

from typing import Any

import torch
import torch.distributed as dist

from steelyard.plan.plan import Plan
from steelyard.runtime.optimizer import make_optimizers
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import parallelize_plan
from steelyard.runtime.peak_memory import LiveStorages
from tests.runtime.models import make_plan

WORLD_SIZE = 2


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "sharded and replicated": (("fsdp2, dp2, fsdp2 remat=full, fsdp2 zero2",), {"precision": "bf16"}),
    "replicated and kept whole, fp16": (("dp2, fsdp2 zero1, dp2 remat=full, tp2",), {"precision": "fp16"}),
    "replicated, fp32": (("dp2, dp2 remat=full, dp2, dp2",), {}),
    "tensor parallel": (("tp2, tp2+sp, tp2+sp remat=full, tp2",), {}),
    "layouts that change": (("tp2+sp, fsdp2, dp2, tp2",), {"precision": "bf16"}),
    "selective remat": (("fsdp2, fsdp2 remat=selective, tp2 remat=selective, fsdp2",), {"precision": "bf16"}),
    "two stages, gpipe": (("single, single remat=full", "single, single"), {"schedule": "gpipe"}),
    "two stages, 1f1b": (("single, single", "single remat=full, single"), {"precision": "bf16"}),
    "moments in 8 bits": (("fsdp2, dp2, tp2, fsdp2 zero2",), {"levers": {"optimizer": "adamw-8bit"}}),
    "moments in 4 bits": (("fsdp2, dp2, tp2, fsdp2 zero2",), {"levers": {"optimizer": "adamw-4bit"}}),
    "weights in bf16": (
        ("fsdp2, fsdp2 zero2, dp2, fsdp2 zero1",),
        {"precision": "bf16", "levers": {"weights": "bf16"}},
    ),
    "moments in host memory": (("fsdp2, dp2, tp2, fsdp2 zero2",), {"levers": {"offload": "optimizer"}}),
    "parameters in host memory": (("fsdp2, fsdp2 remat=full, tp2, fsdp2",), {"levers": {"offload": "parameters"}}),
    "activations in host memory": (
        ("fsdp2, dp2 remat=full, fsdp2, fsdp2 zero2",),
        {"precision": "bf16", "levers": {"offload": "activations"}},
    ),
    "rows and columns of moments": (("dp2, dp2, dp2, dp2",), {"levers": {"optimizer": "adafactor"}}),
    "momentum of matrices": (("dp2, dp2 remat=full, dp2, dp2",), {"levers": {"optimizer": "muon"}}),
}
"""The stages of each, in fp32 under 1f1b unless it says otherwise."""


def plan_of(name: str) -> Plan:
    """The plan of a case: its model has to be split, which collecting does not wait for."""
    stages, options = CASES[name]
    sizes = {"num_devices": WORLD_SIZE, "num_microbatches": 1 + len(stages), "global_batch": 4 * (1 + len(stages))}
    return make_plan("llama-tied", *stages, **options, **sizes)


STEPS = 3


def measured_bytes(plan: Plan) -> list[int]:
    """The peaks of the first and of a later step of this process.

    A collective that ends late keeps its buffer until then, by the luck of the machine's threads and never by the plan:
    the least of several steps is what the plan needs.
    """
    with LiveStorages([]) as meter:
        model = parallelize_plan(plan)
        for state in model.loss_scale.tensors().values() if model.loss_scale else ():
            state.fill_(1)  # so that no step is skipped
        optimizers = make_optimizers(model, TrainOptions())
        peaks = []
        for _ in range(STEPS):
            meter.peak_bytes = meter.live_bytes
            model.train_step(lambda samples: torch.zeros((len(samples), plan.seq_len + 1), dtype=torch.long))
            model.clip_gradients(1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(meter.peak_bytes)
    return [peaks[0], min(peaks[1:])]


def measured_by_rank() -> list[dict[str, list[int]]]:
    """The peaks of every case on every rank."""
    mine = {name: measured_bytes(plan_of(name)) for name in CASES}
    reports: list[dict[str, list[int]]] = [{}] * WORLD_SIZE
    dist.all_gather_object(reports, mine)
    return reports
