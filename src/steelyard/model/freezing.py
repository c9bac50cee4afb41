"""The chain of a model of which a part is frozen: what a layer does follows from what of it, and before it, is trained.

Layers of one type do the same work. Frozen ones do less, and so do those whose input needs no gradient; each is a layer
type of its own, which is traced and priced like any other. A chain of which nothing is frozen is left as it is.
"""

from collections.abc import Iterator
from dataclasses import replace

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.model.family import LayerType
from steelyard.model.freeze import Freeze

_Trained = tuple[int, tuple[str, ...] | None, tuple[bool, ...]]
"""A layer type, what of it is frozen, and for each tensor that it reads whether that needs a gradient."""


def frozen_chain(chain: ModelChain, freeze: Freeze | None) -> ModelChain:
    """The chain with what is frozen; raises `InvalidModelError` for layers that it does not have."""
    if freeze is None:
        return chain
    _check(chain, freeze)
    chain = replace(chain, freeze=freeze)
    trained = [_trained(chain, layer) for layer in range(chain.num_layers)]
    distinct = sorted(set(trained), key=lambda each: (each[0], trained.index(each)))
    layer_types = tuple(_layer_types(chain, distinct))
    layers = tuple(distinct.index(each) for each in trained)
    return replace(chain, layer_types=layer_types, layers=layers)


def _check(chain: ModelChain, freeze: Freeze) -> None:
    for part in freeze.parts:
        first, last = part.layers
        if not 0 <= first <= last < chain.num_layers:
            raise InvalidModelError(
                field="model.frozen.parts",
                found=f"layers [{first}, {last}]",
                expected=f"layers within 0 to {chain.num_layers - 1} of {chain.name}",
                hint="plan again with --freeze",
            )
    if all(map(freeze.is_whole, range(chain.num_layers))):
        raise nothing_left(chain.name)


def nothing_left(name: str) -> InvalidModelError:
    """The error where all that the loss depends on is frozen."""
    return InvalidModelError(
        field="freeze",
        found=f"all of {name} that its loss depends on",
        expected="a part, so that something is left to train",
        hint="freeze less",
    )


def _trained(chain: ModelChain, layer: int) -> _Trained:
    assert chain.freeze is not None, "asked for a chain of which something is frozen"
    paths = chain.freeze.paths(layer)
    needed = chain.read_needs_gradient(layer) if layer else (paths != (),)
    return chain.layers[layer], paths, () if all(needed) else needed


def _layer_types(chain: ModelChain, trained: list[_Trained]) -> Iterator[LayerType]:
    names: list[str] = []
    for number, paths, needed in trained:
        layer_type = chain.layer_types[number]
        if paths is None and not needed:
            yield layer_type
            continue
        names.append(f"{layer_type.name}, {_words(paths, needed)}")
        count = names.count(names[-1])
        name = f"{names[-1]} {count}" if count > 1 else names[-1]
        yield replace(layer_type, name=name, likeness=layer_type.name, needs_gradient=needed)


def _words(paths: tuple[str, ...] | None, needed: tuple[bool, ...]) -> str:
    """What tells a layer type from one of which, and before which, nothing is frozen."""
    of_it = "" if paths is None else "partly frozen" if paths else "frozen"
    before = "behind what is frozen" if needed and paths != () else ""
    beside = "" if needed or paths != () else "behind what is trained"
    return " ".join(filter(None, (of_it, before, beside)))
