"""Plans of every kind for models with adapters; all in one launch."""

from functools import partial

from steelyard.levers import Levers
from steelyard.modules.freezing import find_freeze
from steelyard.plan.plan import Plan
from tests.runtime.cases import Case
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan

NUM_DEVICES = 4
SHORT = CONFIGS["llama"] | {"num_hidden_layers": 2}
FOUR = CONFIGS["llama"] | {"num_hidden_layers": 4}


def lora_plan(
    text: str,
    config: str | dict[str, object],
    *stages: str,
    base: str | None = None,
    loss: str | None = None,
    compiled: str | None = None,
    **options: object,
) -> Plan:
    """A plan of a model with these adapters."""
    plan = make_plan(config, *stages, **options)
    levers = Levers.of({"train": text, "base": base, "loss": loss, "compile": compiled})
    found = find_freeze(levers.change(plan.chain()), ())
    return plan.model_copy(update={"levers": levers.texts, "model": plan.model.model_copy(update={"frozen": found})})


def _case(
    config: str | dict[str, object], text: str, *stages: str, num_microbatches: int = 2, **options: object
) -> Case:
    sizes = {"num_microbatches": num_microbatches, "global_batch": 16, "num_devices": NUM_DEVICES}
    return Case(make=partial(lora_plan, text, config, *stages, **sizes | options), num_steps=2)


