"""Eight processes that run every case of `tests.runtime.cases` and write what they found as JSON.

``python -m tests.runtime.worker RESULT.json``. The imports, which take seconds, happen once: the processes are forks.
One process trains the unmodified model without steelyard first; the others compare with what it wrote.

The optimizer is SGD with momentum. AdamW would do for neither purpose: it divides by the root of the second moment,
so rounding noise in entries near zero grows to the size of a step, while a gradient that is wrong by a constant
factor (averaged instead of summed) changes nothing.
"""

import datetime
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from steelyard.model.chain import ModelChain
from steelyard.modules import data_parallel
from steelyard.modules.build import build_model
from steelyard.plan.plan import Plan
from steelyard.processes.group import quiet_notices
from steelyard.processes.parent import end_with_parent
from steelyard.runtime import parallel_model
from steelyard.runtime.applied import gather_strategies, observe_layers
from steelyard.runtime.parallel_model import ParallelModel, parallelize_plan
from tests.runtime.cases import CASES, Case

WORLD_SIZE = 8
SEED = 1
MAX_NORM = 0.5
NUM_STEPS = 5


def batch(plan: Plan, step: int) -> Tensor:
    """The tokens [N, S + 1] of one step: sequences that count on by 1, 2 or 3, which a model learns."""
    generator = torch.Generator().manual_seed(step)
    first_N1 = torch.randint(0, 256, (plan.global_batch, 1), generator=generator)  # noqa: N806
    stride_N1 = torch.randint(1, 4, (plan.global_batch, 1), generator=generator)  # noqa: N806
    return (first_N1 + stride_N1 * torch.arange(plan.seq_len + 1)) % 256


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


# one process without steelyard's runtime


def write_references(folder: Path) -> None:
    """Losses, norms, gradients and last weights of every model and batch, trained in one process."""
    plans = {reference_file(case.plan): case.plan for case in CASES.values()}
    for name, plan in plans.items():
        torch.save(_reference(plan), folder / name)


def reference_file(plan: Plan) -> str:
    """Where the single process writes what it found for the model and batch of a plan."""
    return f"{plan.chain().config_hash}-{plan.global_batch}.pt"


