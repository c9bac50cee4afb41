"""Stages of different sizes on 3, 4 and 6 processes: each boundary reshards its activations."""

from functools import partial

from tests.runtime.cases import Case
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan

T5 = FAMILY_CONFIGS["t5"]
GPT2 = FAMILY_CONFIGS["gpt2"]


def _case(
    config: str | dict[str, object],
    *stages: str,
    sizes: tuple[int, ...],
    num_microbatches: int = 3,
    samples: int = 4,
    num_steps: int = 1,
    fault: str | None = None,
    **options: int | str,
) -> Case:
    make = partial(
        make_plan,
        config,
        *stages,
        sizes=sizes,
        num_microbatches=num_microbatches,
        global_batch=samples * num_microbatches,
        **options,
    )
    return Case(make=make, num_steps=num_steps, fault=fault)


CASES: dict[str, Case] = {
    "1 + 3, samples gathered by one rank": _case("llama-tied", "single, single", "fsdp3, dp3", sizes=(1, 3), samples=6),
    "3 + 1, gpipe and remat": _case(
        CONFIGS["llama"],
        "fsdp3, dp3 remat=full, fsdp3 zero2",
        "single remat=full, single, single, single, single",
        sizes=(3, 1),
        samples=3,
        schedule="gpipe",
    ),
    "1 + 2 + 1, tied": _case(
        "llama-tied", "single", "fsdp2, tp2+sp", "single", sizes=(1, 2, 1), num_microbatches=4, samples=4, num_steps=2
    ),
    "1 + 2 + 1, copies of one sample": _case(GPT2, "single", "tp2, tp2", "single", sizes=(1, 2, 1), samples=1),
    "2 + 1 + 1, sequences in head-tail order": _case(
        "llama", "cp2, cp2 remat=full, cp2", "single, single", "single, single, single", sizes=(2, 1, 1), samples=2
    ),
    "2 + 1, encoder and decoder": _case(
        T5, "fsdp2, tp2, dp2", "single, single, single, single", sizes=(2, 1), samples=4
    ),
    "1 + 2, decoder on two ranks": _case(T5, "single, single, single", "tp2, fsdp2, dp2, tp2", sizes=(1, 2), samples=4),
    "2 + 4, tensor parallel to sharded and sequences": _case(
        "llama",
        "tp2, fsdp2, tp2",
        "cp2-tp2+sp, fsdp4, tp2-fsdp2, dp2-tp2, fsdp4",
        sizes=(2, 4),
        samples=8,
    ),
    "4 + 2, sequences to tensor parallel, tied": _case(
        "llama-tied", "fsdp4, fsdp2-cp2", "tp2+sp, fsdp2", sizes=(4, 2), samples=8
    ),
    "control: untied": _case("llama-tied", "fsdp2, dp2", "single, single", sizes=(2, 1), fault="untied"),
}
NIGHTLY = {"2 + 1, encoder and decoder", "3 + 1, gpipe and remat"}
"""Two stages of unlike sizes stay in both orders, an encoder and a decoder in one of them."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
