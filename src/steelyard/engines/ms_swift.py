"""A plan as ms-swift's arguments for Megatron (``megatron pt`` and ``megatron sft``), in a script.

Names are those of the package ms-swift 4.6.0 (``swift/megatron/arguments/megatron_args.py``), which are Megatron-LM's
with underscores; switches take true or false. ms-swift starts the processes itself, from NNODES,
NPROC_PER_NODE, NODE_RANK and MASTER_ADDR, and builds the model from its Hugging Face config
(modelscope/mcore-bridge, ``config/parser.py`` at 00e6df7), except the entries in `_LOST`. It is a front end of
`steelyard.engines.megatron`, which defines its plans and models and their execution.
"""

import shlex
from typing import Any

from steelyard.engines import megatron
from steelyard.engines.engine import options_in
from steelyard.engines.writing import Draft, Request, Target, UniformPlan
from steelyard.errors import UserError

_BALANCING = ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff")
"""Model flags that ms-swift does not read from the model's config."""
_LOST = {"--window-size": "sliding_window", "--moe-layer-freq": "blocks without experts"}
"""Model flags that ms-swift neither reads from the config nor has as arguments, with their names in messages."""


def _write(request: Request) -> Draft:
    view = UniformPlan.of(request.plan)
    chain = request.plan.chain()
    megatron.refuse_cut_token("ms-swift", chain, view.tp)
    flags = megatron.model_flags(chain, view.seq_len)
    lost = next((_LOST[option] for option in (flag.partition(" ")[0] for flag in flags) if option in _LOST), None)
    if lost is not None:
        raise UserError(
            field="--to",
            found=f"ms-swift for {chain.name}, whose config sets {lost}",
            expected="a model with full attention, and with experts in every block or in none",
            hint="export --to megatron, which supports it",
        )
    if view.precision not in ("bf16", "fp32", "fp8"):
        raise UserError(
            field="--to",
            found=f"ms-swift for a plan in {view.precision}",
            expected="bf16, fp32 or fp8",
            hint="export --to megatron, which supports it",
        )
    balancing = [flag for flag in flags if flag.startswith(_BALANCING)]
    return Draft(
        files=(("swift.sh", _script(view, request, balancing)),),
        left_out=(
            f"the model: MODEL is an ID or folder with the config of {request.plan.model.name}",
            "data, learning rate and number of steps: pass them as arguments of the script",
        ),
        launch=f"{request.variables}MODEL=NAME bash swift.sh --dataset NAME --train_iters 1000 --lr 3e-4",
        usage=("for DeepSpeed instead: export --to deepspeed, and swift sft --deepspeed ds_config.json",),
    )


def _script(view: UniformPlan, request: Request, balancing: list[str]) -> str:
    options = options_in(request.plan.engine)
    arguments: dict[str, Any] = {
        "recompute_granularity": "none",
        **megatron.attributes(
            [*megatron.parallel_flags(view, options), *megatron.remat_flags(view, request.plan.chain()), *balancing]
        ),
        "micro_batch_size": view.microbatch_per_rank,
        "global_batch_size": view.global_batch,
        "max_length": view.seq_len,
        "packing": True,
        "bf16": view.precision != "fp32",
        "accumulate_allreduce_grads_in_fp32": True,
        **({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"} if view.precision == "fp8" else {}),
    }
    cluster = request.cluster
    nodes, devices = (cluster.num_nodes, cluster.devices_per_node) if cluster else (1, "")
    needed = [
        ': "${MODEL:?set MODEL to the model, an id or a folder}"',
        f'export NNODES="${{NNODES:-{nodes}}}"',
        f'export NPROC_PER_NODE="${{NPROC_PER_NODE:-{devices}}}"'
        if devices
        else ': "${NPROC_PER_NODE:?set NPROC_PER_NODE to the devices of a host}"',
    ]
    if cluster and nodes > 1:
        needed += [
            ': "${NODE_RANK:?set NODE_RANK to the number of this host, from 0}"',
            ': "${MASTER_ADDR:?set MASTER_ADDR to the first host}"',
        ]
    lines = ["#!/bin/bash", "set -euo pipefail", *needed, "", 'megatron pt --model "$MODEL" \\']
    lines += [f"    --{key} {_word(value)} \\" for key, value in arguments.items()]
    return "\n".join([*lines, '    "$@"']) + "\n"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))


TARGET = Target(
    name="ms-swift",
    software="ms-swift 4.6.0",
    summary="swift.sh: arguments of megatron pt, which drives Megatron-Core",
    write=_write,
    weights="--model reads the Hugging Face format and --save_safetensors true writes it; megatron export converts",
    routers=megatron.MEGATRON.targets[0].routers,
)
