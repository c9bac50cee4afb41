"""Where the costs of a plan come from: the profile, a measured run's factor, the catalogue's entry for the rates."""

from pydantic import Field

from steelyard.limits import Count
from steelyard.plan.part import PlanPart
from steelyard.profiles.profile import ProfileIdentity


class CatalogueRates(PlanPart):
    """Which entry says what part of a data sheet's rates a device reaches in matrix products and attention."""

    generation: str
    """The name of the entry."""
    is_assumed: bool
    """Whether no run of such a device was among those that were fitted."""
    is_stand_in: bool = False
    """Whether the device is of no generation that is known, and this entry is taken for all such."""

    @property
    def brief(self) -> str:
        """The words for a cell of a table: ``fitted (hopper)``."""
        return f"{'assumed' if self.is_assumed else 'fitted'} ({self.generation})"

    def __str__(self) -> str:
        if self.is_stand_in:
            return f"assumed: the device is of no known generation, so the entry {self.generation!r} is taken"
        if self.is_assumed:
            return f"assumed for {self.generation}, of which no published run was fitted"
        return f"fitted to published runs of {self.generation}"


class ProfileFile(PlanPart):
    """The file that a profile was read from."""

    path: str
    """As it was given, so relative to where the plan was made, or absolute."""
    sha256: str
    """Of its content."""


class CostSource(ProfileIdentity):
    """The identity of a profile with what else the times rest on."""

    time_factor: float = Field(default=1.0, gt=0)
    """What all times were multiplied by after a measured run; 1 where there was none."""
    num_calibrating: Count = 0
    """Measured runs that gave it; 0 also in plans that were written before they were counted."""
    rates: CatalogueRates | None = None
    """Absent where times were measured or the rates given, and in plans that were written before it was said."""
    links_assumed: bool = False
    """Whether layers were measured on one device, and the rates of links are the cluster's."""

    file: ProfileFile | None = None
    """Absent where the profile was traced or given as a value, and in plans that were written before it was kept."""
    imbalance: float | None = Field(default=None, ge=1)
    """How many times the mean the rank computes whose experts most tokens take, which is assumed; absent for models
    without experts, and in plans that were written before they were divided."""

    def __str__(self) -> str:
        runs = "a measured run" if self.num_calibrating < 2 else f"{self.num_calibrating} measured runs"
        scaled = "" if self.time_factor == 1.0 else f"; all times × {self.time_factor:.3f}, calibrated by {runs}"
        if self.is_measured:
            what, links = ("layers measured", ", links assumed") if self.links_assumed else ("measured", "")
            return f"{what} on {self.device} ({self.created}){links}{scaled}{self._routing}"
        rates = "" if self.rates is None else f", {self.rates}"
        how = f"traced with torch {self.torch}, transformers {self.transformers}"
        return f"{how}; catalogue rates{rates}{scaled}{self._routing}"

    @property
    def _routing(self) -> str:
        return "" if self.imbalance is None else f"; imbalance of divided experts assumed: {self.imbalance:g}"
