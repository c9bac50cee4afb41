"""torchrun agents: decide on restarts, and on the number of processes that an elastic run continues with.

torchrun is elastic in hosts: the hosts that join the next rendezvous form the next world. The agent of a host makes
three decisions here from what it observes:

- A device is given up when its process has died without a report, or reported a device failure, more often than
  ``--restarts``. The agent joins the next rendezvous with one process fewer, and continues while it has any.
- A process that only lost a peer on another host costs no restart, unless the same world meets and fails again
  with no checkpoint in between.
- Returning hosts and devices wait for the next complete checkpoint: a host that has joined the rendezvous, and the
  devices of this host that were given up, once the user says that they are back (`RETURN_SIGNAL`).
"""

import os
import re
import signal
import socket
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

from steelyard.output import say
from steelyard.processes.failure import Failure, ends_of, failures_folder, read_failures, read_standing
from steelyard.processes.start import (
    LOST_PEER,
    LOST_VARIABLE,
    RESTARTS_VARIABLE,
    RETURN_SIGNAL,
    TAKEN_IN_VARIABLE,
    describe,
    first_failure,
)
from steelyard.processes.stop import END_SIGNAL
from steelyard.units import format_plural

LOST_DEVICE = re.compile(r"CUDA error|uncorrectable|ECC error|device is lost|fallen off the bus", re.I)
"""Errors that a process raises because its device is lost."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LEFT = "left"
"""Key in the store of a rendezvous: one of its hosts has stopped its processes, so the others cannot continue."""


class Agent(LocalElasticAgent):
    """Agent of one host: tells restarted processes the reason, and restarts none if they would fail again."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
            self._failed = self._failure(result)
            os.environ[LOST_VARIABLE] = describe(self._failed).splitlines()[0] if self._failed is not None else ""
            if self._failed is not None and self._failed.is_final:
                self._remaining_restarts = 0  # the agent then ends with this result
        return result

    def _failure(self, result: RunResult) -> Failure | None:
        folder = failures_folder()
        assert folder is not None, "the launcher names it"
        ends = ends_of(result.failures, folder) if result.failures else {}
        is_alone = self._worker_group.group_world_size == 1
        asked = (-END_SIGNAL,) if is_alone else (-END_SIGNAL, -signal.SIGABRT)
        own = {rank: end for rank, end in ends.items() if end.exit_code not in asked}  # not ended by torchrun or NCCL
        return first_failure(read_failures(folder), own)


class ElasticAgent(Agent):
    """Agent of one host of an elastic run."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spec = self._worker_group.spec
        self._restarts_left = int(os.environ[RESTARTS_VARIABLE])
        self._num_all = self._spec.local_world_size
        self._all_visible = os.environ.get(_VISIBLE)
        self._returns = False
        self._lost_with_peer = (0, 0)
        """Number of processes of the last world in which a peer was lost, and of the steps saved by then."""
        self._saved_before: int | None = None
        """Number of steps that were saved when a host or device began to wait; None while none waits."""
        self._num_waiting = self._spec.rdzv_handler.num_nodes_waiting
        self._spec.rdzv_handler.num_nodes_waiting = lambda: 0  # `_monitor_workers` asks instead
        signal.signal(RETURN_SIGNAL, self._take_back)

    def _take_back(self, *_: object) -> None:
        self._returns = self._spec.local_world_size < self._num_all

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
            self._tell_others(worker_group)
            os.environ.pop(TAKEN_IN_VARIABLE, None)
            if not self._goes_on(self._failed, worker_group):
                self._remaining_restarts = 0
        elif result.state is WorkerState.HEALTHY and self._takes_in(worker_group):
            self._tell_others(worker_group)
            os.environ[TAKEN_IN_VARIABLE] = "1"
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _takes_in(self, worker_group: WorkerGroup) -> bool:
        """Return whether to restart now, with the hosts and devices that wait for it."""
        waiting = self._num_waiting()
        if not waiting and not self._returns:
            self._saved_before = None
            return False
        if waiting and worker_group.store is not None and worker_group.store.check([_LEFT]):
            return True
        saved = _num_saved()
        if self._saved_before is None:
            self._saved_before = saved
            who = format_plural(waiting, "host") if waiting else "devices of this host"
            say(f"elastic: {who} back; they join at the next complete checkpoint\n")
        if saved == self._saved_before:
            return False
        self._saved_before = None
        if self._returns:
            self._spec.local_world_size, self._returns = self._num_all, False
            if self._all_visible is None:
                os.environ.pop(_VISIBLE, None)
            else:
                os.environ[_VISIBLE] = self._all_visible
        return True

    def _goes_on(self, failure: Failure | None, worker_group: WorkerGroup) -> bool:
        """Return whether to restart after a failure; give a device up if its restarts are used up."""
        if failure is not None and failure.is_final:
            return False
        if failure is not None and failure.error_type and LOST_PEER.search(failure.message):
            before, self._lost_with_peer = self._lost_with_peer, (worker_group.workers[0].world_size, _num_saved())
            if before != self._lost_with_peer and worker_group.group_world_size > 1:
                return True
        if self._restarts_left > 0:
            self._restarts_left -= 1
            return True
        is_device = failure is not None and (not failure.error_type or bool(LOST_DEVICE.search(failure.message)))
        if failure is None or not is_device:
            return False
        if self._spec.local_world_size > 1:
            self._give_up(failure, worker_group)
            return True
        if worker_group.group_world_size > 1:  # like a host that is switched off: the others continue without it
            self._stop_workers(worker_group)
            raise SignalException(f"no device left: {describe(failure)}", signal.SIGTERM)
        return False

    def _give_up(self, failure: Failure, worker_group: WorkerGroup) -> None:
        place = failure.rank - worker_group.workers[0].global_rank
        visible = os.environ.get(_VISIBLE)
        devices = visible.split(",") if visible else [str(each) for each in range(self._spec.local_world_size)]
        if visible != "":
            os.environ[_VISIBLE] = ",".join(devices[:place] + devices[place + 1 :])
        self._spec.local_world_size -= 1
        say(
            f"elastic: {describe(failure).splitlines()[0]}; host {socket.gethostname()} continues with "
            f"{format_plural(self._spec.local_world_size, 'process', 'processes')}. When the device is back: "
            f"kill -{RETURN_SIGNAL.name.removeprefix('SIG')} {os.getppid()}\n"
        )

    def _tell_others(self, worker_group: WorkerGroup) -> None:
        if worker_group.store is not None:
            worker_group.store.set(_LEFT, "")


def _num_saved() -> int:
    return read_standing().num_saved
