"""The content of a report as one value, and the meanings of its names: as tooltips and as a glossary at its end."""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.cost.job import Job
from steelyard.cost.simulator import Timeline
from steelyard.plan.choices import PlanStudy
from steelyard.plan.dimensions import DIMENSIONS
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Prediction
from steelyard.profiles.record import RunRecord
from steelyard.report.html.markup import Html, section, tag


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """A plan with its prediction, and further results about it.

    ``job`` and ``timeline`` are absent if the plan's cluster or measured profile is not available, and ``notes`` then
    say what is missing. ``plan_file`` is the shell-quoted file name for the commands that are shown.
    """

    plan: Plan
    plan_file: str
    job: Job | None = None
    timeline: Timeline | None = None
    study: PlanStudy
    explore_page: str | None = None
    """Page of `steelyard explore`, shown as the last part."""
    record: RunRecord | None = None
    notes: tuple[str, ...] = ()

    @property
    def prediction(self) -> Prediction:
        """Prediction of the plan, which every plan of a report has."""
        assert self.plan.prediction is not None, "a report is made of a plan with its prediction"
        return self.plan.prediction

    @property
    def fixed_s(self) -> float:
        """Seconds of a step that the timeline does not show."""
        return 0.0 if self.timeline is None else self.prediction.step_time_s - self.timeline.step_time_s

    @property
    def pools(self) -> tuple[Job, ...]:
        """Job on each pool that the plan uses, in rank order; a single one if all devices are identical."""
        return () if self.job is None else self.job.used_by(self.plan).by_group

    @property
    def stage_pools(self) -> tuple[str, ...]:
        """Name of each stage's pool; empty if all devices are identical."""
        return tuple(pool.name for pool in self.plan.stage_pools()) if self.plan.is_mixed else ()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest device in bytes."""
        return self.prediction.stages[self.prediction.fullest].total_bytes

    @property
    def budget_bytes(self) -> int:
        """Memory budget of the fullest device in bytes."""
        return self.prediction.stage_budgets()[self.prediction.fullest]


WORDS = {
    "MFU": "model FLOP utilisation: FLOP of forward and backward (attention as the model has it, recomputation not "
    "counted) over the devices' peak",
    "stage": "a part of the layers on a separate group of devices",
    "microbatch": "the samples that pass through the layers at once; a step adds up the gradients of all of them",
    "remat": "activation checkpointing: activations are recomputed in the backward pass, not kept",
    "bubble": "time that a stage waits for another stage",
    "compute": "forward and backward of the layers",
    "host": "kernel launches that take longer than the device's work",
    "pipeline": "sends of activations and gradients between stages",
    "switch": "redistribution of the hidden state between two layers that divide it differently",
    "optimizer": "update of the parameters and its states: two moments and a copy in fp32",
    "waiting": "the pipeline's bubbles",
    "fixed": "once a step, whatever its size: the loop, reading data, loss and gradient norm",
    "gathered parameters": "gathered parameters of the layers in flight, otherwise sharded",
    "activations": "saved for the backward pass, of all microbatches in flight",
    "working set": "the largest short-lived memory of one layer: what it makes and frees while it computes",
    "pipeline buffers": "gradients that stages exchange, and what arrives ahead of the pass that needs it",
    "context": "process, libraries and communicators",
    "allocator slack": "memory that the allocator reserves but does not hand out",
    "imbalance": "waiting for the busiest expert rank",
}


def meaning(name: str) -> str | None:
    """Return the meaning of a name; None if it needs no explanation."""
    return DIMENSIONS[name].term if name in DIMENSIONS else WORDS.get(name)


def term(name: str) -> Html:
    """Build a name with its meaning as a tooltip."""
    return tag("b", name, title=meaning(name))


def glossary_section(found: ReportContents) -> Html:
    """Build the section of the names that this page uses, with their meanings."""
    names = [name for name in dict.fromkeys(_used(found)) if meaning(name)]
    rows = [tag("div", tag("dt", name), tag("dd", meaning(name)), class_="fact") for name in names]
    return section("glossary", "What the names mean", tag("dl", rows))


def _used(found: ReportContents) -> Iterable[str]:
    prediction = found.prediction
    if prediction.mfu is not None:
        yield "MFU"
    yield "microbatch"
    if found.plan.num_stages > 1:
        yield from ("stage", "bubble", "waiting")
    for strategy in found.plan.strategies:
        yield from (dimension.name for dimension in strategy.dimensions)
    for stage in prediction.stages:
        yield from (*stage.time_s, "fixed", *stage.memory_bytes)
