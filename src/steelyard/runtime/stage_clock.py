"""How long a rank works in a step: its forward and backward passes and the optimizer, without waiting for other stages.

On the CPU passes are timed by the wall clock. On a GPU events are recorded around each, and read when the step has
ended, so nothing waits for the device. Waiting for the ranks of the same stage, inside collectives, counts as work: a
plan's prediction counts them too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage


class StageClock:
    """Adds up the time of pieces of work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wall_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._depth = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts its body; a body inside another is counted once."""
        self._depth += 1
        started = self._mark()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._add(started)

    def take_s(self) -> float:
        """Seconds of work since the last call; on a GPU call it when the step has ended there."""
        found = self._wall_s + sum(first.elapsed_time(last) for first, last in self._events) / 1e3
        self._wall_s, self._events = 0.0, []
        return found

    def watch(self, stage: PipelineStage) -> None:
        """Counts the passes of a pipeline stage, whichever schedule runs them."""
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, self._timed(getattr(stage, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.working():
                return work(*arguments, **keywords)

        return timed

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, started: Any) -> None:
        if self._device.type == "cuda":
            self._events.append((started, self._mark()))
        else:
            self._wall_s += time.perf_counter() - started
