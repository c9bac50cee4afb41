"""Proof that samples of several sequences, or with padding, give what their sequences give by themselves.

Some models take positions and read the mask that follows from none (falcon, opt), or carry a state from one sequence to
the next (mamba); transformers packs them wrongly as well. So a small model of the same structure is tried: causal ones
with packed sequences and their positions, others with padding and its mask.
"""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steelyard.errors import InvalidModelError, InvalidPlanError, first_line
from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.modules.build import build_model, prepare_model
from steelyard.modules.known_values import plain_token
from steelyard.modules.model_inputs import PER_SAMPLE, decoder_inputs, forward_options
from steelyard.modules.two_ranks import run_pieces
from steelyard.plan.plan import Plan
from steelyard.plan.shrink import shrunk_plan

_TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest one."""


def check_per_sample(plan: Plan) -> None:
    """Raise `UserError` unless samples under the plan may hold several sequences, or padding that is not seen.

    A small model of the same structure is tried on the CPU, which takes about a second.
    """
    if any(each.token_degree > 1 for each in plan.strategies):
        raise InvalidPlanError(
            field="strategies",
            found="cp, and samples with several sequences or masked padding",
            expected="whole samples on each rank, because cp divides one causal sequence",
            hint="plan without cp, or pack rows into one sequence (--packing wrapped)",
        )
    small = shrunk_plan(plan)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            reason = _difference(small.chain(), small.seq_len)
    except Exception as error:  # many types
        reason = f"it raises {type(error).__name__} ({first_line(error)[:120]})"
    if reason:
        raise InvalidModelError(
            field="model_type",
            found=f"{plan.chain().family.model_type}: {reason}",
            expected="a model that masks attention between packed sequences, and to padding",
            hint="use one sequence per sample, or pack rows into one sequence (--packing wrapped)",
        )


def _difference(chain: ModelChain, seq_len: int) -> str:
    """Return why a small model does not separate sequences, or real tokens from padding; empty if it does."""
    mask_name, positions_name = PER_SAMPLE
    is_causal = chain.family.task is Task.CAUSAL_LM
    name = positions_name if is_causal else mask_name
    model = build_model(chain, seed=0).eval()
    if name not in inspect.signature(type(model).forward).parameters:
        return f"its forward pass takes no {name}"
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(chain.vocab_size, (2, 2, seq_len), generator=generator)
    for tokens in (ids, labels):
        tokens[tokens == getattr(model.config, "pad_token_id", None)] = plain_token(model.config)
    rows = ((5, seq_len - 5), (3, 4, seq_len - 7)) if is_causal else ((seq_len,), (seq_len - 5,))
    decoder_ids = decoder_inputs(labels, model.config) if chain.split.encoder else None
    expected = [_alone(model, ids[place], of, decoder_ids, place) for place, of in enumerate(rows)]
    places = torch.zeros_like(ids)
    for sample, of in zip(places, rows, strict=True):
        numbers = torch.cat([torch.arange(length) for length in of])
        sample[: len(numbers)] = numbers if is_causal else 1
    prepare_model(model, chain)
    logits = run_pieces(model, chain, range(chain.num_layers), ids, decoder_ids, model_kwargs={name: places})
    for found, wanted in zip(logits, expected, strict=True):
        error = float((found[: len(wanted)] - wanted).abs().max() / wanted.abs().max())
        if not error <= _TOLERANCE:
            return f"with {name} its logits differ by {error:.0e} from those of each sequence alone"
    return ""


def _alone(
    model: PreTrainedModel, ids: Tensor, lengths: tuple[int, ...], decoder_ids: Tensor | None, place: int
) -> Tensor:
    """Return the logits of the sequences of a sample, each by itself."""
    found, begin = [], 0
    for length in lengths:
        given = {} if decoder_ids is None else {"decoder_input_ids": decoder_ids[place : place + 1]}
        sequence = ids[None, begin : begin + length]
        found.append(model(input_ids=sequence, **given, **forward_options(model)).logits[0])
        begin += length
    return torch.cat(found)
