"""One block that a model calls again and again, in a row (ALBERT): each call has a place of its own in the list.

All places hold the modules in which the block has its parameters. The model's own forward pass, which asks the list for
the block, is given the next place in turn. Of several blocks, places behind the first would have the names that others
have in files, so these are left as they are.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from torch import nn


class _InTurn(nn.ModuleList):
    """Gives the next place in turn, whichever it is asked for."""

    turn = 0

    def __getitem__(self, _place: Any) -> Any:
        self.turn += 1
        return self._modules[str((self.turn - 1) % len(self))]


def repeat_blocks(model: nn.Module, numbers: Mapping[str, int]) -> None:
    """Gives the block that is alone in a list so many places, by the list's path, in place; twice does no harm."""
    for path, number in numbers.items():
        blocks: Any = model.get_submodule(path)
        if len(blocks) > 1 or number == 1:
            continue
        kept = {id(each): each for each in blocks[0].modules() if each._parameters or not [*each.children()]}
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, _InTurn(deepcopy(blocks[0], dict(kept)) for _ in range(number)))
        model.get_submodule(owner).register_forward_pre_hook(partial(_begin, name))


def _begin(name: str, owner: nn.Module, _given: Any) -> None:
    """Starts with the first place, also after a forward pass that did not end."""
    owner.get_submodule(name).turn = 0
