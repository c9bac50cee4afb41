"""Attention of unmodified `transformers` modules whose sequence is divided over ranks in head-tail order.

Over c ranks the sequence is cut into 2c equal pieces. Rank r holds pieces r and 2c − 1 − r, one from the head and one
from the tail. Their causal prefixes together have 2c + 1 pieces for every r, so all ranks have equal work. *Rank order*
lists the tokens rank by rank; *natural order* is the order of the sequence.

It is an attention implementation of transformers like ``sdpa``, under the name `IMPLEMENTATION`, and bitwise identical
to it except for modules with a `DIVISION`. Such a module receives query, key and value of this rank's tokens, [B,
heads, s, D], and returns the output of these tokens. Its method defines the exchange between ranks:

| method  | forward                                                 | backward                                        |
|---------|---------------------------------------------------------|-------------------------------------------------|
| gather  | all-gather of K and V                                   | the same again, reduce-scatter of dK and dV     |
| ulysses | all-to-all of Q, K and V to all tokens of a rank's      | the same all-to-alls of the gradients, in       |
|         | heads; all-to-all of the output back                    | reverse                                         |

What is named together goes in one collective. Gathered keys and values are not kept: what backward reads is of this
rank's tokens. Full remat gathers and exchanges again; selective keeps what a gather's attention returns, and what
all-to-alls do. Gradients of keys and values are summed over ranks in the type of the keys.

With gather a rank attends with two pieces of the sequence, each to its own causal prefix. With ulysses the numbers of
query and of key-value heads must be multiples of the degree. Neither drops entries. With a sliding window gather builds
what each piece sees and reads no mask; ulysses reads the mask of the whole sequence.

Attention with sinks is that of `steelyard.modules.attention_sinks`, and cannot be divided.

Values narrower than keys (latent attention) are padded with zeros to their width, and the output is cut: fused kernels
then take them everywhere. That is a part (D − Dv) / 2D more work in attention, of 192 and 128 a sixth.

Source: Dubey et al. 2024 (The Llama 3 Herd of Models), section 3.3.2 (order, gather); Brandon et al. 2023 (Striped
Attention) for the imbalance that the order avoids; Jacobs et al. 2023 (ulysses). Not here: ring attention.

Legend of shapes: B samples, S tokens, s tokens of this rank (S/c), P of one piece (S/2c), h query heads, g key-value
heads, D head size, c ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.model.family import KV_HEADS, QUERY_HEADS
from steelyard.modules.attention_sinks import attend_with_sinks
from steelyard.modules.causal_kernels import Attended, Scores, attend, attend_backward
from steelyard.modules.remat import kept_whole

SEQUENCE_DIM = 1
"""Sequence dimension of token ids [B, S], hidden states [B, S, H] and rotary embeddings [1, S, D]."""


def piece_size(seq_len: int, degree: int) -> int:
    """Return the tokens in each of 2 · ``degree`` equal pieces. Raises `InvalidPlanError` if they cannot be equal."""
    if seq_len % (2 * degree):
        raise InvalidPlanError(
            field="seq_len",
            found=f"{seq_len} tokens under cp{degree}",
            expected=f"a multiple of {2 * degree}, because every rank holds two equal pieces of a sequence",
            hint="choose another sequence length or a smaller cp degree",
        )
    return seq_len // (2 * degree)


def pieces_of(rank: int, degree: int) -> tuple[int, int]:
    """Return the natural positions of the two pieces of a rank."""
    return rank, 2 * degree - 1 - rank


def rank_order(degree: int) -> list[int]:
    """Return the natural positions of all pieces in rank order."""
    return [piece for rank in range(degree) for piece in pieces_of(rank, degree)]


def natural_order(degree: int) -> list[int]:
    """Return the positions in rank order of all pieces in natural order: the inverse of `rank_order`."""
    order = rank_order(degree)
    return sorted(range(len(order)), key=order.__getitem__)


def local_tokens(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's tokens of a whole sequence along ``dim``, as a new tensor. Raises like `piece_size`."""
    degree = mesh.size()
    size = piece_size(tensor.size(dim), degree)
    pieces = pieces_of(mesh.get_local_rank(), degree)
    return torch.cat([tensor.narrow(dim, piece * size, size) for piece in pieces], dim)


