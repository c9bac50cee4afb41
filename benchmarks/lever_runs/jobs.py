r"""Turns a row into a priced job, or into the reason why not.

Nothing is guessed: a row that lacks a size, a batch or a length is skipped, and so is one with a lever that the product
has not.

**Lengths.** Memory is that of the longest batch: ``seq_len``, to which texts are cut or padded. Time is that of the
mean batch. Where texts are padded to the longest of a batch and the notes say how many tokens they have, that is their
mean (peft sorts by length before it makes batches), or, where mean $m$ and deviation $s$ are told, the mean over
batches of the longest text of a Weibull distribution with these, texts longer than ``seq_len`` left out (ms-swift's
``truncation_strategy delete``, its default). For the one set of texts told so, of which the longest has 19,548 tokens,
it expects 18,600 of the longest of 5,000; a lognormal distribution 29,700. Where they say nothing there is no time.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lever_runs.frameworks import OUR_LOSS, Framework, framework_of
from lever_runs.models import config_of, targets_of
from lever_runs.rows import Row
from steelyard.cost.job import Job
from steelyard.engines.execution import StateBytes
from steelyard.errors import UserError
from steelyard.hardware import Cluster, parse_cluster
from steelyard.hardware.files import find_device
from steelyard.levers import Levers
from steelyard.levers.float8 import Float8
from steelyard.levers.train import KINDS, LORA
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.strategy import Remat
from steelyard.planning.job import job_of
from steelyard.planning.request import changed_chain, make_request
from steelyard.planning.settings import Settings
from steelyard.profiles.profile import LayerProfile
from steelyard.profiles.shapes import Affine

_DEVICES: Mapping[tuple[str, str], str] = {
    ("A100", "40"): "a100-40gb",
    ("A100", "80"): "a100-80gb",
    ("A100", ""): "a100-80gb",
    ("A100-SXM4-40GB", "40"): "a100-40gb",
    ("A100-SXM4-80GB", "80"): "a100-80gb",
    ("A100 80GB PCIe", "80"): "a100-pcie-80gb",
    ("A10G", "24"): "a10g",
    ("B200", "180"): "b200-180gb",
    ("GeForce RTX 4090", "24"): "rtx-4090",
    ("GB200", ""): "gb200-186gb",
    ("H100", ""): "h100-80gb",
    ("H100", "80"): "h100-80gb",
    ("H100", "95"): "h100-96gb-hbm2e",
    ("H200", "141"): "h200-141gb",
    ("L40S", "48"): "l40s",
    ("MI300X", "192"): "mi300x",
    ("RTX 3090", "24"): "rtx-3090",
    ("RTX 4070 Ti SUPER", "16"): "rtx-4070-ti-super",
    ("RTX 4090", "24"): "rtx-4090",
    ("RTX A6000", "48"): "rtx-a6000",
    ("RTX PRO 6000", "96"): "rtx-pro-6000",
    ("T4", "16"): "t4",
    ("V100", "16"): "v100-16gb",
}
_LAPTOP = {("GeForce RTX 4090 Laptop GPU", "16"): ("rtx-4090", 16_076)}
"""Cards that the catalogue has not, by another of the same chip and their memory in MiB: their memory alone is
predicted."""
_ANY = "h200-141gb"
"""The device where none is stated: its memory alone is predicted, and not whether it fits."""
_ADAPTERS = ("lora", "qlora", "rslora", "dora", "lora+embeddings")
_KINDS: Mapping[str, str] = {"bone": "miss"}
"""Kinds of adapters that peft has under another name by now."""
_SAME_PRODUCTS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("bdlora", "lily", "psoft", "tinylora", "unilora", "vblora"), ("lora", "r")),
    "adalora": ("lora", "init_r"),
    "waveft": ("fourierft", "n_frequency"),
}
"""Kinds of adapters that the runtime refuses, by one of the same products, and the setting that has its rank: their
memory alone, since what makes their matrices (entries of a bank, a mask, wavelets) takes time that nothing prices."""
PROMPTS = ("prompt_tuning", "p_tuning", "prefix_tuning")
"""Kinds that train virtual tokens: all layers stay as they are, and gradients reach the embedding, as they do where a
first norm is trained. Prompts make texts longer; prefixes make keys alone longer, which is left out."""
_FIRST_NORM = "ln_tuning:targets=layers.0.input_layernorm"
_PROMPT_BYTES = 4 * (1 + 2)
"""Bytes of a parameter of a prompt or of its encoder in fp32, with moments: its gradient comes last."""
_OF_VALUES = ("random_loc_seed", "scaling", "eps", "d_initial", "init_scale", "delora_lambda", "save_projection")
"""Settings that change values alone; without them rows share a trace."""
_EMBEDDINGS = "embed_tokens+lm_head"
"""What is trained beside LoRA with its embeddings, in names of Llama, as which Qwen is built."""
_OFFLOADS = ("optimizer", "activations")
"""What the lever moves as the rows mean it: moments or what is saved, with gradients and masters on the device."""
_FIRST_MATRIX_RESTS = "lora-fa"
"""An optimizer of LoRA's second matrices, which decomposes the first ones in each step: its time is not priced."""
_OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("", "adam", "adamw", "adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw8bit", "adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw-8bit"),
    **dict.fromkeys(("adamw8bit (torchao)", "adamw8bit (bitsandbytes)", "adam8bit (bitsandbytes)"), "adamw-8bit"),
    **dict.fromkeys(("adamw4bit (torchao)", "adamw_torch_4bit"), "adamw-4bit"),
    "adamwfp8 (torchao)": "adamw-8bit",
    _FIRST_MATRIX_RESTS: "adamw",
    **dict.fromkeys(("adamw4bit (lpmm)", "adamw4bit rank-1 (lpmm)"), "adamw-4bit"),
    "adafactor": "adafactor",
}
"""Low-bit optimizers by the width of their moments, of which blocks have a scale each."""
_PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("", "bf16 or fp16 (not stated)", "16 bit", "bf16 amp"), "bf16"),
    "fp16 amp": "fp16",
    "fp8-tensorwise (current scaling)": "fp8",
}
_BASES: Mapping[tuple[str, str], str] = {
    ("bnb nf4", "4"): "nf4",
    ("bnb nf4 double quantization", "4"): "nf4",
    ("bnb", "4"): "nf4",
    ("bnb", "8"): "int8",
    ("bnb int8", "8"): "int8",
    ("gptq int4", "4"): "nf4",
    ("gptq", "4"): "nf4",
    ("gptq", "8"): "int8",
    ("nf4 (torchao)", "4"): "nf4",
}
"""The base of as many bits: GPTQ's weights have scales of their own, and kernels that are not priced."""
_STATED: Mapping[str, Mapping[str, str]] = {
    **{source: {"seq_len": "257", "seq_len_kind": "padded"} for source in ("ao_optim_vit", "ao_offload")},
    "msswift_tuners": {"batch_per_gpu": "1", "grad_accum": "16", "seq_len": "2048"},
}
"""What the script of a source says where its rows do not: images cut to 224 pixels, in patches of 14, and a class token
(pytorch/ao, benchmarks/benchmark_low_bit_adam.py, 03cf0ad); batch, accumulation and length of all experiments
(modelscope/ms-swift, scripts/benchmark/config/tuner.json, 87fc380)."""
_MIB = 2**20
_DRAWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Why a row is not predicted."""

    reason: str


class _SkipError(Exception):
    """A reason to skip a row; never leaves this module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row as the cost model sees it."""

    row: Row
    config: Mapping[str, Any]
    cluster: Cluster
    framework: Framework
    levers: tuple[tuple[str, str], ...]
    settings: Settings
    precision: str
    global_batch: int
    seq_len: int
    """Of the longest batch."""
    mean_len: float | None
    """Of the mean batch; None where it is not known."""
    tokens: float | None
    """That a step counts in the row's rate, of all devices; None for those of the mean batch."""
    has_rates: bool
    """Whether the device is in the catalogue."""
    parts: int
    """Devices that work one after another, with a part of the layers each; the config is of one part."""
    prompt_bytes: int
    """Of prompts, prefixes or what encodes them, with their states."""

    @property
    def blocks_bytes(self) -> float:
        """Bytes that the allocator reserves for batches of other lengths than the longest."""
        entries: float = self.settings.micro_batch * (self.mean_len or 0.0) * self.config.get("vocab_size", 0)
        return self.framework.blocks_of_lengths * 4 * entries

    def job(self, seq_len: int) -> Job:
        """The job at a length, with what the framework's modules save beyond ours."""
        levers = Levers.of(dict(self.levers))
        is_closed = self.framework.engine.execution.kernels is not None
        of_model = Levers(tuple(each for each in levers if not (is_closed and isinstance(each, Float8))))
        chain = _changed(json.dumps(dict(self.config), sort_keys=True), of_model)
        request = make_request(chain, self.cluster, global_batch=self.global_batch, seq_len=seq_len, memory_margin=0.0)
        engine = self.framework.engine
        states = engine.execution.states
        if isinstance(states, StateBytes) and self.settings.zero == 0:
            engine = replace(engine, execution=replace(engine.execution, states=replace(states, zero=0)))
        request = replace(request, levers=levers, engine=engine)
        job = job_of(replace(request, precision=self.precision))  # type: ignore[arg-type]
        return job if engine.execution.kernels is not None else self._as_framework(job)

    def _as_framework(self, job: Job) -> Job:
        roles = {each.name: each.role for each in job.chain.layer_types}
        layers = []
        for layer in job.profile.layers:
            if roles[layer.kind] is LayerRole.HEAD:
                layers.append(self._head(layer, job))
            else:
                layers.append(self._block(layer, job) if roles[layer.kind] is LayerRole.BLOCK else layer)
        return job.on(profile=job.profile.model_copy(update={"layers": tuple(layers)}))

    def _head(self, layer: LayerProfile, job: Job) -> LayerProfile:
        entries = job.seq_len * job.chain.vocab_size
        if "loss" in dict(self.levers):
            kept, transient = self.framework.chunked_logits_bytes, 0
        else:
            (kept, peak), (ours, our_peak) = self.framework.loss_bytes, OUR_LOSS
            kept, transient = kept - ours, (peak - kept) - (our_peak - ours)
        layer = _with_more(layer, saved=kept * entries, transient=transient * entries)
        matrix = job.chain.vocab_size * job.chain.hidden_size
        if not (self.framework.quantizes_head and dict(self.levers).get("base")):
            return self._scaled(layer)
        layer = _with_constant(layer, job.compute_bytes * matrix)
        fewer = {name: getattr(layer, name) - matrix for name in ("num_params", "frozen_params")}
        return self._scaled(layer.model_copy(update=fewer | {"buffer_bytes": layer.buffer_bytes + int(_NF4 * matrix)}))

    def _block(self, layer: LayerProfile, job: Job) -> LayerProfile:
        config, framework = self.config, self.framework
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        ffn = config.get("intermediate_size") or 4 * hidden
        groups = 1 if config.get("multi_query") else config.get("num_key_value_heads") or heads
        more = 0
        if framework.has_fused_qkv:
            more += 2 * width * (2 * heads if groups == heads else 2 * (heads - groups))
        if framework.dropout:
            more -= _DROPPED * hidden * max(0, sum(name in dict(self.levers)["train"] for name in _QKV) - 1)
        if not framework.keeps_adapter_inputs:  # of which each adapter has a copy in fp32
            more -= 4 * hidden * sum(name in dict(self.levers)["train"] for name in _QKV)
        if self.settings.remat is Remat.FULL:
            layer = _with_stream(layer, (framework.stream_bytes - job.compute_bytes) * hidden * job.seq_len)
        if dict(self.levers).get("base"):
            more += framework.kept_quantized_inputs * 2 * (3 * hidden + ffn)
        scores = heads * job.seq_len**2 if config.get("attn_implementation") == "eager" else 0
        transient = framework.eager_score_bytes * scores
        return self._scaled(_with_more(layer, saved=more * job.seq_len, transient=transient))

    def _scaled(self, layer: LayerProfile) -> LayerProfile:
        """Returns it with scales in fp32, where the framework has them so."""
        if not (self.framework.single_scales and dict(self.levers).get("base") == "nf4"):
            return layer
        return layer.model_copy(update={"buffer_bytes": int(layer.buffer_bytes * (1 / 2 + 4 / 64) / _NF4)})


