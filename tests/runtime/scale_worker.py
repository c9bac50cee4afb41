"""Loss scaling on the ranks of a world: it changes only overflowing steps, and all ranks agree."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import SGD

from steelyard.modules.updates import LocalAdamW, local_part
from steelyard.plan.plan import Plan
from steelyard.runtime import loss_scale
from steelyard.runtime.checkpoint import load_checkpoint, save_checkpoint
from steelyard.runtime.data.tokens import Samples
from steelyard.runtime.loss_scale import LossScale
from steelyard.runtime.parallel_model import ParallelModel, parallelize_plan
from steelyard.runtime.parity import samples_of_step
from tests.runtime.processes import one_of_many_cases
from tests.runtime.scale_cases import CASES, OTHER_PLAN, SCALED, SHORT

NUM_STEPS = 2


def model_of(plan: Plan, *, growth_interval: int | None = None) -> ParallelModel:
    """A model; scaled whatever the precision where ``growth_interval`` says when the scale is doubled."""
    model = parallelize_plan(plan, seed=1)
    if growth_interval is not None:
        model.loss_scale = LossScale(plan.global_batch, model.device, growth_interval=growth_interval)
    return model


def train(model: ParallelModel, optimizers: list[Any], steps: range, *, overflow: tuple[int, int] = (-1, 0)) -> dict:
    """Train a few steps and return the results; in the step and on the rank of ``overflow`` the backward pass makes an
    infinite entry.
    """
    found: dict[str, list[Any]] = {"losses": [], "norms": [], "scales": [], "skipped": []}
    plan, finish = model.plan, LossScale.finish_step

    def overflowing(scale: LossScale, gradients: list[torch.Tensor]) -> None:
        if overflow[1] == dist.get_rank():
            next(each for each in gradients if each.numel()).view(-1)[-1] = math.inf
        finish(scale, gradients)

    for step in steps:
        samples = samples_of_step(model.chain, num_samples=plan.global_batch, seq_len=plan.seq_len, step=step)
        faulty = mock.patch.object(LossScale, "finish_step", overflowing) if step == overflow[0] else nullcontext()
        with faulty:
            loss = model.train_step(
                lambda indices, of=samples: Samples(inputs=of.inputs[indices], labels=of.labels[indices])
            )
        found["losses"].append(loss.item())
        found["norms"].append(model.clip_gradients(0.5).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scale = model.loss_scale
        found["scales"].append(scale and scale.value)
        found["skipped"].append(scale and scale.is_skipped)
    return found


def sgd(model: ParallelModel) -> list[Any]:
    """Optimizers whose update grows with the gradient, so that one that is scaled would be seen."""
    return model.make_optimizers(lambda parameters: SGD(parameters, lr=0.3, momentum=0.9, foreach=False))


def adamw(model: ParallelModel) -> list[Any]:
    return model.make_optimizers(LocalAdamW)


def parts(model: ParallelModel) -> list[torch.Tensor]:
    """Copies of this rank's parameters."""
    return [local_part(each.detach()).clone() for each in model.parameters()]


def differ(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """The largest difference of an entry."""
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a.numel())


def state_of(model: ParallelModel) -> list[float]:
    """The scale and the steps since it changed."""
    assert model.loss_scale is not None
    return [each.item() for each in model.loss_scale.tensors().values()]


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def scaled_and_not(plan: Plan) -> dict[str, Any]:
    """Same steps in fp32 with and without a scale that doubles in every step."""
    plan = plan.model_copy(update={"precision": "fp32"})
    plain, scaled = model_of(plan), model_of(plan, growth_interval=1)
    expected = train(plain, sgd(plain), range(NUM_STEPS))
    found = train(scaled, sgd(scaled), range(NUM_STEPS))
    return {
        "expected": expected,
        "found": found,
        "difference": max(everywhere(differ(parts(plain), parts(scaled)))),
        "same_scales": len({tuple(each) for each in everywhere(found["scales"])}) == 1,
    }


