"""Plans in fp16: on 4 processes in every mode of every dimension, on 2 what does not depend on the mode."""

from functools import partial
from typing import Any

from tests.runtime.cases import Case
from tests.runtime.ep_cases import CONFIGS
from tests.runtime.models import FAMILY_CONFIGS, make_plan

LLAMA = FAMILY_CONFIGS["llama"] | {"num_hidden_layers": 3}


def _case(
    config: str | dict[str, Any], *stages: str, num_microbatches: int = 2, num_devices: int = 4, **changes: int | str
) -> Case:
    make = partial(
        make_plan,
        CONFIGS.get(config, config) if isinstance(config, str) else config,
        *stages,
        num_microbatches=num_microbatches,
        global_batch=4 * num_microbatches,
        num_devices=num_devices,
        seq_len=16,
        precision="fp16",
        **changes,
    )
    return Case(make=make)


EVERY_MODE = "dp, fsdp, zero1, tp, sp, cp"
EXPERTS = "experts"
CASES: dict[str, Case] = {
    EVERY_MODE: _case(
        "llama", "fsdp4, dp4, fsdp4 zero1, fsdp4 zero2, dp2-tp2+sp remat=full, tp2-fsdp2 zero1, fsdp2-cp2, dp4"
    ),
    "two stages, tied": _case("llama-tied", "fsdp2 zero1, dp2", "tp2+sp, fsdp2", num_microbatches=4),
    "two stages of two chunks, tied": _case(
        "llama-tied",
        *("fsdp2 zero1", "tp2", "dp2 remat=full", "fsdp2"),
        num_microbatches=4,
        num_chunks=2,
        schedule="interleaved-1f1b",
    ),
    EXPERTS: _case("mixtral", "fsdp4 zero1, fsdp4 zero1 ep2, fsdp4 ep4 remat=full, dp4"),
}
SCALED = (EVERY_MODE, "two stages, tied", EXPERTS)
"""Trained with a scale and without: chunks of a rank are scaled as stages are."""
SHORT = _case(LLAMA, "fsdp2, fsdp2 zero1, tp2+sp, cp2, dp2", num_devices=2)
"""A plan for what does not depend on the mode."""
OTHER_PLAN = _case(LLAMA, "single, single", "single, single, single", num_devices=2)
"""Another plan of the same model and batch."""
