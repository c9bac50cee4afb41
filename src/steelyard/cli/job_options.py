"""Options of all commands that plan or price a job: the model, its batch, the cluster and the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from steelyard.cli import options
from steelyard.planning.request import PlanRequest, make_request

PRECISION = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options as they are given; `options.with_levers` declares them for a command with a parameter ``job``."""

    model: options.Model
    cluster: options.ClusterOption
    global_batch: options.GlobalBatch
    seq_len: options.SeqLen = None
    network: options.NetworkOption = None
    image_size: options.ImageSize = None
    memory: options.Memory = None
    precision: options.PrecisionOption = PRECISION
    engine: options.EngineOption = None
    levers: Mapping[str, str | None]

    def _given(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def request(self, **more: Any) -> PlanRequest:
        """Return the request for these options. ``more`` are arguments of `make_request`, also in place of options."""
        size, precision = options.parse_image_size(self.image_size), options.parse_precision(self.precision)
        return make_request(**self._given() | {"image_size": size, "precision": precision} | more)

    def flags(self) -> dict[str, Any]:
        """Return the options by flag, levers included, with None for those at their default."""
        given = self._given() | {"precision": None if self.precision == PRECISION else self.precision}
        del given["model"], given["levers"]
        return {f"--{name.replace('_', '-')}": value for name, value in (given | {**self.levers}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJobOptions(JobOptions):
    """A `JobOptions` whose length and batch may be left to the search."""

    global_batch: options.Batch = None
    seq_len: options.Length = None
