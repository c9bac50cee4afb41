"""Rows read by `datasets` from files, folders, Hub ids or a mixture of these.

| written                    | rows                                                                                  |
|----------------------------|---------------------------------------------------------------------------------------|
| ``rows.jsonl``             | a file: JSON lines, Parquet, CSV, text, Arrow                                         |
| ``folder``                 | a folder written by `Dataset.save_to_disk`, or a folder of data files                 |
| ``owner/name``             | a data set on the Hub, or in the local cache of `datasets`                            |
| ``rows.jsonl@train[:90%]`` | a split or a slice of one, in the syntax of `datasets` (default: ``train``)           |
| ``rows.jsonl:0.7``         | a part of a mixture with this weight                                                  |

Several sources without weights are concatenated, each row once. With weights, every row is drawn from a source with a
probability proportional to the source's weight, until every source has been read to its end (`interleave_datasets`,
``all_exhausted``); rows of sources that end earlier repeat. Weights are fractions of rows, not of tokens.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from steelyard.errors import InvalidDataError

if TYPE_CHECKING:
    from datasets import Dataset

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow")
_WRITTEN = re.compile(r"(?P<name>.+?)(?:@(?P<split>[^@/]+?))?(?::(?P<weight>[-+]?\d[\d.eE+-]*))?")
_SAVED = "dataset_info.json"
_MIXING_SEED = 0
"""Seed for drawing a mixture; the order in which a run reads rows has the run's seed."""
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Source:
    """A source of rows, with its split and its weight in a mixture."""

    name: str
    split: str
    weight: float | None

    def load(self) -> "Dataset":
        """Load the rows. Raises `InvalidDataError` if there are none."""
        datasets = _datasets()
        path = Path(self.name)
        if not path.exists() and (path.suffix in FILE_SUFFIXES or path.is_absolute()):
            raise self._wrong(f"nothing at {self.name}", "check the path")
        try:
            if path.is_file():  # datasets chooses the builder by the file's suffix
                rows = datasets.load_dataset(str(path.parent.resolve()), data_files=path.name, split=self.split)
            elif (path / _SAVED).is_file():
                rows = datasets.load_from_disk(str(path))
            else:
                rows = datasets.load_dataset(self.name, split=self.split)
        except StopIteration:
            raise self._wrong(f"no rows in {self.name}") from None
        except Exception as error:  # many types, including those of format readers
            cause = str(error.__cause__ or error).splitlines()
            raise self._wrong(f"{self.name}@{self.split}: {cause[0] if cause else type(error).__name__}") from error
        if not len(rows):
            raise self._wrong(f"no rows in {self.name}@{self.split}")
        return rows

    def _wrong(self, found: str, hint: str = "write NAME, NAME@SPLIT or NAME@SPLIT:WEIGHT") -> InvalidDataError:
        expected = f"a file ({', '.join(FILE_SUFFIXES)}), a folder or a dataset ID of `datasets`, with a split"
        return InvalidDataError(found=found, expected=expected, hint=hint)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one or several sources."""

    sources: tuple[Source, ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """Parse sources as written. Raises `InvalidDataError` if the weights do not form a mixture."""
        sources = []
        for text in texts:
            found = _WRITTEN.fullmatch(text)
            if Path(text).exists():
                sources.append(Source(text, "train", None))
                continue
            assert found is not None, "a non-empty text is a name"
            weight = found["weight"]
            try:
                sources.append(Source(found["name"], found["split"] or "train", float(weight) if weight else None))
            except ValueError:
                raise _wrong_weights(texts) from None
        weights = [each.weight for each in sources]
        is_mixture = all(weight is not None and 0 < weight < float("inf") for weight in weights)
        if not is_mixture and weights != [None] * len(weights):
            raise _wrong_weights(texts)
        return cls(tuple(sources))

    def __str__(self) -> str:
        """Return the sources as written, without folders, to identify a run's data."""
        parts = ((f"@{each.split}", each) for each in self.sources)
        return " ".join(
            Path(each.name).name + split * (split != "@train") + (f":{each.weight:g}" if each.weight else "")
            for split, each in parts
        )

    def documents(self, column: str) -> Iterator[str]:
        """Yield the texts of a column. Raises `InvalidDataError` for a row without text."""
        parts = [(each, each.load()) for each in self.sources]
        for source, rows in parts:
            check_columns(source, rows, (column,), "the column of the text: --text-key")
        place = 0
        for batch in self.mixed([rows.select_columns([column]) for _, rows in parts]).iter(_ROWS_AT_ONCE):
            for text in batch[column]:
                place += 1
                if not isinstance(text, str):
                    raise InvalidDataError(
                        found=f"{text!r} under {column!r} in row {place} of {self}",
                        expected="text",
                        hint="name the text column with --text-key",
                    )
                yield text

    def mixed(self, parts: "Sequence[Dataset]") -> "Dataset":
        """Return one data set with the rows of all sources, mixed by their weights."""
        datasets = _datasets()
        if len(parts) == 1:
            return parts[0]
        weights = [each.weight for each in self.sources if each.weight is not None]
        if not weights:
            return datasets.concatenate_datasets(list(parts))
        shares = [weight / sum(weights) for weight in weights]
        return datasets.interleave_datasets(
            list(parts), probabilities=shares, seed=_MIXING_SEED, stopping_strategy="all_exhausted"
        )

    def identity(self) -> list[Any]:
        """Return a value that changes if the rows do: sources, splits, weights, and stored files with their times."""
        return [[each.name, each.split, each.weight, stored_files(each.load())] for each in self.sources]


def stored_files(rows: "Dataset") -> list[Any]:
    """Return the number of rows, and the files that hold them with their modification times."""
    files = [each["filename"] for each in rows.cache_files]
    return [len(rows), *([file, os.stat(file).st_mtime_ns] for file in files)]


def check_columns(source: Source, rows: "Dataset", wanted: Sequence[str], expected: str) -> None:
    """Raise `InvalidDataError` unless the rows have the wanted columns."""
    if not set(wanted) <= set(rows.column_names):
        raise InvalidDataError(
            found=f"columns {', '.join(rows.column_names)} in {source.name}@{source.split}",
            expected=f"{' and '.join(wanted)}, {expected}",
            hint="rename the columns, or name another one",
        )


def _wrong_weights(texts: Sequence[str]) -> InvalidDataError:
    return InvalidDataError(
        field="--dataset",
        found=" ".join(texts),
        expected="a weight above 0 for every dataset, or for none",
        hint="write for example --dataset a.jsonl:0.7 --dataset b.jsonl:0.3",
    )


def _datasets() -> Any:
    """Return the package `datasets` with its output silenced. Raises `InvalidDataError` if it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise InvalidDataError(
            found="rows, but no package datasets",
            expected="the package datasets, which reads rows",
            hint='pip install "steelyard[train]"',
        ) from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised as well
    return datasets
