"""Levers of trainers that put peft's adapters into models of transformers, and their names in these trainers.

| lever               | in these trainers                                                          |
|---------------------|----------------------------------------------------------------------------|
| adapters            | `peft.LoraConfig`, with the same layers as our runtime                     |
| base in nf4         | `transformers.BitsAndBytesConfig` in 4 bits, with scales in 8              |
| optimizer           | ``optim`` of `TrainingArguments`: torchao's for 8 and 4 bits               |

Adapters are in fp32 (``autocast_adapter_dtype`` of peft), the base is in compute precision. Under autocast each adapter
casts its input to fp32 (`_cast_input_dtype`) and then to 16 bits, and keeps the latter. FSDP2 of accelerate leaves
4-bit weights whole on every rank (``utils/fsdp_utils.py``), as our runtime does.

Refused because they differ: ``load_in_8bit``, which is LLM.int8() and multiplies in 8 bits, and ``use_liger_kernel``,
whose loss computes its gradients in the forward pass instead of recomputing chunks.

Names are those of peft 0.21.2 (``tuners/lora/config.py``) and transformers 5.23.0 (``training_args.py``,
``trainer_optimizer.py``, ``utils/quantization_config.py``).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from steelyard.engines.capabilities import dimensions_of
from steelyard.engines.engine import Entries, Taken
from steelyard.errors import UserError
from steelyard.levers import Levers
from steelyard.levers.optimizer import Optimizer
from steelyard.levers.quantized_base import QuantizedBase
from steelyard.levers.train import ALL_LINEAR, Train
from steelyard.precision import DTYPES, Precision

OPTIM: Mapping[str, str] = {
    "adamw-8bit": "adamw_torch_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""Values of ``optim`` by optimizer."""
OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **{name: word for word, name in OPTIM.items()},
}
"""Optimizers by value of ``optim``."""
_NEAR = dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "ao_adamw_8bit"), "adamw-8bit")
"""Optimizers of bitsandbytes that are priced as torchao's, and another name of the latter."""
WITHOUT_TP = dimensions_of("dp", "fsdp", "dp+fsdp")
_OTHERWISE = {
    "adafactor": "Adafactor's update rule: transformers bounds steps by the size of the update, not of the parameter",
    "adamw-4bit": "blocks of 128 moments: transformers uses 256 and accepts no other number",
}


def refuse_kind(train: Train) -> str | None:
    """Return why adapters are not supported, or None if they are plain LoRA."""
    return None if train.is_plain else "for which steelyard writes only plain LoRA"


def refuse_fraction(train: Train) -> str | None:
    """Return why adapters are not supported, or None if they are plain LoRA with a whole alpha."""
    fraction = None if train.alpha == int(train.alpha) else "which needs a whole number for lora_alpha"
    return refuse_kind(train) or fraction


def one_of(names: Collection[str], words: str) -> Taken:
    """Return a lever that accepts these values; ``words`` are the reason why others are refused."""
    return Taken(refuse=lambda lever: None if str(lever) in names else words)


OFFLOAD = replace(
    one_of(("parameters",), "which cannot offload moments or activations as planned"),
    dimensions=dimensions_of("fsdp") - dimensions_of(),
)
"""FSDP2's `CPUOffloadPolicy`, which needs shards on several devices."""
WEIGHTS = Taken(dimensions=dimensions_of("dp"))
"""Parameters in bf16, which accelerate converts to fp32 before FSDP shards them."""
LEVERS: Mapping[str, Taken] = {
    "train": Taken(
        refuse=refuse_kind,
        dimensions=WITHOUT_TP,
        execution=lambda execution: replace(execution, adapters="autocast"),
    ),
    "base": replace(
        one_of(("nf4",), "whose load_in_8bit also multiplies in 8 bits (LLM.int8), and which quantizes no experts"),
        dimensions=WITHOUT_TP,
    ),
    "optimizer": one_of(OPTIM, "which has no such optimizer"),
}


FILE_LEVERS: Mapping[str, Taken] = {
    **LEVERS,
    "offload": OFFLOAD,
    "train": replace(LEVERS["train"], refuse=refuse_fraction),
    "base": replace(LEVERS["base"], dimensions=dimensions_of("dp")),
    "weights": WEIGHTS,
}
"""Levers of trainers whose files state a whole alpha, and which shard a base in nf4 under FSDP."""


def words_of_file(
    *, rank: Any, alpha: Any, targets: str, dropout: Any, rslora: Any, dora: Any, quantized: Any
) -> dict[str, str]:
    """Return the adapters of a file, and their base if it is ``quantized``, as texts of levers."""
    text = f"lora:r={rank},alpha={alpha},targets={targets},dropout={dropout}"
    text += ",rslora" * bool(rslora) + ",use_dora=true" * bool(dora)
    return {"train": text, **({"base": "nf4"} if quantized else {})}


