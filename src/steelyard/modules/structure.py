"""Which layers are alike, found by their structure: equal modules with equal parameters in equal places.

Two layers are of one type when their trees of modules have the same classes, the same parameters and buffers with the
same shapes and types, and the same settings (whatever numbers, texts and switches a module keeps), but for those that
only say where a layer stands.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

_PLACES = frozenset({"layer_idx", "layer_type", "sliding_window", "is_sliding", "attention_type", "shift_size"})
"""Attributes that say where a layer stands or what it attends to, which is a mask made outside the module."""
_INTERNAL = frozenset({"training", "call_super_init", "dump_patches", "gradient_checkpointing", "drop_prob"})


def signature(module: nn.Module, *, places: bool = False) -> tuple[tuple[Any, ...], ...]:
    """Equal for modules that do the same work on inputs of the same shape.

    ``places`` tells apart what only says where a layer stands or what it attends to.
    """
    return tuple(_parts(module, _INTERNAL if places else _PLACES | _INTERNAL))


def _parts(module: nn.Module, left_out: frozenset[str]) -> Iterator[tuple[Any, ...]]:
    for path, owner in module.named_modules():
        yield path, type(owner).__module__, type(owner).__qualname__
        for name, value in sorted(vars(owner).items()):
            if isinstance(value, int | float | str) and name not in left_out and not name.startswith("_"):
                yield path, name, value
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            yield path, name, tuple(tensor.shape), tensor.dtype
