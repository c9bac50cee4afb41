"""Pipeline configurations, schedules, and the passes that a schedule gives to each stage.

A stage is a group of ranks. Its layers are divided into one or more chunks: with $P$ stages, chunk $c$ of the stages
has the parts $cP$ to $cP + P - 1$ of the model. Part $cP + i$ lies on stage $i$ unless the schedule places it elsewhere
(`Schedule.stage_of`). A pass runs one microbatch forward or backward through one chunk. A schedule that splits
backward passes computes the weight gradients of linear layers in separate weight passes, at any time after the backward
pass. Other stages wait only for the backward pass.

Costs, memory, search, runtime and exports use a `PipelineConfig` and its `Schedule` and do not name schedules.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from steelyard.errors import InvalidPlanError, UserError

Column = NDArray[np.int64]


class Phase(IntEnum):
    """Type of a pass."""

    FORWARD = 0
    BACKWARD = 1
    """Excludes the weight gradients if the schedule has weight passes."""
    WEIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOrder:
    """Passes of one stage in order: three arrays with one entry per pass."""

    phase: Column
    chunk: Column
    microbatch: Column

    def in_flight(self, of_chunk: Sequence[int] = ()) -> int:
        """Maximum number of microbatches that are alive at once: forward begun, backward not ended.

        ``of_chunk``: weight of a microbatch by chunk, such as its bytes; 1 if not given.
        """
        change = (self.phase == Phase.FORWARD).astype(np.int64) - (self.phase == Phase.BACKWARD)
        return int((change * np.array(of_chunk)[self.chunk] if of_chunk else change).cumsum().max())

    def unfinished(self) -> int:
        """Maximum number of forward passes, over all chunks, whose weight pass has not ended."""
        return int(((self.phase == Phase.FORWARD).astype(np.int64) - (self.phase == Phase.WEIGHT)).cumsum().max())

    def waiting(self) -> int:
        """Maximum number of pending weight passes when a forward or a backward pass begins."""
        change = (self.phase == Phase.BACKWARD).astype(np.int64) - (self.phase == Phase.WEIGHT)
        return int((change.cumsum() - change)[self.phase != Phase.WEIGHT].max())


def all_of(num_microbatches: int, phase: Phase) -> PassOrder:
    """Return a pass for each microbatch in order, for stages with a single chunk."""
    microbatch = np.arange(num_microbatches)
    return PassOrder(phase=np.full(num_microbatches, phase), chunk=np.zeros_like(microbatch), microbatch=microbatch)


def in_turn(forwards: PassOrder, backwards: PassOrder, warm_up: int, *, backward_first: bool) -> PassOrder:
    """Return ``warm_up`` forward passes, then alternating forward and backward passes, then the remaining backward
    passes."""
    ahead, behind = (np.stack([each.phase, each.chunk, each.microbatch]) for each in (forwards, backwards))
    later = ahead[:, warm_up:]
    paired = behind[:, : later.shape[1]]
    pair = (paired, later) if backward_first else (later, paired)
    alternating = np.stack(pair, axis=2).reshape(3, -1)
    whole = np.concatenate([ahead[:, :warm_up], alternating, behind[:, later.shape[1] :]], axis=1)
    return PassOrder(phase=whole[0], chunk=whole[1], microbatch=whole[2])


class Schedule(ABC):
    """Pass order of the stages of a pipeline. Each subclass has one instance; schedules compare equal by type."""

    name: str
    """Name in plans, problem files and options."""
    title: str
    """Name in sentences."""
    torch_name: str
    """Class name in `torch.distributed.pipelining`."""
    torchtitan_name: str | None = None
    megatron_name: str | None = None
    """Function in Megatron's ``pipeline_parallel/schedules.py``, which Megatron selects by the number of chunks."""
    chunk_counts: tuple[int, ...] = (1,)
    """Chunks per stage that the search tries."""
    keeps_sends: bool = False
    """Whether torch waits for sends only at the end of the step, which keeps sent tensors in memory until then."""
    splits_backward: bool = False
    """Whether weight gradients are computed in separate passes."""
    orders_by_time: bool = False
    """Whether the order of passes depends on their times: it is then part of the plan."""
    runs_as_rows: bool = False
    """Whether torch runs the order as rows of passes and transfers (`steelyard.schedules.pass_rows`)."""
    why_not_everywhere: str = ""
    """Reason why the search skips some configurations that the schedule can run; empty if it skips none."""
    only_alone: bool = False
    """Whether the search tries it only if no other schedule is allowed."""
    why_nowhere: str = "no configuration has two or more stages and enough microbatches"
    """Message if the search found no configuration for the schedule."""

    @abstractmethod
    def passes(self, pipeline: "PipelineConfig", stage: int) -> PassOrder:
        """Return the passes of a stage in execution order. Raises `InvalidPlanError` if there is none."""

    def stage_of(self, pipeline: "PipelineConfig", part: int) -> int:
        """Return the stage of a part of the model: by default every chunk runs from the first stage to the last."""
        return part % pipeline.num_stages

    def parts_of(self, pipeline: "PipelineConfig", stage: int) -> tuple[int, ...]:
        """Return the parts of the model on a stage by chunk, the inverse of `stage_of`."""
        return tuple(range(stage, pipeline.num_parts, pipeline.num_stages))

    @property
    def takes_chunks(self) -> bool:
        """Whether a stage holds two or more chunks of the model instead of one."""
        return 1 not in self.chunk_counts

    @property
    def words(self) -> str:
        """Name of the schedule in descriptions of a configuration; empty for the default schedule."""
        return self.name

    def refusal(self, pipeline: "PipelineConfig") -> InvalidPlanError | None:
        """Return an error if the schedule cannot run this number of microbatches, else None (the default)."""
        return None

    def is_tried(self, pipeline: "PipelineConfig") -> bool:
        """Return whether the search tries a configuration with a valid number of chunks: by default if it can run."""
        return self.refusal(pipeline) is None

    def in_flight(self, pipeline: "PipelineConfig", stage: int) -> int:
        """Maximum number of passes of a stage whose activations are alive at once, as the search bounds it."""
        return pipeline.passes(stage).in_flight()

    def waiting(self, _pipeline: "PipelineConfig", _stage: int) -> int:
        """Maximum number of pending weight passes of a stage when a backward pass begins: 0 by default."""
        return 0

    def unfinished(self, pipeline: "PipelineConfig", stage: int) -> int:
        """Maximum number of passes of a stage that are in flight or wait for their weight pass."""
        return self.in_flight(pipeline, stage) + self.waiting(pipeline, stage)

    def received_ahead(self, _pipeline: "PipelineConfig", _stage: int) -> tuple[int, int]:
        """Maximum numbers of activations and gradients that a stage has buffers for before the pass that needs them.

        0 and 0 by default: a pass receives its input when it begins.
        """
        return 0, 0

    def steady_from(self, pipeline: "PipelineConfig", stage: int) -> int:
        """Number of microbatches after which a stage only repeats its pass pattern: by default all of them."""
        return pipeline.num_microbatches

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Pipeline configuration: number of stages, chunks and microbatches, and the schedule."""

    num_stages: int
    """Groups of ranks."""
    num_chunks: int = 1
    """Parts of the model per stage."""
    num_microbatches: int
    schedule: Schedule
    pass_order: tuple[str, ...] = ()
    """Row of passes of each stage (`steelyard.schedules.pass_rows`), if the schedule's order depends on times and these
    are known."""

    def __post_init__(self) -> None:
        counts = (self.num_stages, self.num_chunks, self.num_microbatches)
        if min(counts) < 1:
            raise UserError(
                field="num_stages, num_chunks, num_microbatches",
                found=", ".join(map(str, counts)),
                expected="1 or more of each",
            )

    @property
    def num_parts(self) -> int:
        """Parts of the model on all stages."""
        return self.num_stages * self.num_chunks

    @property
    def num_passes(self) -> int:
        """Forward passes of a stage in a step: one for each microbatch and chunk."""
        return self.num_microbatches * self.num_chunks

    def check(self) -> None:
        """Raise `InvalidPlanError` if the schedule cannot run this number of microbatches, or this order of passes."""
        if self.pass_order and not self.schedule.orders_by_time:
            raise InvalidPlanError(
                field="pass_order",
                found=f"an order of passes under {self.schedule}",
                expected="none, because the schedule has its own",
                hint="leave pass_order out, or use a schedule that takes its order from times",
            )
        refusal = self.schedule.refusal(self)
        if refusal is not None:
            raise refusal

    def stage_of(self, part: int) -> int:
        """Return the stage of a part of the model, both counted from 0."""
        return self.schedule.stage_of(self, part)

    def parts_of(self, stage: int) -> tuple[int, ...]:
        """Return the parts of the model on a stage by chunk."""
        return self.schedule.parts_of(self, stage)

    def stages_apart(self, part: int, other: int) -> int:
        """Number of stages between two parts of the model: 0 on one stage, 1 on neighbouring stages."""
        return abs(self.stage_of(part) - self.stage_of(other))

    @property
    def stage_of_last(self) -> int:
        """Stage of the last part of the model, which has the head."""
        return self.stage_of(self.num_parts - 1)

    @property
    def is_v(self) -> bool:
        """Whether the first stage has the first and the last part: chunks in a V."""
        return self.num_stages > 1 and self.stage_of_last == 0

    def passes(self, stage: int) -> PassOrder:
        """Return the passes of a stage, counted from 0, in execution order."""
        return self.schedule.passes(self, stage)

    def in_flight(self, stage: int) -> int:
        """Maximum number of passes of a stage, counted from 0, whose activations are alive at once; see `Schedule`."""
        return self.schedule.in_flight(self, stage)

    def waiting(self, stage: int) -> int:
        """Maximum number of pending weight passes of a stage when a backward pass begins."""
        return self.schedule.waiting(self, stage)