@cache
def _changed(config: str, levers: Levers) -> ModelChain:
    return changed_chain(chain_from_config(json.loads(config), name="model"), levers, ())


def _with_constant(layer: LayerProfile, num_bytes: int) -> LayerProfile:
    """The layer with so many more bytes while it works."""
    names = ("forward_transient_bytes", "backward_transient_bytes")
    lines = {name: getattr(layer, name) for name in names}
    more = {n: Affine(constant=line.constant + num_bytes, per_sample=line.per_sample) for n, line in lines.items()}
    return layer.model_copy(update=more)


def _with_stream(layer: LayerProfile, num_bytes: int) -> LayerProfile:
    """The layer with so many more bytes of its input, which is all that full recomputation saves."""
    again = tuple(
        each.model_copy(update={"saved_bytes": _more(each.saved_bytes, num_bytes)}) if each.remat == "full" else each
        for each in layer.recomputations
    )
    return layer.model_copy(update={"recomputations": again})


_DROPPED = 3
"""Bytes of an entry that dropout saves on a GPU: what is left of it, and the mask."""
_QKV = ("q_proj", "k_proj", "v_proj")
_NF4 = 1 / 2 + 1 / 64 + 4 / 16384
"""Bytes of a weight: `steelyard.levers.quantized_base`."""


