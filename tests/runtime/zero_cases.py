"""Layers that keep parameters and gradients whole during a step and send them once, on 2 and 4 processes."""

from functools import partial

from tests.runtime.cases import Case
from tests.runtime.ep_cases import CONFIGS
from tests.runtime.family_cases import CASES as FAMILY_CASES
from tests.runtime.models import make_plan


def _case(
    config: str,
    *stages: str,
    num_devices: int = 4,
    num_microbatches: int = 3,
    num_steps: int = 1,
    fault: str | None = None,
    **changes: int | str,
) -> Case:
    make = partial(
        make_plan,
        CONFIGS.get(config, config),
        *stages,
        num_microbatches=num_microbatches,
        global_batch=num_devices * num_microbatches,
        num_devices=num_devices,
        seq_len=16,
        **changes,
    )
    return Case(make=make, num_steps=num_steps, fault=fault)


_CONTROL = partial(_case, "llama-tied", ", ".join(["fsdp2 zero1"] * 4), num_devices=2)
_SWITCH = FAMILY_CASES["switch_transformers without a family, experts that no token of a rank chooses"].make

CASES: dict[str, Case] = {
    "two processes": _case(
        "llama-tied",
        "fsdp2 zero1, fsdp2 zero1 remat=full, fsdp2 zero1 remat=selective, fsdp2 zero1",
        num_devices=2,
        num_steps=2,
    ),
    "control: no fault": _CONTROL(),
    "control: gradients never reduced": _CONTROL(fault="no last backward pass"),
    "beside every other mode": _case(
        "llama", "fsdp4 zero1, dp4, fsdp4 zero2, fsdp4 zero1, fsdp4, fsdp4 zero1, dp4, fsdp4", num_steps=2
    ),
    "beside tp": _case("qwen2", "tp2-fsdp2 zero1, fsdp2-tp2+sp zero1, tp2-fsdp2 zero1 remat=full, fsdp2-tp2 zero1"),
    "beside tp, bf16": _case(
        "qwen2", "tp2-fsdp2 zero1, fsdp2-tp2+sp zero1, fsdp4 zero1, fsdp2-tp2 zero1", precision="bf16", num_steps=2
    ),
    "hybrid, and beside cp": _case("llama-tied", "dp2-fsdp2 zero1, fsdp2-cp2 zero1, dp2-fsdp2 zero1 remat=full, fsdp4"),
    "two stages, 1f1b, tied": _case("llama-tied", "fsdp2 zero1, fsdp2 zero1", "fsdp2, fsdp2 zero1", num_microbatches=4),
    "two stages, gpipe": _case(
        "llama",
        "fsdp2 zero1, fsdp2, fsdp2 zero1, fsdp2 zero1",
        "fsdp2 zero1 remat=full, dp2, fsdp2 zero1, fsdp2 zero1",
        num_microbatches=4,
        schedule="gpipe",
    ),
    "two stages of two chunks, tied": _case(
        "llama-tied",
        *("fsdp2 zero1", "fsdp2 zero1", "fsdp2 zero1 remat=full", "fsdp2 zero1"),
        num_microbatches=4,
        num_steps=2,
        num_chunks=2,
        schedule="interleaved-1f1b",
    ),
    "experts": _case("mixtral", "fsdp4 zero1, fsdp4 zero1 ep2, fsdp4 zero1 ep4 remat=full, fsdp4 zero1"),
    "experts, bf16": _case("mixtral", "fsdp4 zero1, fsdp4 zero1, dp2-fsdp2 zero1 ep2, fsdp4 zero1", precision="bf16"),
    "experts that no token of a rank chooses, bf16": Case(
        make=partial(
            _SWITCH.func,
            _SWITCH.args[0],
            "fsdp2 zero1, fsdp2 zero1, fsdp2 zero1 remat=full",
            "dp2, fsdp2 zero1, fsdp2 zero1, fsdp2 zero1",
            **_SWITCH.keywords | {"precision": "bf16"},
        )
    ),
    "experts, two stages": _case(
        "qwen3_moe", "fsdp2 zero1, fsdp2 zero1, fsdp2 zero1 ep2", "fsdp2 zero1 ep2, fsdp2 zero1"
    ),
}
NIGHTLY = {"two stages, gpipe", "experts, two stages", "experts, bf16", "two stages, 1f1b, tied"}
"""Both schedules, the experts and tied stages are in other cases."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