def overflow_on(plan: Plan, rank: int) -> dict[str, Any]:
    """A first step, then one that overflows on one rank, then the first one's successor as if that had not been."""
    model = model_of(plan)
    optimizers = adamw(model)
    first = train(model, optimizers, range(1))
    before = parts(model)
    skipped = train(model, optimizers, range(1, 2), overflow=(1, rank))
    changed = differ(before, parts(model))
    after = train(model, optimizers, range(2, 3))
    other = model_of(plan)
    of_other = adamw(other)
    train(other, of_other, range(1))
    assert other.loss_scale is not None
    other.loss_scale.tensors()["loss_scale.scale"].mul_(0.5)
    train(other, of_other, range(2, 3))
    return {
        "first": first,
        "skipped": everywhere(skipped["skipped"]),
        "scales": everywhere([*first["scales"], *skipped["scales"], *after["scales"]]),
        "norm": skipped["norms"],
        "changed": max(everywhere(changed)),
        "difference": max(everywhere(differ(parts(model), parts(other)))),
    }


def resumed(first: Plan, second: Plan) -> dict[str, Any]:
    """The scale and the steps since it changed, before a checkpoint and after it was read under another plan.

    The first step is skipped: there are no optimizer states when the checkpoint is written.
    """
    folder = Path(gettempdir()) / f"steelyard-scale-{everywhere(torch.seed())[0]}"
    model = model_of(first, growth_interval=4)
    optimizers = adamw(model)
    train(model, optimizers, range(1), overflow=(0, 0))
    save_checkpoint(model, optimizers, folder / "skipped")
    again = model_of(first, growth_interval=4)
    load_checkpoint(again, adamw(again), folder / "skipped")
    train(model, optimizers, range(1, 3))
    save_checkpoint(model, optimizers, folder / "trained")
    other = model_of(second, growth_interval=4)
    of_other = adamw(other)
    load_checkpoint(other, of_other, folder / "trained")
    found = {
        "skipped": state_of(again)[0],
        "saved": state_of(model),
        "read": state_of(other),
    }
    found["after"] = train(other, of_other, range(3, 5))
    found["expected"] = train(model, optimizers, range(3, 5))
    plain = parallelize_plan(first.model_copy(update={"precision": "bf16"}), seed=1)
    load_checkpoint(plain, adamw(plain), folder / "trained")
    save_checkpoint(plain, adamw(plain), folder / "plain")
    fresh = model_of(first)
    load_checkpoint(fresh, adamw(fresh), folder / "plain")
    return found | {"of_bf16": state_of(fresh)[0]}


def never_ends(plan: Plan) -> dict[str, Any]:
    """Return the number of skipped steps of a model with non-finite gradients from a low scale, and what ends them."""
    with mock.patch.object(loss_scale, "INITIAL_SCALE", 2.0):
        model = model_of(plan)
    for parameter in model.parameters():
        local_part(parameter.detach()).fill_(math.nan)
    optimizers, count = adamw(model), 0
    try:
        while True:
            train(model, optimizers, range(1))
            count += 1
    except Exception as error:
        return {"count": count, "error": type(error).__name__, "message": str(error)}


def accumulated(plan: Plan) -> dict[str, Any]:
    """Gradients of two batches that are added, against twice those of one."""
    model = model_of(plan)
    samples = samples_of_step(model.chain, num_samples=plan.global_batch, seq_len=plan.seq_len, step=0)
    gradients = []
    for _ in range(2):
        model.train_step(lambda indices: Samples(inputs=samples.inputs[indices], labels=samples.labels[indices]))
        gradients.append([local_part(each.grad).clone() for each in model.parameters() if each.grad is not None])
    largest = max(float(each.abs().max()) for each in gradients[1] if each.numel())
    return {"difference": max(everywhere(differ([2 * each for each in gradients[0]], gradients[1]))) / largest}


def on_four() -> dict[str, Any]:
    """What depends on the modes."""
    return _each(
        {f"scaled {name}": lambda name=name: scaled_and_not(CASES[name].plan) for name in SCALED}
        | {"overflow in a pipeline": lambda: overflow_on(CASES["two stages, tied"].plan, rank=0)}
    )


def on_two() -> dict[str, Any]:
    """What does not."""
    return _each(
        {
            "overflow": lambda: overflow_on(SHORT.plan, rank=1),
            "resumed": lambda: resumed(SHORT.plan, OTHER_PLAN.plan),
            "never ends": lambda: never_ends(SHORT.plan),
            "accumulated": lambda: accumulated(SHORT.plan),
        }
    )


def _each(work: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    found = {}
    for name, do in work.items():
        with one_of_many_cases():
            found[name] = do()
    return found
