"""All that a report shows, as one value."""

from dataclasses import dataclass

from steelyard.cost.setting import Job
from steelyard.cost.simulator import Timeline
from steelyard.plan.choices import PlanStudy
from steelyard.plan.plan import Plan, Prediction
from steelyard.profiles.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """A plan with its prediction, and what is known around it.

    ``job`` and ``timeline`` are absent where the plan's cluster or measured profile is not at hand; ``notes`` say what
    is missing then. ``plan_file`` is the name of the file, for the commands that are shown.
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
    def peak_bytes(self) -> int:
        """Bytes of the fullest device."""
        return max(stage.total_bytes for stage in self.prediction.stages)

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget that the fullest device leaves; negative where it does not fit."""
        return self.prediction.budget_bytes - self.peak_bytes
