"""Plan of an elastic run, chosen at every rendezvous, before the processes join a group.

Every process writes its host to the store of the rendezvous, and its device group if the plan has several. The first
process finds the plan for that many hosts and devices, and all read it from the store. A plan uses the first processes
of the first hosts, or of the hosts of each device group; the others are spare and wait.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from steelyard.errors import InvalidPlanError, UserError
from steelyard.output import say
from steelyard.plan.choices import Replan
from steelyard.plan.file import dump_json, parse_value, read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.processes.failure import TORCHRUN_RANK_VARIABLE

_ANSWER, _DONE = "plan", "done"
"""Keys in the store."""
_MOST_DAYS = 365


@contextmanager
def settled_plan(
    path: Path, replan: Replan, *, folder: Path | None, timeout_s: float, pool: str = ""
) -> Iterator[tuple[Plan, dist.Store] | None]:
    """Yield the plan of this process and the store for its group, and set this process's rank in the environment.

    ``path`` is the file of the plan for all devices, ``pool`` the device group of this host. Yields None for a spare
    process, once the others have ended the context. A new plan is also written to ``folder``. Raises `UserError` on
    every process if there is no plan for them.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    store.set(f"host/{rank}", json.dumps([os.environ["GROUP_RANK"], pool]))
    if rank == 0:
        told = [json.loads(store.get(f"host/{each}")) for each in range(world)]
        store.set(_ANSWER, json.dumps(_answer(path, replan, [host for host, _ in told], dict(told), folder)))
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
    yield found, dist.PrefixStore("group", store)
    if rank == answer["ranks"][0]:
        store.set(_DONE, "")
        spare = [f"{_DONE}/{each}" for each in range(world) if each not in answer["ranks"]]
        if spare:
            store.wait(spare)


def _answer(
    path: Path, replan: Replan, hosts: Sequence[str], pools: Mapping[str, str], folder: Path | None
) -> dict[str, Any]:
    """Return the plan and its ranks, or the error, for every process to read.

    ``hosts`` is the host of each process, ``pools`` the device group of each host. Prints the finding and writes a new
    plan to ``folder``.
    """
    counts = Counter(hosts)
    own_pools = [pools[host] for host in counts] if any(pools.values()) else []
    try:
        plan = read_plan(path)
        found = replan(plan, tuple(counts.values()), path.parent, own_pools)
        if found.plan is not plan:
            plan = found.plan
            if folder is not None:
                write_plan(plan, folder / f"plan-{plan.num_devices}.json")
    except UserError as error:
        return {"mistake": error.parts()}
    taken = dict(zip(counts, found.taken, strict=True))
    order = [list(counts)[place] for place in found.order or range(len(counts))]
    of_hosts = {host: [rank for rank, each in enumerate(hosts) if each == host][: taken[host]] for host in order}
    ranks = [rank for host in order for rank in of_hosts[host]]
    if found.notice:
        spare = [str(rank) for rank in range(len(hosts)) if rank not in ranks]
        idle = f"; idle until more come back: process {', '.join(spare)} of {len(hosts)}" if spare else ""
        say(f"elastic: {found.notice}{idle}\n")
    return {"mistake": None, "plan": json.loads(dump_json(plan)), "ranks": ranks, "taken": taken}
