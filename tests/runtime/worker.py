"""Processes that run every case of a module of cases and write their results as JSON.

``python -m tests.runtime.worker MODULE NAMES RESULT.json`` takes a JSON list of names of cases, empty for
all. One process first trains the unmodified model without a plan; the others compare with its results.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from steelyard.modules import replicated, router_loss, weight_passes
from steelyard.modules.build import build_model
from steelyard.modules.levers import compiled_blocks
from steelyard.runtime import parallel_model
from steelyard.runtime import stage as stages
from steelyard.runtime.parity import Reference, compare, train_alone
from tests.runtime.cases import Case
from tests.runtime.processes import fork, one_of_many_cases, run_world

SEED = 1

Cases = Mapping[str, Case]


def write_references(folder: Path, cases: Cases) -> None:
    """Write the results of one process for every model and batch."""
    for name, case in {reference_file(case): case for case in cases.values()}.items():
        torch.save(train_alone(case.plan, seed=SEED, num_steps=case.num_steps), folder / name)


def reference_file(case: Case) -> str:
    """Path of the single process's results for the model, batch and steps of a case."""
    plan, chain = case.plan, case.plan.chain()
    microbatches = f"-in-{plan.num_microbatches}" if chain.trains_routers else ""
    frozen = "".join(f"-without-{each}" for each in chain.freeze.patterns) if chain.freeze else ""
    changed = "".join(f"-{each}" for each in chain.changes)
    return f"{chain.config_hash}{frozen}{changed}-{plan.global_batch}{microbatches}-{plan.seq_len}-{case.num_steps}.pt"


def run_case(case: Case, reference: Reference) -> dict[str, Any]:
    """The largest differences from one process, over all steps, tensors and ranks."""
    with planted(case.fault):
        found = compare(case.plan, reference, seed=SEED, num_steps=case.num_steps)
    return asdict(found)


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Plants a fault in the runtime, to prove that the comparison would find it; or compiles as traces do, no fault."""
    if fault is None:
        yield
        return
    right = replicated.Replica

    def replicate_alone(layer: nn.Module, _mesh: Any, dtype: torch.dtype) -> Any:
        world = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))
        return right(layer, world["one"], dtype)

    def nothing_to_replicate(_replicas: Any, shards: Any) -> Any:
        return shards

    def mean(tensor: torch.Tensor, **arguments: Any) -> Any:
        return dist.all_reduce(tensor.div_(dist.get_world_size()), **arguments)

    patches = {
        "no dp sum": lambda: mock.patch.object(replicated, "Replica", replicate_alone),
        "mean": lambda: mock.patch.object(replicated, "dist", SimpleNamespace(all_reduce=mean, Work=dist.Work)),
        "same samples": lambda: mock.patch.object(parallel_model, "data_index", return_value=0),
        "no last backward pass": lambda: mock.patch.object(stages.StageModule, "_backward_begins", return_value=None),
        "no replica sum": lambda: mock.patch.object(stages, "_state_mesh", nothing_to_replicate),
        "routers alone": lambda: mock.patch.object(
            router_loss, "dist", SimpleNamespace(all_reduce=lambda *_, **__: None)
        ),
        "traced kernels": lambda: mock.patch.object(compiled_blocks, "is_fake", return_value=True),
        "no weight passes": lambda: mock.patch.object(weight_passes.WaitingGradients, "take", return_value=[]),
        "untied": lambda: mock.patch.object(parallel_model, "find_shared_gradients", return_value=[]),
    }
    with patches[fault]():
        yield


def run_rank(rank: int, folder: Path, cases: Cases) -> None:
    """Some cases on one rank; rank 0 writes the results, one file each."""
    for name, case in cases.items():
        reference = torch.load(folder / reference_file(case), weights_only=False)
        started_s = time.process_time()
        with one_of_many_cases():
            found = run_case(case, reference)
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))
            print(f"{name}: {time.process_time() - started_s:.1f} s of CPU", file=sys.stderr, flush=True)


# processes


def main(module: str, names: Sequence[str], result: Path) -> None:
    torch.set_num_threads(1)
    given = importlib.import_module(module)
    cases: Cases = given.CASES
    cases = {name: case for name, case in cases.items() if name in names} if names else cases
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        import_models(cases)
        getattr(given, "before_ranks", lambda: None)()
        if os.waitpid(fork(write_references, folder, cases), 0)[1]:
            sys.exit("the single process failed")
        sizes = {case.plan.num_devices: None for case in cases.values()}
        for size in sizes:
            alike = {name: case for name, case in cases.items() if case.plan.num_devices == size}
            run_world(size, partial(run_rank, folder=folder, cases=alike))
        result.write_text(json.dumps({name: json.loads((folder / f"{name}.json").read_text()) for name in cases}))


def import_models(cases: Cases) -> None:
    """Build every model once, so that the forks inherit the imports that it needs."""
    for chain in {case.plan.chain().config_hash: case.plan.chain() for case in cases.values()}.values():
        build_model(chain, seed=0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
