"""Megatron-LM's arguments as they stand in scripts: options that change a price, and the reading of scripts.

Names are those of megatron-core 0.19.2. What a script sets and no price depends on is skipped by name; the rest that is
not read is named in a note of ``explain --from``.
"""

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from steelyard.engines.capabilities import block_layers
from steelyard.engines.engine import BALANCED, BALANCING, Engine, Entries, FileSettings, Option, Settings
from steelyard.engines.execution import Module, StateBytes
from steelyard.engines.megatron_models import model_flags
from steelyard.engines.shell_script import ShellScript
from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.plan.strategy import Remat
from steelyard.precision import Precision
from steelyard.schedules import SCHEDULES

FLAGS: Mapping[Precision, Sequence[str]] = {
    "bf16": ("--bf16",),
    "fp16": ("--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale 65536"),
    "fp32": (),
    "fp8": ("--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"),
    "fp8-block": ("--bf16", "--fp8-format e4m3", "--fp8-recipe blockwise"),
    "mxfp8": ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"),
    "nvfp4": ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"),
}
"""Flags of each precision. By default Megatron keeps and reduces gradients in fp16 under fp16, and starts with a loss
scale of 2^32."""
_OF_RECIPE = {flags[-1].partition("-recipe ")[2]: precision for precision, flags in FLAGS.items() if flags}
RECOMPUTED: tuple[Module, ...] = ("layernorm", "moe_act", "mla_up_proj")
"""Modules of selective remat that take little time. Recomputing attention's core saves nothing with a flash kernel."""
FLEXIBLE = ("deepep", "hybridep")
"""Backends of the flexible dispatcher of tokens that are priced."""
IN_BF16 = StateBytes(parameters=2, gradients=2, optimizer=12, zero=1)
"""States with gradients in 16 bits."""
OPTIONS: Mapping[str, Option] = {
    "alltoall": Option(change=lambda engine: engine.executing(dispatcher="all-to-all")),
    "allgather": Option(change=lambda engine: engine.executing(dispatcher="all-gather")),
    "deepep": Option(change=lambda engine: engine.executing(dispatcher="deep"), result="exact"),
    BALANCED: BALANCING,
}
"""Options of everything that has Megatron-Core's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch(Option):
    """Further arguments that change a price."""

    flags: tuple[str, ...]
    """Flags, whose value may be any of several."""


def _keeping(engine: Engine, **states: int) -> Engine:
    assert engine.execution.states is not None, "Megatron's buffers"
    return engine.executing(states=replace(engine.execution.states, **states))


def _overlapping_tensors(engine: Engine) -> Engine:
    """Return the engine with half of tp's communication beside compute, which Megatron does only with sp."""
    means = engine.capabilities
    means = replace(means, modes={**means.modes, "sp": frozenset({True})})
    return replace(engine, capabilities=means).executing(hidden_collectives=0.5)


def _overlapping_experts(engine: Engine) -> Engine:
    """Return the engine with half of the exchanges of experts beside compute, which Megatron does only without full
    remat, and in a pipeline only with chunks (`TransformerConfig.__post_init__`)."""
    chunked = frozenset(name for name, each in SCHEDULES.items() if each.takes_chunks)
    means = replace(
        engine.capabilities,
        remats=engine.capabilities.remats - {Remat.FULL},
        remats_first_blocks=False,
        schedules=engine.capabilities.schedules & chunked,
    )
    return replace(engine, capabilities=means).executing(hidden_exchanges=0.5)


