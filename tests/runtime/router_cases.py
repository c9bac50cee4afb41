"""Plans that train the routers' auxiliary loss: every parallelism dimension, remat, pipeline stages.

The loss has a coefficient of 0.5, so that 0.1 % of it is far above rounding errors.
"""

from functools import partial
from pathlib import Path
from typing import Any

from steelyard.model.split import ModelSplit
from tests.runtime.cases import Case
from tests.runtime.models import FAMILY_CONFIGS, make_plan

OLMOE_SPLIT = ModelSplit.model_validate_json((Path(__file__).parent / "olmoe_split.json").read_text())
"""Split of a type without a family file."""

TRAINED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": FAMILY_CONFIGS["mixtral"] | TRAINED,
    "qwen3_moe": FAMILY_CONFIGS["qwen3_moe"]
    | {"num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3}
    | TRAINED,
    "olmoe": {
        **{"model_type": "olmoe", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64},
        **{"num_experts": 4, "num_experts_per_tok": 2, **TRAINED},
    },
}


def _case(
    config: str,
    *stages: str,
    num_chunks: int = 1,
    sizes: tuple[int, ...] | None = None,
    num_steps: int = 1,
    fault: str | None = None,
    schedule: str = "",
    **options: Any,
) -> Case:
    """A step of two microbatches of eight samples on four devices."""
    options["split"] = OLMOE_SPLIT if config == "olmoe" else None
    make = partial(
        make_plan,
        CONFIGS[config],
        *stages,
        num_microbatches=2,
        global_batch=16,
        seq_len=16,
        schedule=schedule or ("1f1b" if num_chunks == 1 else "interleaved-1f1b"),
        num_devices=4,
        num_chunks=num_chunks,
        sizes=sizes,
        **options,
    )
    return Case(make=make, num_steps=num_steps, fault=fault)


CASES: dict[str, Case] = {
    "mixtral, sharded": _case("mixtral", "fsdp4, fsdp4 ep2, fsdp4 ep4 remat=full, fsdp4", num_steps=2),
    "mixtral, replicated": _case("mixtral", "dp4, dp4 ep2 remat=selective, fsdp4 zero2, dp4"),
    "mixtral, beside tp": _case("mixtral", "tp4, fsdp2-tp2+sp ep2 remat=full, dp2-tp2, tp4+sp"),
    "mixtral, beside cp": _case("mixtral", "fsdp2-cp2, fsdp2-cp2 ep2, cp2-tp2+sp remat=selective, fsdp2-cp2"),
    "mixtral, two stages": _case("mixtral", "dp2, fsdp2 ep2", "tp2+sp remat=full, tp2+sp"),
    "mixtral, bf16": _case("mixtral", "dp2, tp2", "fsdp2 remat=full, dp2", precision="bf16"),
    "qwen3_moe, one stage": _case("qwen3_moe", "fsdp4, dp4, tp2-fsdp2+sp remat=full, fsdp4 ep4, dp4"),
    "qwen3_moe, a stage of dense layers": _case("qwen3_moe", "dp2, fsdp2", "fsdp2 remat=full, dp2 ep2, dp2"),
    "qwen3_moe, a stage behind all routers": _case("qwen3_moe", "dp2, fsdp2, fsdp2, fsdp2 remat=full", "tp2"),
    "qwen3_moe, interleaved": _case("qwen3_moe", "dp2", "fsdp2", "tp2+sp", "fsdp2 ep2 remat=full, dp2", num_chunks=2),
    "qwen3_moe, chunks in a V": _case(
        "qwen3_moe", "dp2", "fsdp2", "tp2+sp", "fsdp2 ep2, dp2", num_chunks=2, schedule="zb-v"
    ),
    "qwen3_moe, stages of unlike sizes": _case("qwen3_moe", "single, single, single", "tp2, dp2", sizes=(1, 2)),
    "olmoe, one stage": _case("olmoe", "fsdp4, tp2-fsdp2+sp ep2 remat=full, dp2-tp2, dp4"),
    "olmoe, two stages": _case("olmoe", "dp2, fsdp2 ep2 remat=selective", "tp2, fsdp2"),
    "control: ranks count their own tokens alone": _case("mixtral", "dp4, dp4, fsdp4, dp4", fault="routers alone"),
}
NIGHTLY = {
    *("olmoe, two stages", "mixtral, two stages", "mixtral, replicated", "qwen3_moe, one stage", "mixtral, bf16"),
    "qwen3_moe, a stage of dense layers",
}
"""Cases that others cover: qwen3_moe runs with several stages, olmoe and mixtral with one, replicated layers with
others."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
