"""Plans of every kind for partly frozen models; all in one launch."""

from collections.abc import Sequence
from functools import partial

from steelyard.model.split import ModelSplit
from steelyard.modules.freezing import find_freeze
from steelyard.plan.plan import Plan
from tests.modules.split_configs import split_config
from tests.runtime.cases import Case
from tests.runtime.feature_cases import SPLITS
from tests.runtime.models import make_plan

NUM_DEVICES = 4


def frozen_plan(patterns: Sequence[str], config: str | dict[str, object], *stages: str, **options: object) -> Plan:
    """A plan with what these patterns name frozen."""
    plan = make_plan(config, *stages, **options)
    found = find_freeze(plan.chain(), patterns)
    return plan.model_copy(update={"model": plan.model.model_copy(update={"frozen": found})})


def _case(
    config: str | dict[str, object],
    patterns: Sequence[str],
    *stages: str,
    split: ModelSplit | None = None,
    num_microbatches: int = 2,
    num_steps: int = 1,
    **options: object,
) -> Case:
    """A step of sixteen samples."""
    sizes = {"num_microbatches": num_microbatches, "global_batch": 16, "num_devices": NUM_DEVICES}
    return Case(
        make=partial(frozen_plan, patterns, config, *stages, split=split, **sizes, **options), num_steps=num_steps
    )


def _featured(name: str, patterns: Sequence[str], *stages: str) -> Case:
    return _case(split_config(name), patterns, *stages, split=SPLITS[name], seq_len=16)


FIRST = ("model.embed_tokens", "model.layers.0", "model.layers.1")
MIXED = (*FIRST, "model.layers.2.mlp", "model.layers.4")
TOWER = ("model.vision_tower",)
ALL_BUT_PROJECTOR = (*TOWER, "model.language_model", "lm_head")

CASES: dict[str, Case] = {
    "llama, replicated": _case(
        "llama", MIXED, "dp4, dp4, dp4 remat=full, dp4, dp4, dp4 remat=selective, dp4, dp4", num_steps=2
    ),
    "llama, sharded": _case(
        "llama",
        MIXED,
        "fsdp4 zero2, fsdp4, fsdp4 zero2, fsdp4, fsdp4, fsdp4 zero2 remat=full, fsdp4, fsdp4",
        num_steps=2,
    ),
    "llama, kept whole": _case(
        "llama",
        MIXED,
        "fsdp4 zero1, fsdp4 zero1, fsdp4 zero1 remat=full, fsdp4 zero1, fsdp4, fsdp4 zero1, dp2-fsdp2 zero1, fsdp4",
        num_steps=2,
    ),
    "llama, kept whole, a stage without a backward pass": _case(
        "llama", MIXED, "fsdp2 zero1, fsdp2 zero1", ", ".join(["fsdp2 zero1"] * 6), num_steps=2
    ),
    "llama, hybrid and tensors": _case(
        "llama", MIXED, "dp2-fsdp2, fsdp2-tp2+sp, tp4, dp2-tp2 remat=full, tp2-fsdp2, fsdp2-tp2+sp, dp2-fsdp2, tp4"
    ),
    "llama, a stage without a backward pass": _case(
        "llama", MIXED, "fsdp2, dp2 remat=full, fsdp2", "dp2, fsdp2, dp2, fsdp2, dp2", num_steps=2
    ),
    "llama, two stages without a backward pass": _case(
        "llama", MIXED, "single", "single, single", "single, single, single", "single, single", num_microbatches=8
    ),
    "llama, gpipe": _case("llama", MIXED, "dp2, dp2", "fsdp2, dp2, tp2, fsdp2, dp2, tp2", schedule="gpipe"),
    "llama, chunks": _case(
        "llama", FIRST, "dp2", "fsdp2, dp2", "dp2, dp2", "fsdp2, dp2, dp2", num_chunks=2, schedule="interleaved-1f1b"
    ),
    "llama, chunks in a V": _case(
        "llama", FIRST, "dp2", "fsdp2, dp2", "dp2, dp2", "fsdp2, dp2, dp2", num_chunks=2, schedule="zb-v"
    ),
    "llama, a first chunk in a V without backward passes": _case(
        "llama", (*FIRST, "model.layers.2"), *["single"] * 8, num_chunks=2, schedule="zb-v", num_microbatches=4
    ),
    "llama, bf16": _case("llama", MIXED, "fsdp2, dp2", "dp2, fsdp2, tp2, fsdp2, fsdp2, dp2", precision="bf16"),
    "tied matrix frozen": _case("llama-tied", ("lm_head",), "dp2, fsdp2", "fsdp2, dp2", num_steps=2),
    "tied matrix trained": _case("llama-tied", ("model.layers.0",), "dp2, fsdp2", "fsdp2, dp2"),
    "llava, tower": _featured("llava", TOWER, "fsdp4, tp2-fsdp2, dp4 remat=full, fsdp2-tp2, tp2-dp2, fsdp4, dp4"),
    "llava, tower, cut inside it": _featured("llava", TOWER, "fsdp2, dp2", "fsdp2, tp2, dp2, fsdp2, dp2"),
    "llava, tower, cut before the text": _featured("llava", TOWER, "fsdp2, fsdp2, tp2", "fsdp2, tp2, dp2, tp2"),
    "llava, all but the projector": _featured("llava", ALL_BUT_PROJECTOR, "dp2, tp2, fsdp2, fsdp2", "dp2, fsdp2, dp2"),
    "whisper, encoder": _featured("whisper", ("model.encoder",), "fsdp2, fsdp2, tp2", "tp2, fsdp2, tp2, fsdp2"),
    "whisper, encoder, cut inside the decoder": _featured(
        "whisper", ("model.encoder",), "dp2, tp2, fsdp2, tp2, dp2", "tp2 remat=full, fsdp2"
    ),
    "whisper, decoder": _featured("whisper", ("model.decoder",), "fsdp4, dp4, tp2-dp2, fsdp2-tp2, tp4, fsdp4, dp4"),
}
NIGHTLY = {
    *("llava, tower, cut before the text", "whisper, encoder, cut inside the decoder", "whisper, decoder"),
    *("llava, tower", "llama, gpipe", "llama, two stages without a backward pass"),
}
"""Their models stay with a cut elsewhere; a stage without a backward pass stays, and chunks."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
