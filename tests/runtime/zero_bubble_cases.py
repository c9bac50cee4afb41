"""Split backward passes under every kind of sharding and recomputation, on 4 and 8 processes."""

from functools import partial
from typing import Any

from steelyard.plan.plan import Plan
from tests.runtime.cases import Case
from tests.runtime.models import FAMILY_CONFIGS, make_plan
from tests.schedules.examples import in_own_order

ORDERED = "zero-bubble-auto"


def _case(
    config: str,
    *parts: str,
    num_devices: int = 4,
    num_microbatches: int = 4,
    num_steps: int = 2,
    fault: str | None = None,
    schedule: str = "interleaved-zero-bubble",
    **options: str,
) -> Case:
    """Parts of the model in two chunks a stage."""
    num_blocks = sum(len(part.split(",")) for part in parts) - 2
    make = partial(
        _in_own_order if schedule == ORDERED else make_plan,
        FAMILY_CONFIGS[config] | {"num_hidden_layers": num_blocks},
        *parts,
        num_chunks=2,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        global_batch=4 * num_microbatches,
        seq_len=16,
        schedule=schedule,
        **options,
    )
    return Case(make=make, num_steps=num_steps, fault=fault)


def _in_own_order(*arguments: Any, **options: Any) -> Plan:
    return in_own_order(make_plan(*arguments, **options))


_EVERY_MODE = (
    "dp2, fsdp2 zero2",
    "tp2, tp2+sp remat=selective",
    "fsdp2 zero1, fsdp2, dp2 remat=full",
    "fsdp2 remat=full",
)
CASES: dict[str, Case] = {
    "every mode": _case("llama", *_EVERY_MODE),
    "every mode, bf16": _case("llama", *_EVERY_MODE, precision="bf16"),
    "control: without weight passes": _case("llama", *_EVERY_MODE, fault="no weight passes", num_steps=1),
    "four stages": _case("llama", *["single"] * 8, num_microbatches=8),
    "every mode, in an order of its own": _case("llama", *_EVERY_MODE, schedule=ORDERED),
    "four stages, in an order of their own": _case("llama", *["single"] * 8, num_microbatches=8, schedule=ORDERED),
    "tied, with biases": _case("qwen2", "fsdp2", "dp2", "tp2", "dp2"),
    "experts, sharded": _case("mixtral", "fsdp2 zero1", "fsdp2 zero2", "dp2", "fsdp2"),
    "four stages of two ranks": _case(
        "llama",
        *("dp2", "tp2+sp", "fsdp2 zero2", "fsdp2 zero1", "fsdp2 remat=full", "tp2 remat=selective", "dp2", "tp2"),
        num_devices=8,
        num_microbatches=8,
    ),
    "zb-v: every mode": _case("llama", *_EVERY_MODE, schedule="zb-v"),
    "zb-v: four stages, few microbatches": _case("llama", *["single"] * 8, num_microbatches=3, schedule="zb-v"),
    "zb-v: tied on one stage": _case("gemma", "fsdp2", "dp2", "tp2", "dp2", schedule="zb-v"),
    "zb-v: experts, sharded": _case("mixtral", "fsdp2 zero1", "fsdp2 zero2", "dp2", "fsdp2", schedule="zb-v"),
    "dualpipe-v: every mode": _case("llama", *_EVERY_MODE, num_microbatches=5, schedule="dualpipe-v"),
    "dualpipe-v: four stages": _case("llama", *["single"] * 8, num_microbatches=8, schedule="dualpipe-v"),
    "zb-v: four stages of two ranks": _case(
        "llama",
        *("dp2", "tp2+sp", "fsdp2 zero2", "fsdp2 zero1", "fsdp2 remat=full", "tp2 remat=selective", "dp2", "tp2"),
        num_devices=8,
        num_microbatches=8,
        schedule="zb-v",
    ),
    "zb-v: hybrid, with gradients of a later backward pass": _case(
        "llama",
        *("dp2-fsdp2, fsdp4", "dp2-fsdp2", "dp2-fsdp2 zero2 remat=full", "dp4, dp2-fsdp2 zero1"),
        num_devices=8,
        num_steps=1,
        schedule="zb-v",
    ),
    "stages of four ranks, hybrid": _case(
        "llama",
        "dp2-fsdp2, tp2-fsdp2+sp",
        "dp2-fsdp2 zero1, fsdp2-tp2",
        "dp2-tp2, fsdp4 zero2",
        "fsdp2-cp2, dp4",
        num_devices=8,
    ),
}
NIGHTLY = {
    *("four stages of two ranks", "zb-v: four stages of two ranks", "stages of four ranks, hybrid"),
    *("four stages", "every mode, in an order of its own", "zb-v: experts, sharded", "dualpipe-v: four stages"),
}
"""Cases on 8 processes; four stages, which stay in an order of their own and in one V, as every mode stays in both;
experts, which wait in one V as in chunks that go round."""
