"""Of every type of transformers that splits: does it train two steps on four processes as one process does?

At small width with six blocks, in two stages, every layer sharded by fsdp and computed again in backward; and with
``--strategy``, by other strategies of two ranks. Types that do not split are left out: `model_types` says why.

Where a type differs it is tried whether one process equals itself: with first weights that differ by `ROUNDING` of
themselves. Where a unit of an activation or an expert is chosen by a hair, rounding decides, and it does not. Both are
then compared once more in fp64 (`in_double`), and a row says so. Routers that draw experts while they train (phimoe)
take the best ones on both sides, as nothing is dropped on either.

    python benchmarks/model_types_parity.py                      # about 30 minutes on two cores
    python benchmarks/model_types_parity.py --task causal --types phi3,opt
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING
from transformers.models.phimoe import modeling_phimoe

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.model_types import TASKS, class_of, shallow_config
from steelyard.errors import InvalidModelError
from steelyard.model.small import small_config, widths_of, without_dropout
from steelyard.model.split import ModelSplit
from steelyard.modules.build import build_from_config, build_model
from steelyard.modules.split_proof import split_model
from steelyard.plan.plan import Plan
from steelyard.plan.shrink import TOLERANCES
from steelyard.runtime import parity
from steelyard.runtime.parity import Reference
from tests.runtime.cases import Case
from tests.runtime.models import make_plan
from tests.runtime.processes import fork, joined
from tests.runtime.worker import SEED, run_rank, write_references

NUM_BLOCKS, NUM_PROCESSES, LIMIT_S = 6, 4, 600.0
ROUNDING, NUM_ROUNDED, NUM_STEPS = 1e-7, 4, 2


def make_case(model_type: str, architecture: str, strategy: str) -> Case:
    """Two steps of a small model of a type under a plan of two stages."""
    config, split = _small(model_type, shallow_config(model_type, architecture, NUM_BLOCKS))
    half = (len(split.layers) + 1) // 2
    stages = (", ".join([strategy] * count) for count in (half, len(split.layers) - half))
    options = {"num_microbatches": 2, "global_batch": 8, "num_devices": NUM_PROCESSES, "split": split}
    places = split.features.places if split.features else 0
    options["seq_len"] = split.max_seq_len if split.image else max(places + 16, split.multiple)
    return Case(make=partial(make_plan, config, *stages, **options), num_steps=NUM_STEPS)


def _small(model_type: str, config: dict[str, Any]) -> tuple[dict[str, Any], ModelSplit]:
    """The small config that splits, and how: with the sizes that are known made small, or all that are a width."""
    plain, wide = (without_dropout(small_config(config, widths=each)) for each in ((), widths_of(config)))
    try:
        return plain, split_model(model_type, plain)
    except InvalidModelError:
        return wide, split_model(model_type, wide)


def outcome(model_type: str, architecture: str, strategy: str) -> dict[str, Any]:
    """The largest difference of a type from one process, or why there is none."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if reason := _ended(folder, [lambda: _prepare(folder, model_type, architecture, strategy)]):
            return {"type": model_type, "split": False, "reason": reason}
        case = torch.load(folder / "case.pt", weights_only=False)
        if not (wrong := _compared(folder, case)):
            return {"type": model_type, "split": True, "exact": True}
        if not (folder / "case.json").exists():
            return {"type": model_type, "split": True, "exact": False, "reason": wrong}
        if reason := _ended(folder, [lambda: _compare_rounded(folder, case)]):
            return {"type": model_type, "split": True, "exact": False, "reason": f"{wrong}; one process: {reason}"}
        by_rounding = _wrong(json.loads((folder / "rounded.json").read_text()))
        why = f"{wrong}; one process, its weights rounded otherwise: {by_rounding or 'as before'}"
        if not by_rounding:
            return {"type": model_type, "split": True, "exact": False, "reason": why}
        failed = _ended(folder, [in_double(lambda: write_references(folder, {"case": case}))])
        still = failed or _compared(folder, case, in_double)
    why += f"; in fp64: {still or 'equal'}"
    return {"type": model_type, "split": True, "exact": not still, "in_double": not still, "reason": why}


def _compared(
    folder: Path, case: Case, within: Callable[[Callable[[], None]], Callable[[], None]] = lambda work: work
) -> str:
    """What differs between four processes and one, or why they fail; empty where nothing does."""
    (folder / "case.json").unlink(missing_ok=True)
    (folder / "store").unlink(missing_ok=True)
    ranks = [within(_rank_work(folder, case, rank)) for rank in range(NUM_PROCESSES)]
    if reason := _ended(folder, ranks):
        return reason
    return _wrong(json.loads((folder / "case.json").read_text())) if (folder / "case.json").exists() else "no result"


