"""All that a report shows, as one value."""

from dataclasses import dataclass

from steelyard.cost.job import Job
from steelyard.cost.simulator import Timeline
from steelyard.plan.choices import PlanStudy
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Prediction
from steelyard.profiles.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """A plan with its prediction, and what is known around it.

    ``job`` and ``timeline`` are absent where the plan's cluster or measured profile is not at hand; ``notes`` say what
    is missing then. ``plan_file`` is the name of the file as a shell takes it, for the commands that are shown.
    """

    plan: Plan
    plan_file: str
    job: Job | None = None
    timeline: Timeline | None = None
    study: PlanStudy
    record: RunRecord | None = None
    notes: tuple[str, ...] = ()

    @property
    def prediction(self) -> Prediction:
        """The prediction, which every plan of a report has."""
        assert self.plan.prediction is not None, "a report is made of a plan with its prediction"
        return self.plan.prediction

    @property
    def fixed_s(self) -> float:
        """Seconds of a step that the timeline does not show."""
        return 0.0 if self.timeline is None else self.prediction.step_time_s - self.timeline.step_time_s

    @property
    def pools(self) -> tuple[Job, ...]:
        """The job on each pool that the plan uses, in the order of their ranks; one where all devices are alike."""
        return () if self.job is None else self.job.used_by(self.plan).by_group

    @property
    def stage_pools(self) -> tuple[str, ...]:
        """The pool of each stage by name; none where all devices are alike."""
        return tuple(pool.name for pool in self.plan.stage_pools()) if self.plan.is_mixed else ()

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest device."""
        return self.prediction.stages[self.prediction.fullest].total_bytes

    @property
    def budget_bytes(self) -> int:
        """Bytes that the fullest device may hold."""
        return self.prediction.stage_budgets()[self.prediction.fullest]
