"""Reads the table of levers: one row is one measurement, with its model, hardware, software, levers and figures.

An empty cell is not known, and nothing is filled in here. Columns that are not asked for are ignored.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import UserError

FILE_NAME = "runs.csv"
NEEDED = (
    *("id", "split", "source", "scope", "model", "method", "rank", "target_modules", "quant_bits", "quant_type"),
    *("precision", "optimizer", "optimizer_bits", "compile", "remat", "offload", "chunked_loss", "attention"),
    *("framework", "gpu", "gpu_mem_gib", "num_gpus", "fsdp", "tp", "pp", "cp", "ep", "batch_per_gpu", "grad_accum"),
    *("seq_len", "seq_len_kind", "rate_scope", "tokens_per_s", "step_time_s", "samples_per_s", "peak_allocated_gib"),
    *("peak_reserved_gib", "peak_memory_gib", "status", "pair_id", "lever", "notes"),
)


class InvalidRowsError(UserError):
    """The folder holds no table of levers, or one that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row; ``cells`` holds every column as text."""

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell as it stands; empty where it is not known."""
        return self.cells[column]

    def number(self, column: str) -> float | None:
        """A cell as a number, None where it is not known; raises `InvalidRowsError` for anything else."""
        text = self.cells[column]
        if not text:
            return None
        try:
            return float(text)
        except ValueError as error:
            raise InvalidRowsError(
                field=f"{self.id}: {column}", found=repr(text), expected="a number", hint="correct the cell"
            ) from error

    def count(self, column: str) -> int | None:
        """A cell as a whole number, None where it is not known; raises `InvalidRowsError` for anything else."""
        value = self.number(column)
        if value is not None and value != int(value):
            raise InvalidRowsError(
                field=f"{self.id}: {column}", found=str(value), expected="a whole number", hint="correct the cell"
            )
        return None if value is None else int(value)

    @property
    def id(self) -> str:
        """The name of the row."""
        return self.cells["id"]

    @property
    def source(self) -> str:
        """The group of rows that were measured together."""
        return self.cells["source"]

    @property
    def is_open(self) -> bool:
        """Whether the row shows its measurement."""
        return self.cells["split"] == "open"

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names of the pairs that the row is part of, each with the lever that it differs in, or ``baseline``."""
        names, levers = (self.cells[column].split(";") for column in ("pair_id", "lever"))
        return tuple((name, lever) for name, lever in zip(names, levers, strict=False) if name)


def read_rows(folder: Path) -> tuple[Row, ...]:
    """The rows of a folder in their order; raises `InvalidRowsError` where they cannot be read."""
    path = folder / FILE_NAME
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in NEEDED if column not in (reader.fieldnames or ())]
            if missing:
                raise InvalidRowsError(
                    field=str(path), found=f"no column {missing[0]}", expected=", ".join(NEEDED), hint="add the column"
                )
            return tuple(Row(cells={name: cell or "" for name, cell in row.items() if name}) for row in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRowsError(
            field=str(path), found=str(error), expected=f"a folder with {FILE_NAME}", hint="check the path"
        ) from error