ALL, SOME = "lora:r=4", "lora:r=2,alpha=8,targets=q_proj+v_proj+down_proj,rslora"
_SOME = "targets=q_proj+v_proj+down_proj"
STACKED = "target_parameters=mlp.experts.gate_up_proj+mlp.experts.down_proj"
KINDS = {
    "ia3": "ia3:feedforward_modules=down_proj,targets=k_proj+v_proj+down_proj",
    "oft": f"oft:oft_block_size=4,{_SOME}",
    "vera": f"vera:r=8,{_SOME}",
    "ln_tuning": "ln_tuning",
    "trainable_tokens": "trainable_tokens:token_indices=1+2,targets=embed_tokens",
    "loha": f"loha:r=4,{_SOME}",
    "lokr": f"lokr:r=4,{_SOME}",
    "hra": f"hra:r=4,{_SOME}",
    "fourierft": f"fourierft:n_frequency=10,{_SOME}",
    "c3a": f"c3a:block_size=8,{_SOME}",
    "randlora": f"randlora:r=4,{_SOME}",
    "road": f"road:group_size=8,{_SOME}",
    **{kind: f"{kind}:{_SOME}" for kind in ("beft", "deft", "delora", "gralora", "hira", "miss", "peanut")},
    "glora": f"glora:r=4,{_SOME}",
}
"""Kinds of adapters but those that draw numbers as they compute."""
MIXED = "fsdp2, dp2, fsdp2 zero2 remat=full, dp2 remat=selective, fsdp2, dp2"
CASES: dict[str, Case] = {
    "replicated": _case(SHORT, ALL, "dp4, dp4 remat=full, dp4 remat=selective, dp4"),
    "sharded": _case(FOUR, SOME, "fsdp4 zero2, fsdp4, fsdp4 zero2, fsdp4 zero1, fsdp4 remat=full, dp4"),
    "tensors": _case(FOUR, ALL, "tp4, tp2-dp2+sp, fsdp2-tp2, dp2-tp2 remat=full, tp4+sp, tp4"),
    "tensors of a part": _case("llama", SOME, "tp4, tp2-dp2+sp, fsdp2-tp2+sp, dp2-tp2, tp4, tp4, tp2-fsdp2, tp4"),
    "context": _case(FOUR, ALL, "fsdp4, cp4, dp2-cp2, fsdp2-cp2, cp4 remat=full, dp4", seq_len=32),
    "stages": _case(FOUR, ALL, "fsdp2, dp2 remat=full, fsdp2", "dp2, tp2, fsdp2"),
    "chunks": _case(
        "llama", SOME, "dp2", "fsdp2, dp2", "dp2, tp2", "fsdp2, dp2, dp2", num_chunks=2, schedule="interleaved-1f1b"
    ),
    "bf16": _case(SHORT, ALL, "fsdp2, dp2", "tp2, fsdp2", precision="bf16"),
    "tied": _case("llama-tied", ALL, "dp2, fsdp2", "fsdp2, dp2"),
    "experts": _case(FAMILY_CONFIGS["mixtral"], "lora:r=4", "fsdp4, dp4, fsdp4 ep2 remat=full, dp4"),
    "stacked experts": _case(
        FAMILY_CONFIGS["mixtral"],
        f"lora:r=4,targets=q_proj,{STACKED}",
        "fsdp4, dp4, fsdp2-cp2 zero2 remat=full, dp4",
        seq_len=16,
    ),
    "stacked experts, stages": _case(FAMILY_CONFIGS["mixtral"], f"lora:r=4,{STACKED}", "dp2, fsdp2", "dp2, fsdp2"),
    "one key-value head, tensors": _case(
        FAMILY_CONFIGS["mistral with one key-value head"], ALL, "dp4, tp4, tp2-dp2+sp, dp4", seq_len=16
    ),
    "qwen2, which has biases": _case("qwen2", SOME, "fsdp4, tp4, fsdp2-tp2+sp, dp4"),
    "gpt2, stored together": _case(FAMILY_CONFIGS["gpt2"], "lora:r=4", "fsdp2, dp2", "dp2, fsdp2"),
    "nf4": _case(FOUR, "qlora:r=4", "fsdp2, dp2, dp2 remat=full, fsdp2 remat=selective, dp2, fsdp2", num_devices=2),
    "nf4 and experts": _case(
        FAMILY_CONFIGS["mixtral"], "qlora:r=4", "fsdp2, dp2, fsdp2 remat=full, dp2", base="nf4+experts", num_devices=2
    ),
    "int8 and experts, all with adapters": _case(
        FAMILY_CONFIGS["mixtral"],
        f"lora:r=4,{STACKED}",
        *("dp2, fsdp2 remat=full", "dp2 remat=selective, fsdp2"),
        base="int8+experts",
    ),
    "nf4, stages": _case("qwen2", "qlora:r=4", "dp2, fsdp2", "dp2, fsdp2", num_microbatches=4),
    "nf4, dora": _case(SHORT, "qlora:r=4,use_dora=true", "dp2, fsdp2 remat=full", "dp2, fsdp2", num_microbatches=4),
    "int8": _case(FOUR, SOME, "fsdp4, dp4, cp4, fsdp4, dp2-cp2, dp4", base="int8", seq_len=32),
    "loss in chunks, replicated": _case(SHORT, "full", ", ".join(["dp2"] * 4), loss="chunked:3", num_devices=2),
    "loss in chunks, sharded": _case(
        SHORT, "full", ", ".join(["fsdp2"] * 4), loss="chunked", precision="fp32", num_devices=2
    ),
    "loss in chunks, tensors": _case(SHORT, "full", ", ".join(["dp2-tp2"] * 4), loss="chunked:4"),
    "loss in chunks, tokens": _case(SHORT, "full", ", ".join(["dp2-cp2"] * 4), loss="chunked:4", seq_len=32),
    "loss in chunks, recomputed": _case(SHORT, "full", "dp4, dp4, dp4, dp4 remat=full", loss="chunked:4"),
    "loss in chunks, tied": _case("llama-tied", "full", "dp2, fsdp2", "fsdp2, dp2", loss="chunked:4"),
    "loss in chunks beside adapters": _case(FOUR, ALL, "fsdp2, dp2, dp2", "dp2, fsdp2, fsdp2", loss="chunked:4"),
    "dora": _case(FOUR, "dora:r=4", "dp4, dp4 remat=full, fsdp4 zero2, cp4, dp4 remat=selective, dp4", seq_len=32),
    "dora, stages": _case(
        FOUR,
        "dora:r=4,targets=q_proj+v_proj+down_proj",
        "dp2, fsdp2, dp2 remat=full",
        "fsdp2, dp2, fsdp2",
    ),
    "copies of embedding and head": _case(FOUR, "lora:r=4,modules_to_save=embed_tokens+lm_head", MIXED, num_devices=2),
    **{kind: _case(FOUR, text, MIXED, num_devices=2) for kind, text in KINDS.items()},
    "latent attention": _case(FAMILY_CONFIGS["deepseek_v3"], ALL, "dp4, fsdp4, dp4, fsdp4", seq_len=16),
}
NIGHTLY = {
    *KINDS.keys() - {"ia3", "oft", "vera"},
    "chunks",
    "qwen2, which has biases",
    "tensors of a part",
    "loss in chunks, recomputed",
    "loss in chunks, replicated",
    "nf4, stages",
    "stages",
    "vera",
    *("context", "stacked experts, stages", "dora, stages", "loss in chunks, tied", "sharded", "ia3", "nf4"),
    *("one key-value head, tensors", "gpt2, stored together", "latent attention"),
}
"""Cases that other cases cover: every dimension stays under one kind of adapters, and every kind of base under one
plan; other models stay without adapters in `tests.runtime.family_cases`."""
SAMPLE = [name for name in CASES if name not in NIGHTLY]
