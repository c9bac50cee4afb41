"""Results of users' own modules on four ranks under plans of every kind, against one process; one launch."""

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import steelyard
from steelyard.errors import UserError
from steelyard.modules.own_pieces import loss_of
from steelyard.modules.own_proof import Built, own_model
from steelyard.modules.stubbed_model import call_arguments
from steelyard.plan.plan import Plan
from steelyard.runtime.state import RunState
from tests.modules.own_models import CASES, SAMPLES, Case
from tests.runtime.models import make_plan
from tests.runtime.processes import one_of_many_cases

BATCH, STEPS = 16, 2
LAYOUTS: dict[str, tuple[str, ...]] = {
    "data": ("dp4, fsdp4, fsdp4 zero2, dp2-fsdp2, dp4 remat=selective, fsdp4 remat=full",),
    "stages": ("dp2, fsdp2, dp2 remat=full", "fsdp2 zero2, fsdp2, dp2"),
    "tensors": ("dp4, dp2-tp2, tp2-fsdp2 remat=full, fsdp2-tp2, dp4, fsdp4",),
}
"""Strategies per stage for modules of four blocks."""
PAIRS = [
    *((name, "tensors") for name in ("nanogpt", "titan", "dit", "sequential", "stock")),
    *((name, "stages") for name in ("nanogpt", "sequential", "unet", "towers")),
    *((name, "data") for name in ("dit", "unet")),
]
"""Modules and layouts. Tensor parallelism depends on the module, stages on its cross-layer inputs; replicas and shards
depend on neither."""

SPLITS = {
    name: own_model(Built(module=case.module(), sample=case.sample, loss=case.loss, blocks=case.blocks)).split
    for name, case in CASES.items()
    if name in dict(PAIRS)
}
"""Found before the ranks begin: a proof has ranks of its own."""


def plan_of(name: str, layout: str, *, precision: str = "fp32") -> Plan:
    own = SPLITS[name]
    sizes = {"global_batch": BATCH, "num_microbatches": 2, "seq_len": own.seq_len, "num_devices": 4}
    return make_plan(None, *LAYOUTS[layout], split=own, precision=precision, **sizes)


def samples_of(case: Case, indices: list[int], step: int) -> Any:
    """The samples at these places of a step's batch, the same whoever asks."""
    generator = torch.Generator().manual_seed(step)
    places = torch.randint(SAMPLES, (BATCH,), generator=generator)[indices]
    shifts = torch.rand(BATCH, generator=generator)[indices]

    def taken(each: Tensor) -> Tensor:
        values = each[places]
        return values + shifts.view(-1, *[1] * (each.dim() - 1)) if each.is_floating_point() else values

    return pytree.tree_map_only(Tensor, taken, case.sample)


@cache
def alone(name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of one process, its last gradients and its weights."""
    case = CASES[name]
    module = case.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        read = samples_of(case, list(range(BATCH)), step)
        inputs, targets = read if case.loss else (read, None)
        places, names = call_arguments(inputs)
        optimizer.zero_grad()
        loss = loss_of(module(*places, **names), targets, case.loss)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return losses, gradients, {name: each.detach() for name, each in module.named_parameters()}


def under(plan: Plan, case: Case) -> tuple[Any, list[Any], list[float]]:
    """The trainer, its optimizers and the losses of a few steps."""
    trainer = steelyard.parallelize(case.module(), plan, loss=case.loss)
    optimizers = trainer.make_optimizers(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    losses = [step_of(trainer, optimizers, case, step) for step in range(STEPS)]
    return trainer, optimizers, losses


def step_of(trainer: Any, optimizers: list[Any], case: Case, step: int) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = trainer.train_step(lambda indices: samples_of(case, indices, step))
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst_difference(trainer: Any, gradients: dict[str, Tensor], weights: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient or weight of this rank, as a share of its tensor's largest entry."""
    names = RunState(trainer, []).names.by_path
    worst = (0.0, "")
    for path, parameter in trainer.named_parameters():
        name = names[path]
        pairs = [(weights[name], parameter.detach())]
        if name in gradients:
            pairs.append((gradients[name], parameter.grad))
        for expected, found in pairs:
            error = float((whole(found) - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
            worst = max(worst, (error if error == error else 9.0, name))
    return worst


def compared(name: str, layout: str) -> dict[str, Any]:
    case = CASES[name]
    expected, gradients, weights = alone(name)
    trainer, _, losses = under(plan_of(name, layout), case)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, worst_difference(trainer, gradients, weights))
    evaluated = trainer.eval_step(lambda indices: samples_of(case, indices, 0)).item()
    return {
        **{"losses": losses, "expected": expected, "error": max(errors)},
        **{"evaluated": evaluated, "expected_evaluated": evaluated_alone(case, weights)},
    }


@torch.no_grad()
def evaluated_alone(case: Case, weights: dict[str, Tensor]) -> float:
    """The loss of one process with these weights, which computes with plain matrices."""
    module = case.module()
    module.load_state_dict(weights, strict=False)
    read = samples_of(case, list(range(BATCH)), 0)
    inputs, targets = read if case.loss else (read, None)
    places, names = call_arguments(inputs)
    outputs = module(*places, **names)
    return float(case.loss(outputs, targets) if case.loss else outputs[1])


def resumed(name: str) -> dict[str, Any]:
    """The loss of the third step without a checkpoint, and after one that was written under another plan."""
    case = CASES[name]
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    trainer, optimizers, _ = under(plan_of(name, "stages"), case)
    steelyard.save_checkpoint(trainer, optimizers, Path(folder[0]) / "checkpoint")
    expected = step_of(trainer, optimizers, case, STEPS)
    other = steelyard.parallelize(case.module(), plan_of(name, "data"), loss=case.loss, seed=3)
    own_optimizers = other.make_optimizers(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    steelyard.load_checkpoint(other, own_optimizers, Path(folder[0]) / "checkpoint")
    return {"expected": expected, "found": step_of(other, own_optimizers, case, STEPS), "steps": other.num_steps}


def refused() -> dict[str, str]:
    """Message for a module or samples that are not the plan's."""
    case = CASES["dit"]
    plan = plan_of("dit", "data")
    found = {}
    other = CASES["nanogpt"]
    attempts = {
        "module": lambda: steelyard.parallelize(other.module(), plan, loss=case.loss),
        "loss": lambda: steelyard.parallelize(case.module(), plan),
        "samples": lambda: steelyard.parallelize(case.module(), plan, loss=case.loss).train_step(
            lambda indices: samples_of(case, indices[:-1], 0)
        ),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except UserError as error:
            found[name] = str(error)
    return found


def bf16() -> list[float]:
    case = CASES["dit"]
    return under(plan_of("dit", "stages", precision="bf16"), case)[2]


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layout in PAIRS:
        with one_of_many_cases():
            found[f"{name} {layout}"] = compared(name, layout)
    for what, find in (("resumed", partial(resumed, "nanogpt")), ("refused", refused), ("bf16", bf16)):
        with one_of_many_cases():
            found[what] = find()
    return found
