"""What blocks are given beside the hidden state: masks, positions, rotary embeddings.

One more forward pass with blanks for all parameters shows it, of each block type; it depends on no
parameter.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.model.split import BlockArguments, ModelSplit
from steelyard.modules.known_values import known_of, plain_token, with_first
from steelyard.modules.model_inputs import blank, first_tokens, read_by
from steelyard.modules.stubbed_model import ReachedError, StubbedTransformers, recording_stubs


class BlockInputs:
    """What every block type reads beside the hidden state."""

    def __init__(
        self, model: PreTrainedModel, chain: ModelChain, layer_types: Collection[str], *, makes_masks: bool = True
    ) -> None:
        split = chain.split
        assert isinstance(split, ModelSplit), "a user's own module has blocks of its own"
        first_of = {chain.type_of(layer).name: layer for layer in reversed(range(chain.num_layers))}
        layers = sorted(first_of[name] for name in layer_types)
        stubs = recording_stubs(split, layers)
        self._records = {chain.type_of(layer).name: record for layer, record in stubs.items()}
        self._stubbed = StubbedTransformers(model, split, keep=(), stubs=stubs, makes_masks=makes_masks)
        self._by_sample, self._read = split.sides_by_sample, read_by(split)
        self._token, self._first = plain_token(model.config), first_tokens(split.features)

    @torch.no_grad()
    def __call__(self, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, BlockArguments]:
        """For every layer type its arguments, for one sample of so many tokens and a hidden state in ``dtype``."""
        one = self._recorded(1, tokens, dtype, device)
        if not self._by_sample:
            return one
        two = self._recorded(2, tokens, dtype, device)
        return {name: pytree.tree_map(_per_sample, one[name], two[name]) for name in one}

    def token_dims(self, device: torch.device, dtype: torch.dtype) -> dict[str, BlockArguments]:
        """For every layer type, in the place of each tensor the one dim that is tokens; None where there is none, or
        two."""
        few, more = (self(tokens, dtype, device) for tokens in _LENGTHS)
        return {name: pytree.tree_map(_token_dim, few[name], more[name]) for name in few}

    def _recorded(
        self, samples: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, BlockArguments]:
        ids = with_first(torch.full((samples, tokens), self._token, device=device), *self._first)
        with suppress(ReachedError):
            self._stubbed(blank(self._read, samples, tokens, device, dtype) if self._read else ids, dtype, ids)
        return {name: record.take_sides() for name, record in self._records.items()}


@dataclass(frozen=True, slots=True)
class PerSample:
    """A tensor that blocks want for every sample, one after another in a dim; held for one, since all are alike."""

    held: Tensor
    dim: int

    def of(self, samples: int) -> Tensor:
        """The tensor for so many samples."""
        times = [samples if dim == self.dim else 1 for dim in range(self.held.ndim)]
        return self.held.repeat(times)


@dataclass(frozen=True, slots=True)
class EndsPerSample:
    """Where sequences end that stand one behind another, as many in every sample; on the host, where it is read."""

    ends: tuple[int, ...]
    dtype: torch.dtype

    def of(self, samples: int) -> Tensor:
        """The ends of so many samples, behind a 0."""
        ends = [sample * self.ends[-1] + end for sample in range(samples) for end in self.ends]
        return torch.tensor([0, *ends], dtype=self.dtype)


def _per_sample(one: Any, two: Any) -> Any:
    """What a block is given, from what it is given for one sample and for two."""
    if not isinstance(one, Tensor) or one.shape == two.shape:
        return one
    if one.ndim == 1 and 2 * (len(one) - 1) == len(two) - 1:
        return EndsPerSample(tuple(known_of(one).tolist()[1:]), one.dtype)
    (dim,) = [dim for dim, (size, twice) in enumerate(zip(one.shape, two.shape, strict=True)) if size != twice]
    return PerSample(one, dim)


_LENGTHS = (8, 16)
"""Short sequences whose arguments show what grows with the tokens."""


def _token_dim(few: Any, more: Any) -> int | None:
    one, other = (each.held if isinstance(each, PerSample) else each for each in (few, more))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None
    dims = [dim for dim, (size, longer) in enumerate(zip(one.shape, other.shape, strict=True)) if size != longer]
    return dims[0] if len(dims) == 1 else None


def tensors_in(arguments: BlockArguments) -> Iterator[Tensor]:
    """The tensors among a block's arguments."""
    leaves = pytree.tree_leaves(arguments)
    return (
        leaf.held if isinstance(leaf, PerSample) else leaf for leaf in leaves if isinstance(leaf, Tensor | PerSample)
    )