def in_order(whole: Tensor, order: Sequence[int]) -> Tensor:
    """Return the pieces of a whole sequence [B, S, …] in another order. Raises like `piece_size`."""
    size = piece_size(whole.size(SEQUENCE_DIM), len(order) // 2)
    pieces = whole.split(size, SEQUENCE_DIM)
    return torch.cat([pieces[place] for place in order], SEQUENCE_DIM)


IMPLEMENTATION = "steelyard"
DIVISION = "context_division"
"""Attribute with the `ContextDivision` of an attention module whose sequence is divided."""
_collective = torch.ops._c10d_functional


class ContextMethod(StrEnum):
    """Method by which ranks that hold different tokens attend to each other's tokens."""

    GATHER = "gather"
    ULYSSES = "ulysses"


@dataclass(frozen=True, slots=True)
class ContextDivision:
    """Division of an attention module's sequence: ranks, method and sliding window."""

    mesh: DeviceMesh
    method: ContextMethod
    window: int | None


def reads_mask(block: nn.Module) -> bool:
    """Return whether a block's attention needs the whole sequence's mask, which grows with the square of its length."""
    divisions = (getattr(module, DIVISION, None) for module in block.modules())
    return not any(division is not None and division.method is ContextMethod.GATHER for division in divisions)


def run_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention [B, s, h, Dv] of [B, h or g, s, D], in the signature of transformers' attention functions.

    ``s_aux`` are the sinks of the heads, if they have any. Under cp, raises `InvalidModelError` if attention has
    dropout or sinks, and `InvalidPlanError` if the heads cannot be divided.
    """
    division: ContextDivision | None = getattr(module, DIVISION, None)
    width, missing = value.size(-1), key.size(-1) - value.size(-1)
    value = nn.functional.pad(value, (0, missing)) if missing > 0 else value
    if division is not None and dropout:
        raise InvalidModelError(
            field="attention dropout",
            found=f"{dropout} in a layer under cp",
            expected="0, because ranks with different tokens cannot apply the same attention dropout",
            hint="set the config's attention dropout to 0, or plan without cp",
        )
    if division is not None and options.get("sliding_window") not in (None, division.window):
        raise InvalidModelError(
            field="cp",
            found=f"attention over a window of {options['sliding_window']} tokens in a layer under cp",
            expected=f"a window of {division.window} tokens, as in its layer type",
            hint="plan without cp",
        )
    if division is not None and s_aux is not None:
        raise InvalidModelError(
            field="cp",
            found="attention with sinks in a layer under cp",
            expected="attention without sinks",
            hint="plan without cp",
        )
    if s_aux is not None:
        output = attend_with_sinks(module, query, key, value, attention_mask, s_aux, dropout, scaling, **options)
    elif division is not None and division.method is ContextMethod.GATHER:
        scores = Scores(scale=scaling, window=division.window)
        output = _GatheredAttention.apply(query, key, value, division.mesh, scores)
    else:
        if division is not None:
            query, key, value = _heads_to_tokens(query, key, value, division.mesh)
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        output = output if division is None else _tokens_to_heads(output, division.mesh)
    return output[..., :width] if missing > 0 else output, None


# gather


class _GatheredAttention(torch.autograd.Function):
    """Attention that saves query, output and this rank's keys and values, and gathers those of other ranks in each
    direction."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query_BhsD: Tensor,  # noqa: N803
        key_BgsD: Tensor,  # noqa: N803
        value_BgsD: Tensor,  # noqa: N803
        mesh: DeviceMesh,
        scores: Scores,
    ) -> Tensor:
        def attend_all() -> tuple[Tensor, ...]:
            keys, values = _gather_keys(key_BgsD, value_BgsD, mesh)
            done = [
                attend(query, keys[:, :, :end], values[:, :, :end], scores)
                for query, end in zip(query_BhsD.chunk(2, 2), _prefixes(keys, mesh), strict=True)
            ]
            return torch.cat([each.output.transpose(1, 2) for each in done], 1), *(each.log_sums for each in done)

        output_BshD, *log_sums = kept_whole(attend_all)  # noqa: N806
        ctx.save_for_backward(query_BhsD, key_BgsD, value_BgsD, output_BshD, *log_sums)
        ctx.mesh, ctx.scores = mesh, scores
        return output_BshD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BshD: Tensor) -> tuple[Tensor | None, ...]:  # noqa: N803
        query_BhsD, key_BgsD, value_BgsD, output_BshD, *log_sums = ctx.saved_tensors  # noqa: N806
        keys, values = _gather_keys(key_BgsD, value_BgsD, ctx.mesh)
        batch, heads, length, size = keys.shape
        of_pairs = key_BgsD.new_zeros((batch, length, 2, heads, size))
        of_keys, of_values = _unpaired(of_pairs)
        of_queries = []
        ends = _prefixes(keys, ctx.mesh)
        halves = (tensor.transpose(1, 2).chunk(2, 2) for tensor in (gradient_BshD.contiguous(), output_BshD))
        for gradient, output, query, sums, end in zip(*halves, query_BhsD.chunk(2, 2), log_sums, ends, strict=True):
            found, reach = attend_backward(
                gradient, query, keys[:, :, :end], values[:, :, :end], Attended(output, sums), ctx.scores
            )
            of_queries.append(found.query)
            of_keys[:, :, end - reach : end] += found.key
            of_values[:, :, end - reach : end] += found.value
        del keys, values
        return torch.cat(of_queries, 2), *_scatter_sums(of_pairs, ctx.mesh), None, None


