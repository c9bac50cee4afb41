"""Engines for the frameworks of the table: those of the product, and values of the same kind, each with its reason.

| framework       | full                               | adapters                 | reason                                |
|-----------------|------------------------------------|--------------------------|---------------------------------------|
| litgpt          | all in bf16                        | all in bf16              | ``bf16-true`` of its configurations   |
| torchtune       | all in bf16, fused AdamW           | all in bf16              | ``dtype: bf16`` of its recipes        |
| peft's scripts  | all in bf16                        | adapters in fp32         | peft's ``autocast_adapter_dtype``     |
| Trainer, peft   | all in bf16                        | adapters in fp32         | models load in the type of their files|
| Qwen, one GPU   | DeepSpeed's ZeRO                   | adapters in fp32         | finetune_ds.sh, finetune_lora_*.sh    |
| torchtitan, Automodel | the product's engines        | our runtime's            |                                       |

An optimizer step of ``torch.optim.AdamW`` takes the square root of all second moments at once
(``torch._foreach_sqrt`` in ``_multi_tensor_adam``), a moment's bytes for each trained parameter, where it is not fused.
"""

from dataclasses import dataclass, replace
from typing import Any

from published_runs.frameworks import MIXED_16

from lever_runs.rows import Row
from steelyard.engines.automodel import AUTOMODEL
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Execution, StateBytes
from steelyard.engines.native import NATIVE
from steelyard.engines.torchtitan import TORCHTITAN, WHOLE_LOSS

OUR_LOSS = (4, 12)
"""Bytes of each logit that our head saves, and holds at most: `steelyard.modules.layers.HeadLayer`."""
_BF16 = Execution(
    states=StateBytes(parameters=2, gradients=2, optimizer=4, zero=0), frees_gradients=True, step_shard_bytes=2
)
_FP32_ADAPTERS = Execution(
    states=StateBytes(parameters=4, gradients=4, optimizer=8, zero=0), frees_gradients=True, step_shard_bytes=4
)
_DEEPSPEED = Execution(
    states=MIXED_16, reduce_bytes=2, overlaps_data=False, bucket_bytes=2 * 2 * 500_000_000, step_shard_bytes=2 + 4
)
"""As `published_runs.frameworks`: buffers of 500 million entries, an fp16 and an fp32 copy of gradients in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What a framework does otherwise than our runtime, for a method."""

    engine: Engine
    loss_bytes: tuple[int, int] = OUR_LOSS
    """As `OUR_LOSS`."""
    adapter_input_bytes: int = 0
    """Bytes of an entry of the copy of its input that each adapter saves; 0 where they share the input."""
    dropout: float = 0.0
    """Of adapters."""
    keeps_fused_qkv: bool = False
    """Whether values saved for attention are a part of the fused projection's result, which they keep alive."""
    saves_quantized_inputs: bool = False
    """Whether layers with weights in few bits save their input, as bitsandbytes before 0.43 has it (`MatMul4Bit`:
    ``ctx.tensors = (A, B)``)."""
    quantizes_head: bool = False
    single_scales: bool = False
    """Whether scales of nf4 are in fp32 (no double quantization), which is 4 bytes for 64 weights."""
    default_remat: str = "none"


def _engine(name: str, execution: Execution) -> Engine:
    """An engine that runs levers as our runtime, with states of its own."""
    return replace(NATIVE, name=f"native+{name}", execution=execution)


def framework_of(row: Row, config: Any) -> Framework | None:
    """The framework of a row as it runs the row's method; None where it is not known."""
    name = row.text("framework")
    is_full = row.text("method") == "full"
    if name == "litgpt":
        heads = config["num_attention_heads"]
        groups = 1 if config.get("multi_query") else config.get("num_key_value_heads") or heads
        return Framework(
            engine=_engine("litgpt", _BF16),
            loss_bytes=(4, 6),  # chunked_cross_entropy in bf16, of logits that the caller's list keeps
            dropout=0.0 if is_full else 0.05,
            keeps_fused_qkv=groups in (1, heads),  # the view that `CausalSelfAttention` splits, else it is expanded
            saves_quantized_inputs=True,  # it requires bitsandbytes 0.41 or 0.42
            quantizes_head=True,  # BitsandbytesPrecision converts every linear layer
            single_scales="double" not in row.text("quant_type"),
        )
    if name.startswith("torchtune"):
        return Framework(engine=_engine("torchtune", replace(_BF16, step_shard_bytes=0)))
    if name == "peft + transformers":
        kept = Framework(engine=_engine("peft", _BF16 if is_full else _FP32_ADAPTERS), loss_bytes=(6, 14))
        return kept if is_full else replace(kept, adapter_input_bytes=4)  # the script keeps `outputs`, has no autocast
    if name.startswith("Qwen finetune.py"):
        states = replace(MIXED_16, zero=0)
        execution = replace(_DEEPSPEED, states=states) if is_full or "DeepSpeed" in name else _FP32_ADAPTERS
        return Framework(engine=_engine("qwen", execution), adapter_input_bytes=0 if is_full else 2)
    if name == "transformers + peft (scripts/measure.py)":
        execution = replace(_FP32_ADAPTERS, states=replace(_FP32_ADAPTERS.states, frozen=4))
        return Framework(engine=_engine("transformers", execution), adapter_input_bytes=2)
    if name in ("ms-swift", "LLaMA-Factory", "transformers Trainer", "axolotl"):
        execution = _BF16 if is_full else _FP32_ADAPTERS
        return Framework(
            engine=_engine(name.lower(), execution),
            adapter_input_bytes=0 if is_full else 2,
            default_remat="full" if name == "LLaMA-Factory" else "none",
        )
    if name == "torchtitan":
        return Framework(engine=_torchtitan(row))
    if name == "NeMo Automodel":
        return Framework(engine=AUTOMODEL if is_full else _engine("automodel", Execution()))
    return None


def _torchtitan(row: Row) -> Engine:
    """torchtitan with its loss at once, and with what ``torch.compile`` fuses where a row is compiled."""
    engine = TORCHTITAN.with_options([WHOLE_LOSS])
    kernels, execution = engine.execution.kernels, engine.execution
    assert kernels is not None, "of torchtitan"
    if row.text("compile") == "1":
        kernels = replace(kernels, norm=True, rotary=True, activation=True)
    if "async" in row.text("notes") and "async_tp" in row.text("lever"):
        execution = replace(execution, hidden_collectives=0.5)
    return replace(engine, execution=replace(execution, kernels=kernels))
