"""The plans whose numbers are compared with one process, each with the fault that a negative control plants.

What every strategy and every schedule computes in one step is compared in `tests.runtime.leaf_cases`; here steps follow
each other, embeddings are tied, layers have biases or compute in bf16, and stages have one layer.
"""

from dataclasses import dataclass
from functools import cached_property, partial

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
        """That of the plan."""
        return str(self.make.keywords.get("precision", "fp32"))


_CONTROL = partial(make_plan, "llama-tied", "fsdp8, dp8, tp2-fsdp4, dp4-tp2", global_batch=16, num_microbatches=2)


def _brief(config: str, *stages: str, schedule: str = "1f1b", precision: str = "fp32", num_steps: int = 1) -> Case:
    """A step of two microbatches, which no step follows that could find something else."""
    options = {"num_microbatches": 2, "global_batch": 16, "schedule": schedule, "precision": precision}
    return Case(make=partial(make_plan, config, *stages, **options), num_steps=num_steps)


CASES: dict[str, Case] = {
    "one stage, every layer type": Case(
        make=partial(
            make_plan,
            "llama",
            "fsdp8, dp8 remat=selective, fsdp4-tp2+sp, tp2-fsdp4 remat=selective, dp4-tp2 remat=full, "
            "fsdp2-tp4+sp remat=full, tp8, fsdp8 zero2",
            num_microbatches=2,
        )
    ),
    "one stage, one microbatch": Case(
        make=partial(make_plan, "qwen2", "dp8, fsdp8 zero2, dp2-tp4+sp, dp8", num_microbatches=1)
    ),
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
    "tied, two stages of two chunks": Case(
        make=partial(
            make_plan,
            "llama-tied",
            "tp2-fsdp2",
            "dp4",
            "fsdp4",
            "tp2-fsdp2+sp",
            num_chunks=2,
            schedule="interleaved-1f1b",
        )
    ),
    "tied, one stage": Case(make=partial(make_plan, "llama-tied", "fsdp8, dp8, fsdp4-tp2, tp2-dp4+sp")),
    "tied, one stage, both orders": _brief("llama-tied", "tp2-fsdp4+sp, dp8, fsdp8, fsdp4-tp2+sp"),
    "tied, two stages, alike": _brief("llama-tied", "fsdp2-tp2+sp, dp4", "fsdp4, fsdp2-tp2"),
    "tied, two stages, replicated": _brief("llama-tied", "dp4, fsdp4", "tp2-fsdp2, dp4"),
    "tied, two stages": Case(make=partial(make_plan, "llama-tied", "fsdp2-tp2+sp, dp4", "fsdp4, tp2-fsdp2")),
    "tied, four stages": Case(make=partial(make_plan, "llama-tied", "dp2", "fsdp2", "tp2", "fsdp2", schedule="gpipe")),
    "tied, four stages, tensor parallel": _brief("llama-tied", "tp2+sp", "dp2", "tp2", "dp2", schedule="gpipe"),
    "bf16": _brief(
        "llama",
        "fsdp4, dp4, fsdp2-tp2+sp remat=selective, tp2-fsdp2",
        "dp4, tp4+sp, fsdp4, tp4",
        precision="bf16",
        num_steps=2,
    ),
    "control: no fault": Case(make=_CONTROL, num_steps=1),
    "control: gradients of a replicated layer not summed": Case(make=_CONTROL, num_steps=1, fault="no dp sum"),
    "control: gradients averaged": Case(make=_CONTROL, num_steps=1, fault="mean"),
    "control: ranks read the same samples": Case(make=_CONTROL, num_steps=1, fault="same samples"),
    "control: tied gradients not summed": Case(make=_CONTROL, num_steps=1, fault="untied"),
}
NIGHTLY = {"two stages, 1f1b", "four stages, gpipe"}
"""One step of both schedules is in `tests.runtime.leaf_cases`, further ones in four stages under 1f1b."""