def _prefixes(keys: Tensor, mesh: DeviceMesh) -> tuple[int, int]:
    """Return the ends of the causal prefixes of this rank's two pieces."""
    size = keys.size(2) // (2 * mesh.size())
    first, second = pieces_of(mesh.get_local_rank(), mesh.size())
    return (first + 1) * size, (second + 1) * size


def _gather_keys(key_BgsD: Tensor, value_BgsD: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Gather keys and values [B, g, S, D] of all ranks in natural order."""
    pairs_Bs2gD = torch.stack([key_BgsD.transpose(1, 2), value_BgsD.transpose(1, 2)], 2)  # noqa: N806
    pieces = pairs_Bs2gD.unflatten(1, (2, -1)).movedim(1, 0).contiguous()
    group = mesh.get_group().group_name
    gathered = _collective.wait_tensor(_collective.all_gather_into_tensor(pieces, mesh.size(), group))
    in_rank_order = gathered.unbind()
    pairs_BS2gD = torch.cat([in_rank_order[place] for place in natural_order(mesh.size())], 1)  # noqa: N806
    return _unpaired(pairs_BS2gD)


def _unpaired(pairs_BS2gD: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Return views [B, g, S, D] of keys and values that lie side by side."""
    key, value = pairs_BS2gD.transpose(1, 3).unbind(2)
    return key, value


def _scatter_sums(of_pairs_BS2gD: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Sum gradients of all keys and values over ranks, and return those of this rank's, [B, g, s, D] each."""
    pieces = of_pairs_BS2gD.chunk(2 * mesh.size(), 1)
    in_rank_order = torch.stack([pieces[place] for place in rank_order(mesh.size())])
    group = mesh.get_group().group_name
    scattered = _collective.reduce_scatter_tensor(in_rank_order, "sum", mesh.size(), group)
    return _unpaired(torch.cat(_collective.wait_tensor(scattered).unbind(), 1))


# ulysses


def _heads_to_tokens(query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's tokens of all heads for all tokens, in natural order, of this rank's heads [B, h/c or g/c,
    S, D]."""
    for tensor, name in ((query, QUERY_HEADS), (key, KV_HEADS)):
        if tensor.size(1) % mesh.size():
            raise InvalidPlanError(
                field="cp method",
                found=f"ulysses over {mesh.size()} ranks of {tensor.size(1)} {name}",
                expected=f"a divisor of the {name} of a rank",
                hint="choose cp_method gather, or a smaller degree",
            )
    parts = [tensor.transpose(1, 2).unflatten(2, (mesh.size(), -1)) for tensor in (query, key, value)]
    mine = _exchanged(torch.cat(parts, 3).movedim(2, 0), mesh)
    whole = in_order(mine.transpose(0, 1).flatten(1, 2), natural_order(mesh.size()))
    query, key, value = whole.transpose(1, 2).split([part.size(3) for part in parts], 1)
    return query, key, value


def _tokens_to_heads(output_BShD: Tensor, mesh: DeviceMesh) -> Tensor:  # noqa: N803
    """Exchange all tokens, in natural order, of this rank's heads for this rank's tokens of all heads [B, s, h, D]."""
    ranked = in_order(output_BShD, rank_order(mesh.size()))
    heads = _exchanged(ranked.unflatten(SEQUENCE_DIM, (mesh.size(), -1)).movedim(1, 0), mesh)
    return heads.movedim(0, 2).flatten(2, 3)


def _exchanged(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Exchange parts [c, …], one for each rank, and return the parts for this rank [c, …], one from each."""
    equal = [1] * mesh.size()
    received = _collective.all_to_all_single(tensor.contiguous(), equal, equal, mesh.get_group().group_name)
    return _collective.wait_tensor(received)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, run_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)
