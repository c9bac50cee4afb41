"""An engine: the software that runs a plan. Which models it runs, what it can express, how it executes, what it reads.

Each engine is one value in one module of this package. Search, prices and exports take an engine and know none by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.engines.capabilities import Capabilities
from steelyard.engines.execution import OURS, Execution
from steelyard.engines.settings import Reader
from steelyard.engines.writing import Target
from steelyard.model.chain import ModelChain
from steelyard.plan.plan import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Software that runs plans."""

    name: str
    software: str
    """The full name, with the version that was read."""
    capabilities: Capabilities
    """The plans that it can run."""
    execution: Execution = OURS
    """How it runs them, as far as that changes time or memory; the default is how `steelyard.runtime` does."""
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    refuse: Callable[[ModelChain, int], None] = lambda chain, seq_len: None
    """Raises `UserError` for a model, or a sequence length of it, that the engine cannot train; called before any
    search."""
    targets: tuple[Target, ...] = ()
    """The ways to write a plan for it."""
    reader: Reader | None = None
    """How its files of settings are read; None where that is not known here."""
