"""Plans with divided routed experts: with every data-parallel dimension, tp, cp, and in stages.

Embedding, head and dense blocks have no experts to divide. Layers of a plan may all differ: what one
case leaves out, another has.
"""

from functools import partial
from typing import Any

from tests.runtime.cases import Case
from tests.runtime.models import FAMILY_CONFIGS, make_plan

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": FAMILY_CONFIGS["mixtral"],
    "qwen3_moe": FAMILY_CONFIGS["qwen3_moe"] | {"num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3},
    "deepseek_v3": FAMILY_CONFIGS["deepseek_v3"] | {"n_group": 1, "num_experts_per_tok": 2, "num_hidden_layers": 3},
}
"""DeepSeek-V3 chooses from one group of experts: from several, rounding alone would decide between groups."""


def _case(
    config: str,
    *stages: str,
    num_devices: int = 4,
    precision: str = "fp32",
    num_chunks: int = 1,
    num_steps: int = 1,
) -> Case:
    """A step of two microbatches of eight samples."""
    make = partial(
        make_plan,
        CONFIGS[config],
        *stages,
        num_microbatches=2,
        global_batch=16,
        seq_len=16,
        schedule="1f1b" if num_chunks == 1 else "interleaved-1f1b",
        precision=precision,
        num_devices=num_devices,
        num_chunks=num_chunks,
    )
    return Case(make=make, num_steps=num_steps)


CASES: dict[str, Case] = {
    "mixtral, sharded": _case("mixtral", "fsdp4, fsdp4 ep2, fsdp4 ep4 remat=full, fsdp4", num_steps=2),
    "mixtral, ZeRO-2 and replicated": _case(
        "mixtral", "dp4, fsdp4 zero2 ep4, dp4 ep2 remat=selective, fsdp4 zero2", num_steps=2
    ),
    "mixtral, hybrid": _case("mixtral", "dp2-fsdp2, dp2-fsdp2 ep2, dp2-fsdp2 ep4, fsdp4"),
    "mixtral, beside tp": _case("mixtral", "fsdp4, fsdp2-tp2+sp ep2, dp2-tp2 ep2 remat=full, tp4"),
    "mixtral, beside cp": _case("mixtral", "fsdp2-cp2, fsdp2-cp2 ep2, fsdp2-cp2 ep4 remat=selective, fsdp2-cp2"),
    "mixtral, two stages": _case("mixtral", "dp2, fsdp2 ep2", "dp2 ep2 remat=full, tp2+sp"),
    "mixtral, all computed again": _case(
        "mixtral", "fsdp4 remat=full, fsdp4 ep4 remat=full, fsdp4 ep2 remat=full, fsdp4 remat=full"
    ),
    "mixtral, bf16": _case("mixtral", "fsdp4, fsdp4 ep2, dp4 ep4, fsdp4", precision="bf16", num_steps=2),
    "qwen3_moe, one stage": _case("qwen3_moe", "fsdp4, fsdp4, fsdp4 zero2 ep4 remat=selective, dp4 ep2, dp4"),
    "qwen3_moe, two stages": _case("qwen3_moe", "dp2, fsdp2, fsdp2 ep2", "dp2 ep2 remat=selective, dp2"),
    "deepseek_v3, sharded": _case("deepseek_v3", "fsdp4, fsdp4, fsdp4 ep4 remat=full, fsdp4 ep2, fsdp4"),
    "deepseek_v3, hybrid": _case("deepseek_v3", "dp4, dp2-fsdp2, dp2-fsdp2 ep4 remat=selective, dp4 ep4, dp4"),
    "deepseek_v3, two stages": _case("deepseek_v3", "dp2, fsdp2, fsdp2 ep2", "fsdp2 ep2 remat=full, fsdp2"),
    "mixtral, eight ranks": _case(
        "mixtral", "fsdp8, dp2-fsdp4 ep4, fsdp4-tp2+sp ep2 remat=full, dp2-fsdp4", num_devices=8
    ),
    "qwen3_moe, eight ranks": _case(
        "qwen3_moe", "dp8, dp2-fsdp4, fsdp8 ep8 remat=full, dp2-fsdp4 zero2 ep8, fsdp8", num_devices=8
    ),
    "deepseek_v3, eight ranks": _case(
        "deepseek_v3", "dp4, fsdp4, dp2-fsdp2 ep4", "fsdp4 ep2 remat=full, fsdp2-tp2", num_devices=8
    ),
    "qwen3_moe, interleaved": _case("qwen3_moe", "dp2", "fsdp2", "fsdp2 ep2", "dp2 ep2 remat=full, dp2", num_chunks=2),
}
NIGHTLY = {"mixtral, hybrid", "qwen3_moe, two stages", "deepseek_v3, sharded", "deepseek_v3, eight ranks"} | {
    *("mixtral, all computed again", "qwen3_moe, eight ranks", "deepseek_v3, two stages", "mixtral, eight ranks"),
}
"""Their divisions stay under another model, and their models under another division."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
