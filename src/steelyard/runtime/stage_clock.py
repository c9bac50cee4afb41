"""How long a rank works in a step: its forward and backward passes and the optimizer, without waiting for other stages.

On the CPU passes are timed by the wall clock. On a GPU events are recorded around each, and read when the step has
ended, so nothing waits for the device. Waiting for the ranks of the same stage, inside collectives, counts as work: a
plan's prediction counts them too. It is also measured by itself, where work waits for a collective: on the CPU in
`Work.wait` and `wait_tensor`, on a GPU also where its stream waits for another one's event, as FSDP has it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.pipelining import PipelineStage


class StageClock:
    """Adds up the time of pieces of work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worked = _Sum()
        self._waited = _Sum()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts its body; a body inside another is counted once."""
        with self._counted(self._worked):
            yield

    @contextmanager
    def seeing_waits(self) -> Iterator[None]:
        """In the context, work that waits for other ranks is also counted by itself."""
        waits = [(dist.Work, "wait"), (functional_collectives, "wait_tensor")]
        if self._device.type == "cuda":
            waits += [(torch.cuda.Stream, "wait_event"), (torch.cuda.Stream, "wait_stream")]
        with ExitStack() as stack:
            for owner, name in waits:
                stack.enter_context(mock.patch.object(owner, name, self._waiting(getattr(owner, name))))
            yield

    def take_s(self) -> tuple[float, float]:
        """Seconds of work since the last call, and those of them without waiting for other ranks of the stage.

        On a GPU call it when the step has ended there.
        """
        worked_s = self._worked.take_s()
        return worked_s, max(0.0, worked_s - self._waited.take_s())

    def watch(self, stage: PipelineStage) -> None:
        """Counts the passes of a pipeline stage, whichever schedule runs them."""
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, self._timed(getattr(stage, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.working():
                return work(*arguments, **keywords)

        return timed

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*arguments: Any, **keywords: Any) -> Any:
            if not self._worked.depth:
                return wait(*arguments, **keywords)
            with self._counted(self._waited):
                return wait(*arguments, **keywords)

        return waiting

    @contextmanager
    def _counted(self, total: "_Sum") -> Iterator[None]:
        total.depth += 1
        started = self._mark()
        try:
            yield
        finally:
            total.depth -= 1
            if total.depth == 0:
                total.add(started, self._mark())

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Sum:
    """Seconds between pairs of marks: of the wall clock, or events of a GPU."""

    def __init__(self) -> None:
        self.depth = 0
        self._wall_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, first: Any, last: Any) -> None:
        if isinstance(first, float):
            self._wall_s += last - first
        else:
            self._events.append((first, last))

    def take_s(self) -> float:
        found = self._wall_s + sum(first.elapsed_time(last) for first, last in self._events) / 1e3
        self._wall_s, self._events = 0.0, []
        return found
