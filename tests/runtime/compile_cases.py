"""Compiled blocks under plans of every kind, by inductor on the CPU or a stand-in; in one launch.

Blocks with identical graphs are compiled once, so cases have few different graphs.
"""

from dataclasses import replace
from functools import partial

from steelyard.plan.plan import Plan
from tests.runtime.cases import Case
from tests.runtime.lora_cases import lora_plan
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan

LLAMA = CONFIGS["llama"] | {"num_hidden_layers": 3}
SIZES = {"global_batch": 16, "num_devices": 2}


def compiled_plan(config: str | dict[str, object], *stages: str, **options: object) -> Plan:
    """A plan of a model whose blocks are compiled."""
    return make_plan(config, *stages, **options, levers={"compile": "blocks"})


def _case(config: str | dict[str, object], *stages: str, **options: object) -> Case:
    return Case(make=partial(compiled_plan, config, *stages, **SIZES | {"num_microbatches": 2} | options), num_steps=2)


BY_INDUCTOR = " by inductor"
"""Suffix of the names of cases whose blocks inductor compiles.

The other cases run the kernels that a trace counts: the code around a compiled block is the same, and a fault in these
kernels would show in every trace.
"""
_CASES: dict[str, Case] = {
    "replicated, sharded, tensors": _case(LLAMA, "dp2, fsdp2 zero2, tp2+sp remat=full, dp2, fsdp2"),
    "tensors": _case(LLAMA | {"num_hidden_layers": 2}, "tp2+sp, tp2+sp, tp2+sp remat=full, tp2"),
    "tensors, selective": _case(LLAMA | {"num_hidden_layers": 1}, "fsdp2, tp2+sp remat=selective, dp2"),
    "stages": _case(LLAMA | {"num_hidden_layers": 2}, "single, single", "single, single", num_microbatches=4),
    "bf16": _case(LLAMA | {"num_hidden_layers": 2}, "fsdp2, dp2, fsdp2, dp2", precision="bf16"),
    "adapters": Case(
        make=partial(
            lora_plan,
            "lora:r=4",
            LLAMA | {"num_hidden_layers": 1},
            "dp2, tp2 remat=selective, dp2",
            compiled="blocks",
            num_microbatches=2,
            **SIZES,
        ),
        num_steps=2,
    ),
    "experts": _case(FAMILY_CONFIGS["mixtral"], "dp2, fsdp2 remat=selective, dp2 remat=selective, dp2"),
    "two meshes": _case(LLAMA | {"num_hidden_layers": 1}, "fsdp4, fsdp2-tp2+sp remat=selective, dp4", num_devices=4),
}
CASES = {name: replace(case, fault="traced kernels") for name, case in _CASES.items()} | {
    name + BY_INDUCTOR: case for name, case in _CASES.items()
}
NIGHTLY = {"tensors", "two meshes", "tensors, selective", "stages", "bf16"}
"""The case with adapters has selective remat with tp, that with experts has it without, and inductor compiles it on one
mesh; stages and casts are around compiled blocks, as around others."""
SAMPLE = [name for name in _CASES if name not in NIGHTLY] + ["tensors, selective" + BY_INDUCTOR]


def before_ranks() -> None:
    """Imports what compiles, which then starts no processes of its own."""
    import torch._inductor.compile_fx

    torch._inductor.config.compile_threads = 1
