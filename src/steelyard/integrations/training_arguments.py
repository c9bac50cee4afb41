"""Arguments of `transformers.Trainer` under a plan. Arguments that contradict the plan are refused.

An argument at the default of its class counts as not given, and the plan sets it.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

from steelyard.errors import CombinedError, UserError
from steelyard.levers.compiled_blocks import OFF, CompiledBlocks
from steelyard.levers.optimizer import Optimizer
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat

_OF_LEVER: Mapping[str, tuple[str, ...]] = {
    "adamw": ("adamw_torch", "adamw_torch_fused"),
    "adamw-8bit": ("adamw_torch_8bit",),
    "adamw-4bit": ("adamw_torch_4bit",),
    "sgd": ("sgd",),
}
"""Values of ``optim`` for each optimizer of a plan."""
_ENGINES = ("fsdp", "deepspeed", "parallelism_config", "auto_find_batch_size")
"""Arguments that choose the parallelism of the model, or the batch."""
_ELSEWHERE: Mapping[str, str] = {
    "label_smoothing_factor": "the last layer of the plan computes the loss without smoothing",
    "use_liger_kernel": "the plan assumes unchanged modules",
    "neftune_noise_alpha": "the plan assumes an unchanged embedding",
    "fp16_full_eval": "evaluation computes in the precision of the plan",
    "bf16_full_eval": "evaluation computes in the precision of the plan",
    "eval_use_gather_object": "every rank already has all predictions",
    "activation_offloading": "the plan decides about offload: steelyard plan --offload",
}
"""Arguments that must stay unset, with the reason."""
_EPSILON = 1e-8


def planned_arguments(args: TrainingArguments, plan: Plan) -> TrainingArguments:
    """Return a copy of the arguments with the values that the plan decides.

    Raises `UserError` for all arguments that contradict the plan.
    """
    wrong = list(_contradictions(args, plan))
    if wrong:
        raise CombinedError(wrong) if len(wrong) > 1 else wrong[0]
    found = copy.copy(args)
    decided: dict[str, Any] = {
        "per_device_train_batch_size": plan.global_batch,
        "per_device_eval_batch_size": plan.global_batch,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "fp16": False,
        "mixed_precision": "no",
        "activation_checkpointing": False,
        "gradient_checkpointing": False,
        "torch_compile": False,
        "enable_jit_checkpoint": False,  # `PlanTrainer` has its own, on which all ranks agree
    }
    for name, value in decided.items():
        setattr(found, name, value)
    if hasattr(args, "max_length") and args.max_length == _defaults(args)["max_length"]:
        found.max_length = plan.seq_len
    return found


def _defaults(args: TrainingArguments) -> dict[str, Any]:
    return {field.name: field.default for field in fields(args)}


def _contradictions(args: TrainingArguments, plan: Plan) -> Iterator[UserError]:
    yield from _of_batch(args, plan)
    for name in ("bf16", "fp16"):
        if getattr(args, name) and plan.precision != name:
            yield _wrong(name, args, f"{name}=False, because the plan computes in {plan.precision}", "--precision")
    for name in _ENGINES:
        if getattr(args, name):
            yield _wrong(name, args, "nothing, because the plan divides the model and the batch", "other degrees")
    yield from _of_levers(args, plan)
    for name, reason in _ELSEWHERE.items():
        if getattr(args, name, None):
            yield _wrong(name, args, f"nothing: {reason}", "")
    if args.save_only_model and args.load_best_model_at_end and plan.chain().has_adapters:
        yield _wrong(
            "save_only_model", args, "False, because a checkpoint with only adapters cannot be reloaded at the end", ""
        )
    if getattr(args, "loss_type", "nll") != "nll":
        yield _wrong("loss_type", args, "nll, the loss of the plan's last layer", "")


def _of_batch(args: TrainingArguments, plan: Plan) -> Iterator[UserError]:
    defaults, degree = _defaults(args), plan.strategies[0].sample_degree
    batch = plan.microbatch_samples // degree
    whole = f"{plan.global_batch} samples in {plan.num_microbatches} microbatches over {degree} ranks"
    for name, planned in {
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": plan.num_microbatches,
    }.items():
        if getattr(args, name) not in (defaults[name], planned):
            yield _wrong(name, args, f"{planned}, because the plan has {whole}", "--global-batch, --microbatches")
    length = getattr(args, "max_length", None)
    if length is not None and length > plan.seq_len and length != defaults["max_length"]:
        yield _wrong("max_length", args, f"at most {plan.seq_len}, the plan's sequence length", "--seq-len")


def _of_levers(args: TrainingArguments, plan: Plan) -> Iterator[UserError]:
    defaults, levers = _defaults(args), plan.chosen_levers
    recomputes = any(strategy.remat is not Remat.NONE for strategy in plan.strategies)
    if args.activation_checkpointing and not recomputes and defaults["gradient_checkpointing"] is not True:
        yield _wrong("activation_checkpointing", args, "False, because the plan recomputes nothing", "--remat")
    if args.torch_compile and levers.value(CompiledBlocks).word == OFF:
        yield _wrong("torch_compile", args, "False, because the plan compiles nothing", "--compile blocks")
    word = levers.value(Optimizer).word
    if args.optim not in (defaults["optim"], *_OF_LEVER.get(word, ())):
        yield _wrong("optim", args, f"the optimizer of the plan, {word}", "--optimizer")
    if args.adam_epsilon != _EPSILON:
        yield _wrong("adam_epsilon", args, f"{_EPSILON}, the value of a plan's optimizers", "")


def _wrong(name: str, args: TrainingArguments, expected: str, option: str) -> UserError:
    hint = f"leave {name} out" + (f", or plan with it (steelyard plan, {option})" if option else "")
    return UserError(field=name, found=f"{getattr(args, name)} in {type(args).__name__}", expected=expected, hint=hint)
