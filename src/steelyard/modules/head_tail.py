"""The tokens of a sequence divided over ranks so that causal attention is equal work for all: the head-tail order.

Over c ranks the sequence is cut into 2c equal pieces. Rank r holds pieces r and 2c − 1 − r, one from the head and one
from the tail, whose causal prefixes have 2c + 1 pieces together whatever r is. The ranks' tokens one after another are
the *rank order*; the sequence as it reads is the *natural order*.

Source: Dubey et al. 2024 (The Llama 3 Herd of Models), section 3.3.2; Brandon et al. 2023 (Striped Attention) for the
imbalance that it avoids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from steelyard.errors import InvalidPlanError

SEQUENCE_DIM = 1
"""Of token ids [B, S], of hidden states [B, S, H] and of rotary embeddings [1, S, D]."""


def piece_size(seq_len: int, degree: int) -> int:
    """Tokens of one of the 2 · ``degree`` pieces; raises `InvalidPlanError` where they would not be equal."""
    if seq_len % (2 * degree):
        raise InvalidPlanError(
            field="seq_len",
            found=f"{seq_len} tokens under cp{degree}",
            expected=f"a multiple of {2 * degree}: every rank holds two equal pieces of a sequence",
            hint="choose another sequence length or a smaller cp degree",
        )
    return seq_len // (2 * degree)


def pieces_of(rank: int, degree: int) -> tuple[int, int]:
    """The natural places of the two pieces that a rank holds."""
    return rank, 2 * degree - 1 - rank


def rank_order(degree: int) -> list[int]:
    """The natural places of all pieces in rank order."""
    return [piece for rank in range(degree) for piece in pieces_of(rank, degree)]


def natural_order(degree: int) -> list[int]:
    """The places in rank order of all pieces in natural order: the inverse of `rank_order`."""
    return inverse(rank_order(degree))


def inverse(order: Sequence[int]) -> list[int]:
    """Where each number stands in a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)


def local_tokens(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of a whole sequence along ``dim``, in a tensor of their own; raises as `piece_size`."""
    degree = mesh.size()
    size = piece_size(tensor.size(dim), degree)
    pieces = pieces_of(mesh.get_local_rank(), degree)
    return torch.cat([tensor.narrow(dim, piece * size, size) for piece in pieces], dim)


def in_order(whole: Tensor, order: Sequence[int]) -> Tensor:
    """The pieces of a whole sequence [B, S, …] in another order; raises as `piece_size`."""
    size = piece_size(whole.size(SEQUENCE_DIM), len(order) // 2)
    pieces = whole.split(size, SEQUENCE_DIM)
    return torch.cat([pieces[place] for place in order], SEQUENCE_DIM)
