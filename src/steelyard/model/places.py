"""Numbers in a split that stand for a layer type, a layer, or a place in what flows: each is checked as it is read."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from steelyard.errors import InvalidModelError
from steelyard.limits import MOST_LAYERS, MOST_SIZE
from steelyard.model.family import LayerRole

Place = Annotated[int, Field(ge=0, lt=MOST_LAYERS)]
"""A layer, a layer type, a block, an argument or a result; in the file alone, no more is known of it."""
Token = Annotated[int, Field(ge=0, lt=MOST_SIZE)]


def _permutation(order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"every number from 0 to {len(order) - 1} once")
    return order


Order = Annotated[tuple[Place, ...], AfterValidator(_permutation)]
"""Dims of a tensor in another order."""


def check_place(field: str, place: int, known: range, of: str) -> None:
    """Raises `InvalidModelError` where a number of a split is not among those known, which are ``of`` something."""
    if place not in known:
        raise wrong_split(field, str(place), f"{known[0]} to {known[-1]}, {of}" if known else f"none: no {of}")


def check_layers(field: str, layers: Sequence[int], roles: Sequence[LayerRole], num_embeddings: int) -> None:
    """Raises `InvalidModelError` where layers are of layer types that are not there, or no chain from embedding to
    head.

    The chain of an encoder and a decoder has two embeddings.
    """
    for layer, layer_type in enumerate(layers):
        check_place(f"{field}.layers[{layer}]", layer_type, range(len(roles)), "the numbers of its types")
    found = [roles[layer_type] for layer_type in layers]
    num_others = len(found) - found.count(LayerRole.BLOCK)
    if found[:1] + found[-1:] != [LayerRole.EMBEDDING, LayerRole.HEAD] or num_others != num_embeddings + 1:
        expected = f"an embedding first, the head last, blocks between, {num_embeddings} embeddings in all"
        raise wrong_split(f"{field}.layers", f"layers of the roles {', '.join(found):.100}", expected)
    unused = {*range(len(roles))} - {*layers}
    if unused:
        raise wrong_split(f"{field}.kinds[{min(unused)}]", "a layer type that no layer is of", "layer types")


def wrong_split(field: str, found: str, expected: str) -> InvalidModelError:
    """The error for a part of a split that contradicts another."""
    return InvalidModelError(field=field, found=found, expected=expected, hint="plan again: the split was changed")
