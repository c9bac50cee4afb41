r"""DualPipeV: chunks in a V as under ZB-V, and pairs of a forward and a backward pass in the steady state.

DeepSeek's DualPipe runs the forward pass of one microbatch and the backward pass of another at once, so that the
communication of one overlaps the computation of the other. Here, as with torch's stages, the two passes of a pair run
one after the other on one rank: the order is that of DualPipeV, but nothing overlaps inside a pair. torch's class sends
the results of both passes only after the pair, so the order runs as rows, with each send after its own pass. Most
weight passes follow their backward pass at once. Those of the warm-up and of the second half of the cool-down fill
bubbles. A stage has at most $2P + 1$ passes in flight on $P$ stages, one more than under ZB-V, and needs $2P$
microbatches or more.

Not exported to other engines: torchtitan's ``DualPipeV`` overlaps the passes of a pair and sends after both, which no
price here covers. Megatron-Core has no schedule with chunks in a V.

Source: https://github.com/deepseek-ai/DualPipe (DualPipeV), after DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1;
the order of `ScheduleDualPipeV` of `torch.distributed.pipelining` 2.13.
"""

from collections import deque
from collections.abc import Iterator

from steelyard.errors import InvalidPlanError
from steelyard.schedules.pipeline import PipelineConfig
from steelyard.schedules.zb_v import B, Counters, F, Pass, W, ZeroBubbleV


class DualPipeV(ZeroBubbleV):
    """ZB-V's placement in the order of DualPipe, one pass at a time."""

    name = "dualpipe-v"
    title = "DualPipeV"
    torch_name = "_PipelineScheduleRuntime"
    torchtitan_name = None
    runs_as_rows = True

    def sequence(self, num_stages: int, num_microbatches: int, stage: int) -> Iterator[Pass]:
        """Yield the passes of a stage, in the eight steps of DualPipeV."""
        passes, later = _Passes(), num_stages - stage - 1
        yield from (passes(F, 0) for _ in range(2 * later))
        for _ in range(stage + 1):
            yield from (passes(F, 0), passes(F, 1))
        for _ in range(later):
            yield from (*passes.backward(1, is_split=True), *passes.weight(), passes(F, 1))
        for _ in range(num_microbatches - 2 * num_stages + stage + 1):
            yield from (passes(F, 0), *passes.backward(1), passes(F, 1), *passes.backward(0))
        for _ in range(later):
            yield from (*passes.backward(1), passes(F, 1), *passes.backward(0))
        for place in range(stage + 1):
            for chunk in (1, 0):
                yield from passes.backward(chunk, is_split=2 * place + 1 - chunk > stage)
        for _ in range(later):
            yield from (*passes.weight(), *passes.backward(0, is_split=True))
        for _ in range(stage + 1):
            yield from passes.weight()

    def refusal(self, pipeline: PipelineConfig) -> InvalidPlanError | None:
        """Return an error if a stage does not have two chunks, or if there are fewer microbatches than parts."""
        if (found := super().refusal(pipeline)) is not None or pipeline.num_microbatches >= pipeline.num_parts:
            return found
        return InvalidPlanError(
            field="num_microbatches",
            found=f"{pipeline.num_microbatches} for {pipeline.num_stages} stages under {self.name}",
            expected=f"{pipeline.num_parts} or more, twice the number of stages",
            hint="raise num_microbatches, or use another schedule",
        )


class _Passes(Counters):
    """Passes so far, with the chunks whose weight passes are pending, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[int] = deque()

    def backward(self, chunk: int, *, is_split: bool = False) -> list[Pass]:
        """Return the next backward pass of a chunk, with its weight pass unless that is to wait."""
        found = self(B, chunk)
        if is_split:
            self._pending.append(chunk)
            return [found]
        return [found, self(W, chunk)]

    def weight(self) -> list[Pass]:
        """Return the weight pass that has waited longest, if there is one."""
        return [self(W, self._pending.popleft())] if self._pending else []


DUAL_PIPE_V = DualPipeV()
