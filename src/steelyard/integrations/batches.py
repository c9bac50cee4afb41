"""Collator batches as the samples of a plan: one shape, with labels at the positions that predict them.

A collator's batch has at most the plan's samples and tokens. Missing samples and tokens are padded at the end and have
no targets; no real token sees them, because attention is causal or the ``attention_mask`` hides them. Positions that
begin anew within a sample separate packed sequences. The loss is the mean over the real targets.

Not modelled: padding counts among the tokens that expert routers balance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.errors import InvalidDataError, UserError
from steelyard.model.family import Task
from steelyard.modules.model_inputs import IGNORED, PER_SAMPLE
from steelyard.plan.plan import Plan
from steelyard.runtime.data.tokens import Samples
from steelyard.runtime.parallel_model import ModelKwargs

_READ: Mapping[Task, str] = {
    Task.CAUSAL_LM: "input_ids",
    Task.MASKED_LM: "input_ids",
    Task.SEQ2SEQ_LM: "input_ids",
    Task.IMAGE_CLASSIFICATION: "pixel_values",
}
_KNOWN = ("labels", "shift_labels", *PER_SAMPLE, "token_type_ids", "num_items_in_batch", "decoder_input_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A global batch of a plan."""

    samples: Samples
    num_targets: int
    num_samples: int
    """Number of samples from the collator. The others are padding."""
    arguments: Mapping[str, Tensor]
    """Arguments of the model that differ between samples, if any (`PER_SAMPLE`)."""

    def read(self, numbers: list[int]) -> Samples:
        """Return the samples with these numbers."""
        return Samples(inputs=self.samples.inputs[numbers], labels=self.samples.labels[numbers])

    @property
    def model_kwargs(self) -> ModelKwargs | None:
        """Function that returns the arguments of samples with some numbers; None if there are no arguments."""
        return (
            (lambda numbers: {name: each[numbers] for name, each in self.arguments.items()}) if self.arguments else None
        )


def check_task(plan: Plan) -> None:
    """Raise `UserError` if data collators cannot provide the samples of a plan's task."""
    task = plan.chain().family.task
    if task not in _READ:
        raise UserError(
            field="plan",
            found=f"a plan for {task}",
            expected=f"a plan for {', '.join(_READ)}, whose batches come from data collators",
            hint="train in your own loop (steelyard.parallelize) or with steelyard train",
        )


def planned_batch(given: Mapping[str, Any], plan: Plan) -> PlannedBatch:
    """Return the samples of a collator's batch. Raises `InvalidDataError` if the plan cannot train on it."""
    task = plan.chain().family.task
    name = _READ[task]
    if name not in given or given.get("labels") is None:
        raise _cannot(f"a batch of {', '.join(given)}", f"{name} and labels, as from data collators")
    unknown = sorted(key for key in given if key not in (*_KNOWN, name) and given[key] is not None)
    if unknown:
        raise _cannot(
            f"a batch with {', '.join(unknown)}",
            f"only {name}, labels and a padding mask",
            "pack without padding_free (TRL: packing_strategy='wrapped')" if "cu_seq_lens_q" in unknown else "",
        )
    inputs, labels = given[name], given["labels"]
    if task is Task.CAUSAL_LM:
        shifted = given.get("shift_labels")
        labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted
    arguments: dict[str, Tensor] = {}
    if task.reads_text:
        missing, length = plan.seq_len - inputs.shape[1], max(inputs.shape[1], labels.shape[1])
        if length > plan.seq_len:
            raise _cannot(
                f"samples of {length} tokens",
                f"at most the {plan.seq_len} tokens of the plan's samples",
                f"truncate them (TRL: max_length={plan.seq_len}), or plan with --seq-len {length}",
            )
        arguments = _per_sample(given, inputs, missing, is_causal=task is Task.CAUSAL_LM)
        inputs = functional.pad(inputs, (0, missing))
        labels = functional.pad(labels, (0, plan.seq_len - labels.shape[1]), value=IGNORED)
    count = len(inputs)
    if count > plan.global_batch:
        raise _cannot(f"{count} samples", f"at most {plan.global_batch}, the plan's global batch")
    return PlannedBatch(
        samples=Samples(inputs=_filled(inputs, plan, 0), labels=_filled(labels, plan, IGNORED)),
        num_targets=max(1, int((labels != IGNORED).sum())),
        num_samples=count,
        arguments={name: _filled(each, plan, 1) for name, each in arguments.items()},
    )


def _per_sample(given: Mapping[str, Any], tokens: Tensor, missing: int, *, is_causal: bool) -> dict[str, Tensor]:
    """Return the arguments of the model for samples with ``missing`` tokens of padding more.

    These are a mask of padding, unless attention is causal, and positions, if they begin anew. Refuses padding before
    tokens of causal models.
    """
    mask, places = given.get("attention_mask"), given.get("position_ids")
    types, decoder_ids = given.get("token_type_ids"), given.get("decoder_input_ids")
    if mask is not None and mask.ndim > 2:
        raise _cannot("an attention mask with more than two dims", "a padding mask")
    if types is not None and types.any():
        raise _cannot("token_type_ids other than 0", "one segment per sample")
    if decoder_ids is not None:
        shifted = given["labels"][:, :-1]
        if ((shifted != IGNORED) & (decoder_ids[:, 1:] != shifted)).any():
            raise _cannot("decoder_input_ids that differ from the labels", "the labels, shifted by one place")
    found = {}
    if places is not None and (places != torch.arange(tokens.shape[1])).any():
        found["position_ids"] = functional.pad(places.expand_as(tokens), (0, missing))
    if is_causal and mask is not None and (mask[:, 1:].bool() & ~mask[:, :-1].bool()).any():
        raise _cannot("padding before tokens", "padding after the tokens", "set the tokenizer's padding_side='right'")
    has_padding = not is_causal and (missing or (mask is not None and not mask.all()))
    if has_padding or (found and mask is not None):  # with a mask transformers does not separate packed sequences
        mask = torch.ones_like(tokens) if mask is None else mask.long()
        found["attention_mask"] = functional.pad(mask, (0, missing))
    return found


def _filled(tensor: Tensor, plan: Plan, value: int) -> Tensor:
    missing = plan.global_batch - len(tensor)
    if not missing:
        return tensor
    return torch.cat([tensor, torch.full_like(tensor[:1], value).expand(missing, *tensor.shape[1:])])


def _cannot(found: str, expected: str, hint: str = "") -> InvalidDataError:
    return InvalidDataError(field="train_dataset", found=found, expected=expected, hint=hint)
