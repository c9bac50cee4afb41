"""Problem files: cost tables as versioned JSON, so that users can search their own tables.

A file holds a name, a budget and one or more pipeline configurations. Tables list one number for each of the
configuration's ``strategies``, in their order; `CostTables` defines the numbers. Strategies are written as in a plan,
for example ``fsdp4-tp2+sp remat=full``.

```json
{
  "version": 1,
  "name": "two layers on two devices",
  "budget_bytes": 8000000000,
  "settings": [{
    "num_stages": 1, "num_microbatches": 4, "schedule": "1f1b",
    "strategies": ["dp2", "fsdp2"],
    "layers": [{"kind": "block", "count": 2}],
    "kinds": [{
      "name": "block", "legal": [true, true], "time_s": [0.010, 0.012],
      "static_bytes": [3200000000, 1600000000], "activation_bytes": [100000000, 100000000],
      "transient_bytes": [50000000, 450000000]
    }],
    "switch_s": [{"kinds": ["block"], "seconds": [[0, 0], [0, 0]]}],
    "transfer_s": 0.0, "overhead_bytes": 1000000000, "samples": 32
  }]
}
```

A configuration may list cross-layer inputs: values that layers read besides the output of the layer before them
(positions count from 0; rows of ``seconds`` are the strategies of the source, columns those of a reader). Files with
cross-layer inputs have version 2, all others version 1.

```json
"side_inputs": [{"source": 0, "readers": [1], "seconds": [[0.0, 0.002], [0.001, 0.0]]}]
```

Files are checked on reading: unknown keys, missing, negative or non-finite numbers and ragged tables raise
`InvalidProblemError` with the place in the file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field

from steelyard.cost.tables import CostTables, CrossLayerInput
from steelyard.errors import InvalidProblemError, UserError, nearest
from steelyard.limits import MOST_BYTES, MOST_LAYERS, Bytes, Microbatches, Samples, Seconds
from steelyard.output import write_file
from steelyard.plan.file import parse_file, parse_value
from steelyard.plan.strategy import Strategy, parse_strategy
from steelyard.schedules import PipelineConfig, find_schedule
from steelyard.schedules.name import ScheduleName
from steelyard.search.solve import SearchResult, search

Row = Annotated[list[Seconds], FailFast()]
ByteRow = Annotated[list[Bytes], FailFast()]
LayerCount = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
LayerPlace = Annotated[int, Field(ge=0, lt=MOST_LAYERS)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class LayerTypeCosts(_Part):
    """Costs of one layer type, one entry per strategy."""

    name: str
    legal: Annotated[list[bool], FailFast()]
    time_s: Row
    static_bytes: ByteRow
    activation_bytes: ByteRow
    transient_bytes: ByteRow


class SwitchCosts(_Part):
    """Resharding costs before layers of these types: row = strategy of the layer before, column = of the layer."""

    kinds: list[str]
    seconds: Annotated[list[Row], FailFast()]


class EqualLayers(_Part):
    """``count`` equal layers in a row."""

    kind: str
    count: LayerCount


class CrossLayerInputCosts(_Part):
    """A value that the layers ``readers`` read from the layer ``source``: row = its strategy, column = the reader's."""

    source: LayerPlace
    readers: Annotated[list[LayerPlace], FailFast()]
    seconds: Annotated[list[Row], FailFast()]


class ConfigCosts(_Part):
    """One pipeline configuration; ``samples`` is its global batch, 1 if all configurations have the same."""

    num_stages: LayerCount
    num_microbatches: Microbatches
    schedule: ScheduleName
    strategies: Annotated[list[str], FailFast()]
    layers: Annotated[list[EqualLayers], FailFast()]
    kinds: Annotated[list[LayerTypeCosts], FailFast()]
    switch_s: Annotated[list[SwitchCosts], FailFast()]
    transfer_s: Seconds
    overhead_bytes: Bytes
    samples: Samples = 1
    side_inputs: list[CrossLayerInputCosts] = []
    num_chunks: LayerCount = 1
    fill: Annotated[float, Field(gt=0, le=1, exclude_if=lambda fill: fill == 1)] = 1.0


