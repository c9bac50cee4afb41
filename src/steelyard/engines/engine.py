"""Definition of an engine, the software that runs a plan: its models, capabilities, execution, files and levers.

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
    """A lever as an engine runs it; the engine's writer translates it."""

    refuse: Callable[[Any], str | None] = lambda lever: None
    """Function that returns why the engine does not run a value, in words that follow its name; None if it does."""
    dimensions: frozenset[Dimensions] | None = None
    """Sets of parallelism dimensions that may share a layer with this lever; None: all that the engine has."""
    execution: Callable[[Execution], Execution] = lambda execution: execution
    """Function that returns the execution with this lever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Software that runs plans."""

    name: str
    capabilities: Capabilities
    """Plans that it can run."""
    execution: Execution = OURS
    """Execution of plans, as far as it changes time or memory; the default is that of `steelyard.runtime`."""
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    refuse: Callable[[ModelChain, int], None] = lambda chain, seq_len: None
    """Function that raises `UserError` if the engine cannot train a model or sequence length; called before any
    search."""
    targets: tuple[Target, ...] = ()
    """Ways to write a plan for it."""
    reader: Reader | None = None
    """Reader of its settings files; None if they are not supported."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options that users set in addition to a plan, by name, with the fields of the execution that they change. They
    are part of the engine's name, ``megatron+deepep``, and therefore recorded in the plan."""

    levers: Mapping[str, Taken] = field(default_factory=dict)
    """Supported levers by name; an engine that ``mixes_layers`` runs all others as our runtime does."""

    def lever_refusal(self, lever: Lever) -> str | None:
        """Return why the engine does not run this value of a lever, in words that follow its name; None if it does."""
        taken = self.levers.get(lever.name)
        if taken is None:
            return None if self.capabilities.mixes_layers else ""
        return taken.refuse(lever)

    def running(self, levers: Levers) -> "Engine":
        """Return the engine as it runs these levers."""
        found = self
        for taken in (self.levers[lever.name] for lever in levers if lever.name in self.levers):
            means = found.capabilities
            if taken.dimensions is not None:
                means = replace(means, dimensions=means.dimensions & taken.dimensions)
            found = replace(found, capabilities=means, execution=taken.execution(found.execution))
        return found

    def with_options(self, chosen: Sequence[str]) -> "Engine":
        """Return the engine with these of its options. Raises `UserError` if it does not have one of them."""
        found = self.execution
        for name in chosen:
            if name not in self.options:
                raise UserError(
                    field="--engine",
                    found=f"{self.name}+{name}",
                    expected=f"{self.name} without options"
                    + (", or with + and any of: +" + ", +".join(self.options)) * bool(self.options),
                    hint=nearest(name, self.options) if self.options else "leave the option out",
                )
            found = replace(found, **self.options[name])
        return replace(self, name="+".join([self.name, *chosen]), execution=found)


def options_in(engine: str | None) -> tuple[str, ...]:
    """Return the options in the name of an engine."""
    return tuple((engine or "").split("+")[1:])
