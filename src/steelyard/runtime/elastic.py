"""Which plan the processes of an elastic run follow: settled anew at every rendezvous, before they join a group.

Every process tells in the store of the rendezvous which host it is on; the first one finds the plan for as many hosts
and devices, and all read it there. A plan takes the first processes of the first hosts: the others are spare, and wait.
While all train, another process makes plans for the likeliest next losses, so that the next rendezvous need not search.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from steelyard.errors import InvalidPlanError, UserError
from steelyard.output import say
from steelyard.plan.file import dump_json, parse_value, read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.replanned import Replanner
from steelyard.processes.failure import TORCHRUN_RANK_VARIABLE

_ANSWER, _DONE = "plan", "done"
"""Keys in the store."""
_AHEAD = "spares.json"
"""File beside the checkpoints with the plans that were made ahead."""
_MOST_DAYS = 365


@contextmanager
def settled_plan(
    path: Path, replanner: Replanner, *, folder: Path | None, timeout_s: float
) -> Iterator[tuple[Plan, dist.Store] | None]:
    """The plan that this process takes part in and where its group meets, with its place in the environment.

    ``path`` is the file of the plan for all devices.
    None for a process that is spare, once the others have ended the context. A new plan is also written to ``folder``.
    Raises `UserError` on every process where there is no plan for them.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    store.set(f"host/{rank}", os.environ["GROUP_RANK"])
    hosts: list[str] = []
    if rank == 0:
        hosts = [store.get(f"host/{each}").decode() for each in range(world)]
        store.set(_ANSWER, json.dumps(_answer(path, replanner, hosts, folder)))
    answer = json.loads(store.get(_ANSWER))
    if answer["mistake"]:
        raise UserError(**answer["mistake"])
    found = parse_value(answer["plan"], Plan, InvalidPlanError, what="plan")
    if rank not in answer["ranks"]:
        store.wait([_DONE], timedelta(days=_MOST_DAYS))
        store.set(f"{_DONE}/{rank}", "")
        yield None
        return
    os.environ[TORCHRUN_RANK_VARIABLE] = str(rank)
    os.environ["RANK"] = str(answer["ranks"].index(rank))
    os.environ["WORLD_SIZE"] = str(found.num_devices)
    os.environ["LOCAL_WORLD_SIZE"] = str(answer["taken"][os.environ["GROUP_RANK"]])
    planner = _begin_ahead(path, replanner, hosts, folder) if rank == 0 and folder is not None else None
    try:
        yield found, dist.PrefixStore("group", store)
    finally:
        if planner is not None:
            planner.kill()
            planner.wait()
    if rank == 0:
        store.set(_DONE, "")
        spare = [f"{_DONE}/{each}" for each in range(world) if each not in answer["ranks"]]
        if spare:
            store.wait(spare)


def _begin_ahead(path: Path, replanner: Replanner, hosts: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Begins to make plans for the likeliest next losses; where that fails, a loss is answered by a search."""
    counts = [str(each) for each in Counter(hosts).values()]
    return subprocess.Popen(
        [sys.executable, "-m", replanner.ahead, str(path), str(folder / _AHEAD), *counts],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def with_ahead(plan: Plan, folder: Path | None) -> Plan:
    """The plan with what was made ahead of it."""
    if folder is None or not (folder / _AHEAD).exists():
        return plan
    try:
        ahead = read_plan(folder / _AHEAD)
    except InvalidPlanError:  # of another version, or damaged: it is written anew
        return plan
    return ahead if ahead.model_copy(update={"spares": plan.spares}) == plan else plan


def _answer(path: Path, replanner: Replanner, hosts: Sequence[str], folder: Path | None) -> dict[str, Any]:
    """What every process needs to know, by the host of each; says what was found, and writes a plan that is new."""
    counts = Counter(hosts)
    try:
        plan = read_plan(path)
        known = with_ahead(plan, folder)
        found = replanner.replan(known, tuple(counts.values()), path.parent)
        if found.plan is not known:
            plan = found.plan
            if folder is not None:
                write_plan(plan, folder / f"plan-{plan.num_devices}.json")
    except UserError as error:
        mistake = {name: getattr(error, name) for name in ("field", "found", "expected", "hint")}
        return {"mistake": mistake}
    taken = dict(zip(counts, found.taken, strict=True))
    ranks = [rank for rank, host in enumerate(hosts) if list(hosts[:rank]).count(host) < taken[host]]
    if found.notice:
        spare = [str(rank) for rank in range(len(hosts)) if rank not in ranks]
        idle = f"; spare, until more come back: process {', '.join(spare)} of {len(hosts)}" if spare else ""
        say(f"elastic: {found.notice}{idle}\n")
    return {
        "mistake": None,
        "plan": json.loads(dump_json(plan)),
        "ranks": ranks,
        "taken": taken,
    }
