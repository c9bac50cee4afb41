"""An engine: the software that runs a plan. Which models it runs, what it can express, how it executes, what it reads.

Each engine is one value in one module of this package. Search, prices and exports take an engine and know none by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steelyard.engines.capabilities import Capabilities, Dimensions
from steelyard.engines.execution import OURS, Execution
from steelyard.engines.settings import Reader
from steelyard.engines.writing import Target
from steelyard.errors import UserError, nearest
from steelyard.levers import Lever, Levers
from steelyard.model.chain import ModelChain
from steelyard.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A lever as an engine runs it; its writer says it in words of the engine."""

    refuse: Callable[[Any], str | None] = lambda lever: None
    """Why it does not run a value, in words behind its name; None where it does."""
    dimensions: frozenset[Dimensions] | None = None
    """The sets of parallelism dimensions that may share a layer beside it; None: all that the engine has."""
    execution: Callable[[Execution], Execution] = lambda execution: execution
    """What it makes of the execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Software that runs plans."""

    name: str
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
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What its users set beside a plan, by name, with the fields of its execution that this changes. An engine with
    some of them has them in its name, ``megatron+deepep``, so that a plan names them too."""

    levers: Mapping[str, Taken] = field(default_factory=dict)
    """How it runs each lever that it has, by name; an engine that ``mixes_layers`` runs all others as our runtime does.
    """

    def lever_refusal(self, lever: Lever) -> str | None:
        """Why it does not run this value of a lever, in words behind its name; None where it does."""
        taken = self.levers.get(lever.name)
        if taken is None:
            return None if self.capabilities.mixes_layers else ""
        return taken.refuse(lever)

    def running(self, levers: Levers) -> "Engine":
        """The engine as it runs these levers."""
        found = self
        for taken in (self.levers[lever.name] for lever in levers if lever.name in self.levers):
            means = found.capabilities
            if taken.dimensions is not None:
                means = replace(means, dimensions=means.dimensions & taken.dimensions)
            found = replace(found, capabilities=means, execution=taken.execution(found.execution))
        return found

    def with_options(self, chosen: Sequence[str]) -> "Engine":
        """The engine with these of its options; raises `UserError` for one that it does not have."""
        found = self.execution
        for name in chosen:
            if name not in self.options:
                raise UserError(
                    field="--engine",
                    found=f"{self.name}+{name}",
                    expected=f"{self.name} alone"
                    + (", or with any of +" + ", +".join(self.options)) * bool(self.options),
                    hint=nearest(name, self.options) if self.options else "leave the option out",
                )
            found = replace(found, **self.options[name])
        return replace(self, name="+".join([self.name, *chosen]), execution=found)


def options_in(engine: str | None) -> tuple[str, ...]:
    """Return the options in the name of an engine."""
    return tuple((engine or "").split("+")[1:])
