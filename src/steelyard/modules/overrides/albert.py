"""ALBERT calls each of its groups of layers again and again; here every call has a place of its own in their list.

All that are of one group share its weights.
"""

from copy import copy, deepcopy
from typing import Any

TYPES = ("albert",)


def prepare(model: Any) -> None:
    """Gives every layer a place of its own in the list of groups, with the weights of the group that it shares.

    The model calls each group for several layers one after another.
    """
    stack = model.albert.encoder
    groups, number = stack.albert_layer_groups, stack.config.num_hidden_layers
    if len(groups) == number:
        return
    own = {id(each): each for each in groups.modules() if not [*each.children()]}  # which all copies hold
    of_layers = [groups[layer * len(groups) // number] for layer in range(number)]
    stack.albert_layer_groups = type(groups)(deepcopy(group, dict(own)) for group in of_layers)
    stack.config = copy(stack.config)
    stack.config.num_hidden_groups = number
