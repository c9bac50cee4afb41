"""A plan as a script of stock PyTorch calls: DeviceMesh, parallelize_module, fully_shard, checkpoint, pipelining.

The script is `scripts/train_plan.py`, one file for every plan, copied as it is: no text of a plan or of a config ever
becomes code. Beside it lies what it reads, in JSON: the plan with the model's config, and what the family says of the
model's parts. It trains decoders with the stock modules that tensor parallelism has, on the same samples and from the
same first weights as `steelyard train`.
"""

import json
import re
from pathlib import Path
from typing import Any

from steelyard.errors import UserError
from steelyard.export.target import Draft, Request, Target
from steelyard.model.chain import ModelChain
from steelyard.model.decoder import embed, project, project_capped, run_block
from steelyard.model.families import FAMILIES
from steelyard.model.family import Family, LayerKind, LayerRole
from steelyard.plan.capabilities import Capabilities
from steelyard.plan.plan import OTHER_PLANS, Plan
from steelyard.units import format_plural

SCRIPT = Path(__file__).parent / "scripts" / "train_plan.py"
"""What the export copies."""
MEANS = Capabilities(mixes_layers=True)

KINDS = frozenset({"dp", "fsdp", "tp"})
"""Kinds of parallelism that the script carries out."""
STYLES = frozenset({"colwise", "rowwise", "gather", "sequence", "sequence_local", "vocabulary", "logits"})
"""Styles of families that the script knows, by the first word of their name."""
_BUFFERS = "memory as predicted: every stage has buffers for what it exchanges of all {} microbatches of a step"
SPLIT_TYPES = frozenset(("deepseek_v3",))
"""The types without a family whose blocks the script gives what they read, as the model does."""
_NAMES = {LayerRole.EMBEDDING: ("embedding",), LayerRole.BLOCK: ("block",), LayerRole.HEAD: ("norm", "output")}
"""What the script calls the modules of a layer, in their order."""
_RUNS = frozenset({embed, run_block, project, project_capped})
"""How layers run that the script knows."""


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
    name, family = chain.name, chain.family
    divided = {chain.kind_of(layer) for layer, strategy in enumerate(plan.strategies) if strategy.tensor_degree > 1}
    words = {
        style.partition(":")[0] for kind in divided for path, style in _styles(family, kind).items() if path != "*"
    }
    found = None
    if not _is_known(family):
        found = f"pytorch for {name} ({family.model_type})"
    elif words - STYLES:
        found = f"pytorch for {name} with tp, whose style {min(words - STYLES)!r} is more than stock calls"
    sizes = plan.stage_sizes
    if len(set(sizes)) > 1:
        raise UserError(
            field="--to",
            found=f"pytorch for a plan with stages of {', '.join(map(str, sizes))} devices",
            expected="stages of as many devices each, which are one mesh",
            hint="run the plan with `steelyard train`, or plan with equal stages",
        )
    shared = _shared(plan, chain)
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
        known = sorted({each.model_type for each in FAMILIES.values() if _is_known(each)} | SPLIT_TYPES)
        raise UserError(
            field="--to",
            found=found,
            expected="a model of " + ", ".join(known) + "; experts without tp",
            hint="run the plan with `steelyard train`, or --to torchrun for a script that starts it",
        )


def _shared(plan: Plan, chain: ModelChain) -> tuple[int, str, int] | None:
    """A tp degree of a plan, and the name and number of what its ranks, being more, share; None where they do not."""
    for layer, strategy in enumerate(plan.strategies):
        kind = chain.kind_of(layer)
        for name, size in kind.tp_divides:
            if name in kind.tp_shares and size % strategy.tensor_degree:
                return strategy.tensor_degree, name, size
    return None


def _is_known(family: Family) -> bool:
    return family.model_type in SPLIT_TYPES or (family.rotary is not None and set(family.run.values()) <= _RUNS)


def _styles(family: Family, kind: LayerKind) -> dict[str, str]:
    return dict(family.of_kind(family.tp, kind) or {})


def _path(chain: ModelChain, layer: int, path: str) -> str:
    """The path of a module or parameter of a layer, whose modules have their names in the script."""
    if chain.split is None:
        return path
    name, dot, rest = path.partition(".")
    names = zip(chain.family.modules(chain.layout, layer), _NAMES[chain.kind_of(layer).role], strict=True)
    return dict(names)[name] + dot + rest


def _plan(plan: Plan, chain: ModelChain) -> dict[str, Any]:
    """The plan without predictions and other plans, with the config of a packaged model."""
    content = plan.model_dump(mode="json", exclude_none=True, exclude={"prediction", *OTHER_PLANS})
    return content | {"model": {"name": plan.model.name, "config": dict(chain.config)}}


def _chain(chain: ModelChain) -> dict[str, Any]:
    """What the script must know of the model beside its config; paths are those of modules and parameters."""
    family, numbers = chain.family, range(chain.num_layers)
    return {
        "hidden_size": chain.hidden_size,
        "vocab_size": chain.vocab_size,
        "rotary": f"{chain.split.blocks.rpartition('.')[0]}.rotary_emb" if chain.split else family.rotary,
        "rotary_by_attention": family.rotary_by_attention,
        "fused_attention": family.fused_attention,
        "tied": [[layer, _path(chain, layer, path)] for shared in chain.shared for layer, path in shared.copies],
        "kinds": {
            kind.name: {"role": kind.role.value, "attention": kind.attention, "styles": _styles(family, kind)}
            for kind in chain.kinds
        },
        "layers": [
            {
                "kind": chain.kind_of(number).name,
                "modules": {
                    _path(chain, number, name): path for name, path in family.modules(chain.layout, number).items()
                },
            }
            for number in numbers
        ],
    }


TARGET = Target(
    name="pytorch",
    software="torch 2.13 and transformers 5",
    summary="a training script of stock calls that runs the plan, mixes per layer included, without steelyard",
    capabilities=MEANS,
    write=_write,
)
