"""Plans with mixed strategies for models with features besides token ids; all in one launch."""

from functools import partial
from pathlib import Path

from steelyard.model.split import ModelSplit
from tests.modules.split_configs import split_config
from tests.runtime.cases import Case
from tests.runtime.models import make_plan

NUM_DEVICES = 4
SPLITS = {
    name: ModelSplit.model_validate_json((Path(__file__).parent / f"{name}_split.json").read_text())
    for name in ("llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "speech_to_text", "whisper")
}
"""Splits that `steelyard.modules.split_proof.split_model` finds for their small configs."""


def _case(name: str, *stages: str) -> Case:
    """A step of eight samples, in two microbatches."""
    options = {"num_microbatches": 2, "global_batch": 8, "seq_len": 16, "precision": "fp32", "schedule": "1f1b"}
    make = partial(make_plan, split_config(name), *stages, **options, num_devices=NUM_DEVICES, split=SPLITS[name])
    return Case(make=make, num_steps=1)


CASES: dict[str, Case] = {
    "llava, one stage": _case(
        "llava", "fsdp4, tp2-fsdp2, dp4 remat=full, fsdp2-tp2, tp2-dp2, fsdp4 remat=selective, dp4"
    ),
    "llava, cut before the text": _case("llava", "fsdp2, fsdp2 remat=full, tp2", "fsdp2, tp2, dp2, tp2"),
    "llava, cut inside the text": _case("llava", "dp2, tp2, fsdp2, fsdp2, dp2", "fsdp2 remat=full, fsdp2"),
    "qwen2_5_vl, one stage": _case(
        "qwen2_5_vl", "fsdp4, tp2-fsdp2, dp4 remat=full, fsdp2-tp2, fsdp4, tp2-dp2, fsdp4 remat=selective, dp4"
    ),
    "qwen2_5_vl, cut inside the tower": _case(
        "qwen2_5_vl", "fsdp2, dp2 remat=selective", "tp2, fsdp2 remat=full, fsdp2, tp2, dp2, tp2"
    ),
    "qwen2_vl, cut before the text": _case("qwen2_vl", "fsdp2, fsdp2 remat=full, tp2", "fsdp2, tp2, dp2, tp2"),
    "qwen3_vl, one stage": _case(
        "qwen3_vl", "fsdp4, tp2-fsdp2, dp4 remat=full, fsdp4, dp4, tp2-dp2, fsdp4 remat=selective, dp4, fsdp2-tp2"
    ),
    "qwen3_vl, cut inside the tower": _case(
        "qwen3_vl", "fsdp2, dp2 remat=selective", "tp2, fsdp2 remat=full, fsdp2, tp2, fsdp2, dp2, tp2"
    ),
    "qwen3_vl, cut inside the text": _case(
        "qwen3_vl", "dp2, tp2 remat=full, fsdp2, fsdp2, dp2, fsdp2", "tp2 remat=full, fsdp2, fsdp2"
    ),
    "speech_to_text, cut before the decoder": _case(
        "speech_to_text", "fsdp2, fsdp2, tp2 remat=full", "tp2, fsdp2, tp2, fsdp2"
    ),
    "whisper, one stage": _case(
        "whisper", "fsdp4, tp2-fsdp2, dp4 remat=full, fsdp2-tp2, tp4, fsdp4 remat=selective, dp4"
    ),
    "whisper, cut before the decoder": _case("whisper", "fsdp2, fsdp2, tp2 remat=full", "tp2, fsdp2, tp2, fsdp2"),
    "whisper, cut inside the decoder": _case("whisper", "dp2, tp2, fsdp2, tp2, dp2", "tp2 remat=full, fsdp2"),
    "whisper, cut inside the encoder": _case("whisper", "fsdp2, dp2", "fsdp2, fsdp2, dp2 remat=full, fsdp2, fsdp2"),
}