SWITCHES: Mapping[str, _Switch] = {
    "bf16-gradients": _Switch(
        flags=("--grad-reduce-in-bf16",),
        change=lambda engine: _keeping(engine, gradients=2).executing(reduce_bytes=2, accumulation_bytes=2),
        result="rounding",
    ),
    "bf16-moments": _Switch(
        flags=("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"),
        change=lambda engine: _keeping(engine, optimizer=8),
        result="rounding",
    ),
    "fp8-parameters": _Switch(
        flags=("--fp8-param-gather",), change=lambda engine: engine.executing(low_copies=0), result="rounding"
    ),
    "fused-loss": _Switch(
        flags=("--cross-entropy-loss-fusion",),
        change=lambda engine: engine.with_kernels(loss_bytes=(14, 4)),
        result="rounding",
    ),
    "tp-overlap": _Switch(flags=("--tp-comm-overlap",), change=_overlapping_tensors, result="exact"),
    "ep-overlap": _Switch(flags=("--overlap-moe-expert-parallel-comm",), change=_overlapping_experts, result="exact"),
    "cuda-graphs": _Switch(
        flags=("--cuda-graph-impl local|transformer_engine",),
        change=lambda engine: engine.executing(eager_launch=False),
        result="exact",
    ),
}
"""Options of Megatron-LM's script: gradients kept and reduced in bf16, moments in bf16, parameters kept and gathered in
8 bits, a loss that torch compiles (fusions/fused_cross_entropy.py; bytes seen in published runs), half of the
communication of tensor or expert parallelism beside compute (as published runs that say so are priced), and no launches
by the host."""
CONDITIONAL = "conditional"
"""Name under which `arguments` says which options count only under a condition that the script leaves open."""
_OF_LAUNCH = (
    r"(--|\w\.)micro[-_]batch[-_]size\b",
    r"(--|\w\.)((tensor|pipeline)[-_]model[-_]parallel[-_]size|num[-_]layers)\b",
)
"""Options of the command that starts training; those without a size of the batch count if none has it."""
_OLD_METHOD = "activations_checkpoint_method"
_LISTS = ("--recompute-modules",)
"""Options with several values."""
_OPTION = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?|([a-z][\w.]*)=(.*)")
_LAUNCH = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint")
_NOT_PRICED = (
    *("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "ckpt_format"),
    *("average_in_collective", "no_gradient_accumulation_fusion", "outer_dp_sharding_strategy", "bf16", "fp16"),
    *("accumulate_allreduce_grads_in_fp32", "loss_scale", "initial_loss_scale", "min_loss_scale"),
    *("loss_scale_window", "hysteresis", "lr", "seed", "split", "num_workers", "mock_data", "clip_grad"),
    *("init_method_std", "distributed_backend", "no_position_embedding", "use_rotary_position_embeddings"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "use_flash_attn", "no_masked_softmax_fusion", "dataloader_type"),
    *("no_create_attention_mask_in_dataloader", "no_mmap_bin_files", "empty_unused_memory_level", "use_mcore_models"),
    *("use_te_rng_tracker", "group_query_attention", "make_vocab_size_divisible_by", "rotary_percent", "finetune"),
    *("attention_softmax_in_fp32", "async_save", "dist_ckpt_strictness", "framework", "config", "model"),
)
_OF_TRAINING = (
    r"(min_lr|lr|decoupled|train|valid|test|eval|save|load|no_load|no_save|log|tensorboard|wandb|weight_decay|"
    r"(start|end)_weight_decay|adam|data|tokenizer|vocab|merge|tiktoken|exit|timing|profile|manual_gc|"
    r"distributed_timeout|override_opt|use_checkpoint)(_\w+)?"
)
"""Names of arguments of data, learning rates, evaluation, checkpoints and logs."""
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
)
"""Sizes of a model that tell it from another one."""
_PADDING = 0.02
"""Fraction of a vocabulary by which a tokenizer's and a padded one may differ."""
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".txt", ".args")
"""File name suffixes of scripts and of files with arguments."""
YAML = r"(?m)^\s*(--)?tensor[-_]model[-_]parallel[-_]size:\s"
"""Mark of a file with arguments in YAML: Megatron-LM's own (``--yaml-cfg``), of its tests, or of Primus."""
_WITHOUT_PRICE: Mapping[str, tuple[Collection[Any], str, str]] = {
    "optimizer_cpu_offload": (
        (True,),
        "states on the device: an update by the host has no price for Megatron",
        "leave it out, or plan with --offload optimizer for our own runtime",
    ),
    "cpu_offloading": (
        (True,),
        "activations on the device: their offload has no price for Megatron",
        "leave it out, or plan with --offload activations for our own runtime",
    ),
    "use_torch_fsdp2": (
        (True,),
        "Megatron's own sharding: that of torch has no price within Megatron",
        "price it by steelyard price --engine torchtitan",
    ),
    "zero_stage": (
        ("2", "3"),
        "0 or 1: gradients and parameters that DeepSpeed shards within Megatron have no price",
        "price it by steelyard price --engine deepspeed",
    ),
}
"""Arguments that change a price in a way that is unknown: their values, what is expected, and what to do."""
_NARROW = "gradients in fp16 (priced in fp32, as with --accumulate-allreduce-grads-in-fp32)"
_LOOPED = "experts one after another (priced with --moe-grouped-gemm)"


