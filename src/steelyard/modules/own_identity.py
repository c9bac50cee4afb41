"""The identity of a user's own module: digests of its structure, by which a plan knows the module that it is for."""

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence

from torch import nn

from steelyard.errors import InvalidModelError
from steelyard.model.own import OwnSplit
from steelyard.modules.paths import is_below_any
from steelyard.modules.structure import signature


def fingerprint_of_rest(module: nn.Module, blocks: Sequence[str]) -> str:
    """A digest of the structure of what is not in blocks."""
    parts = (part for part in _structure(module) if not is_below_any(str(part[0]), blocks))
    return digest_of(type(module).__qualname__, *parts)


def fingerprint_of_block(block: nn.Module, place: int) -> str:
    """A digest of the structure of a block; where it stands plays no part."""
    return digest_of(*_without_place(_structure(block), place))


def check_same_module(module: nn.Module, own: OwnSplit) -> None:
    """Raises `InvalidModelError` naming the first place where a module is not the one that was planned."""
    refuse_compiled(module)
    found = {path for path, _ in module.named_modules()}
    count = sum(parameter.numel() for parameter in module.parameters())
    for number, path in enumerate(own.blocks):
        if path not in found:
            raise _other_module(f"{type(module).__qualname__} without a block {path}", f"{own.module} with it")
        digest = fingerprint_of_block(module.get_submodule(path), number)
        if digest != own.type_of(number + 1).fingerprint:
            raise _other_module(f"block {path} of structure {digest}", f"{own.type_of(number + 1).fingerprint}")
    digest = fingerprint_of_rest(module, own.blocks)
    if (digest, count) != (own.kinds[0].fingerprint, own.num_params):
        raise _other_module(
            f"{type(module).__qualname__} of {count} parameters and, outside its blocks, structure {digest}",
            f"{own.module} of {own.num_params} parameters and structure {own.kinds[0].fingerprint}",
        )


def refuse_compiled(module: nn.Module) -> None:
    """Raises `InvalidModelError` for what `torch.compile` returns, and for a module that holds such."""
    for path, each in module.named_modules():
        outer, _, name = path.rpartition(".")
        if name == "_orig_mod":
            raise InvalidModelError(
                field=outer or "model",
                found=f"what torch.compile returned for a {type(each).__qualname__}, whose operations cannot be seen",
                expected="the module that torch.compile was given",
                hint="leave torch.compile out, or give its _orig_mod",
            )


def _other_module(found: str, expected: str) -> InvalidModelError:
    return InvalidModelError(
        field="model",
        found=found,
        expected=f"{expected}, as planned",
        hint="build the module as it was planned (its sizes, its layers, its settings), or plan again",
    )


def _structure(module: nn.Module) -> Iterator[tuple[Hashable, ...]]:
    """A signature without the files that classes are from: one that is run is called otherwise than one imported."""
    path: Hashable = None
    for part in signature(module, places=True):
        yield (part[0], part[2]) if part[0] != path else part  # what comes first of a module is its class
        path = part[0]


def _without_place(parts: Iterable[tuple[Hashable, ...]], place: int) -> Iterator[Hashable]:
    """A signature without what says where a block stands, or how it was filled."""
    for part in parts:
        is_setting = len(part) == 3 and isinstance(part[1], str) and not isinstance(part[2], str)
        words = str(part[1]).split("_") if is_setting else []
        if "init" in words or (words and part[2] == place and {"idx", "id", "index", "layer"} & set(words)):
            continue
        yield part


def digest_of(*parts: Hashable) -> str:
    """A short digest of values that print alike where they are equal."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
