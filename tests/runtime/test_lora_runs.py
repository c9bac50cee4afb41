"""Tests of runs with adapters: what peft and transformers read of them, and resuming under another plan."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from steelyard.modules.build import build_model
from steelyard.modules.prepared import store_together
from steelyard.plan.plan import Plan
from tests.runtime.adapter_runs import logits_of, run_all
from tests.runtime.lora_cases import STACKED, lora_plan
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS
from tests.runtime.test_checkpoints import MIDDLE, RUN, load_folder, stored

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

CONFIG = CONFIGS["llama"] | {"num_hidden_layers": 3}
TEXT = "lora:r=4,alpha=16,targets=q_proj+v_proj+down_proj"


def _plan(*stages: str, num_microbatches: int, num_devices: int = 4, text: str = TEXT, base: str | None = None) -> Plan:
    sizes = {"global_batch": 8, "num_microbatches": num_microbatches, "num_devices": num_devices}
    return lora_plan(text, CONFIG, *stages, base=base, **sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a written base, a run from it and its rest under another plan, with merged weights; also with
    magnitudes on a 4-bit base."""
    folder = tmp_path_factory.mktemp("lora")
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 250, 20_000).astype(np.uint16))
    one = _plan("fsdp4, tp4, fsdp2-tp2+sp, dp4, tp2-fsdp2", num_microbatches=2)
    other = _plan("dp2, fsdp2", "tp2, fsdp2, dp2", num_microbatches=4)
    base = build_model(one.chain().unchanged, seed=7)
    base.save_pretrained(folder / "base")
    lr = replace(RUN, lr=0.05, init=folder / "base", export_hf=folder / "adapters")
    short, other_short = (
        _plan(*stages, num_microbatches=2, num_devices=2, text=f"{TEXT},use_dora=true", base="nf4")
        for stages in (["fsdp2, fsdp2, dp2, fsdp2, fsdp2"], ["single, single, single", "single, single"])
    )
    others = []
    for name, text in (("gpt2", "lora:r=4"), ("mixtral", f"lora:r=4,targets=q_proj,{STACKED}")):
        found = lora_plan(
            text,
            FAMILY_CONFIGS[name] | {"vocab_size": 256},
            "fsdp2, dp2, fsdp2, dp2",
            **{"global_batch": 8, "num_microbatches": 2, "num_devices": 2, "seq_len": 16},
        )
        found_base = build_model(found.chain().unchanged, seed=7)
        store_together(found_base)  # as transformers has them
        found_base.save_pretrained(folder / f"{name} base")
        options = replace(lr, steps=2, init=folder / f"{name} base", export_hf=folder / f"{name} adapters")
        others.append((name, found, options))
        merged = replace(options, export_hf=folder / f"{name} merged", merge=True)
        others.append((f"{name}, merged", found, merged))
        if name == "mixtral":
            in_bits = lora_plan(
                f"qlora:r=4,targets=q_proj,{STACKED}",
                FAMILY_CONFIGS[name] | {"vocab_size": 256},
                "fsdp2, dp2, fsdp2, dp2",
                base="nf4+experts",
                **{"global_batch": 8, "num_microbatches": 2, "num_devices": 2, "seq_len": 16},
            )
            others.append(("experts in nf4", in_bits, replace(options, export_hf=folder / "beside experts in nf4")))
    middle, short_middle = (str(folder / name / f"step-{MIDDLE:08d}") for name in ("one", "nf4"))
    runs = [
        ("one", one, replace(lr, checkpoint_dir=folder / "one")),
        ("other", other, replace(lr, init=None, resume=middle, export_hf=folder / "merged", merge=True)),
        ("nf4", short, replace(lr, checkpoint_dir=folder / "nf4", export_hf=folder / "beside nf4")),
        *others,
        ("nf4, other", other_short, replace(lr, init=None, resume=short_middle, export_hf=None)),
    ]
    run_all(folder, runs)
    return folder


@pytest.mark.parametrize(("whole", "rest"), [("one", "other"), ("nf4", "nf4, other")])
def test_a_run_goes_on_under_another_plan_as_if_it_had_not_stopped(folder: Path, whole: str, rest: str) -> None:
    losses = json.loads((folder / "losses.json").read_text())
    expected = [loss for _, loss in losses[whole][MIDDLE:]]
    assert [loss for _, loss in losses[rest]] == pytest.approx(expected, rel=1e-5)


def test_a_base_in_four_bits_begins_near_the_base_and_not_with_it(folder: Path) -> None:
    losses = json.loads((folder / "losses.json").read_text())
    (_, first), (_, first_beside) = losses["one"][0], losses["nf4"][0]
    assert first_beside == pytest.approx(first, rel=1e-2)
    assert first_beside != pytest.approx(first, rel=1e-7)


def test_experts_in_four_bits_begin_near_the_base(folder: Path) -> None:
    losses = json.loads((folder / "losses.json").read_text())
    (_, first), (_, first_in_bits) = losses["mixtral"][0], losses["experts in nf4"][0]
    assert first_in_bits == pytest.approx(first, rel=1e-2)
    assert first_in_bits != pytest.approx(first, rel=1e-7)
    assert load_folder(folder / "beside experts in nf4").keys() == load_folder(folder / "mixtral adapters").keys()


def test_peft_reads_magnitudes_beside_a_base_in_four_bits(folder: Path) -> None:
    in_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=in_bits)
    before = logits_of(base)
    with_adapters = PeftModel.from_pretrained(base, str(folder / "beside nf4"))
    found = {name.replace(".default", "") for name, _ in with_adapters.named_parameters() if ".lora_" in name}
    stored_names = {name.removesuffix(".weight") for name in load_folder(folder / "beside nf4")}
    assert {name.removesuffix(".weight") for name in found} == stored_names
    assert sum("magnitude" in name for name in stored_names) == 3 * CONFIG["num_hidden_layers"]
    assert not torch.allclose(before, logits_of(with_adapters), atol=1e-3)


@pytest.mark.parametrize("model", ["", "gpt2 ", "mixtral "])
def test_peft_reads_adapters_that_compute_what_the_merged_weights_do(folder: Path, model: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / f"{model}base")
    before = logits_of(base)
    with_adapters = logits_of(PeftModel.from_pretrained(base, str(folder / f"{model}adapters")))
    merged = logits_of(AutoModelForCausalLM.from_pretrained(folder / f"{model}merged", dtype=torch.float32))
    assert not torch.allclose(before, with_adapters, atol=1e-3)
    assert torch.allclose(with_adapters, merged, atol=1e-4)
    assert {each.name for each in (folder / f"{model}adapters").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_what_has_no_adapters_is_merged_as_it_was(folder: Path) -> None:
    first, merged = load_folder(folder / "base"), load_folder(folder / "merged")
    assert first.keys() == merged.keys()
    for name, weight in first.items():
        has_adapters = any(f".{each}.weight" in name for each in ("q_proj", "v_proj", "down_proj"))
        assert torch.equal(weight, merged[name]) != has_adapters, name


def test_a_checkpoint_has_moments_of_adapters_alone(folder: Path) -> None:
    tensors = stored(folder / "one" / f"step-{MIDDLE:08d}")
    with_moments = {each.split(".", 1)[1].rpartition(".")[0] for each in tensors if each.startswith("optimizer.")}
    num_layers = CONFIG["num_hidden_layers"]
    assert len(with_moments) == 2 * 3 * num_layers
    assert all(".lora_" in name for name in with_moments)
