"""Settings as engineers give them to an engine, and the entries of a file of the engine from which they are read.

Every engine that has files of settings has a `Reader` beside its writer: it reads the degrees, the batch and the
precision, and the rest of the file is named as not read.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.plan.strategy import Remat


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Degrees of parallelism and what goes with them; the data degree is what is left of the devices."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    """Chunks of the model on every stage."""
    ep: int = 1
    """Ranks that the experts are divided over, among all ranks of a stage but those of cp."""
    replicas: int = 1
    """Groups of data ranks, each of which shards states among its own ranks (hybrid sharding)."""
    micro_batch: int = 1
    """Samples of a microbatch on a data rank."""
    zero: int = 1
    """0: all replicated; 1: optimizer states sharded; 2: gradients too; 3: parameters too (FSDP)."""
    sp: bool = True
    """Sequence parallelism beside tp."""
    remat: Remat = Remat.NONE
    remat_blocks: int | None = None
    """Of every stage, or of every chunk, only so many blocks at its start are recomputed."""
    blocks: tuple[int, ...] | None = None
    """Blocks of each part of the pipeline; None for parts as even as can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """Settings in a file of an engine."""

    settings: Settings
    global_batch: int | None
    """Samples of a step; None where the file does not say it."""
    seq_len: int | None
    precision: str
    unread: tuple[str, ...]
    """Entries that were not read, by name."""
    levers: Mapping[str, str] = field(default_factory=dict)
    """Texts of levers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The reading of an engine's files."""

    suffixes: tuple[str, ...]
    """Endings of their names."""
    read: Callable[[str, ModelChain, int], FileSettings]
    """The settings in the text of a file, for a model on so many devices; raises `UserError`."""


class Entries:
    """Named values of a file, of which those that were asked for count as read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._read = values, set[str]()

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these names that the file has."""
        self._read |= {*names}
        return next((self._values[name] for name in names if name in self._values), default)

    def number(self, *names: str, default: int = 1, least: int = 1) -> int:
        """Return the same as a whole number of ``least`` or more; raise `UserError` where it is none."""
        value = self.get(*names, default=default)
        text = "" if isinstance(value, bool) else str(value)
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < least:
            raise UserError(
                field=names[0],
                found=repr(value),
                expected=f"a whole number of {least} or more",
                hint="write the number into the file in the place of names and calculations",
            )
        return int(text)

    def number_or_none(self, *names: str) -> int | None:
        """Return the same, or None where the file does not have it, or leaves it open."""
        value = self.get(*names)
        return None if value is None or str(value) in ("auto", "-1") else self.number(*names)

    @property
    def unread(self) -> tuple[str, ...]:
        """The names that were not asked for, in the order of the file."""
        return tuple(name for name in self._values if name not in self._read)
