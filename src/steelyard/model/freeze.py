"""Frozen parts of a model, as data that travels in the plan file.

A frozen parameter keeps its value: it has no gradient and no optimizer state. Layers before the first trained layer
have no backward pass; a frozen layer after it passes gradients on to its inputs.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from steelyard.files import FilePart
from steelyard.units import format_count

Count = Annotated[int, Field(ge=0, lt=2**53)]
Place = Annotated[int, Field(ge=0, lt=2**31)]


class FrozenLayers(FilePart):
    """Consecutive layers of the chain with the same frozen parts."""

    layers: tuple[Place, Place]
    """First and last layer, both included."""
    paths: tuple[str, ...] = ()
    """Paths in the layer of the frozen modules or parameters; empty if the whole layer is frozen."""


class Freeze(FilePart):
    """Frozen parts of a model."""

    patterns: tuple[str, ...] = ()
    """Patterns of the request; empty if the module itself came with frozen parameters."""
    num_params: Count | None = None
    """Number of frozen parameters; absent if they were not counted."""
    of_params: Count | None = None
    """Number of parameters of the whole model."""
    parts: tuple[FrozenLayers, ...] = Field(min_length=1)

    def paths(self, layer: int) -> tuple[str, ...] | None:
        """Return the frozen paths of a layer, as `FrozenLayers.paths`; None if nothing in it is frozen."""
        return next((each.paths for each in self.parts if each.layers[0] <= layer <= each.layers[1]), None)

    def holds(self, layer: int, path: str) -> bool:
        """Return whether the module or parameter at a path of a layer is frozen."""
        paths = self.paths(layer)
        return paths is not None and (not paths or any(path == each or path.startswith(f"{each}.") for each in paths))

    def is_whole(self, layer: int) -> bool:
        """Return whether all of a layer is frozen."""
        return self.paths(layer) == ()

    @property
    def of(self) -> str:
        """Description of what is frozen: the patterns of the request."""
        return " and ".join(self.patterns) or "parameters with requires_grad=False"

    def of_layers(self, kept: Sequence[int]) -> "Freeze | None":
        """Return the frozen parts of a model with only some of the layers; None if nothing in them is frozen."""
        found = ((place, self.paths(layer)) for place, layer in enumerate(kept))
        parts = tuple(FrozenLayers(layers=(place, place), paths=paths) for place, paths in found if paths is not None)
        return Freeze(patterns=self.patterns, parts=parts) if parts else None

    def __str__(self) -> str:
        if self.num_params is None or self.of_params is None:
            return self.of
        return f"{self.of}, {format_count(self.num_params)} of {format_count(self.of_params)} parameters"
