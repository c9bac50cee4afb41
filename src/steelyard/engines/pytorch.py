"""A plan as a script of stock PyTorch calls: DeviceMesh, parallelize_module, fully_shard, checkpoint, pipelining.

The script is `scripts/train_plan.py`, one unchanged file for every plan: no text of a plan or of a config ever becomes
code. A JSON file in the same folder holds its input: the plan with the model's config, and the model's parts from its
split. The script trains text and image models of any type whose split is simple enough (`_why_not`), with the stock
modules of tensor parallelism, on the same samples and from the same initial weights as `steelyard train`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steelyard.engines.writing import Draft, Request, Target, refuse_untold
from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.model.family import BEGIN_WITH_THE_LAST, LayerRole, LayerType, Task
from steelyard.model.split import BlockCall, ModelSplit
from steelyard.plan.plan import OTHER_PLANS, Plan
from steelyard.precision import Precision
from steelyard.units import format_plural

SCRIPT = Path(__file__).parent / "scripts" / "train_plan.py"
"""Script that the export copies."""
DIMENSIONS = frozenset({"dp", "fsdp", "tp"})
"""Parallelism dimensions that the script supports."""
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
STYLES: Mapping[str, str] = {
    "columns": "colwise",
    "rows": "rowwise",
    "columns_gathered": "colwise_gathered",
    "rows_of_whole": "rowwise_of_whole",
    "enter": "gather",
    "on_part": "sequence_local",
    "whole": "replicated_with_grad_allreduce",
    "vocabulary": "vocabulary",
    "positions": "positions",
    "logits": "logits",
}
"""Names in the script of the module styles that it has stock calls for, by the first word of the style."""
_BUFFERS = "memory as predicted: every stage keeps communication buffers for all {} microbatches of a step"
_HEAD_NORMS = (".q_norm", ".k_norm", ".query_layernorm", ".key_layernorm")
"""Norms of a rank's heads if ranks divide heads."""
_FUSED = "split_size"
"""Number by which modules split the result of one matrix, which no stock style divides in parts."""
_TABLE = ".relative_attention_bias.weight"
"""Table of relative positions that the first block holds for all blocks."""
_TASKS = frozenset({Task.CAUSAL_LM, Task.MASKED_LM, Task.SEQ2SEQ_LM, Task.IMAGE_CLASSIFICATION})
"""Tasks for which the script has samples."""


def _write(request: Request) -> Draft:
    plan = request.plan
    chain = plan.chain()
    for found, expected, hint in _refusals(plan, chain):
        raise UserError(field="--to", found=f"pytorch for {found}", expected=expected, hint=hint)
    # the plan without predictions and other plans, with the config of a packaged model
    content = plan.model_dump(mode="json", exclude_none=True, exclude={"prediction", *OTHER_PLANS})
    content |= {"model": {"name": plan.model.name, "config": dict(chain.config)}}
    stem = "train_" + re.sub(r"[^a-z0-9]+", "_", plan.model.name.lower()).strip("_")
    counts = (
        format_plural(len(set(plan.strategies)), "strategy", "strategies") + " in all",
        format_plural(plan.num_stages, "stage"),
        format_plural(plan.num_microbatches, "microbatch", "microbatches"),
        *((plan.schedule,) if plan.num_stages > 1 else ()),
    )
    return Draft(
        script=(f"{stem}.py", SCRIPT.read_text(encoding="utf-8")),
        files=((f"{stem}.json", json.dumps({"plan": content, "chain": _chain(chain, plan.seq_len)})),),
        carried=(
            "every layer's own strategy: " + ", ".join(counts),
            f"precision: {plan.precision}",
            "initial weights, sample order, AdamW, warm-up and clipping: as steelyard train with the same options",
        ),
        left_out=(
            "checkpoints, resuming, loading weights, dropout that is independent of the plan, run records, "
            "and the checks of steelyard's own runtime",
            *((_BUFFERS.format(plan.num_microbatches),) if plan.num_stages > 1 else ()),
        ),
        launch=f"{request.torchrun} {stem}.py --data PATH --steps 100",
        usage=("the script reads the .json file next to it with its own name, or the one of --plan",),
    )