def _check_sizes(entries: Entries, own: Mapping[str, str], chain: ModelChain) -> None:
    for name in _SIZES:
        found = entries.get(name)
        told = own.get(name, "none" if name == "num_experts" and not chain.has_experts else None)
        if found is not None and told is not None and str(found) != told and "$" not in str(found):
            raise UserError(
                field="--from",
                found=f"{name} {found}",
                expected=f"{told}, the value of {chain.name}",
                hint="pass the model that the file trains",
            )
    tokens = str(entries.values.get("vocab_size", ""))
    if tokens.isdigit() and abs(int(tokens) - chain.vocab_size) > _PADDING * chain.vocab_size:
        raise UserError(
            field="--from",
            found=f"vocab_size {tokens}",
            expected=f"about {chain.vocab_size}, the value of {chain.name}",
            hint="pass the model that the file trains",
        )


def _dispatch_options(entries: Entries) -> tuple[str, ...]:
    """Return the options of the engine for experts that the file sets."""
    backend = entries.text("moe_flex_dispatcher_backend", default="deepep")
    deep = "deepep" if backend in FLEXIBLE or entries.get("moe_enable_deepep") else None
    dispatcher = entries.text("moe_token_dispatcher_type")
    named = {"alltoall": "alltoall", "allgather": "allgather", "flex": deep}.get(dispatcher)
    if "moe_token_dispatcher_type" in entries.values and named is None:
        raise UserError(
            field="moe_token_dispatcher_type",
            found=f"{dispatcher} {backend}" if dispatcher == "flex" else dispatcher,
            expected="alltoall, allgather, or flex with deepep or hybridep",
            hint="change it in the file",
        )
    balanced = (BALANCED,) if entries.get("moe_router_force_load_balancing") else ()
    return (*([named] if named else ()), *balanced)


def read_script(entries: Entries, chain: ModelChain, num_devices: int) -> FileSettings:
    """Return the settings of Megatron-LM's arguments with the defaults of its experts."""
    for name, (values, expected, hint) in _WITHOUT_PRICE.items():
        if (value := entries.values.get(name)) in values and name not in entries.values.get(CONDITIONAL, ()):
            shown = "" if value is True else f" {value}"
            raise UserError(field="--from", found=f"--{name.replace('_', '-')}{shown}", expected=expected, hint=hint)
    on = read_switches(SWITCHES, entries)
    is_in_place = entries.get("cross_entropy_fusion_impl") == "te"  # Transformer Engine's loss, as without fusion
    switches = tuple(name for name in on if name != "fused-loss" or not is_in_place)
    found = read(entries, chain, num_devices)
    options, looped = (*found.options, *switches), False
    if chain.has_experts:
        options = options if "moe_token_dispatcher_type" in entries.values else ("allgather", *options)
        looped = "moe_grouped_gemm" not in entries.values
    return replace(found, options=options, unread=(*found.unread, *[_LOOPED] * looped))


def read_switches(switches: Mapping[str, _Switch], entries: Entries) -> list[str]:
    """Return the names of the switches that a file sets."""
    return [name for name, switch in switches.items() if _is_on(switch, entries)]


def _is_on(switch: _Switch, entries: Entries) -> bool:
    """Return whether a file has all flags of a switch, with one of their values if they have values.

    Otherwise they count as not read.
    """
    flags = [flag.removeprefix("--").replace("-", "_").partition(" ") for flag in switch.flags]
    values = entries.values
    is_on = all(name in values and (not few or values[name] in few.split("|")) for name, _, few in flags)
    for name, _, _ in flags if is_on else ():
        entries.get(name)
    return is_on


