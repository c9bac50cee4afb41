"""Engines for the frameworks of the table: those of the product, and values of the same kind, each with its reason.

| framework             | full                         | adapters         | reason                                 |
|-----------------------|------------------------------|------------------|----------------------------------------|
| litgpt                | all in bf16                  | all in bf16      | ``bf16-true`` of its configurations    |
| torchtune             | all in bf16, AdamW fused     | all in bf16      | ``dtype: bf16`` of its recipes         |
| peft's scripts        | all in bf16                  | adapters in fp32 | peft's ``autocast_adapter_dtype``      |
| Trainer               | all in bf16                  | adapters in fp32 | models load in the type of their files |
| Qwen                  | DeepSpeed's ZeRO             | adapters in fp32 | finetune_ds.sh, finetune_lora_*.sh     |
| torchtitan, Automodel | the product's engines        | our runtime's    |                                        |

An optimizer step of ``torch.optim.AdamW`` takes the square root of all second moments at once
(``torch._foreach_sqrt`` in ``_multi_tensor_adam``), a moment's bytes for each trained parameter, where it is not fused.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from published_runs.frameworks import DEEPSPEED_ZERO_1, FIXED_SEGMENTS_RESERVE, torchtitan_of

from lever_runs.rows import Row
from steelyard.engines.automodel import AUTOMODEL
from steelyard.engines.deepspeed import DEEPSPEED
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Execution, StateBytes
from steelyard.engines.megatron_bridge import MEGATRON_BRIDGE
from steelyard.engines.native import NATIVE
from steelyard.engines.torchtitan import ASYNC_TP, COMPILED
from steelyard.engines.transformers import TRANSFORMERS
from steelyard.levers import Levers

OUR_LOSS = (4, 12)
"""Bytes of each logit that our head saves, and holds at most: `steelyard.modules.layers.HeadLayer`."""
_BF16_STATES = StateBytes(parameters=2, gradients=2, optimizer=4, zero=0)
_BF16 = Execution(states=_BF16_STATES, frees_gradients=True, step_shard_bytes=2)
_ADAPTERS = TRANSFORMERS.running(Levers.of({"train": "lora"}), "bf16").execution
"""As the product prices adapters of peft under autocast."""
_FP32_ADAPTERS = replace(
    _ADAPTERS,
    states=StateBytes(parameters=4, gradients=4, optimizer=8, zero=0),
    frees_gradients=True,
    step_shard_bytes=4,
)
_DEEPSPEED = replace(DEEPSPEED_ZERO_1, kernels=None)


_BLOCKS_OF_LENGTHS = 14.0
"""Of texts of every length in any order: a block that served the logits of one length is too small for a longer one and
stays reserved. Chosen on the LoRA rows of Qwen-7B by length in msswift_bench, with which those by batch, bits and remat
agree: what is reserved there beyond what is allocated goes with the vocabulary and the mean length alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Differences of a framework from our runtime, for a method."""

    engine: Engine
    loss_bytes: tuple[int, int] = OUR_LOSS
    """As `OUR_LOSS`."""
    chunked_logits_bytes: int = 0
    """Bytes of each logit that it saves where the loss is computed in chunks."""
    dropout: float = 0.0
    """Of adapters."""
    keeps_adapter_inputs: bool = True
    """Whether the first matrices of adapters are trained, which need their inputs; those of LoRA-FA are not, nor are
    those of PSOFT and TinyLoRA, which train what stands between two matrices."""
    has_fused_qkv: bool = False
    """Whether queries, keys and values are one product, whose result values that are saved for attention keep alive;
    keys and values of fewer heads are repeated for all instead. Its adapters drop entries of one input together."""
    kept_quantized_inputs: int = 0
    """Microbatches of which layers with weights in few bits keep their inputs. Bitsandbytes before 0.43 has them in an
    attribute of the graph's node (`MatMul4Bit`: ``ctx.tensors = (A, B)``), which goes with the graph: where a loop has
    the last loss in a variable, when the next one is there."""
    quantizes_head: bool = False
    """Whether the head is in few bits as well, so that its matrix is made whole while all activations are there."""
    ties_head: bool = True
    """Whether a head that has the embedding's matrix has no copy of its own."""
    stream_bytes: int = 2
    """Bytes of an entry of what flows between blocks."""
    eager_score_bytes: int = 0
    """Bytes that eager attention's backward pass holds of a score beyond ours. Queries of a stream in fp32 leave the
    softmax in fp32, of which autocast makes a copy for the product with values."""
    reserve: float = FIXED_SEGMENTS_RESERVE
    """Part of what comes and goes by which the allocator reserves more than is allocated."""
    blocks_of_lengths: float = 0.0
    """Blocks, each of the logits of the mean batch in fp32, that it reserves beside for batches of other lengths."""
    single_scales: bool = False
    """Whether scales of nf4 are in fp32 (no double quantization), which is 4 bytes for 64 weights."""
    zero: int | None = None
    """ZeRO stage where the rows of a framework name none; None for what `fsdp` says."""
    default_remat: str = "none"
    default_targets: str = ""
    """Linear layers that have adapters where a row does not say, in the table's words."""


