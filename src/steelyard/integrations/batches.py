"""Collator batches as the samples of a plan: one shape, with labels at the positions that predict them.

A collator's batch has at most the plan's samples and tokens. Missing samples and tokens are padded at the end, where
the causal attention of real tokens does not see them, and have no targets. The loss is the mean over the real targets.

Not modelled: padding counts among the tokens that expert routers balance; several documents packed into one sample
with separate attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.errors import InvalidDataError, UserError
from steelyard.model.family import Task
from steelyard.modules.model_inputs import IGNORED
from steelyard.plan.plan import Plan
from steelyard.runtime.data.tokens import Samples

_READ: Mapping[Task, str] = {
    Task.CAUSAL_LM: "input_ids",
    Task.MASKED_LM: "input_ids",
    Task.SEQ2SEQ_LM: "input_ids",
    Task.IMAGE_CLASSIFICATION: "pixel_values",
}
_KNOWN = ("labels", "shift_labels", "attention_mask", "position_ids", "token_type_ids", "num_items_in_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A global batch of a plan."""

    samples: Samples
    num_targets: int
    num_samples: int
    """Number of samples from the collator. The others are padding."""

    def read(self, numbers: list[int]) -> Samples:
        """Return the samples with these numbers."""
        return Samples(inputs=self.samples.inputs[numbers], labels=self.samples.labels[numbers])


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
    if task.reads_text:
        _check_places(given, inputs, is_causal=task is Task.CAUSAL_LM)
        missing, length = plan.seq_len - inputs.shape[1], max(inputs.shape[1], labels.shape[1])
        if length > plan.seq_len or (missing and task is not Task.CAUSAL_LM):
            raise _cannot(
                f"samples of {length} tokens",
                f"{'at most ' if task is Task.CAUSAL_LM else ''}the {plan.seq_len} tokens of the plan's samples",
                f"truncate them (TRL: max_length={plan.seq_len}), or plan with --seq-len {length}",
            )
        inputs = functional.pad(inputs, (0, missing))
        labels = functional.pad(labels, (0, plan.seq_len - labels.shape[1]), value=IGNORED)
    count = len(inputs)
    if count > plan.global_batch:
        raise _cannot(f"{count} samples", f"at most {plan.global_batch}, the plan's global batch")
    return PlannedBatch(
        samples=Samples(inputs=_filled(inputs, plan, 0), labels=_filled(labels, plan, IGNORED)),
        num_targets=max(1, int((labels != IGNORED).sum())),
        num_samples=count,
    )


def _check_places(given: Mapping[str, Any], tokens: Tensor, *, is_causal: bool) -> None:
    """Refuse padding before tokens, several documents in a sample, and any padding unless attention is causal."""
    mask = given.get("attention_mask")
    if mask is not None and mask.ndim > 2:
        raise _cannot("an attention mask with more than two dims", "a padding mask")
    if mask is not None:
        is_token = mask.bool()
        if (is_token[:, 1:] & ~is_token[:, :-1]).any() or not (is_causal or is_token.all()):
            raise _cannot(
                "padding before tokens" if is_causal else "samples with padding",
                "padding after the tokens"
                if is_causal
                else "samples of one length, because attention reads every position",
                "set the tokenizer's padding_side='right'" if is_causal else "pack samples to the plan's length",
            )
    places = given.get("position_ids")
    if places is not None and (places != torch.arange(tokens.shape[1])).any():
        raise _cannot("position_ids that restart within a sample", "one sequence per sample")
    types = given.get("token_type_ids")
    if types is not None and types.any():
        raise _cannot("token_type_ids other than 0", "one segment per sample")


def _filled(tensor: Tensor, plan: Plan, value: int) -> Tensor:
    missing = plan.global_batch - len(tensor)
    if not missing:
        return tensor
    return torch.cat([tensor, torch.full_like(tensor[:1], value).expand(missing, *tensor.shape[1:])])


def _cannot(found: str, expected: str, hint: str = "") -> InvalidDataError:
    return InvalidDataError(field="train_dataset", found=found, expected=expected, hint=hint)