class _Double(TorchFunctionMode):
    """Within it whatever asks for fp32 gets fp64, the normalisation and softmax of models too."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [_wider(each) for each in args]
        return func(*args, **{name: _wider(each) for name, each in (kwargs or {}).items()})


def _wider(each: Any) -> Any:
    return torch.float64 if each is torch.float32 else each


def in_double(work: Callable[[], None]) -> Callable[[], None]:
    """The same work in fp64, from weights to losses."""

    def wide() -> None:
        torch.set_default_dtype(torch.float64)
        defaults, run_backward = build_from_config.__kwdefaults__, torch.autograd._engine_run_backward

        def backward(*places: Any, **names: Any) -> Any:
            with _Double():  # which torch leaves while it calls what a mode was asked for: layers computed again see it
                return run_backward(*places, **names)

        dtype = mock.patch.dict(defaults, {"dtype": torch.float64})
        with dtype, mock.patch.object(torch.autograd, "_engine_run_backward", backward), _Double():
            work()

    return wide


def _wrong(found: dict[str, Any]) -> str:
    """What differs most of a comparison; empty where nothing differs more than it may."""
    loss, gradient = TOLERANCES["fp32"]
    pairs = zip(found["losses"], found["expected_losses"], strict=True)
    differences = {
        f"gradient of {found['gradient_tensor']}": (found["gradient_error"], gradient),
        "weights": (found["weight_error"], gradient),
        "loss": (max((abs(a - b) / abs(b) for a, b in pairs), key=lambda each: (math.isnan(each), each)), loss),
    }
    return ", ".join(f"{what} by {error:.0e}" for what, (error, most) in differences.items() if not error < most)


def _compare_rounded(folder: Path, case: Case) -> None:
    """Writes the largest differences of one process from itself with other first weights, by `ROUNDING`."""
    alone, *others = (_rounded(case.plan, seed) for seed in range(NUM_ROUNDED + 1))
    found = {"expected_losses": alone.losses, "losses": alone.losses, "weight_error": 0.0, "gradient_error": 0.0}
    for other in others:
        for mine, each in zip(alone.gradients, other.gradients, strict=True):
            error, name = _difference(mine, each)
            if error > found["gradient_error"]:
                found |= {"gradient_error": error, "gradient_tensor": name}
        found["weight_error"] = max(found["weight_error"], _difference(alone.weights, other.weights)[0])
        found["losses"] = max(found["losses"], other.losses, key=lambda each: abs(each[-1] - alone.losses[-1]))
    (folder / "rounded.json").write_text(json.dumps({"gradient_tensor": "", **found}))


def _difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest, as parity has it, and the tensor's name."""
    largest = {name: float(each.abs().max()) for name, each in one.items() if each.numel()}
    least = parity.SMALL * max(largest.values())
    return max((float((other[n] - one[n]).abs().max()) / max(most, least, 1e-12), n) for n, most in largest.items())


def _rounded(plan: Plan, seed: int) -> Reference:
    """What one process finds; but for seed 0 from first weights that are off by `ROUNDING` of themselves."""

    def build(*places: Any, **names: Any) -> torch.nn.Module:
        model, generator = build_model(*places, **names), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each in model.parameters() if seed else ():
                each.mul_(1 + ROUNDING * torch.randn(each.shape, generator=generator))
        return model

    torch.manual_seed(SEED)
    with mock.patch.object(parity, "build_model", build):
        return parity.train_alone(plan, seed=SEED, num_steps=NUM_STEPS)


def _choose_best_experts() -> None:
    """Makes the routers that draw experts while they train choose as they do in evaluation."""
    choose = modeling_phimoe.sparsemixer

    def choose_best(scores: Tensor, **options: Any) -> Any:
        return choose(scores, **options | {"training": False})

    modeling_phimoe.sparsemixer = choose_best


def _prepare(folder: Path, model_type: str, architecture: str, strategy: str) -> None:
    case = make_case(model_type, architecture, strategy)
    build_model(case.plan.chain(), seed=0)
    write_references(folder, {"case": case})
    torch.save(case, folder / "case.pt")


def _rank_work(folder: Path, case: Case, rank: int) -> Callable[[], None]:
    def work() -> None:
        with joined(rank, NUM_PROCESSES, str(folder / "store")):
            run_rank(rank, folder, {"case": case})

    return work


def _ended(folder: Path, works: list[Callable[[], None]]) -> str:
    """Runs each work in a process of its own; why one of them failed, an empty text where none did."""

    def guarded(work: Callable[[], None]) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            work()
        except BaseException as error:
            text = getattr(error, "found", None) or f"{type(error).__name__}: {error}"
            with suppress(FileExistsError), (folder / "reason").open("x") as file:  # others fail since it did
                file.write((str(text).splitlines() or [""])[0][:200])
            raise

    processes = {fork(guarded, work) for work in works}
    until, failed = time.monotonic() + LIMIT_S, False
    while processes and not failed and time.monotonic() < until:
        for process in list(processes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                processes.discard(process)
                failed = failed or status != 0
        time.sleep(0.05)
    late = bool(processes) and not failed
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    reason = folder / "reason"
    return (
        f"takes more than {LIMIT_S:.0f} s"
        if late
        else reason.read_text()
        if failed and reason.exists()
        else "failed" * failed
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="causal")
    parser.add_argument("--part", default="0/1", help="1/3: the second of every three types, for several at once")
    parser.add_argument("--types", help="separated by commas; all where left out")
    parser.add_argument("--strategy", default="fsdp2 remat=full", help="of every layer, over two ranks")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    _choose_best_experts()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names, chosen = TASKS[options.task], options.types.split(",") if options.types else None
    place, parts = (int(each) for each in options.part.split("/"))
    known = [name for name in names if name in CONFIG_MAPPING][place::parts]
    rows = []
    for name in (name for name in known if chosen is None or name in chosen):
        rows.append(outcome(name, class_of(names, name), options.strategy))
        print(json.dumps(rows[-1]), flush=True)
    split = [row for row in rows if row["split"]]
    exact = sum(row["exact"] for row in split)
    double = sum(row.get("in_double", False) for row in split)
    counts = f"{len(rows)} types, {len(split)} split, {exact} exact ({exact / max(len(split), 1):.0%})"
    print(f"{counts}, of these {double} in fp64, since in fp32 rounding decides", file=sys.stderr)


if __name__ == "__main__":
    main()