def _engine(name: str, execution: Execution) -> Engine:
    """An engine that runs levers as our runtime, with states of its own."""
    return replace(NATIVE, name=f"native+{name}", execution=execution)


def framework_of(row: Row, config: Mapping[str, Any]) -> Framework | None:
    """The framework of a row as it runs the row's method; None where it is not known."""
    name, is_full = row.text("framework"), row.text("method") == "full"
    make = next((make for start, make in _FRAMEWORKS if name.startswith(start)), None)
    return None if make is None else make(row, config, is_full)


def _litgpt(row: Row, config: Mapping[str, Any], is_full: bool) -> Framework:
    """FSDP1 shards adapters with the base, and without synchronisation has gradients of all, whole on each rank, which
    stay from one microbatch to the next.

    Only blocks are units of their own (``auto_wrap_policy``): the embedding and the head are whole all the while.
    """
    shards = row.count("fsdp") or 1
    sharded = replace(_BF16_STATES, zero=3, gradients=2 * shards, frozen=2 + 2 * shards)
    root = 2 * 2 * config["vocab_size"] * config["hidden_size"]
    return Framework(
        engine=_engine("litgpt", replace(_BF16, states=sharded, bucket_bytes=root) if shards > 1 else _BF16),
        loss_bytes=(
            8,
            10,
        ),  # in chunks, of logits that its Fabric makes fp32 (HalfPrecision.convert_output) and a list keeps
        dropout=0.0 if is_full else 0.05,
        has_fused_qkv=True,
        kept_quantized_inputs=1 if "longest sample" in row.text("notes") else 2,  # bitsandbytes 0.41, 0.42; one is long
        quantizes_head=True,  # BitsandbytesPrecision converts every linear layer
        ties_head=False,  # its checkpoints have the matrix twice (convert_hf_checkpoint.py)
        single_scales="double" not in row.text("quant_type"),
    )


def _torchtune(_row: Row, _config: Mapping[str, Any], _is_full: bool) -> Framework:
    """Its chunks of logits are of the output, which is whole, in bf16, and has a gradient."""
    return Framework(engine=_engine("torchtune", replace(_BF16, step_shard_bytes=0)), chunked_logits_bytes=4)


def _peft(row: Row, _config: Mapping[str, Any], is_full: bool) -> Framework:
    return Framework(
        keeps_adapter_inputs=row.text("optimizer") != "lora-fa" and row.text("method") not in ("psoft", "tinylora"),
        engine=_engine("peft", _BF16 if is_full else replace(_FP32_ADAPTERS, adapters="fp32")),  # no autocast
        loss_bytes=(6, 14),  # the script keeps `outputs`, with the logits in bf16, until the next step
        reserve=0.0,  # it empties the cache every 10 steps, and makes batches of texts of one length
    )


def _qwen(row: Row, _config: Mapping[str, Any], is_full: bool) -> Framework:
    if (row.count("fsdp") or 1) > 1 or (is_full and (row.count("num_gpus") or 1) > 1):
        return Framework(engine=_engine("qwen", DEEPSPEED.execution))  # ZeRO-2 keeps what is not trained whole
    is_deepspeed = is_full or "DeepSpeed" in row.text("framework")
    execution = _DEEPSPEED if is_deepspeed else _FP32_ADAPTERS
    if "embeddings" in row.text("method"):  # nearly all that is trained, which peft copies in bf16 and does not cast
        execution = replace(execution, states=_BF16_STATES, step_shard_bytes=2)
    return Framework(engine=_engine("qwen", replace(execution, adapters="computed" if is_full else "autocast")))


