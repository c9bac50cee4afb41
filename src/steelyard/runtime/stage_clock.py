"""Clock of a rank's work in a step: forward and backward passes and the optimizer, without waiting for other stages.

On the CPU passes are timed by the wall clock. On a GPU events are recorded around each pass and read after the step,
so timing does not synchronise with the device. Waiting for ranks of the same stage, inside collectives, counts as work,
as it does in a plan's prediction. This waiting is also measured by itself: on the CPU in `Work.wait` and `wait_tensor`,
on a GPU also when a stream waits for another stream's event, as FSDP does.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.pipelining import PipelineStage


class StageClock:
    """Stopwatch that sums the time of pieces of work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._depth: Counter[str] = Counter()
        self._laps: dict[str, list[tuple[Any, Any]]] = {"worked": [], "waited": []}
        """Pairs of marks: wall-clock seconds, or events of a GPU."""

    def working(self) -> AbstractContextManager[None]:
        """Time the body of the context; nested contexts are counted once."""
        return self._counted("worked")

    @contextmanager
    def seeing_waits(self) -> Iterator[None]:
        """Also time by itself, in the context, the work that waits for other ranks."""
        waits = [(dist.Work, "wait"), (functional_collectives, "wait_tensor")]
        if self._device.type == "cuda":
            waits += [(torch.cuda.Stream, "wait_event"), (torch.cuda.Stream, "wait_stream")]
        with ExitStack() as stack:
            for owner, name in waits:
                stack.enter_context(mock.patch.object(owner, name, self._waiting(getattr(owner, name))))
            yield

    def take_s(self) -> tuple[float, float]:
        """Seconds of work since the last call, with and without waiting for other ranks of the stage.

        On a GPU call it after the step has ended on the device.
        """
        worked_s, waited_s = (sum(_seconds(*lap) for lap in laps) for laps in self._laps.values())
        self.clear()
        return worked_s, max(0.0, worked_s - waited_s)

    def clear(self) -> None:
        """Forget the work since the last call."""
        self._laps = {what: [] for what in self._laps}

    def watch(self, stage: PipelineStage) -> None:
        """Time the passes of a pipeline stage under any schedule."""
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, self._timed(getattr(stage, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.working():
                return work(*arguments, **keywords)

        return timed

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*arguments: Any, **keywords: Any) -> Any:
            with self._counted("waited") if self._depth["worked"] else nullcontext():
                return wait(*arguments, **keywords)

        return waiting

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        self._depth[what] += 1
        started = self._mark()
        try:
            yield
        finally:
            self._depth[what] -= 1
            if not self._depth[what]:
                self._laps[what].append((started, self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(first: Any, last: Any) -> float:
    seconds: float = last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3
    return seconds