def _refusals(plan: Plan, chain: ModelChain) -> Iterator[tuple[str, str, str]]:
    """Yield the parts of a plan or its model without stock calls, each with the supported form and an alternative."""
    train = "run the plan with `steelyard train`"
    if plan.levers:
        own = "a target that starts steelyard's own runtime, which supports it"
        torchrun = "export --to torchrun, or plan without these options"
        yield f"a plan with {plan.chosen_levers}", own, torchrun
    if plan.pipeline.schedule.splits_backward:
        own = "a schedule that does not split backward passes, because stock calls do not split those of sharded layers"
        yield f"a plan under {plan.schedule}", own, f"plan with another --schedule, or {train}"
    refuse_untold("pytorch", chain)
    if plan.precision not in PRECISIONS:
        yield f"a plan in {plan.precision}", f"{' or '.join(PRECISIONS)}: the script does not scale the loss", train
    if len(set(plan.stage_sizes)) > 1:
        sizes, equal = ", ".join(map(str, plan.stage_sizes)), "stages of equal numbers of devices, which form one mesh"
        yield f"a plan with stages of {sizes} devices", equal, f"{train}, or plan with equal stages"
    if (shared := plan.shared_heads(chain)) is not None:
        degree, name, size = shared
        whole = f"a tp degree that divides them, because with stock calls ranks cannot share {name}"
        yield f"a plan with tp {degree} over {size} {name}", whole, f"plan with --max-tp {size}, or {train}"
    others = sorted({dimension.name for strategy in plan.strategies for dimension in strategy.dimensions} - DIMENSIONS)
    if others:
        known = f"a plan with only {', '.join(sorted(DIMENSIONS))}"
        yield f"a plan with {', '.join(others)}", known, f"plan with --space paper, or {train}"
    divided = {chain.type_of(layer) for layer, strategy in enumerate(plan.strategies) if strategy.tensor_degree > 1}
    named = f"{chain.name} ({chain.family.model_type})"
    if reason := _why_not(chain):
        yield (
            named + reason,
            "a model of token ids or image classes, one hidden state between blocks and at most one encoder output",
            f"{train}, or --to torchrun for a script that starts it",
        )
    for reason in filter(None, (_why_no_tp(chain.family.styles(layer_type)) for layer_type in divided)):
        yield named + reason, "a plan without tp in these layers", f"plan with --max-tp 1, or {train}"


def other_export(chain: ModelChain) -> str:
    """Return the hint of a refusal by a framework that builds the model itself: an export of the unchanged plan."""
    if _why_not(chain):
        return "run the plan with `steelyard train`, or export --to torchrun for a script that starts it"
    return "export --to pytorch, which builds the model with transformers"


def _why_not(chain: ModelChain) -> str:
    """Return the part of a model that the script has no calls for; empty if it runs all layers as the model does.

    The script, too, uses the model's own forward pass for operations around blocks and for their cross-layer inputs.
    """
    split, task = chain.split, chain.family.task
    if not isinstance(split, ModelSplit):
        return ", which is not a transformers model"
    is_block = [chain.type_of(layer).role is LayerRole.BLOCK for layer in range(chain.num_layers)]
    calls = [split.call_of(layer) for layer in range(chain.num_layers) if is_block[layer]]
    plain = [each.model_copy(update={"num_results": None, "result": each.result or None}) for each in calls]
    encoder = split.encoder
    of_blocks = [copy for each in chain.shared for copy in each.copies if is_block[each.copies[0][0]]]
    start = chain.config.get("decoder_start_token_id")
    reasons = {
        f"samples are those of {task}": task not in _TASKS,
        "blocks read or return several states": split.streams or (encoder and (encoder.order or encoder.shape)),
        "hidden state is not the first input and result of blocks": any(each != BlockCall() for each in plain),
        "blocks read something for each sample": split.sides_by_sample,
        "length is rounded up": split.multiple > 1,
        "states have positions other than tokens": any(
            layer_type.tokens != (1, 0) or len(layer_type.shape) not in (0, 2) for layer_type in split.kinds
        ),
        "layers share more than embedding tables": not all(path.endswith(_TABLE) for _, path in of_blocks),
        "modules are not all trained, or hold blocks": split.resting or split.holders,
        "blocks convert their buffers": split.typed_buffers,
        "decoder begins with no token that its config names": encoder
        and (not isinstance(start, int) or chain.family.model_type in BEGIN_WITH_THE_LAST),
    }
    return next((f", whose {reason}" for reason, holds in reasons.items() if holds), "")


