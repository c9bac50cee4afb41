"""Reads the table of levers: one row is one measurement, with its model, hardware, software, levers and figures.

An empty cell is not known, and nothing is filled in here. Columns that are not asked for are ignored.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from published_runs.rows import Cells, InvalidRunsError, opened, table_file

OPEN_ROWS = Path(__file__).parent / "data"
"""The folder of the rows whose measurements are shown."""
NEEDED = (
    *("id", "split", "source", "scope", "model", "method", "rank", "target_modules", "quant_bits", "quant_type"),
    *("precision", "optimizer", "optimizer_bits", "compile", "remat", "offload", "chunked_loss", "attention"),
    *("framework", "gpu", "gpu_mem_gib", "num_gpus", "fsdp", "tp", "pp", "cp", "ep", "batch_per_gpu", "grad_accum"),
    *("seq_len", "seq_len_kind", "rate_scope", "tokens_per_s", "step_time_s", "samples_per_s", "peak_allocated_gib"),
    *("peak_reserved_gib", "peak_memory_gib", "status", "pair_id", "lever", "notes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Cells):
    """One measurement."""

    @property
    def source(self) -> str:
        """The group of rows that were measured together."""
        return self.cells["source"]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names of the pairs that the row is part of, each with the lever that it differs in, or ``baseline``."""
        names, levers = (self.cells[column].split(";") for column in ("pair_id", "lever"))
        return tuple((name, lever) for name, lever in zip(names, levers, strict=False) if name)


def read_rows(folder: Path = OPEN_ROWS) -> tuple[Row, ...]:
    """The rows of a folder in their order; raises `InvalidRunsError` where they cannot be read."""
    path = table_file(folder)
    try:
        with opened(path) as file:
            reader = csv.DictReader(file)
            missing = [column for column in NEEDED if column not in (reader.fieldnames or ())]
            if missing:
                raise InvalidRunsError(
                    field=str(path), found=f"no column {missing[0]}", expected=", ".join(NEEDED), hint="add the column"
                )
            return tuple(Row(cells={name: cell or "" for name, cell in row.items() if name}) for row in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRunsError(
            field=str(path), found=str(error), expected="a table of runs", hint="check the path"
        ) from error
