"""A plan as a script of stock PyTorch calls: DeviceMesh, parallelize_module, fully_shard, checkpoint, pipelining.

The script is `scripts/train_plan.py`, one file for every plan, copied as it is: no text of a plan or of a config ever
becomes code. Beside it lies what it reads, in JSON: the plan with the model's config, and what its split says of the
model's parts. It trains decoders with the stock modules that tensor parallelism has, on the same samples and from the
same first weights as `steelyard train`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.errors import UserError
from steelyard.export.target import Draft, Request, Target
from steelyard.model.chain import ModelChain
from steelyard.model.family import LayerKind, LayerRole
from steelyard.plan.capabilities import Capabilities
from steelyard.plan.plan import OTHER_PLANS, Plan
from steelyard.units import format_plural

SCRIPT = Path(__file__).parent / "scripts" / "train_plan.py"
"""What the export copies."""
CAPABILITIES = Capabilities(mixes_layers=True)

KINDS = frozenset({"dp", "fsdp", "tp"})
"""Kinds of parallelism that the script carries out."""
STYLES: Mapping[str, str] = {
    "columns": "colwise",
    "rows": "rowwise",
    "enter": "gather",
    "on_part": "sequence_local",
    "whole": "replicated_with_grad_allreduce",
    "vocabulary": "vocabulary",
    "logits": "logits",
}
"""What the script calls the styles of modules that it has stock calls for, by the first word of their name."""
TYPES = frozenset(
    (
        "deepseek_v3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    )
)
"""The types whose blocks the script gives what they read, as the model does."""
_BUFFERS = "memory as predicted: every stage has buffers for what it exchanges of all {} microbatches of a step"
_ROTARY = "rotary_emb"
"""The rotary embedding, beside the list of blocks."""
_NAMES = {LayerRole.EMBEDDING: ("embedding",), LayerRole.BLOCK: ("block",), LayerRole.HEAD: ("norm", "output")}
"""What the script calls the modules of a layer, in their order."""


def _write(request: Request) -> Draft:
    plan = request.plan
    chain = plan.chain()
    _check(plan, chain)
    stem = "train_" + re.sub(r"[^a-z0-9]+", "_", plan.model.name.lower()).strip("_")
    counts = (
        format_plural(len(set(plan.strategies)), "strategy", "strategies") + " in all",
        format_plural(plan.num_stages, "stage"),
        format_plural(plan.num_microbatches, "microbatch", "microbatches"),
        *((plan.schedule,) if plan.num_stages > 1 else ()),
    )
    return Draft(
        script=(f"{stem}.py", SCRIPT.read_text(encoding="utf-8")),
        files=((f"{stem}.json", json.dumps({"plan": _plan(plan, chain), "chain": _chain(chain)})),),
        carried=(
            "every layer's own strategy: " + ", ".join(counts),
            f"precision: {plan.precision}",
            "first weights, order of samples, AdamW, warm-up and clipping: as steelyard train with the same options",
        ),
        left_out=(
            "checkpoints, resuming, loading of weights, dropout that no plan changes, run records and the checks of "
            "steelyard's own runtime",
            *((_BUFFERS.format(plan.num_microbatches),) if plan.num_stages > 1 else ()),
        ),
        usage=(
            f"on every host: {request.torchrun} {stem}.py --data PATH --steps 100, {plan.num_devices} processes in all",
            "the script reads the .json file of its own name beside it, or the one that --plan names",
        ),
    )


def _check(plan: Plan, chain: ModelChain) -> None:
    """Raises `UserError` for a model, or a tensor parallelism of it, that the script has no stock calls for."""
    name, model_type = chain.name, chain.family.model_type
    divided = {chain.kind_of(layer) for layer, strategy in enumerate(plan.strategies) if strategy.tensor_degree > 1}
    words = {_word(path, style) for kind in divided for path, style in _split_styles(chain, kind).items()}
    found = None
    if model_type not in TYPES:
        found = f"pytorch for {name} ({model_type})"
    elif words - STYLES.keys():
        found = f"pytorch for {name} with tp, whose style {min(words - STYLES.keys())!r} is more than stock calls"
    sizes = plan.stage_sizes
    if len(set(sizes)) > 1:
        raise UserError(
            field="--to",
            found=f"pytorch for a plan with stages of {', '.join(map(str, sizes))} devices",
            expected="stages of as many devices each, which are one mesh",
            hint="run the plan with `steelyard train`, or plan with equal stages",
        )
    shared = plan.shared_heads(chain)
    if shared is not None:
        raise UserError(
            field="--to",
            found=f"pytorch for a plan with tp {shared[0]} over {shared[2]} {shared[1]}",
            expected=f"a tp degree that divides them: stock calls let no ranks share {shared[1]}",
            hint=f"plan with --max-tp {shared[2]}, or run the plan with `steelyard train`",
        )
    others = sorted({kind.name for strategy in plan.strategies for kind in strategy.kinds} - KINDS)
    if others:
        raise UserError(
            field="--to",
            found=f"pytorch for a plan with {', '.join(others)}",
            expected="a plan of " + ", ".join(sorted(KINDS)),
            hint="plan with --space paper, or run the plan with `steelyard train`",
        )
    if found is not None:
        raise UserError(
            field="--to",
            found=found,
            expected="a model of " + ", ".join(sorted(TYPES)) + "; experts without tp",
            hint="run the plan with `steelyard train`, or --to torchrun for a script that starts it",
        )


def _styles(chain: ModelChain, kind: LayerKind) -> dict[str, str]:
    """The styles of the modules of a kind under their names in the script, those alone that it has."""
    found: dict[str, str] = {}
    layer = chain.layers.index(chain.kinds.index(kind))
    for path, style in _split_styles(chain, kind).items():
        word = _word(path, style)
        if word in STYLES:
            keyword = style.split(":")[1] if word == "enter" and ":" in style else ""
            found[_path(chain, layer, path)] = f"{STYLES[word]}:{keyword}".rstrip(":")
    return found


def _split_styles(chain: ModelChain, kind: LayerKind) -> Mapping[str, str]:
    return chain.family.of_kind(chain.family.tp, kind) or {}


def _word(path: str, style: str) -> str:
    """The first word of a style; of what is whole on every rank only norms of heads have a stock call."""
    word = style.partition(":")[0]
    return word if word != "whole" or path.endswith("_norm") else f"{word} {path}"


def _path(chain: ModelChain, layer: int, path: str) -> str:
    """The path of a module or parameter of a layer, whose modules have other names in the script."""
    name, dot, rest = path.partition(".")
    return dict(zip(chain.family.modules(layer), _NAMES[chain.kind_of(layer).role], strict=True))[name] + dot + rest


def _plan(plan: Plan, chain: ModelChain) -> dict[str, Any]:
    """The plan without predictions and other plans, with the config of a packaged model."""
    content = plan.model_dump(mode="json", exclude_none=True, exclude={"prediction", *OTHER_PLANS})
    return content | {"model": {"name": plan.model.name, "config": dict(chain.config)}}


def _chain(chain: ModelChain) -> dict[str, Any]:
    """What the script must know of the model beside its config; paths are those of modules and parameters."""
    assert chain.split is not None, "every type that the script knows is split by its structure"
    family, numbers = chain.family, range(chain.num_layers)
    return {
        "hidden_size": chain.hidden_size,
        "vocab_size": chain.vocab_size,
        "rotary": f"{chain.split.blocks.rpartition('.')[0]}.{_ROTARY}",
        "rotary_by_attention": family.rotary_by_attention,
        "fused_attention": family.fused_attention,
        "tied": [[layer, _path(chain, layer, path)] for shared in chain.shared for layer, path in shared.copies],
        "kinds": {
            kind.name: {"role": kind.role.value, "attention": kind.attention, "styles": _styles(chain, kind)}
            for kind in chain.kinds
        },
        "layers": [
            {
                "kind": chain.kind_of(number).name,
                "modules": {_path(chain, number, name): path for name, path in family.modules(number).items()},
            }
            for number in numbers
        ],
    }


TARGET = Target(
    name="pytorch",
    software="torch 2.13 and transformers 5",
    summary="a training script of stock calls that runs the plan, mixes per layer included, without steelyard",
    capabilities=CAPABILITIES,
    write=_write,
)