class ProblemFile(_Part):
    """The whole file."""

    version: Literal[1, 2]
    name: str = ""
    budget_bytes: Bytes | None = None
    settings: Annotated[list[ConfigCosts], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Content of a problem file, ready to be searched."""

    name: str
    budget_bytes: int | None
    configs: tuple[CostTables, ...]
    samples: tuple[int, ...]


def solve_problem(problem: Problem, budget_bytes: int | None = None, **options: Any) -> SearchResult:
    """Search a problem within its own budget or another one. Raises `InvalidProblemError` if there is none."""
    budget = problem.budget_bytes if budget_bytes is None else budget_bytes
    if budget is None:
        raise InvalidProblemError(
            field="budget_bytes", found="none", expected="a budget", hint="add budget_bytes to the file, or --memory"
        )
    if budget > MOST_BYTES:
        raise InvalidProblemError(field="budget_bytes", found=str(budget), expected=f"at most {MOST_BYTES}")
    return search(problem.configs, budget, samples=problem.samples, **options)


def save_problem(path: Path, problem: Problem) -> None:
    """Write a problem as JSON, losslessly. Raises `UserError` if it cannot be written."""
    content = ProblemFile(
        version=2 if any(tables.cross_layer_inputs for tables in problem.configs) else 1,
        name=problem.name,
        budget_bytes=problem.budget_bytes,
        settings=[
            _config_costs(tables, samples) for tables, samples in zip(problem.configs, problem.samples, strict=True)
        ],
    )
    unused = {"settings": {"__all__": {"side_inputs"}}} if content.version == 1 else None
    write_file(path, content.model_dump_json(exclude=unused) + "\n", "problem")


def load_problem(path: Path) -> Problem:
    """Read a problem file. Raises `InvalidProblemError` with the place in the file and the expected content."""
    return _problem(parse_file(path, ProblemFile, InvalidProblemError, what="problem"))


def parse_problem(content: object) -> Problem:
    """Return the problem that this parsed JSON describes. Raises `InvalidProblemError` if it is invalid."""
    return _problem(parse_value(content, ProblemFile, InvalidProblemError, what="problem"))


def _problem(content: ProblemFile) -> Problem:
    for index, config in enumerate(content.settings):
        if config.side_inputs and content.version == 1:
            raise InvalidProblemError(
                field=f"settings[{index}].side_inputs",
                found="cross-layer inputs in a file of version 1",
                expected="none, or version 2",
                hint='write "version": 2',
            )
    return Problem(
        name=content.name,
        budget_bytes=content.budget_bytes,
        configs=tuple(_named(config, f"settings[{index}]") for index, config in enumerate(content.settings)),
        samples=tuple(config.samples for config in content.settings),
    )


def _config_costs(tables: CostTables, samples: int) -> ConfigCosts:
    table = tables.switches
    switches: dict[bytes, list[int]] = {}
    for layer_type in range(len(tables.layer_types)):
        switches.setdefault(table[layer_type].tobytes(), []).append(layer_type)
    return ConfigCosts(
        num_stages=tables.pipeline.num_stages,
        num_microbatches=tables.pipeline.num_microbatches,
        schedule=tables.pipeline.schedule.name,
        strategies=[str(strategy) for strategy in tables.strategies],
        layers=[
            EqualLayers(kind=tables.layer_types[layer_type], count=len(list(run)))
            for layer_type, run in groupby(tables.layers)
        ],
        kinds=[
            LayerTypeCosts(
                name=name,
                legal=tables.legal[layer_type].tolist(),
                time_s=tables.time_s[layer_type].tolist(),
                static_bytes=tables.static_bytes[layer_type].tolist(),
                activation_bytes=tables.activation_bytes[layer_type].tolist(),
                transient_bytes=tables.transient_bytes[layer_type].tolist(),
            )
            for layer_type, name in enumerate(tables.layer_types)
        ],
        switch_s=[
            SwitchCosts(
                kinds=[tables.layer_types[layer_type] for layer_type in layer_types],
                seconds=table[layer_types[0]].tolist(),
            )
            for layer_types in switches.values()
        ],
        transfer_s=tables.transfer_s,
        overhead_bytes=tables.overhead_bytes,
        samples=samples,
        side_inputs=[
            CrossLayerInputCosts(source=side.source, readers=list(side.readers), seconds=side.seconds.tolist())
            for side in tables.cross_layer_inputs
        ],
        num_chunks=tables.pipeline.num_chunks,
        fill=tables.fill,
    )


def _named(config: ConfigCosts, place: str) -> CostTables:
    """Return the tables of a configuration; errors name the place in the file."""
    try:
        return _tables(config)
    except UserError as error:
        raise InvalidProblemError(**error.parts() | {"field": f"{place}.{error.field}"}) from None


def _tables(config: ConfigCosts) -> CostTables:
    names = [layer_type.name for layer_type in config.kinds]
    size = len(config.strategies)
    _expect_once(names, "kinds")
    _expect_once([name for part in config.switch_s for name in part.kinds], "switch_s", expected=names)
    columns: dict[str, list[list[Any]]] = {}
    for field in ("legal", "time_s", "static_bytes", "activation_bytes", "transient_bytes"):
        columns[field] = [getattr(layer_type, field) for layer_type in config.kinds]
        for name, row in zip(names, columns[field], strict=True):
            _expect_length(row, size, f"kinds.{name}.{field}")
    switch = np.zeros((len(names), size, size))
    for part in config.switch_s:
        _expect_length(part.seconds, size, "switch_s")
        for row in part.seconds:
            _expect_length(row, size, "switch_s")
        switch[[names.index(name) for name in part.kinds]] = np.array(part.seconds)
    if sum(run.count for run in config.layers) > MOST_LAYERS:
        found = f"{sum(run.count for run in config.layers)} layers"
        raise InvalidProblemError(field="layers", found=found, expected=f"at most {MOST_LAYERS}")
    for run in config.layers:
        if run.kind not in names:
            raise InvalidProblemError(
                field="layers",
                found=repr(run.kind),
                expected="a layer type of the configuration",
                hint=nearest(run.kind, names),
            )
    return CostTables(
        pipeline=PipelineConfig(
            num_stages=config.num_stages,
            num_chunks=config.num_chunks,
            num_microbatches=config.num_microbatches,
            schedule=find_schedule(config.schedule),
        ),
        layer_types=tuple(names),
        layers=tuple(names.index(run.kind) for run in config.layers for _ in range(run.count)),
        strategies=tuple(_strategy(text) for text in config.strategies),
        legal=np.array(columns["legal"], dtype=bool),
        time_s=np.array(columns["time_s"], dtype=np.float64),
        static_bytes=np.array(columns["static_bytes"], dtype=np.int64),
        activation_bytes=np.array(columns["activation_bytes"], dtype=np.int64),
        transient_bytes=np.array(columns["transient_bytes"], dtype=np.int64),
        switch_s=switch,
        transfer_s=config.transfer_s,
        overhead_bytes=config.overhead_bytes,
        fill=config.fill,
        cross_layer_inputs=_cross_layer_inputs(config),
    )


def _cross_layer_inputs(config: ConfigCosts) -> tuple[CrossLayerInput, ...]:
    size = len(config.strategies)
    for index, side in enumerate(config.side_inputs):
        _expect_length(side.seconds, size, f"side_inputs[{index}].seconds")
        for row in side.seconds:
            _expect_length(row, size, f"side_inputs[{index}].seconds")
    return tuple(
        CrossLayerInput(
            source=side.source, readers=tuple(side.readers), seconds=np.array(side.seconds, dtype=np.float64)
        )
        for side in config.side_inputs
    )


def _strategy(text: str) -> Strategy:
    try:
        return parse_strategy(text)
    except UserError as error:
        raise InvalidProblemError(**error.parts() | {"field": "strategies", "found": repr(text)}) from None


def _expect_length(row: Sequence[object], size: int, place: str) -> None:
    if len(row) != size:
        raise InvalidProblemError(field=place, found=f"{len(row)} entries", expected=f"{size}, one for each strategy")


def _expect_once(names: Iterable[str], place: str, expected: Sequence[str] | None = None) -> None:
    """Raise `InvalidProblemError` unless every name occurs once and, if given, the expected names are listed."""
    listed = list(names)
    if len(set(listed)) < len(listed) or (expected is not None and set(listed) != set(expected)):
        wanted = "each layer type once" + (f", of {', '.join(expected)}" if expected is not None else "")
        raise InvalidProblemError(field=place, found=", ".join(listed) or "none", expected=wanted)