def _fitcheck(_row: Row, _config: Mapping[str, Any], _is_full: bool) -> Framework:
    """Keeps in fp32 what is not quantized (peft's prepare_model_for_kbit_training)."""
    states = StateBytes(parameters=4, gradients=4, optimizer=8, zero=0, frozen=4)
    return Framework(
        engine=_engine("transformers", replace(_FP32_ADAPTERS, states=states)),
        loss_bytes=(8, 16),  # of a head in fp32, whose logits `outputs` keeps
        stream_bytes=4,
        eager_score_bytes=2,
    )


def _trainer(row: Row, _config: Mapping[str, Any], is_full: bool) -> Framework:
    name = row.text("framework")
    is_foreach = row.text("optimizer") in ("", "adam", "adamw", "adamw_torch")
    full = _BF16 if is_foreach else replace(_BF16, step_shard_bytes=0)
    return Framework(
        engine=_engine(name.lower(), full if is_full else _ADAPTERS),
        reserve=0.0 if name == "ms-swift" else FIXED_SEGMENTS_RESERVE,
        blocks_of_lengths=_BLOCKS_OF_LENGTHS if name == "ms-swift" else 0.0,
        default_remat="full" if name == "LLaMA-Factory" else "none",
        default_targets="all" if name == "axolotl" else "",  # lora_target_linear of the rows' configurations
    )


def _mixed(row: Row, _config: Mapping[str, Any], _is_full: bool) -> Framework:
    """Masters in fp32, which autocast copies."""
    return Framework(engine=_engine(row.text("framework").lower(), NATIVE.execution))


def _titan(row: Row, _config: Mapping[str, Any], _is_full: bool) -> Framework:
    return Framework(engine=_torchtitan(row), reserve=Execution().reserve)  # run_train.sh: expandable segments


def _timm(row: Row, _config: Mapping[str, Any], _is_full: bool) -> Framework:
    """Parameters in fp32 under autocast, or all in bf16 (``--full_bf16``); optimizers of torch are fused.

    With DeepSpeed parameters and states are those of ZeRO-2 with the optimizer on the host."""
    if "DeepSpeed" in row.text("framework"):
        return Framework(engine=DEEPSPEED)
    fused = replace(_BF16, step_shard_bytes=0)
    return Framework(engine=_engine("timm", NATIVE.execution if "amp" in row.text("precision") else fused))


def _bridge(row: Row, _config: Mapping[str, Any], _is_full: bool) -> Framework:
    """Its recipes' distributed optimizer, with the modules that a row recomputes."""
    execution = MEGATRON_BRIDGE.execution
    named = json.loads(row.text("method_config") or "{}").get("recompute_modules") or ["core_attn"]
    assert execution.kernels is not None, "of Megatron-Bridge"
    kernels = replace(execution.kernels, selective=tuple(named))
    priced = replace(MEGATRON_BRIDGE, execution=replace(execution, kernels=kernels), refuse=NATIVE.refuse)
    return Framework(engine=priced, zero=1)  # which runs models that the product does not write for it


def _automodel(_row: Row, _config: Mapping[str, Any], _is_full: bool) -> Framework:
    return Framework(engine=AUTOMODEL)


_FRAMEWORKS: tuple[tuple[str, Callable[[Row, Mapping[str, Any], bool], Framework | None]], ...] = (
    ("litgpt", _litgpt),
    ("torchtune", _torchtune),
    ("peft + transformers", _peft),
    ("Qwen finetune.py", _qwen),
    ("transformers + peft (scripts/measure.py)", _fitcheck),
    ("ms-swift", _trainer),
    ("LLaMA-Factory", _trainer),
    ("transformers Trainer", _mixed),
    ("axolotl", _trainer),
    ("torchtitan", _titan),
    ("NeMo Automodel", _automodel),
    ("Megatron-Bridge", _bridge),
    ("timm + torchao script", _timm),
    ("torchao script", _timm),
)
"""The beginning of a framework's name."""


def _torchtitan(row: Row) -> Engine:
    """torchtitan as its version has it: that of torch where a row names one, or its date, which is that of the page."""
    said = [COMPILED] * (row.text("compile") == "1")
    said += [ASYNC_TP] * ("async" in row.text("notes") and "async_tp" in row.text("lever"))
    version = row.text("torch_version")
    return torchtitan_of(f"torch {version}" if version else row.text("date"), said)
