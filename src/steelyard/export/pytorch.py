"""A plan as a script of stock PyTorch calls: DeviceMesh, parallelize_module, fully_shard, checkpoint, pipelining.

The script runs every plan of a decoder of the Llama kind, mixes of strategies per layer included, on the same samples
and from the same first weights as `steelyard train`. It has what the plan needs and no more: a plan without a pipeline
gives a script without one.
"""

import json
import re
from dataclasses import dataclass

from steelyard.errors import UserError
from steelyard.export import pytorch_parts as parts
from steelyard.export.target import Draft, Request, Target
from steelyard.model.chain import ModelChain
from steelyard.plan.means import Means
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Parallelism, Remat, Strategy, mesh_axes
from steelyard.units import format_plural

MEANS = Means(mixes_layers=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Modules:
    """Names of the parts of an unmodified ``…ForCausalLM`` module of transformers."""

    body: str = "model"
    embedding: str = "embed_tokens"
    blocks: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    attention_keyword: str | None = "hidden_states"
    mlp: str = "mlp"
    block_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")


_MODULES = {
    **{model_type: _Modules() for model_type in ("llama", "mistral", "qwen2", "qwen3")},
    "gpt_neox": _Modules(
        body="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        attention="attention",
        attention_keyword=None,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """Which parts a plan needs."""

    pipeline: bool
    tensor: bool
    switch: bool
    remats: frozenset[Remat]
    tied: bool

    @classmethod
    def of(cls, plan: Plan, chain: ModelChain) -> "_Needs":
        return cls(
            pipeline=plan.num_stages > 1,
            tensor=any(strategy.tp > 1 for strategy in plan.strategies),
            switch=len({strategy.layout for strategy in plan.strategies}) > 1,
            remats=frozenset(strategy.remat for strategy in plan.strategies),
            tied=chain.tied_embeddings,
        )


def _write(request: Request) -> Draft:
    plan = request.plan
    chain = plan.chain()
    modules = _modules_of(chain)
    name = "train_" + re.sub(r"\W+", "_", plan.model.name.lower()).strip("_") + ".py"
    counts = set(plan.strategies)
    microbatches = format_plural(plan.num_microbatches, "microbatch", "microbatches")
    return Draft(
        files=((name, _script(plan, chain, modules)),),
        carried=(
            f"every layer's own strategy ({format_plural(len(counts), 'strategy', 'strategies')} in all), "
            f"{format_plural(plan.num_stages, 'stage')}, {microbatches}"
            + (f", {plan.schedule}" if plan.num_stages > 1 else ""),
            f"precision: {plan.precision}",
            "first weights, order of samples, AdamW, warm-up and clipping: as steelyard train with the same options",
        ),
        left_out=("checkpoints, resuming, loading of weights, run records and the checks of steelyard's own runtime",),
        usage=(
            f"torchrun --nproc-per-node DEVICES {name} --data PATH --steps 100, {plan.num_devices} processes in all",
        ),
    )


def _modules_of(chain: ModelChain) -> _Modules:
    modules = _MODULES.get(chain.family.model_type)
    if modules is None:
        raise UserError(
            field="--to",
            found=f"pytorch for {chain.name} ({chain.family.model_type})",
            expected="a model of " + ", ".join(sorted(_MODULES)),
            hint="run the plan with `steelyard train`, or --to torchrun for a script that starts it",
        )
    return modules


def _script(plan: Plan, chain: ModelChain, modules: _Modules) -> str:
    needs = _Needs.of(plan, chain)
    sections = [
        _imports(plan, needs),
        parts.LAYER,
        _constants(plan, chain, modules),
        parts.MESHES,
        *([parts.SWITCH] if needs.switch else []),
        *([parts.TENSOR_PARALLEL] if needs.tensor else []),
        parts.SHARD_DATA,
        *([parts.SELECTIVE] if Remat.SELECTIVE in needs.remats else []),
        _chain_layer(needs),
        parts.LAYER_LOOP.replace("{loop}", parts.LOOP_SWITCHING if needs.switch else parts.LOOP),
        _build(needs),
        *([parts.TIED] if needs.tied else []),
        _step(plan, needs),
        parts.DATA,
        _train(plan, needs),
    ]
    return "\n\n".join(section if section.endswith("\n") else section + "\n" for section in sections)


def _imports(plan: Plan, needs: _Needs) -> str:
    text = parts.IMPORTS
    if needs.pipeline:
        text += parts.IMPORT_PIPELINE.format(schedule=plan.pipeline.schedule.torch_name)
    text += parts.IMPORT_TENSOR if needs.tensor or needs.switch else "from torch.distributed.tensor import DTensor\n"
    if needs.tensor:
        is_parallel = plan.strategies[-1].tp > 1
        text += parts.IMPORT_TP.replace("{loss_parallel}", "    loss_parallel,\n" if is_parallel else "")
    if Remat.SELECTIVE in needs.remats:
        text += parts.IMPORT_SELECTIVE
    elif Remat.FULL in needs.remats:
        text += parts.IMPORT_REMAT
    return text + parts.IMPORT_HF


def _constants(plan: Plan, chain: ModelChain, modules: _Modules) -> str:
    compute = "torch.bfloat16" if plan.precision == "bf16" else "None"
    last = chain.num_layers - 1
    tied = [("0", "embedding.weight"), (str(last), "output.weight")] if chain.tied_embeddings else []
    config = json.dumps(dict(chain.config), indent=4)
    ranges = ", ".join(f"({part.first_layer}, {part.last_layer})" for part in plan.stages)
    lines = [
        "# the model, as Hugging Face's config.json has it",
        f"CONFIG = json.loads('''{config}''')",
        "# its parts in transformers",
        f'BODY, EMBEDDING, BLOCKS, FINAL_NORM = "{modules.body}", "{modules.embedding}", "{modules.blocks}", '
        f'"{modules.final_norm}"',
        f'ATTENTION, MLP = "{modules.attention}", "{modules.mlp}"',
        f"ATTENTION_KEYWORD = {_quoted(modules.attention_keyword)}",
        f"BLOCK_NORMS = {json.dumps(list(modules.block_norms))}",
        f"SLIDING = {_slides(chain)}",
        "# the batch",
        f"SEQ_LEN, GLOBAL_BATCH, NUM_MICROBATCHES = {plan.seq_len}, {plan.global_batch}, {plan.num_microbatches}",
        f"COMPUTE_DTYPE = {compute}  # parameters are kept, and gradients reduced, in fp32",
        "# stages of the pipeline, ranks of each, and the small axes (prime factors) of those ranks",
        f"NUM_STAGES, STAGE_SIZE = {plan.num_stages}, {plan.stages[0].num_devices}",
        f"STAGE_AXES = {list(mesh_axes(plan.stages[0].num_devices)) or [1]}",
        "# first and last layer of each part of the pipeline; part k runs on stage k mod NUM_STAGES",
        f"PARTS = [{ranges}]",
        "# layers that hold the same matrix, and its path in them",
        f"TIED_COPIES = {json.dumps(tied).replace('[[', '[(').replace(']]', ')]').replace('], [', '), (')}",
        "# layer 0 is the embedding, the last one the head with the loss",
        "LAYERS = [",
        *_layer_lines(plan),
        "]",
    ]
    return "\n".join(lines) + "\n"


def _layer_lines(plan: Plan) -> list[str]:
    lines = []
    for part in plan.stages:
        for run in part.runs:
            count = run.layers[1] - run.layers[0] + 1
            repeated = f"*[{_layer(run.strategy)}] * {count}" if count > 1 else _layer(run.strategy)
            lines.append(f"    {repeated},  # {run.layers[0]} to {run.layers[1]}: {run.strategy}")
    return lines


def _layer(strategy: Strategy) -> str:
    arguments = [f"data={strategy.data_degree}", f"tensor={strategy.tp}", f"shard={strategy.fsdp > 1}"]
    if strategy.fsdp > 1 and strategy.zero == 2:
        arguments.append("free=False")
    if strategy.sp:
        arguments.append("sp=True")
    if len(strategy.levels) > 1 and strategy.levels[-1].kind is not Parallelism.TP:
        arguments.append("tensor_outside=True")
    if strategy.remat is not Remat.NONE:
        arguments.append(f'remat="{strategy.remat}"')
    return f"Layer({', '.join(arguments)})"


def _slides(chain: ModelChain) -> bool:
    """Whether blocks attend to a window; raises `UserError` where only some do."""
    kinds = set(chain.config.get("layer_types") or [])
    if len(kinds) > 1:
        raise UserError(
            field="--to",
            found=f"pytorch for {chain.name}, whose blocks differ in attention ({', '.join(sorted(kinds))})",
            expected="blocks that all attend alike",
            hint="run the plan with `steelyard train`, or --to torchrun for a script that starts it",
        )
    if kinds:
        return kinds == {"sliding_attention"}
    return bool(chain.config.get("sliding_window")) and chain.config.get("use_sliding_window") is not False


def _chain_layer(needs: _Needs) -> str:
    head = parts.CHAIN_LAYER_HEAD.replace("{loss}", parts.LOSS_TP if needs.tensor else parts.LOSS)
    if Remat.SELECTIVE in needs.remats:
        return head + parts.FORWARD_SELECTIVE
    return head + (parts.FORWARD_FULL if Remat.FULL in needs.remats else parts.FORWARD_PLAIN)


def _build(needs: _Needs) -> str:
    tensor = (
        '            if how.tensor > 1:\n                shard_tensors(module, role, how, mesh["tensor"], config)\n'
    )
    text = parts.BUILD.replace("{tensor}", tensor if needs.tensor else "")
    return text.replace("{untie}", parts.UNTIE if needs.tied else "").replace("{tie}", parts.TIE if needs.tied else "")


def _step(plan: Plan, needs: _Needs) -> str:
    if not needs.pipeline:
        return parts.STEP_ONE_STAGE
    schedule = plan.pipeline.schedule
    stages = "stages" if schedule.takes_chunks else "stages[0]"
    return parts.STEP_PIPELINE.replace("{schedule}", schedule.torch_name).replace("{stages}", stages)


def _train(plan: Plan, needs: _Needs) -> str:
    is_parallel = plan.strategies[-1].tp > 1
    text = parts.TRAIN.replace("{run}", parts.RUN_LOSS_PARALLEL if is_parallel else parts.RUN)
    text = text.replace("{stage_mesh}", "build_stage_mesh(device_type)" if needs.switch else "None")
    text = text.replace("{pair}", "    pair = tied_pair()\n" if needs.tied else "")
    return text.replace("{tied}", "        sum_tied_gradients(layers, pair)\n" if needs.tied else "")


def _quoted(text: str | None) -> str:
    return "None" if text is None else f'"{text}"'


TARGET = Target(
    name="pytorch",
    software="torch 2.13 and transformers 5",
    summary="a training script of stock calls that runs the plan, mixes per layer included, without steelyard",
    means=MEANS,
    write=_write,
)
