"""Plans with context parallelism, alone and nested in other dimensions, compared on four and eight processes.

Covers both methods, every remat, each order of levels, layers that differ within a stage and across a cut, and an
embedding or a head with and without cp.
"""

from functools import partial
from typing import Any

from tests.modules.split_configs import split_config
from tests.runtime.cases import Case
from tests.runtime.family_cases import SPLITS
from tests.runtime.models import FAMILY_CONFIGS, make_plan


def _case(
    config: str,
    *stages: str,
    schedule: str = "1f1b",
    precision: str = "fp32",
    num_chunks: int = 1,
    num_devices: int = 4,
    num_steps: int = 1,
    **changes: Any,
) -> Case:
    """A step of two microbatches."""
    split = SPLITS.get(config)
    make = partial(
        make_plan,
        (split_config(config) if split else FAMILY_CONFIGS[config]) | changes,
        *stages,
        split=split,
        num_microbatches=2,
        global_batch=2 * num_devices,
        seq_len=32,
        schedule=schedule,
        precision=precision,
        num_devices=num_devices,
        num_chunks=num_chunks,
    )
    return Case(make=make, num_steps=num_steps)


_FEW_KEYS = {"num_key_value_heads": 2}

CASES: dict[str, Case] = {
    "llama, gather, every remat": _case(
        "llama", "cp4, cp4 remat=selective, cp4 remat=full, cp4", num_key_value_heads=1, num_steps=2
    ),
    "llama, ulysses, every remat": _case("llama", "cp4, cp4+ulysses remat=selective, cp4+ulysses remat=full, cp4"),
    "llama, inside fsdp and dp": _case("llama", "fsdp2-cp2, dp2-cp2, fsdp2-cp2+ulysses zero2, dp2-cp2", **_FEW_KEYS),
    "llama, states sharded over its ranks alone": _case(
        "llama",
        "fsdp1-cp4, fsdp1-cp4 zero1, fsdp1-cp2-tp2+sp remat=full, dp2-fsdp1-cp2 zero2",
        num_steps=2,
        **_FEW_KEYS,
    ),
    "llama, outside tp": _case("llama", "cp2-tp2, cp2-tp2+sp remat=selective, cp2-tp2+sp+ulysses, cp2-tp2+sp"),
    "llama, next to other dimensions": _case(
        "llama", "fsdp4, fsdp2-cp2 remat=full, cp4, tp4+sp, cp2-tp2+sp, cp4", num_hidden_layers=4, num_steps=2
    ),
    "llama, next to other dimensions, from and to cp": _case(
        "llama", "cp4, dp2-tp2, cp2-tp2, fsdp4, cp4+ulysses, dp4", num_hidden_layers=4
    ),
    "llama, tied": _case("llama", "cp4, fsdp2-cp2, dp4, cp2-tp2", tie_word_embeddings=True),
    "llama, two stages": _case("llama", "cp2, cp2 remat=full", "fsdp2, cp2+ulysses"),
    "llama, two stages, interleaved": _case(
        "llama", "cp2, cp2", "fsdp2", "cp2", "tp2, cp2", schedule="interleaved-1f1b", num_chunks=2, num_hidden_layers=4
    ),
    "qwen3": _case("qwen3", "fsdp4, cp4, cp2-tp2+sp, cp4", **_FEW_KEYS),
    "gpt2": _case("gpt2", "cp4, fsdp2-cp2, cp2-tp2, cp4"),
    "mistral with a sliding window": _case("mistral", "cp4, cp4 remat=full, cp4+ulysses, cp4"),
    "mistral with a sliding window, two stages": _case("mistral", "cp2, cp2", "tp2+sp, dp2", schedule="gpipe"),
    "cohere2 without a family": _case("cohere2", "cp4, cp4 remat=full, cp2-tp2+sp remat=selective, fsdp2-cp2"),
    "cohere2 without a family, ulysses": _case("cohere2", "fsdp4, fsdp2-cp2+ulysses, dp2-cp2+ulysses, cp4"),
    "cohere2 without a family, two stages": _case("cohere2", "cp2, cp2", "tp2+sp, cp2"),
    "bf16": _case("llama", "fsdp2-cp2, fsdp4, cp2-tp2+sp, dp2-cp2", precision="bf16", num_steps=2),
    "eight, hybrid sharding": _case(
        "llama", "dp2-fsdp2-cp2, dp2-fsdp2-cp2 remat=selective, fsdp8, dp2-fsdp2-cp2", num_devices=8
    ),
    "eight, two stages": _case("llama", "fsdp2-cp2, cp2-tp2+sp", "cp4 remat=full, dp2-cp2", num_devices=8),
    "eight, qwen3, two stages": _case(
        "qwen3", "fsdp2-cp2, cp2-tp2+sp", "fsdp2-cp2+ulysses remat=full, cp2-tp2+sp", num_devices=8
    ),
    "eight, gpt2, two stages": _case("gpt2", "cp2-tp2+sp, fsdp2-cp2", "cp4 remat=selective, fsdp2-cp2", num_devices=8),
    "eight, every level": _case(
        "llama",
        "dp2-cp2-tp2+sp, fsdp2-cp2-tp2, dp2-fsdp2-cp2 remat=selective, dp2-cp2-tp2, fsdp4-cp2",
        num_devices=8,
        num_hidden_layers=3,
    ),
}
"""The cases of four processes come first."""
NIGHTLY = {
    *("eight, gpt2, two stages", "eight, qwen3, two stages", "mistral with a sliding window, two stages"),
    *("eight, two stages", "cohere2 without a family, two stages", "cohere2 without a family, ulysses", "qwen3"),
    *("eight, hybrid sharding", "eight, every level", "llama, next to other dimensions, from and to cp", "bf16"),
}
"""Their divisions stay under llama and mistral, three dimensions of a layer where states are sharded over the ranks of
cp alone, and their models in one stage; fewer keys than queries in llama."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
