"""Plans whose numbers are compared with one process, each with the fault that a negative control plants.

`tests.runtime.leaf_cases` compares every strategy and schedule in one step; the cases here have consecutive steps, tied
embeddings, layers with biases or in bf16, and stages of one layer.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from steelyard.plan.plan import Plan
from tests.runtime.models import make_plan


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, how many steps it trains, and the fault planted in the runtime, if any.

    The plan is made when it is first asked for: its model may have to be split, which collecting does not wait for.
    """

    make: "partial[Plan]"
    num_steps: int = 2
    fault: str | None = None

    @cached_property
    def plan(self) -> Plan:
        return self.make()

    @property
    def precision(self) -> str:
        """Precision of the plan."""
        return str(self.make.keywords.get("precision", "fp32"))


_FOUR = {"num_devices": 4, "num_microbatches": 2, "global_batch": 16}
_CONTROL = partial(make_plan, "llama-tied", "fsdp4, dp4, tp2-fsdp2, dp2-tp2", **_FOUR)


def _brief(config: str, *stages: str, num_steps: int = 1, **options: Any) -> Case:
    """A step of two microbatches on four devices, which no step follows that could find something else."""
    return Case(make=partial(make_plan, config, *stages, **_FOUR | options), num_steps=num_steps)


CASES: dict[str, Case] = {
    "one stage, every layer type": Case(
        make=partial(
            make_plan,
            "llama",
            "fsdp4, dp4 remat=selective, fsdp2-tp2+sp, tp2-fsdp2 remat=selective, dp2-tp2 remat=full, "
            "fsdp2-tp2+sp remat=full, tp4, fsdp4 zero2",
            **_FOUR,
        )
    ),
    "one stage, one microbatch": _brief("qwen2", "dp4, fsdp4 zero2, dp2-tp2+sp, dp4", num_microbatches=1, num_steps=2),
    "two stages, 1f1b": Case(
        make=partial(
            make_plan,
            "llama",
            "fsdp4, dp4, fsdp2-tp2+sp, tp2-fsdp2",
            "dp2-tp2 remat=full, tp4+sp remat=full, fsdp4 zero2 remat=selective, tp2-fsdp2+sp",
        )
    ),
    "four stages, 1f1b": Case(
        make=partial(
            make_plan,
            "llama",
            "fsdp2, dp2",
            "tp2+sp remat=selective, fsdp2 remat=full",
            "tp2 remat=selective, dp2 remat=full",
            "fsdp2 zero2, tp2",
        )
    ),
    "four stages, gpipe": Case(
        make=partial(
            make_plan, "llama", "dp2, fsdp2 remat=full, tp2", "dp2, tp2+sp", "tp2", "fsdp2, dp2", schedule="gpipe"
        )
    ),
    "tied, two stages of two chunks": _brief(
        "llama-tied",
        *("tp2", "dp2", "fsdp2", "tp2+sp"),
        num_chunks=2,
        schedule="interleaved-1f1b",
        num_microbatches=4,
        num_steps=2,
    ),
    "tied, one stage": _brief("llama-tied", "fsdp4, dp4, fsdp2-tp2, tp2-dp2+sp", num_steps=2),
    "tied, one stage, both orders": _brief("llama-tied", "tp2-fsdp2+sp, dp4, fsdp4, fsdp2-tp2+sp"),
    "tied, two stages, alike": _brief("llama-tied", "fsdp2-tp2+sp, dp4", "fsdp4, fsdp2-tp2", num_devices=8),
    "tied, two stages, replicated": _brief("llama-tied", "dp2, fsdp2", "tp2, dp2"),
    "tied, two stages": _brief("llama-tied", "fsdp2-tp2+sp, dp4", "fsdp4, tp2-fsdp2", num_devices=8, num_steps=2),
    "tied, four stages": Case(make=partial(make_plan, "llama-tied", "dp2", "fsdp2", "tp2", "fsdp2", schedule="gpipe")),
    "tied, four stages, tensor parallel": _brief(
        "llama-tied", "tp2+sp", "dp2", "tp2", "dp2", schedule="gpipe", num_devices=8
    ),
    "bf16": _brief(
        "llama",
        "fsdp2, dp2, tp2+sp remat=selective, tp2",
        "dp2, tp2+sp, fsdp2, tp2",
        precision="bf16",
        num_steps=2,
    ),
    "control: no fault": Case(make=_CONTROL, num_steps=1),
    "control: gradients of a replicated layer not summed": Case(make=_CONTROL, num_steps=1, fault="no dp sum"),
    "control: gradients averaged": Case(make=_CONTROL, num_steps=1, fault="mean"),
    "control: ranks read the same samples": Case(make=_CONTROL, num_steps=1, fault="same samples"),
    "control: tied gradients not summed": Case(make=_CONTROL, num_steps=1, fault="untied"),
}
NIGHTLY = {
    *("two stages, 1f1b", "four stages, gpipe"),
    *("tied, one stage", "tied, two stages, alike", "tied, four stages", "tied, four stages, tensor parallel"),
    *("tied, two stages", "four stages, 1f1b"),
}
"""One step of both schedules is in `tests.runtime.leaf_cases`, further ones in two stages of two chunks. Tied tables
stay in one stage (both orders, and the control, of one whole and one sharded), alike in two (replicated), and unlike in
chunks; a stage between them that holds neither is in `tests.runtime.unlike_cases`."""