def _with_more(layer: LayerProfile, *, saved: float = 0.0, transient: float = 0.0) -> LayerProfile:
    """The layer with so many more bytes of a sample; recomputed in full it has what it saves as it works backwards."""
    again = tuple(
        each.model_copy(
            update={
                "backward_transient_bytes": _more(
                    each.backward_transient_bytes, transient + (saved if each.remat == "full" else 0.0)
                ),
                "saved_bytes": _more(each.saved_bytes, 0.0 if each.remat == "full" else saved),
            }
        )
        for each in layer.recomputations
    )
    lines = {
        "saved_bytes": _more(layer.saved_bytes, saved),
        "forward_transient_bytes": _more(layer.forward_transient_bytes, transient),
        "backward_transient_bytes": _more(layer.backward_transient_bytes, transient),
    }
    return layer.model_copy(update=lines | {"recomputations": again})


def _more(line: Affine, num_bytes: float) -> Affine:
    return Affine(constant=line.constant, per_sample=line.per_sample + num_bytes)


def case_of(row: Row) -> Case | Skipped:
    """The case of a row, or why it cannot be predicted."""
    stated = {name: text for name, text in _STATED.get(row.source, {}).items() if not row.text(name)}
    try:
        return _case(replace(row, cells={**row.cells, **stated}) if stated else row)
    except _SkipError as skip:
        return Skipped(reason=str(skip))
    except UserError as error:
        return Skipped(reason=f"{error.field}: found {error.found}; expected {error.expected}")


