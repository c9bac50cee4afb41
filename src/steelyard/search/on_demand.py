"""Cost tables that are made when they are first asked for: most configurations are beaten by what computing takes
alone."""

from collections.abc import Callable, Sequence

from steelyard.cost.tables import CostTables
from steelyard.schedules import PipelineConfig


class OnDemand:
    """The cost tables of a pipeline configuration, made when first asked for.

    No plan of them takes less than ``least_s`` seconds; infinite where no plan can run. Where tables are dear, a
    sharper bound comes before them: ``sharpen`` returns the configurations that take this one's place, given the
    seconds beyond which none need be told apart, and ``missing_bytes`` how much more memory a configuration of infinite
    bound needs at least, or the most that is asked about.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        least_s: float,
        make: Callable[[], CostTables],
        *,
        sharpen: "Callable[[float], Sequence[OnDemand]] | None" = None,
        missing_bytes: Callable[[int], int] | None = None,
    ) -> None:
        self.pipeline, self.least_s, self._make = pipeline, least_s, make
        self.sharpen, self.missing_bytes = sharpen, missing_bytes
        self._tables: CostTables | None = None

    @classmethod
    def of(cls, tables: "CostTables | OnDemand") -> "OnDemand":
        """Tables that are there already, of whose plans nothing is known beforehand."""
        if isinstance(tables, OnDemand):
            return tables
        found = cls(tables.pipeline, 0.0, lambda: tables)
        found._tables = tables
        return found

    @property
    def tables(self) -> CostTables:
        """The tables themselves."""
        if self._tables is None:
            self._tables = self._make()
        return self._tables

    @property
    def is_made(self) -> bool:
        """Whether the tables are there."""
        return self._tables is not None

    def bounded(self, least_s: float) -> "OnDemand":
        """The same tables, of which it is known that no plan takes less than ``least_s``."""
        found = OnDemand(self.pipeline, max(least_s, self.least_s), lambda: self.tables)
        found._tables = self._tables
        return found

    def narrowed(self, narrow: Callable[[CostTables], CostTables]) -> "OnDemand":
        """What is left of the tables when ``narrow`` has taken choices away."""
        return OnDemand(self.pipeline, self.least_s, lambda: narrow(self.tables))
