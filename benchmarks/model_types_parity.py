"""Of every type of transformers that splits: does it train two steps on four processes as one process does?

At small width with six blocks, in two stages, every layer sharded by fsdp and computed again in backward; and with
``--strategy``, by other strategies of two ranks. Types that do not split are left out: `model_types` says why.

    python benchmarks/model_types_parity.py                      # about 30 minutes on two cores
    python benchmarks/model_types_parity.py --task causal --types phi3,opt
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.model_types import TASKS, class_of, shallow_config
from steelyard.model.small import small_config
from steelyard.modules.build import build_model
from steelyard.modules.split_proof import split_model, without_dropout
from steelyard.plan.parity import TOLERANCES
from tests.runtime.cases import Case
from tests.runtime.models import make_plan
from tests.runtime.worker import fork, run_rank, write_references

NUM_BLOCKS, NUM_PROCESSES, LIMIT_S = 6, 4, 300.0


def make_case(model_type: str, architecture: str, strategy: str) -> Case:
    """Two steps of a small model of a type under a plan of two stages."""
    config = without_dropout(small_config(shallow_config(model_type, architecture, NUM_BLOCKS)))
    split = split_model(model_type, config)
    half = (len(split.layers) + 1) // 2
    stages = (", ".join([strategy] * count) for count in (half, len(split.layers) - half))
    options = {"num_microbatches": 2, "global_batch": 8, "num_devices": NUM_PROCESSES, "split": split}
    options["seq_len"] = split.max_seq_len if split.image else max(16, split.multiple)
    return Case(plan=make_plan(config, *stages, **options), num_steps=2)


def outcome(model_type: str, architecture: str, strategy: str) -> dict[str, Any]:
    """The largest difference of a type from one process, or why there is none."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if reason := _ended(folder, [lambda: _prepare(folder, model_type, architecture, strategy)]):
            return {"type": model_type, "split": False, "reason": reason}
        case = torch.load(folder / "case.pt", weights_only=False)
        ranks = [_rank_work(folder, case, rank) for rank in range(NUM_PROCESSES)]
        if reason := _ended(folder, ranks):
            return {"type": model_type, "split": True, "exact": False, "reason": reason}
        if not (folder / "case.json").exists():
            return {"type": model_type, "split": True, "exact": False, "reason": "no result"}
        found = json.loads((folder / "case.json").read_text())
    loss, gradient = TOLERANCES["fp32"]
    losses = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], found["expected_losses"], strict=True))
    exact = losses < loss and found["gradient_error"] < gradient and found["weight_error"] < gradient
    why = {} if exact else {"reason": f"{found['gradient_tensor']} differs by {found['gradient_error']:.0e}"}
    return {"type": model_type, "split": True, "exact": exact, **why}


def _prepare(folder: Path, model_type: str, architecture: str, strategy: str) -> None:
    case = make_case(model_type, architecture, strategy)
    build_model(case.plan.chain(), seed=0)
    write_references(folder, {"case": case})
    torch.save(case, folder / "case.pt")


def _rank_work(folder: Path, case: Case, rank: int) -> Callable[[], None]:
    return lambda: run_rank(rank, NUM_PROCESSES, folder, folder / "store", {"case": case})


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
    print(f"{len(rows)} types, {len(split)} split, {exact} exact ({exact / len(rows):.0%})", file=sys.stderr)


if __name__ == "__main__":
    main()
