"""Settings that users give to an engine, and the entries of the engine's files from which they are read.

Every engine with settings files has a `Reader` in addition to its writer. It reads the degrees, the batch and the
precision, and reports the rest of the file as not read.
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
    """Degrees of parallelism and related settings; the data degree follows from the number of devices."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    """Number of chunks of the model on every stage."""
    ep: int = 1
    """Ranks over which the experts are divided, among all ranks of a stage except those of cp."""
    replicas: int = 1
    """Groups of data ranks, each of which shards states among its own ranks (hybrid sharding)."""
    micro_batch: int = 1
    """Samples of a microbatch on a data rank."""
    zero: int = 1
    """0: all replicated; 1: optimizer states sharded; 2: gradients too; 3: parameters too (FSDP)."""
    sp: bool = True
    """Sequence parallelism with tp."""
    remat: Remat = Remat.NONE
    remat_blocks: int | None = None
    """Number of blocks recomputed at the start of every stage or chunk; None for all."""
    blocks: tuple[int, ...] | None = None
    """Number of blocks in each part of the pipeline; None for parts as even as possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """Settings in an engine's file."""

    settings: Settings
    global_batch: int | None
    """Samples of a step; None if the file does not give them."""
    seq_len: int | None
    precision: str
    unread: tuple[str, ...]
    """Names of entries that were not read."""
    levers: Mapping[str, str] = field(default_factory=dict)
    """Values of levers as text, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader of an engine's settings files."""

    suffixes: tuple[str, ...]
    """File name suffixes."""
    read: Callable[[str, ModelChain, int], FileSettings]
    """Function that returns the settings in a file's text, given the model and the number of devices. Raises
    `UserError` if they are invalid."""


class Entries:
    """Named values of a file that record which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._read = values, set[str]()

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these names that the file has."""
        self._read |= {*names}
        return next((self._values[name] for name in names if name in self._values), default)

    def number(self, *names: str, default: int = 1, least: int = 1) -> int:
        """Return that value as a whole number of ``least`` or more. Raises `UserError` if it is none."""
        value = self.get(*names, default=default)
        text = "" if isinstance(value, bool) else str(value)
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < least:
            raise UserError(
                field=names[0],
                found=repr(value),
                expected=f"a whole number of {least} or more",
                hint="write the number into the file instead of names and calculations",
            )
        return int(text)

    def number_or_none(self, *names: str) -> int | None:
        """Return that value as a whole number, or None if the file does not have it or leaves it open."""
        value = self.get(*names)
        return None if value is None or str(value) in ("auto", "-1") else self.number(*names)

    @property
    def unread(self) -> tuple[str, ...]:
        """Entries that were not read, by name, in the order of the file."""
        return tuple(name for name in self._values if name not in self._read)