def _case(row: Row) -> Case:
    _refuse(row)
    config = config_of(row.text("model"))
    if config is None:
        raise _SkipError(f"config not known: {row.text('model') or 'model not stated'}")
    batch, seq_len = (_needed(row, column) for column in ("batch_per_gpu", "seq_len"))
    framework = framework_of(row, config)
    if framework is None:
        raise _SkipError(f"framework without an engine: {row.text('framework')}")
    if not framework.ties_head:
        config = {**config, "tie_word_embeddings": False}
    if row.text("attention") == "eager":
        config = {**config, "attn_implementation": "eager"}
    count, pp, tp, cp = (row.count(column) or 1 for column in ("num_gpus", "pp", "tp", "cp"))
    parts = count if "device_map" in row.text("notes") else 1
    if parts > 1:  # of which none has both the embedding and the head
        count, layers = 1, -(-config["num_hidden_layers"] // parts)
        config = {**config, "num_hidden_layers": layers, "tie_word_embeddings": True}
    precision = _precision(row)
    if precision not in framework.engine.precisions:
        raise _SkipError(f"{precision} is no lever yet")
    accumulation = row.count("grad_accum") or 1
    data = count // (tp * pp * cp)
    cluster, has_rates = _cluster(row, count)
    mean_len, tokens = _mean_len(row, batch, seq_len)
    if row.text("method") in _SAME_PRODUCTS or row.text("optimizer") == _FIRST_MATRIX_RESTS:
        mean_len = None
    if row.text("method") in PROMPTS:
        virtual = json.loads(row.text("method_config"))["num_virtual_tokens"]
        added = 0 if row.text("method") == "prefix_tuning" else virtual
        seq_len, mean_len = seq_len + added, None if mean_len is None else mean_len + added
    return Case(
        row=row,
        config=config,
        cluster=cluster,
        framework=framework,
        levers=_levers(row, config, framework),
        settings=Settings(
            tp=tp,
            pp=pp,
            vpp=int(told[1]) if (told := re.search(r"VPP (\d+)", row.text("notes"))) else 1,
            cp=cp,
            ep=row.count("ep") or 1,
            micro_batch=batch,
            zero=_zero(row, framework, data),
            replicas=max(1, data * cp // max(1, row.count("fsdp") or 1) // cp) if (row.count("fsdp") or 1) > 1 else 1,
            remat=Remat(row.text("remat") or framework.default_remat),
        ),
        precision=precision,
        global_batch=batch * accumulation * data,
        seq_len=seq_len,
        mean_len=mean_len,
        tokens=tokens,
        has_rates=has_rates,
        parts=parts,
        prompt_bytes=_PROMPT_BYTES * (row.count("trainable_params") or 0) if row.text("method") in PROMPTS else 0,
    )


def _needed(row: Row, column: str) -> int:
    value = row.count(column)
    if value is None:
        raise _SkipError(f"{column} not stated")
    return value


def _refuse(row: Row) -> None:
    """Raises for what no lever has, and for layouts that no settings are."""
    method = row.text("method")
    if row.text("scope") != "run":
        raise _SkipError(f"a measurement of scope {row.text('scope')}")
    if row.text("offload") not in ("", "0", "none", *_OFFLOADS):
        raise _SkipError(f"offload of {row.text('offload')} is no lever")
    priced = (*KINDS, *_SAME_PRODUCTS, *PROMPTS)
    if method not in ("full", *_ADAPTERS) and _KINDS.get(method, method) not in priced:
        raise _SkipError(f"{method or 'no method stated'} is no lever")
    if row.text("method") == "lora" and row.text("quant_type"):
        raise _SkipError(f"{row.text('quant_type')} is no lever")
    if row.text("optimizer") not in _OPTIMIZERS:
        raise _SkipError(f"optimizer {row.text('optimizer')} is no lever")
    if "alpaca samples, at most" in row.text("notes"):
        raise _SkipError("padded to the longest of a batch, whose length is not stated")


def _precision(row: Row) -> str:
    text = row.text("precision")
    if _float8(row) in Float8.values:
        return "bf16"
    return _PRECISIONS.get(text, text)


def _float8(row: Row) -> str:
    """Scales of operands in 8 bits, where the row has some."""
    return row.text("precision").removeprefix("fp8-")


def _levers(row: Row, config: Mapping[str, Any], framework: Framework) -> tuple[tuple[str, str], ...]:
    found = {}
    if row.text("method") in PROMPTS:
        found["train"] = _FIRST_NORM
    elif _KINDS.get(row.text("method"), row.text("method")) in {*KINDS, *_SAME_PRODUCTS} - {LORA}:
        found["train"] = _adapters(row, config)
    elif row.text("method") != "full":
        rank, targets = row.count("rank"), targets_of(row.text("target_modules") or framework.default_targets, config)
        if rank is None or targets is None:
            raise _SkipError("rank or targets of adapters not stated" if rank is None else "targets not known")
        found["train"] = f"lora:r={rank},targets={'+'.join(targets)}"
        found["train"] += f",dropout={framework.dropout:g}" if framework.dropout else ""
        found["train"] += ",rslora" if row.text("method") == "rslora" else ""
        found["train"] += ",use_dora=true" if row.text("method") == "dora" else ""
        found["train"] += f",modules_to_save={_EMBEDDINGS}" if row.text("method") == "lora+embeddings" else ""
    if row.text("quant_type"):
        base = _BASES.get((row.text("quant_type"), row.text("quant_bits")))
        if base is None:
            raise _SkipError(f"base {row.text('quant_type')} is no lever")
        found["base"] = base
    if row.text("chunked_loss") == "1":
        found["loss"] = "chunked"
    if row.text("offload") in _OFFLOADS:
        found["offload"] = row.text("offload")
    if _float8(row) in Float8.values:
        found["float8"] = _float8(row)
    if row.text("compile") == "1" and framework.engine.execution.kernels is None:
        found["compile"] = "blocks"
    optimizer = _OPTIMIZERS[row.text("optimizer")]
    return tuple((found | ({} if optimizer == "adamw" else {"optimizer": optimizer})).items())


def _adapters(row: Row, config: Mapping[str, Any]) -> str:
    """The text of adapters whose settings are those of a config of peft."""
    kind = _KINDS.get(row.text("method"), row.text("method"))
    settings: dict[str, Any] = {"targets": row.text("target_modules").split(), "r": row.text("rank")}
    settings |= {"oft_block_size": 0} if kind == "oft" else {}  # its rank is a count of blocks
    settings |= json.loads(row.text("method_config") or "{}")
    if kind in _SAME_PRODUCTS:
        kind, rank = _SAME_PRODUCTS[kind]
        targets = targets_of(row.text("target_modules"), config) or ()
        settings = {"targets": [*targets], rank.removeprefix("init_"): settings.get(rank, row.text("rank"))}
    said = []
    for name, value in settings.items():
        parts = value if isinstance(value, list) else [value]
        words = (str(each).lower() if isinstance(each, bool) else str(each) for each in parts)
        if value not in ("", [], "none", None) and name not in _OF_VALUES:
            said.append(f"{name}={'+'.join(words)}")
    return f"{kind}:{','.join(said)}" if said else kind


def _zero(row: Row, framework: Framework, data: int) -> int:
    """The ZeRO stage: 3 or 2 where ``fsdp`` is above 1 or the engine is an FSDP engine, else what the states say."""
    is_sharded = (row.count("fsdp") or 1) > 1
    if framework.zero is not None:
        return framework.zero
    states = framework.engine.execution.states
    own = isinstance(states, StateBytes)
    if is_sharded and isinstance(states, StateBytes) and states.zero == 0 and data > 1 and row.text("method") == "full":
        raise _SkipError("all in bf16 under FSDP")
    if (own and not is_sharded) or (row.count("fsdp") == 1 and data > 1):
        return 0
    return 2 if "ZeRO-2" in row.text("notes") and not is_sharded else 3


def _cluster(row: Row, count: int) -> tuple[Cluster, bool]:
    key = row.text("gpu"), row.text("gpu_mem_gib")
    has_rates = key in _DEVICES
    if has_rates:
        device = find_device(_DEVICES[key])
    elif key in _LAPTOP:
        like, mib = _LAPTOP[key]
        device = replace(find_device(like), memory_bytes=mib * _MIB)
    elif not key[0]:
        device = find_device(_ANY)
    else:
        raise _SkipError(f"device not known: {' '.join(key).strip() or 'not stated'}")
    nodes = _nodes(row, count)
    return parse_cluster(f"{nodes}x{count // nodes}x{device.name}").on(device=device), has_rates


def _nodes(row: Row, count: int) -> int:
    """Nodes as the notes count them, or of 8 devices."""
    told = re.search(r"(\d+) node\(s\) x (\d+) GPU", row.text("notes"))
    return int(told[1]) if told and int(told[1]) * int(told[2]) == count else max(1, count // 8)


def _mean_len(row: Row, batch: int, seq_len: int) -> tuple[float | None, float | None]:
    """Tokens of a sample of the mean batch, padding included, and those of a step that the row's rate counts."""
    if row.text("seq_len_kind") in ("padded", "packed"):
        return float(seq_len), None
    notes = row.text("notes")
    if told := re.search(r"(\d+) unpadded tokens in (\d+) steps of (\d+)", notes):
        tokens, steps, samples = map(int, told.groups())
        return tokens / steps / samples, tokens / steps
    if told := re.search(r"(\d+) \+- (\d+) tokens", notes):
        return _mean_longest(float(told[1]), float(told[2]), batch, seq_len), None
    return None, None


@cache
def _mean_longest(mean: float, deviation: float, count: int, most: int) -> float:
    """The mean of the longest of so many lengths of texts, each ``most`` or less."""
    shape = math.pow(deviation / mean, -1.086)  # Justus et al. 1978, within 1 % for deviations of 0.2 to 1 of the mean
    scale = mean / math.gamma(1 + 1 / shape)
    short = -math.expm1(-((most / scale) ** shape))
    quantiles = (short * ((draw + 0.5) / _DRAWS) ** (1 / count) for draw in range(_DRAWS))
    return sum(scale * math.pow(-math.log1p(-each), 1 / shape) for each in quantiles) / _DRAWS