def _uneven(entries: Entries, chain: ModelChain, pp: int, vpp: int) -> tuple[int, ...]:
    """Return the number of blocks in each part of a pipeline whose ends differ; empty if the file has no such entry."""
    ends = [entries.number_or_none(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    counted = [bool(entries.get(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss")]
    if ends == [None, None] and not any(counted):
        return ()
    blocks, given = len(block_layers(chain)), [each for each in ends if each is not None]
    inner = pp - len(given)
    rest = blocks - sum(given) + sum(counted)
    stages = [rest // max(1, inner)] * pp
    if not inner or rest % inner or any(each % vpp for each in (*given, stages[0])):
        raise UserError(
            field="--from",
            found=f"{blocks} blocks with {', '.join(map(str, given)) or 'no'} of them on the ends, {pp} stages",
            expected="the same number on all other stages and chunks",
            hint="correct the numbers of layers in the file",
        )
    for place, count in ((0, ends[0]), (-1, ends[1])):
        stages[place] = stages[place] if count is None else count
    parts = [stages[part % pp] // vpp for part in range(pp * vpp)]
    parts[0] -= counted[0]
    parts[-1] -= counted[1]
    return tuple(parts)


def own_arguments(chain: ModelChain, seq_len: int) -> dict[str, str]:
    """Return the arguments of a model for Megatron-LM, by name with underscores. Raises as `model_flags`."""
    flags = (flag.partition(" ") for flag in model_flags(chain, seq_len))
    return {option.removeprefix("--").replace("-", "_"): value for option, _, value in flags}


def read(
    entries: Entries,
    chain: ModelChain,
    num_devices: int,
    own_of: Callable[[ModelChain, int], Mapping[str, str]] = own_arguments,
) -> FileSettings:
    """Return the settings that Megatron-LM's arguments or the settings of a Megatron-Bridge recipe are.

    ``own_of`` returns the arguments that such a file has of a model for a sequence length.
    """
    values = entries.values
    entries.skip(*_LAUNCH, *_NOT_PRICED)
    modules = str(values.get("recompute_modules", "")).split()
    entries.skip(*(["recompute_modules"] if {*modules} <= {*RECOMPUTED} else []))
    usual = {
        "attention_backend": ("auto", "flash", "fused"),
        "transformer_impl": ("transformer_engine",),
        "optimizer": ("adam",),
        "cross_entropy_fusion_impl": ("te",),
    }
    entries.skip(*(name for name, known in usual.items() if values.get(name) in known))
    entries.skip_like(_OF_TRAINING)
    seq_len = entries.number_or_none("seq_length", "sequence_length", "seq_len")
    own = own_of(chain, seq_len or 1)
    _check_sizes(entries, own, chain)
    tp, pp, cp, ep = (
        entries.number(f"{word}_model_parallel_size", f"{word}_parallel_size", short)
        for word, short in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp"), ("expert", "ep"))
    )
    ep, parted = _ranks_of_experts(entries, chain, tp, ep)
    parts = _parts_of_layout(entries.text("pipeline_model_parallel_layout"))
    chunks = entries.number("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "vp")
    if (layers := entries.number_or_none("num_layers_per_virtual_pipeline_stage")) is not None:
        chunks = len(block_layers(chain)) // (pp * layers)
    parts = parts or _uneven(entries, chain, pp, chunks)
    shards = entries.text("data_parallel_sharding_strategy", default="optim_grads_params")
    zero = int("use_distributed_optimizer" in values or str(entries.get("zero_stage")) == "1")
    if entries.get("use_megatron_fsdp"):
        zero = {"optim_grads_params": 3, "optim_grads": 2}.get(shards, 1)
    data = num_devices // (tp * pp * cp)
    instances = entries.number("num_distributed_optimizer_instances")
    remat, blocks = _read_remat(entries)
    if remat is Remat.FULL and blocks is None and str(count := values.get("recompute_num_layers", 1)) != "1":
        parted = [*parted, f"recompute_num_layers {count} (priced as 1)"]
    opened = entries.get(CONDITIONAL, default=())
    parted += [
        f"{name} (under a condition that the file leaves open)" for name in opened if not entries.is_skipped(name)
    ]
    narrow = "fp16" in values and "accumulate_allreduce_grads_in_fp32" not in values
    return FileSettings(
        settings=Settings(
            tp=tp,
            cp=cp,
            cp_method="ulysses" if entries.get("cp_comm_type") == "a2a" else "gather",
            pp=pp,
            vpp=len(parts) // pp if parts else chunks,
            ep=ep,
            replicas=instances if zero > 1 else 1,
            zero=zero if data * cp > 1 else 1,
            sp=bool(entries.get("sequence_parallel", default=False)),
            remat=remat,
            remat_blocks=blocks,
            blocks=parts or None,
        ),
        micro_batch=entries.number_or_none("micro_batch_size", "mbs"),
        global_batch=entries.number_or_none("global_batch_size", "gbs"),
        seq_len=seq_len,
        precision=_read_precision(entries) or next((each for each in ("bf16", "fp16") if each in values), "fp32"),
        options=_dispatch_options(entries),
        unread=(*(name for name in entries.unread if name not in own), *[_NARROW] * narrow, *parted),
    )


def _ranks_of_experts(entries: Entries, chain: ModelChain, tp: int, ep: int) -> tuple[int, list[str]]:
    """Return the ranks over which experts are divided, and a note if their tensors are, too, as by default with tp."""
    parts = entries.number("expert_tensor_parallel_size", "etp", default=tp)
    if parts == 1 or not chain.has_experts:
        return ep, []
    is_whole = all(each.num_experts % (ep * parts) == 0 for each in chain.layer_types)
    priced = "whole experts over as many ranks" if is_whole else "1"
    return ep * parts if is_whole else ep, [f"expert_tensor_parallel_size {parts} (priced as {priced})"]


def arguments(text: str) -> Mapping[str, Any]:
    """Return the values of options in a shell script by name with underscores; True for an option without a value.

    Options have the form ``--tensor-model-parallel-size 4`` or, for a Megatron-Bridge recipe,
    ``model.tensor_model_parallel_size=4``. Those of the command that starts training count, or all of the file if none
    has a batch or a degree. Names that count only under an open condition are the value of `CONDITIONAL`.
    """
    try:
        if re.search(YAML, text):
            return _yaml_arguments(text)
        script = ShellScript.read(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    texts = [
        *map(_of_training, _launches(script.commands)),
        *(each for each in script.commands if re.match(r"-|[\w.]+=", each)),
    ]
    if not texts and _launches(script.assigned):
        texts = [*script.assigned, *script.commands]
    found = _options(" ".join(texts))
    conditional = tuple(each for each in _options(" ".join(script.conditional)) if each in found)
    return found | ({CONDITIONAL: conditional} if conditional else {})


def _yaml_arguments(text: str) -> dict[str, Any]:
    """Return the arguments in YAML, of all its sections; those of Primus, which trains in bf16 by default, too."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    found: dict[str, Any] = {}
    sections = [content] if isinstance(content, dict) else []
    sections = [each[name] for each in sections for name in ("MODEL_ARGS", "modules") if name in each] or sections
    while sections:
        section = sections.pop()
        for name, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, dict):
                sections.append(value)
            else:
                found[str(name).removeprefix("--").replace("-", "_")] = value
    if found.get("framework") == "megatron":
        found = {"bf16": not found.get("fp16")} | found
    return {name: value for name, value in found.items() if value is not None and value is not False}


def _launches(texts: Sequence[str]) -> list[str]:
    return next((found for mark in _OF_LAUNCH if (found := [each for each in texts if re.search(mark, each)])), [])


def _of_training(command: str) -> str:
    """Return a command without its launcher's options, which stand before a script in Python."""
    _, script, after = command.partition(".py")
    return after if script and _launches([after]) else command


def _options(text: str) -> dict[str, Any]:
    """Return the values of the options in a command."""
    words = re.sub("[\"']", " ", text).split()
    for place in reversed([place for place, word in enumerate(words) if word in _LISTS]):
        end = next((n for n in range(place + 1, len(words)) if not words[n].isidentifier()), len(words))
        words[place + 1 : end] = [" ".join(words[place + 1 : end])]
    found: dict[str, Any] = {}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if option := _OPTION.fullmatch(word):
            given = option[2] if option[1] else option[4]
            name = (option[1] or option[3]).rpartition(".")[2].replace("-", "_")
            is_alone = given is None and re.match(r"-|[\w.]+\+?=", after) is not None
            value = given if given is not None else True if is_alone else after
            found[name] = {"true": True, "false": False, "null": None, "none": None}.get(str(value).lower(), value)
    return {name: value for name, value in found.items() if value is not None and value is not False}


def _parts_of_layout(layout_text: str) -> tuple[int, ...]:
    """Return the number of blocks of each part in ``--pipeline-model-parallel-layout``; empty if it is not given."""
    spelt = layout_text.replace("\\", "")
    spelt = re.sub(r"\(([^)]*)\)\*(\d{1,3})", lambda part: part[1] * int(part[2]), spelt)
    spelt = re.sub(r"([Etm|L])\*(\d{1,3})", lambda part: part[1] * int(part[2]), spelt)
    return tuple(part.count("t") for part in spelt.split("|")) if spelt else ()


def _read_precision(entries: Entries) -> str:
    """Return the precision of products in 8 or 4 bits by its recipe, any other 8-bit recipe as fp8; empty if none."""
    for bits, usual in (("fp4", "nvfp4"), ("fp8", "fp8")):
        if entries.text(f"{bits}_format", bits):
            return _OF_RECIPE.get(entries.text(f"{bits}_recipe", default="none"), usual)
    return ""


def _read_remat(entries: Entries) -> tuple[Remat, int | None]:
    """Return the remat of blocks, and the number of recomputed blocks of each part; None for all."""
    is_old = entries.get("checkpoint_activations") or entries.get(_OLD_METHOD)  # before 2022-06
    usual = "selective" if entries.get("recompute_activations") else "full" if is_old else ""
    granularity = entries.text("recompute_granularity", default=usual)
    method = entries.text("recompute_method", _OLD_METHOD, default="uniform")
    count = entries.number_or_none("recompute_num_layers", "activations_checkpoint_num_layers")
    if granularity != "full":
        return Remat.SELECTIVE if granularity == "selective" else Remat.NONE, None
    return Remat.FULL, count if method == "block" else None
