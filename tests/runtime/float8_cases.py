"""Plans of every kind with 8-bit linear layers; all in one launch."""

from functools import partial

from tests.runtime.cases import Case
from tests.runtime.models import CONFIGS, make_plan

LLAMA = CONFIGS["llama"] | {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128}


def _case(word: str, *stages: str, num_microbatches: int = 2, compiled: str = "off") -> Case:
    sizes = {"num_microbatches": num_microbatches, "global_batch": 16, "num_devices": 4}
    levers = {"float8": word, "compile": compiled}
    return Case(make=partial(make_plan, LLAMA, *stages, **sizes, levers=levers), num_steps=2)


CASES: dict[str, Case] = {
    "replicated": _case("rowwise", "dp4, dp4, dp4 remat=full, dp4 remat=selective, dp4"),
    "sharded": _case("tensorwise", "fsdp4, fsdp4, fsdp4 zero2 remat=full, fsdp4 remat=selective, fsdp4"),
    "tensors": _case("rowwise", "tp4, tp2-dp2+sp, fsdp2-tp2 remat=selective, tp4 remat=full, tp4"),
    "stages": _case("tensorwise", "fsdp2, dp2, fsdp2", "tp2, cp2", num_microbatches=4),
    "compiled": _case("rowwise", "fsdp4, fsdp4, dp4 remat=full, tp2-dp2 remat=selective, fsdp4", compiled="blocks"),
}
