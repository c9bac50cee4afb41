"""What of a model is not trained, as data: it travels in the plan file.

A parameter that is frozen keeps its value: it has no gradient and no optimizer state. Layers before the first one that
is trained have no backward pass; one behind it passes gradients on to what it reads.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from steelyard.units import format_count

Count = Annotated[int, Field(ge=0, lt=2**53)]
Place = Annotated[int, Field(ge=0, lt=2**31)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FrozenLayers(_Part):
    """Consecutive layers of the chain of which the same is frozen."""

    layers: tuple[Place, Place]
    """The first and the last, both included."""
    paths: tuple[str, ...] = ()
    """Of what is frozen in each of them, modules or parameters by their path in the layer; empty where all of it is."""


class Freeze(_Part):
    """What is frozen of a model."""

    patterns: tuple[str, ...] = ()
    """What it was asked for by, in words; empty where the module came so."""
    num_params: Count | None = None
    """Parameters; absent where they were not counted."""
    of_params: Count | None = None
    """Parameters of the whole model."""
    parts: tuple[FrozenLayers, ...] = Field(min_length=1)

    def paths(self, layer: int) -> tuple[str, ...] | None:
        """What is frozen of a layer, as `FrozenLayers.paths` has it; None where that is nothing."""
        return next((each.paths for each in self.parts if each.layers[0] <= layer <= each.layers[1]), None)

    def holds(self, layer: int, path: str) -> bool:
        """Whether a module or parameter at a path of a layer is frozen."""
        paths = self.paths(layer)
        return paths is not None and (not paths or any(path == each or path.startswith(f"{each}.") for each in paths))

    def is_whole(self, layer: int) -> bool:
        """Whether nothing of a layer is trained."""
        return self.paths(layer) == ()

    @property
    def of(self) -> str:
        """What is frozen, in the words that it was asked for by."""
        return " and ".join(self.patterns) or "what the module has without gradients"

    def of_layers(self, kept: Sequence[int]) -> "Freeze | None":
        """The same of a model with some of the layers alone; None where nothing of them is frozen."""
        found = ((place, self.paths(layer)) for place, layer in enumerate(kept))
        parts = tuple(FrozenLayers(layers=(place, place), paths=paths) for place, paths in found if paths is not None)
        return Freeze(patterns=self.patterns, parts=parts) if parts else None

    def __str__(self) -> str:
        if self.num_params is None or self.of_params is None:
            return self.of
        return f"{self.of}, {format_count(self.num_params)} of {format_count(self.of_params)} parameters"
