"""Measurements by two ranks for `test_two_processes`: one launch, many facts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from steelyard.modules.replicated import mixed_precision
from steelyard.runtime.parallel_model import ParallelModel, parallelize_plan
from tests.runtime.models import CONFIGS, make_plan

DROPPING = {**CONFIGS["gpt_neox"], "hidden_dropout": 0.2, "attention_dropout": 0.2}
LLAMA = {**CONFIGS["llama"], "num_hidden_layers": 2}


def read(indices: list[int]) -> torch.Tensor:
    """Read the same sample for every index, so that ranks with other samples differ by dropout alone."""
    tokens = torch.arange(33) * 7 % 256
    return tokens.expand(len(indices), -1)


def plan_of(strategy: str, config: dict[str, Any], *, num_microbatches: int, precision: str = "fp32") -> Any:
    return make_plan(
        config,
        ", ".join([strategy] * 4),
        num_devices=2,
        global_batch=8,
        num_microbatches=num_microbatches,
        precision=precision,
    )


def gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def replicas_differ(model: ParallelModel) -> float:
    """The largest difference between the ranks' gradients of parameters that both hold whole."""
    worst = 0.0
    for _, parameter in model.named_parameters():
        if all(
            place.is_replicate() or parameter.device_mesh.size(axis) == 1
            for axis, place in enumerate(parameter.placements)
        ):
            mine = parameter.grad.to_local()
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine)
            worst = max(worst, (both[0] - both[1]).abs().max().item())
    return worst


def _noted(losses: list[Tensor], own: list[float]) -> list[Tensor]:
    own.append(float(losses[0]))
    return losses


def dropout_losses(strategy: str) -> dict[str, Any]:
    """Losses of two steps, twice; whether replicas stay equal; the ranks' own shares of the loss."""
    runs = []
    for _ in range(2):
        model = parallelize_plan(plan_of(strategy, DROPPING, num_microbatches=2), seed=0)
        own: list[float] = []
        step = model._step_microbatches
        model._step_microbatches = lambda *given, step=step, own=own: _noted(step(*given), own)
        runs.append([model.train_step(read).item() for _ in range(2)])
        differ = replicas_differ(model)
    return {"runs": runs, "replicas_differ": differ, "own": gather(own)}


class Collectives(TorchDispatchMode):
    """Counts of sends by operation, without waits."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait" not in func.name():
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def num_collectives(strategy: str, num_microbatches: int) -> dict[str, int]:
    """Collectives of the forward and backward passes of the second step, by name."""
    model = parallelize_plan(plan_of(strategy, LLAMA, num_microbatches=num_microbatches), seed=0)
    model.train_step(read)
    with Collectives() as counter:
        model.train_step(read)
    return dict(counter.counts)


def precision_of(strategy: str) -> dict[str, str]:
    """Types of parameters, gradients and optimizer states in a bf16 plan."""
    model = parallelize_plan(plan_of(strategy, LLAMA, num_microbatches=2, precision="bf16"), seed=0)
    optimizers = model.make_optimizers(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    seen: set[str] = set()
    handle = model.layers["1"].register_forward_hook(lambda _m, inputs, _o: seen.add(str(inputs[0].dtype)))
    model.train_step(read)
    handle.remove()
    for optimizer in optimizers:
        optimizer.step()
    states = {str(state["exp_avg"].dtype) for optimizer in optimizers for state in optimizer.state.values()}
    return {
        "parameters": ",".join({str(parameter.dtype) for parameter in model.parameters()}),
        "gradients": ",".join({str(parameter.grad.dtype) for parameter in model.parameters()}),
        "states": ",".join(states),
        "computed": ",".join(seen),
        "reduced": str(mixed_precision("bf16", {torch.float32}).reduce_dtype),
    }


def everything() -> dict[str, Any]:
    """All facts; every entry is a collective call."""
    facts: dict[str, Callable[[], Any]] = {
        **{f"dropout {strategy}": (lambda s=strategy: dropout_losses(s)) for strategy in ("dp2", "tp2", "tp2+sp")},
        **{
            f"collectives {strategy} {count}": (lambda s=strategy, c=count: num_collectives(s, c))
            for strategy in ("dp2", "fsdp2", "fsdp2 zero2", "fsdp2 zero1")
            for count in (1, 4)
        },
        **{f"precision {strategy}": (lambda s=strategy: precision_of(s)) for strategy in ("dp2", "fsdp2", "tp2")},
    }
    return {name: find() for name, find in facts.items()}
