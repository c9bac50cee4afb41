"""Pipeline configurations, schedules, and the passes that a schedule gives to each stage.

A stage is a group of ranks. Its layers come in one or more chunks, and chunk $c$ of stage $i$ is part $cP + i$ of the
model, $P$ stages in all. A pass takes one microbatch forward or backward through one chunk. A schedule that splits
backward passes computes the gradients of the weights of linear layers in a pass of their own, at any time after the
backward pass, which other stages wait for.

Costs, memory, search, runtime and exports ask a `PipelineConfig` and its `Schedule`, and name no schedule.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from steelyard.errors import InvalidPlanError, UserError

Column = NDArray[np.int64]


class Phase(IntEnum):
    """The work of a pass."""

    FORWARD = 0
    BACKWARD = 1
    """Without what a weight pass does, under a schedule that has these."""
    WEIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOrder:
    """The passes of one stage in order; three arrays of the same length, one entry for each pass."""

    phase: Column
    chunk: Column
    microbatch: Column

    def in_flight(self, chunk: int | None = None) -> int:
        """Most microbatches of a chunk, or of all, that are alive at once: forward begun, backward not ended."""
        change = (self.phase == Phase.FORWARD).astype(np.int64) - (self.phase == Phase.BACKWARD)
        return int((change if chunk is None else change * (self.chunk == chunk)).cumsum().max())


def all_of(num_microbatches: int, phase: Phase) -> PassOrder:
    """All microbatches in order through the one chunk of a stage."""
    microbatch = np.arange(num_microbatches)
    return PassOrder(phase=np.full(num_microbatches, phase), chunk=np.zeros_like(microbatch), microbatch=microbatch)


def in_turn(forwards: PassOrder, backwards: PassOrder, warm_up: int, *, backward_first: bool) -> PassOrder:
    """``warm_up`` forwards, then the other forwards and the backwards one by one, then the other backwards."""
    ahead, behind = (np.stack([each.phase, each.chunk, each.microbatch]) for each in (forwards, backwards))
    later = ahead[:, warm_up:]
    paired = behind[:, : later.shape[1]]
    pair = (paired, later) if backward_first else (later, paired)
    alternating = np.stack(pair, axis=2).reshape(3, -1)
    whole = np.concatenate([ahead[:, :warm_up], alternating, behind[:, later.shape[1] :]], axis=1)
    return PassOrder(phase=whole[0], chunk=whole[1], microbatch=whole[2])


class Schedule(ABC):
    """In which order the stages of a pipeline do their passes. One instance each; equal by type."""

    name: str
    """As plans, problem files and options write it."""
    title: str
    """As a sentence writes it."""
    torch_name: str
    """The class in `torch.distributed.pipelining`."""
    torchtitan_name: str | None = None
    megatron_name: str | None = None
    """The function of Megatron's ``pipeline_parallel/schedules.py``, which its arguments choose by the chunks."""
    chunk_counts: tuple[int, ...] = (1,)
    """Chunks per stage that the search tries."""
    keeps_sends: bool = False
    """Whether torch waits for sends only when the step ends, so that what a stage sent would stay until then."""
    splits_backward: bool = False
    """Whether the gradients of weights have passes of their own."""
    why_not_everywhere: str = ""
    """Why the search leaves out configurations in which the schedule can run; empty where it leaves out none."""
    only_alone: bool = False
    """Whether the search tries it only where no other schedule is allowed."""
    why_nowhere: str = "not searched"
    """What to say where the search found no configuration for the schedule."""

    @abstractmethod
    def passes(self, pipeline: "PipelineConfig", stage: int) -> PassOrder:
        """The passes of a stage in the order in which it does them; raises `InvalidPlanError` where there is none."""

    @property
    def takes_chunks(self) -> bool:
        """Whether a stage holds two or more chunks of the model, and not one."""
        return 1 not in self.chunk_counts

    @property
    def words(self) -> str:
        """How a configuration is said to run under this schedule; empty where that goes without saying."""
        return self.name

    def refusal(self, pipeline: "PipelineConfig") -> InvalidPlanError | None:
        """What is wrong with the number of microbatches; None, by default, where nothing is."""
        return None

    def is_tried(self, pipeline: "PipelineConfig") -> bool:
        """Whether the search tries a configuration with chunks that the schedule takes: by default wherever it can
        run."""
        return self.refusal(pipeline) is None

    def in_flight(self, pipeline: "PipelineConfig", stage: int) -> int:
        """The bound of the search: most passes of a stage whose activations are alive at once."""
        return pipeline.passes(stage).in_flight()

    def waiting(self, _pipeline: "PipelineConfig", _stage: int) -> int:
        """Most passes of a stage whose weight passes wait as a backward pass begins: by default there are none."""
        return 0

    def received_ahead(self, _pipeline: "PipelineConfig", _stage: int) -> tuple[int, int]:
        """Most activations and gradients for which a stage has memory before the pass that needs them: by default none.

        A pass that needs one receives it first.
        """
        return 0, 0

    def steady_from(self, pipeline: "PipelineConfig", stage: int) -> int:
        """Microbatches beyond which a stage only repeats what it did for those before: by default there are none."""
        return pipeline.num_microbatches

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """One pipeline configuration: how the model is cut into parts, and the batch into microbatches, and how they are
    run."""

    num_stages: int
    """Groups of ranks."""
    num_chunks: int = 1
    """Parts of the model on every stage."""
    num_microbatches: int
    schedule: Schedule

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
        """Forward passes of every stage in a step: one for each microbatch and chunk."""
        return self.num_microbatches * self.num_chunks

    def check(self) -> None:
        """Raises `InvalidPlanError` where the schedule cannot run this number of microbatches."""
        refusal = self.schedule.refusal(self)
        if refusal is not None:
            raise refusal

    def passes(self, stage: int) -> PassOrder:
        """The passes of a stage, counted from 0, in the order in which it does them."""
        return self.schedule.passes(self, stage)

    def in_flight(self, stage: int) -> int:
        """Passes whose activations are alive at once on a stage, counted from 0, as the search bounds them."""
        return self.schedule.in_flight(self, stage)

    def waiting(self, stage: int) -> int:
        """Passes of a stage whose weight passes wait as a backward pass begins."""
        return self.schedule.waiting(self, stage)
