"""Hybrid sharding on 4 and 8 processes: states sharded over near ranks and replicated over far ones."""

from functools import partial

from tests.runtime.cases import Case
from tests.runtime.models import make_plan


def _case(
    config: str,
    *stages: str,
    num_steps: int = 1,
    num_devices: int = 8,
    num_microbatches: int = 2,
    precision: str = "fp32",
    fault: str | None = None,
    **pipeline: int | str,
) -> Case:
    make = partial(
        make_plan,
        config,
        *stages,
        num_microbatches=num_microbatches,
        global_batch=8 * num_microbatches,
        num_devices=num_devices,
        precision=precision,
        **pipeline,
    )
    return Case(make=make, num_steps=num_steps, fault=fault)


def _control(fault: str | None) -> Case:
    return _case("llama-tied", "dp2-fsdp2, dp2-fsdp2, dp2-fsdp2 zero2, dp2-fsdp2", num_devices=4, fault=fault)


CASES: dict[str, Case] = {
    "four processes, ZeRO-2 and 3": _case(
        "qwen2", "dp2-fsdp2, dp2-fsdp2 zero2, dp2-fsdp2 remat=full, dp2-fsdp2 zero2", num_devices=4, num_steps=2
    ),
    "four processes, one microbatch": _case(
        "llama-tied", "dp2-fsdp2, dp2-fsdp2 zero2 remat=selective, fsdp4, dp4", num_devices=4, num_microbatches=1
    ),
    "control: no fault": _control(None),
    "control: shards not summed over replicas": _control("no replica sum"),
    "every order and degree": _case(
        "llama",
        "dp2-fsdp4, dp4-fsdp2 zero2, dp2-fsdp2-tp2+sp, tp2-dp2-fsdp2, dp2-tp2-fsdp2 remat=selective, "
        "dp2-fsdp2-tp2 zero2 remat=full, tp2-dp2-fsdp2+sp, dp4-fsdp2",
    ),
    "next to other dimensions": _case(
        "llama",
        "dp2-fsdp2, fsdp4, dp4, dp2-fsdp2, fsdp2-tp2, dp2-fsdp2, tp4, dp2-fsdp2",
        num_devices=4,
    ),
    "one microbatch": _case("llama-tied", "dp4-fsdp2, dp2-fsdp4, fsdp8, dp4-fsdp2", num_microbatches=1),
    "two stages, 1f1b": _case(
        "llama",
        "dp2-fsdp2, fsdp4, dp4, dp2-fsdp2 zero2",
        "dp2-fsdp2 remat=full, fsdp4, dp4, dp2-fsdp2",
        num_microbatches=4,
    ),
    "two stages, gpipe": _case(
        "llama-tied", "dp2-fsdp2, dp2-fsdp2", "fsdp4, dp2-fsdp2", num_microbatches=4, schedule="gpipe"
    ),
    "two stages of two chunks, interleaved": _case(
        "llama",
        "dp2-fsdp2, dp4",
        "dp2-fsdp2 remat=full, fsdp4",
        "fsdp4, dp2-fsdp2 zero2",
        "dp4, dp2-fsdp2",
        num_microbatches=4,
        num_chunks=2,
        schedule="interleaved-1f1b",
    ),
    "tied, one stage, alike": _case("llama-tied", "dp2-fsdp4, dp2-fsdp4, fsdp8, dp2-fsdp4"),
    "tied, one stage, unlike": _case("llama-tied", "dp2-fsdp4, dp2-fsdp4, fsdp8, dp4-fsdp2"),
    "tied, two stages, alike": _case("llama-tied", "dp2-fsdp2, dp4", "fsdp4, dp2-fsdp2", num_microbatches=4),
    "tied, two stages, tensor parallel": _case(
        "llama-tied", "dp2-fsdp2, dp4", "fsdp4, tp2-fsdp2+sp", num_microbatches=4
    ),
    "bf16": _case(
        "qwen2",
        "dp2-fsdp2, dp2-fsdp2 zero2, dp2-fsdp2 remat=full, fsdp4",
        precision="bf16",
        num_devices=4,
        num_steps=2,
    ),
}
NIGHTLY = {
    *("one microbatch", "two stages, gpipe", "tied, two stages, alike", "tied, one stage, alike", "two stages, 1f1b"),
    *("two stages of two chunks, interleaved", "tied, one stage, unlike"),
}
"""One microbatch stays on four processes, as tied ones do in one stage, a second step there, two stages tied and beside
tensor parallelism; chunks have no sharding of their own."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