def _why_no_tp(styles: Mapping[str, str]) -> str:
    """Return the style of a layer type that the script has no stock calls for; empty if it divides all modules."""
    for path, style in styles.items():
        word, *given = style.split(":")
        numbers = given[1].split(",") if word == "enter" and given[1:] else []
        unknown = _FUSED in numbers or any(given[2:] if word == "enter" else given)
        is_whole = path.endswith(_HEAD_NORMS) or _is_gathered(path, styles)
        is_known = is_whole if word == "whole" else word in STYLES
        if not is_known or unknown or (word in ("columns", "rows") and _is_gathered(path, styles)):
            return f" with tp, whose style {style!r} of {path} has no stock call"
    return ""


def _is_gathered(path: str, styles: Mapping[str, str]) -> bool:
    """Return whether ranks gather the outputs of sibling matrices, so that every rank computes this module whole."""
    beside = path.rpartition(".")[0] + "."
    return any(each.startswith(beside) and style.startswith("columns_gathered") for each, style in styles.items())


def _styles(chain: ModelChain, layer_type: LayerType) -> dict[str, str]:
    """Return the styles of the modules of a layer type that the script supports."""
    found: dict[str, str] = {}
    styles = chain.family.styles(layer_type)
    for path, style in styles.items():
        word, *given = style.split(":")
        if word in STYLES and not (word == "whole" and _is_gathered(path, styles)):
            found[path] = ":".join((STYLES[word], *(given[:2] if word == "enter" else ())))
    return found


def _chain(chain: ModelChain, seq_len: int) -> dict[str, Any]:
    """Return what the script needs to know of the model besides its config, by paths of modules and parameters."""
    split = chain.split
    assert isinstance(split, ModelSplit), "checked above"
    layers = range(chain.num_layers)
    calls = {chain.type_of(layer): split.call_of(layer).num_results or 0 for layer in layers}
    return {
        "task": chain.family.task.value,
        "vocab_size": chain.vocab_size,
        "image": chain.image,
        "encoded": split.encoder.encoded if split.encoder else None,
        "decoder_start": chain.config.get("decoder_start_token_id"),
        "attention": "sinks" if chain.family.fuses_sinks else "sdpa" if chain.family.fused_attention else "eager",
        "shared": [[list(copy) for copy in shared.copies] for shared in chain.shared],
        "kinds": {
            layer_type.name: {
                "role": layer_type.role.value,
                "styles": _styles(chain, layer_type),
                "num_results": num_results,
            }
            for layer_type, num_results in calls.items()
        },
        "layers": [
            {
                "kind": chain.type_of(layer).name,
                "modules": dict(split.modules(layer)),
                "flow": chain.flow_shapes(layer, seq_len),
            }
            for layer in layers
        ],
    }


TARGET = Target(
    precisions=PRECISIONS,
    name="pytorch",
    software="torch 2.13 and transformers 5",
    summary="a training script of stock PyTorch calls that runs the plan (with a strategy per layer) without steelyard",
    write=_write,
    weights="the script starts from new weights and writes none; steelyard train --init and --export-hf read and "
    "write the Hugging Face format",
)
