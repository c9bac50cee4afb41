"""Compiled blocks under plans of every kind, by inductor on the CPU; all of them in one launch."""

from functools import partial

from steelyard.plan.plan import Plan
from tests.runtime.cases import Case
from tests.runtime.lora_cases import lora_plan
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan

NUM_DEVICES = 4
LLAMA = CONFIGS["llama"] | {"num_hidden_layers": 3}


def compiled_plan(config: str | dict[str, object], *stages: str, **options: object) -> Plan:
    """A plan of a model whose blocks are compiled."""
    return make_plan(config, *stages, **options, levers={"compile": "blocks"})


def _case(config: str | dict[str, object], *stages: str, num_microbatches: int = 2, **options: object) -> Case:
    sizes = {"num_microbatches": num_microbatches, "global_batch": 16, "num_devices": NUM_DEVICES}
    return Case(make=partial(compiled_plan, config, *stages, **sizes, **options), num_steps=2)


CASES: dict[str, Case] = {
    "replicated": _case(LLAMA, "dp4, dp4, dp4 remat=full, dp4 remat=selective, dp4"),
    "sharded": _case(LLAMA, "fsdp4, fsdp4, fsdp4 zero2 remat=full, fsdp4 remat=selective, fsdp4"),
    "tensors": _case(LLAMA, "tp4, tp2-dp2+sp, fsdp2-tp2 remat=selective, dp2-tp2 remat=full, tp4"),
    "stages": _case(LLAMA, "fsdp2, dp2, fsdp2", "dp2, fsdp2", num_microbatches=4),
    "bf16": _case(LLAMA, "fsdp4, dp4, fsdp4, dp4, fsdp4", precision="bf16"),
    "adapters": Case(
        make=partial(
            lora_plan,
            "lora:r=4",
            LLAMA,
            "dp4, dp2-tp2, fsdp4 remat=full, dp4 remat=selective, dp4",
            compiled="blocks",
            num_microbatches=2,
            global_batch=16,
            num_devices=NUM_DEVICES,
        ),
        num_steps=2,
    ),
    "experts": _case(FAMILY_CONFIGS["mixtral"], "dp4, fsdp4, dp4 remat=selective, dp4"),
}
