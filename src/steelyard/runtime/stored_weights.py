"""Where the parameters of a model lie in Hugging Face files, whose tensors may have other names or be in pieces.

`transformers` changes some families since their files were written: it renames tensors, and joins the matrices of all
experts into one parameter. Its own table of these changes (``conversion_mapping``) says which; here a slice of a
parameter becomes the slices of the tensors that it is made of, so that a rank reads what it holds and no more.

Not modelled: changes other than renaming, stacking and concatenating along the first dim; they are an error.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.core_model_loading import rename_source_key as renamed_key

from steelyard.errors import InvalidModelError
from steelyard.modules.prepared import stored_apart

OpenTensor = Callable[[str], Any]
"""A stored tensor by its name, as safetensors' ``get_slice`` gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """The tensors that a parameter is made of: entries, each of pieces that lie side by side in the first dim."""

    entries: tuple[tuple[str, ...], ...]
    is_stacked: bool
    """The parameter has a dim more than its tensors: its first counts the entries."""
    apart: int = 1
    """So many matrices lie side by side in the last dim of a tensor; more than one lie in a dim of their own here."""

    def shape(self, open_tensor: OpenTensor) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        pieces = [tuple(open_tensor(name).get_shape()) for name in self.entries[0]]
        joined = (sum(piece[0] for piece in pieces), *pieces[0][1:]) if len(pieces) > 1 else pieces[0]
        if self.apart > 1:
            return (*joined[:-1], self.apart, joined[-1] // self.apart)
        return (len(self.entries), *joined) if self.is_stacked else joined

    def read(self, open_tensor: OpenTensor, slices: tuple[slice, ...]) -> Tensor:
        """A part of the parameter; of the files nothing else is read."""
        if self.apart > 1:
            *others, parts, columns = slices
            width = self.shape(open_tensor)[-1]
            beside = [slice(part * width + columns.start, part * width + columns.stop) for part in range(self.apart)]
            read = [_read_entry(self.entries[0], open_tensor, (*others, each)) for each in beside[parts]]
            return torch.stack(read, dim=-2)
        if not self.is_stacked:
            return _read_entry(self.entries[0], open_tensor, slices)
        chosen = self.entries[slices[0]]
        return torch.stack([_read_entry(entry, open_tensor, slices[1:]) for entry in chosen])


def _read_entry(pieces: tuple[str, ...], open_tensor: OpenTensor, slices: tuple[slice, ...]) -> Tensor:
    if len(pieces) == 1:
        return open_tensor(pieces[0])[slices]
    rows, *others = slices
    found, first = [], 0
    for name in pieces:
        stored = open_tensor(name)
        end = first + stored.get_shape()[0]
        least, most = max(rows.start, first), min(rows.stop, end)
        if least < most:
            found.append(stored[(slice(least - first, most - first), *others)])
        first = end
    return torch.cat(found)


def stored_parameters(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, StoredParameter]:
    """What each parameter of a model (on the meta device) is made of, among the names of ``stored`` tensors.

    Names that are of no parameter come out under the name that they would have. Raises `InvalidModelError` where
    transformers makes a parameter in a way that is not known here.
    """
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    own = model.state_dict()
    found: dict[str, list[tuple[str, str | None]]] = {}
    for name in stored:
        target, pattern = (
            (name, None)
            if name in own
            else renamed_key(
                name, renamings, converters, base_model_prefix=model.base_model_prefix, meta_state_dict=own
            )
        )
        found.setdefault(target, []).append((name, pattern))
    apart = stored_apart(model)
    return {
        target: replace(_joined(target, pieces, converters), apart=apart.get(target.rpartition(".")[0], 1))
        for target, pieces in found.items()
    }


def _joined(target: str, pieces: list[tuple[str, str | None]], converters: list[WeightConverter]) -> StoredParameter:
    pattern = pieces[0][1]
    converter = next((each for each in converters if pattern in each.source_patterns), None)
    if converter is None:
        return StoredParameter(entries=((pieces[-1][0],),), is_stacked=False)
    _check_known(target, converter.operations)
    by_pattern = {
        source: sorted((n for n, p in pieces if p == source), key=_numbers) for source in converter.source_patterns
    }
    columns = [names for names in by_pattern.values() if names]
    is_stacked = any(isinstance(each, MergeModulelist) for each in converter.operations)
    return StoredParameter(entries=tuple(zip(*columns, strict=False)), is_stacked=is_stacked)


def _check_known(target: str, operations: list[Any]) -> None:
    merges = [(type(each), each.dim) for each in operations if isinstance(each, MergeModulelist | Concatenate)]
    known = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)], [(Concatenate, 0)])
    if len(merges) != len(operations) or merges not in known:
        raise InvalidModelError(
            field="--init",
            found=f"{target}, made by {', '.join(type(each).__name__ for each in operations)}",
            expected="a parameter that is stored as it is, stacked, or in rows",
            hint="load and save the model with transformers under its present names (save_original_format=False)",
        )


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


def unknown_names(stored: Mapping[str, StoredParameter], names: Iterable[str]) -> list[str]:
    """The stored tensors that are of none of the parameters ``names``."""
    known = set(names)
    return sorted(
        name
        for target, parameter in stored.items()
        if target not in known
        for entry in parameter.entries
        for name in entry
    )
