"""Results of two ranks that run the example of docs/how-to/your-own-model.md: one launch, two plans."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.modules.own_proof import Built, own_model
from tests.processes.warm import ROOT
from tests.runtime.models import make_plan

EXAMPLE = ROOT / "examples" / "diffusion.py"
BATCH, STEPS = 32, 4
FIRST = ("dp2, fsdp2, tp2, fsdp2 remat=full, fsdp2 zero2, dp2",)
SECOND = ("single, single, single", "single remat=full, single, single")


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("diffusion", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DIFFUSION = _example()


def _split() -> Any:
    module, sample, loss = DIFFUSION.build_model()
    return own_model(Built(module=module, sample=sample, loss=loss)).split


SPLIT = _split()


def alone(num_steps: int) -> list[float]:
    """The losses of the plain training loop in one process."""
    module, _, loss_function = DIFFUSION.build_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for step in range(num_steps):
        inputs, targets = DIFFUSION.read(list(range(BATCH)), step)
        loss = loss_function(module(**inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything() -> dict[str, Any]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    found = []
    for stages in (FIRST, SECOND):
        sizes = {"seq_len": SPLIT.seq_len, "global_batch": BATCH, "num_microbatches": 2, "num_devices": 2}
        plan = make_plan(None, *stages, split=SPLIT, **sizes)
        found += DIFFUSION.train(plan, Path(folder[0]) / "checkpoint", num_steps=STEPS)
    return {"found": found, "expected": alone(2 * STEPS)}