def optimizer_of_file(entries: Entries, name: str) -> tuple[dict[str, str], list[str]]:
    """Return the optimizer that an entry of a file names as text of the lever, and a remark if another is priced."""
    found = str(entries.get(name, default="adamw_torch_fused"))
    word = {**OPTIMIZERS, **_NEAR}.get(found, "adamw")
    remarks = [] if found in OPTIMIZERS else [f"{name} {found} (priced as {word})"]
    return {"optimizer": word} if word != "adamw" else {}, remarks


def names_in_pattern(field: str, pattern: str) -> str:
    r"""Return the names of linear layers at the end of a pattern of paths, such as ``.*\.(q|v)_proj``, joined by +.

    Raises `UserError` if the pattern has another form, or selects layers by their number.
    """
    whole = re.fullmatch(r"(?:(.*)\\?\.)?((?:\w|\((?:\?:)?[\w|]+\))+)\$?", pattern)
    places = re.sub(r"\[(\\d|0-9)\]|\([^()]*[^()\d|][^()]*\)", "", whole[1] or "") if whole else "|"
    if whole is None or re.search(r"[\d|]", places):
        raise UserError(
            field=field,
            found=pattern,
            expected="names of linear layers, or one pattern of paths that ends in such names and holds in all blocks",
            hint=f"list the names: {field}: [q_proj, v_proj]",
        )
    parts = re.findall(r"\((?:\?:)?([\w|]+)\)|(\w+)", whole[2])
    return "+".join(map("".join, product(*((several or one).split("|") for several, one in parts))))


def remarks_on_base(entries: Entries, name: str, levers: Mapping[str, str]) -> list[str]:
    """Return a remark if the model that an entry names is stored in few bits, but has a price in 16."""
    model = str(entries.get(name))
    is_quantized = re.search(r"gptq|awq|aqlm|[48]-?bit|(nv|mx)?fp[48]|int[48]", model.lower()) and "base" not in levers
    return [f"{name} {model}, by its name in few bits (priced in 16 bits)"] if is_quantized else []


def refuse_sharded_base(field: str, levers: Mapping[str, str], *, zero: int) -> None:
    """Raise `UserError` if parameters of a quantized base are sharded."""
    if "base" in levers and zero:
        raise UserError(
            field=field,
            found="a base in 4 bits that is sharded",
            expected="4 bits on one device or replicated: shards of quantized storage have no price",
            hint="leave the shards or the 4 bits out of the file, or plan the model: steelyard plan --train qlora:r=16",
        )


def lora_config(train: Train) -> dict[str, Any]:
    """Return the equivalent arguments of `peft.LoraConfig`."""
    return {
        "r": train.r,
        "lora_alpha": whole_if_so(train.alpha),
        "target_modules": ALL_LINEAR if train.targets == (ALL_LINEAR,) else list(train.targets),
        "lora_dropout": train.dropout,
        "use_rslora": train.rslora,
    }


def quantization_config(precision: Precision) -> dict[str, Any]:
    """Return the arguments of `transformers.BitsAndBytesConfig` for a base in nf4."""
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": DTYPES[precision],
    }


def training_arguments(levers: Levers) -> dict[str, Any]:
    """Return the arguments of `transformers.TrainingArguments` for an optimizer other than the default."""
    word = str(levers.value(Optimizer))
    return {"optim": OPTIM[word]} if word in OPTIM else {}


def model_lines(levers: Levers, precision: Precision) -> tuple[list[str], list[str]]:
    """Return lines of Python for imports and for ``lora_config`` and ``quantization_config``, if there are any."""
    imports, lines = [], []
    train, base = levers.value(Train), levers.value(QuantizedBase)
    if not train.is_default:
        imports.append("from peft import LoraConfig")
        lines += _call("lora_config", "LoraConfig", lora_config(train))
    if not base.is_default:
        imports.append("from transformers import BitsAndBytesConfig")
        lines += _call("quantization_config", "BitsAndBytesConfig", quantization_config(precision))
    return imports, lines


def model_files(levers: Levers, precision: Precision) -> tuple[tuple[str, str], ...]:
    """Return a file with `model_lines` for a training script to import, if there are any."""
    imports, lines = model_lines(levers, precision)
    return (("steelyard_model.py", "\n".join([*imports, "", *lines]) + "\n"),) if imports else ()


def model_usage(levers: Levers, precision: Precision) -> tuple[str, ...]:
    """Return the instructions for a training script to build the model of these levers."""
    if levers.value(Train).is_default:
        return ()
    quantized = "" if levers.value(QuantizedBase).is_default else ", quantization_config=quantization_config"
    return (
        f"in train.py: from_pretrained(..., dtype={DTYPES[precision]!r}{quantized}), then peft.get_peft_model(model, "
        "lora_config); prepare_model_for_kbit_training would keep more in fp32 than is priced",
    )


def left_out(levers: Levers) -> tuple[str, ...]:
    """Return the differences of the optimizer in these trainers."""
    word = str(levers.value(Optimizer))
    return (_OTHERWISE[word],) if word in _OTHERWISE else ()


def whole_if_so(value: float) -> int | float:
    """Return a number as an int if it is whole."""
    return int(value) if value == int(value) else value


def _call(name: str, function: str, arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {function}(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"]
