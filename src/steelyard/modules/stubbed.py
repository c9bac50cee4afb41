"""A model around what a layer keeps of it: its own forward pass, in which blocks are stubs and parameters are blank.

Modules are copied, parameters are not. Where one is not kept stands a blank (`steelyard.modules.blanks`), so that what
depends on it costs nothing and can pass for no value.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from steelyard.modules.blanks import blank_of

Fate = Literal["kept", "constant", "blank"]
"""What becomes of a parameter: of a constant one the value, as of a buffer."""


class Whole:
    """A whole model or block, which a copy of what points to it does not copy."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Whole":
        return self


class ReachedError(Exception):
    """All that a pass was to show has been seen."""


class Stub(nn.Module):
    """Stands where a block was; what else a model asks of the block it has from what it stands for."""

    stands_for: Whole | SimpleNamespace | None = None

    def __getattr__(self, name: str) -> Any:
        """An attribute of the block."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.stands_for is None:
                raise
            return getattr(self.stands_for.model, name)


class StubbedModel(ABC):
    """A copy of a model around what it keeps; its blocks are stubs, wherever they stand."""

    model: nn.Module

    def __init__(self, stubs: Mapping[nn.Module, Stub]) -> None:
        self._standing = dict(stubs)
        self._blanked: list[tuple[nn.Module, str, torch.Size]] = []
        self._blank_for: tuple[torch.dtype, torch.device] | None = None

    @abstractmethod
    def fate(self, module: nn.Module, path: str, name: str) -> Fate:
        """What becomes of a parameter of a module at a path."""

    @abstractmethod
    def is_whole(self, path: str) -> bool:
        """Whether the module at a path is kept as it is."""

    def copied(self, module: nn.Module, path: str = "") -> nn.Module:
        """The copy of a module."""
        if module in self._standing:
            return self._standing[module]
        if self.is_whole(path):
            return module
        found = copy.copy(module)
        found._buffers, found._parameters = dict(module._buffers), {}
        found._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        found._modules = {
            name: child and self.copied(child, f"{path}.{name}".removeprefix("."))
            for name, child in module._modules.items()
        }
        for name, parameter in module._parameters.items():
            fate = "kept" if parameter is None else self.fate(module, path, name)
            if fate == "kept":
                found._parameters[name] = parameter
            elif fate == "constant":
                found._buffers[name] = parameter.detach()
                found._non_persistent_buffers_set.add(name)
            else:
                self._blanked.append((found, name, parameter.shape))
        return found

    def stub(self, model: nn.Module, path: str = "") -> None:
        """Makes the copy; tensors are taken as they are, also where new ones are fake."""
        with _disable_current_modes():
            self.model, self._standing = self.copied(model, path), {}
            self._blank_for = None
            self.become(torch.float32, torch.device("cpu"))

    def become(self, dtype: torch.dtype, device: torch.device) -> None:
        """Has blanks of a type and on a device in the place of parameters that are not kept."""
        if (dtype, device) == self._blank_for:
            return
        self._blank_for = dtype, device
        for module, name, shape in self._blanked:
            module.__dict__[name] = blank_of(shape, dtype, device)
