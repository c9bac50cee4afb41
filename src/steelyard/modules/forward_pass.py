"""A forward pass of ours in the place of that of a module of transformers."""

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Has a function of a module, and of what it is called with, be its forward pass, in place; twice does no harm.

    What it replaces the function calls as ``module.own_forward``.
    """
    own: Any = type(module)
    if own.forward is not forward:
        changed: Any = type(own.__name__, (own,), {"own_forward": own.forward, "__module__": __name__})
        changed.forward = forward  # not at its birth, when transformers wraps the forward pass of some classes
        module.__class__ = changed