def _reference(plan: Plan) -> dict[str, Any]:
    model = build_model(plan.chain(), seed=SEED)
    optimizer = make_optimizer(model.parameters())
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step in range(NUM_STEPS):
        tokens = batch(plan, step)
        logits = model(tokens[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        found["losses"].append(loss.item())
        found["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


# eight processes


def run_case(case: Case, reference: dict[str, Any]) -> dict[str, Any]:
    """The largest differences from one process, over all steps, tensors and ranks."""
    with planted(case.fault):
        model = parallelize_plan(case.plan, seed=SEED)
        optimizers = model.make_optimizers(make_optimizer)
        found: dict[str, Any] = {"losses": [], "norms": [], "gradient_error": 0.0, "gradient_tensor": ""}
        for step in range(case.num_steps):
            tokens = batch(case.plan, step)
            with observe_layers(model) as shapes:
                found["losses"].append(model.train_step(lambda indices, tokens=tokens: tokens[indices]).item())
            error, tensor = _largest_difference(model, reference["gradients"][step], of_gradients=True)
            if error >= found["gradient_error"]:
                found.update(gradient_error=error, gradient_tensor=tensor)
            found["norms"].append(model.clip_gradients(MAX_NORM).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    if case.num_steps == NUM_STEPS:
        found["weight_error"], _ = _largest_difference(model, reference["weights"], of_gradients=False)
    found["strategies"] = gather_strategies(model, shapes)
    reports: list[dict[str, Any]] = [{} for _ in range(WORLD_SIZE)]
    dist.all_gather_object(reports, found)
    worst = max(reports, key=lambda report: report["gradient_error"])
    worst["weight_error"] = max(report.get("weight_error", 0.0) for report in reports)
    worst["same_loss_on_all_ranks"] = len({tuple(report["losses"]) for report in reports}) == 1
    worst["expected_losses"] = reference["losses"][: case.num_steps]
    worst["expected_norms"] = reference["norms"][: case.num_steps]
    return worst


def _largest_difference(model: ParallelModel, expected: dict[str, Tensor], *, of_gradients: bool) -> tuple[float, str]:
    """The largest difference of an entry, as a share of the largest entry of its tensor, and the tensor's name.

    The gradient of a key bias is truly zero (softmax ignores a shift of all scores): it is compared as a share of the
    largest entry of the key weight's gradient.
    """
    worst, where = 0.0, ""
    for path, parameter in model.named_parameters():
        name = reference_name(model.chain, path)
        full = expected[name]
        scale = expected[name.replace("k_proj.bias", "k_proj.weight")].abs().max().item()
        mine = parameter.grad if of_gradients else parameter.detach()
        error = _local(mine).sub(_local_part(full, parameter)).abs().max().item() / scale if _local(mine).numel() else 0
        if not error <= worst:
            worst, where = error, name
    return worst, where


def reference_name(chain: ModelChain, path: str) -> str:
    """Name in the unmodified model of the parameter at a path of a `ParallelModel`."""
    layer, rest = path.split(".", 1)
    family = chain.family
    if int(layer) == 0:
        return f"{family.body}.{rest.replace('embedding', family.embedding, 1)}"
    if int(layer) < chain.num_layers - 1:
        return f"{family.body}.{family.blocks}.{int(layer) - 1}.{rest.removeprefix('block.')}"
    if rest.startswith("norm."):
        return f"{family.body}.{rest.replace('norm', family.final_norm, 1)}"
    if chain.tied_embeddings:
        return f"{family.body}.{family.embedding}.weight"
    return rest.replace("output", family.output, 1)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_part(full: Tensor, like: nn.Parameter) -> Tensor:
    """This rank's part of ``full`` in the placement of ``like``, without communication."""
    if not isinstance(like, DTensor):
        return full
    replicated = DTensor.from_local(full, like.device_mesh, run_check=False)
    return replicated.redistribute(placements=like.placements).to_local()


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Plants a fault in the runtime, to prove that the comparison would find it."""
    if fault is None:
        yield
        return
    right = data_parallel.replicate

    def replicate_alone(layer: nn.Module, *, mesh: Any, mp_policy: Any) -> nn.Module:
        world = dist.device_mesh.init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("all", "one"))
        return right(layer, mesh=world["one"], mp_policy=mp_policy)

    patches = {
        "no dp sum": lambda: mock.patch.object(data_parallel, "replicate", replicate_alone),
        "mean": lambda: mock.patch.object(
            torch.distributed.fsdp.FSDPModule,
            "set_gradient_divide_factor",
            lambda layer, _factor: layer._get_fsdp_state()._fsdp_param_group.__setattr__("gradient_divide_factor", 8.0),
        ),
        "same samples": lambda: mock.patch.object(parallel_model, "data_index", return_value=0),
        "untied": lambda: mock.patch.object(parallel_model, "find_tied_embedding", return_value=None),
    }
    with patches[fault]():
        yield


def run_rank(rank: int, folder: Path, result: Path) -> None:
    """All cases on one rank; rank 0 writes the results."""
    quiet_notices()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=100),
    )
    results = {}
    for name, case in CASES.items():
        reference = torch.load(folder / reference_file(case.plan))
        started_s = time.perf_counter()
        results[name] = run_case(case, reference)
        if rank == 0:
            print(f"{name}: {time.perf_counter() - started_s:.1f} s", file=sys.stderr, flush=True)
    if rank == 0:
        result.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# processes


def fork(work: Any, *arguments: Any) -> int:
    """The id of a new process that does ``work`` and ends with code 0, or 1 if that raised."""
    process = os.fork()
    if process:
        return process
    end_with_parent()
    try:
        work(*arguments)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(result: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.waitpid(fork(write_references, folder), 0)[1]:
            sys.exit("the single process failed")
        ranks = [fork(run_rank, rank, folder, result) for rank in range(WORLD_SIZE)]
        failed = [rank for rank, process in enumerate(ranks) if os.waitpid(process, 0)[1]]
        if failed:
            sys.exit(f"ranks {failed} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
