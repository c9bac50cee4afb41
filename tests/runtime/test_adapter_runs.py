"""Tests of runs with adapters other than LoRA: initial weights, what peft reads, and resuming."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from steelyard.modules.build import build_model
from tests.runtime.adapter_runs import logits_of, run_all
from tests.runtime.lora_cases import SHORT, lora_plan
from tests.runtime.test_checkpoints import MIDDLE, RUN, load_folder

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Specified to not"),
]

SOME = "targets=q_proj+v_proj+down_proj"
TEXTS = {
    "dora": "dora:r=4",
    "ia3": "ia3",
    "oft": f"oft:oft_block_size=4,{SOME}",
    "vera": f"vera:r=8,{SOME}",
    "delora": f"delora:r=4,{SOME}",
    "tokens": "trainable_tokens:token_indices=1+2,targets=embed_tokens",
    "copies": "lora:r=4,targets=q_proj,modules_to_save=embed_tokens+lm_head",
}
SAMPLE = ("dora", "vera", "copies")
NAMES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.nightly) for name in TEXTS]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a written base and, for each PEFT method, a run from it and its rest under another plan, merged."""
    folder = tmp_path_factory.mktemp("adapters")
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 250, 20_000).astype(np.uint16))
    items = (item for item in request.session.items if item.path == request.path)
    names = (item.callspec.params["name"] for item in items)  # type: ignore[attr-defined]
    asked = dict.fromkeys(["vera", *names])  # whose adapters are of no change first, for the others to be compared with
    sizes: dict[str, Any] = {"global_batch": 8, "num_devices": 2}
    runs = []
    for name in asked:
        whole = "fsdp2, dp2 remat=full, dp2, fsdp2"
        one = lora_plan(TEXTS[name], SHORT, whole, num_microbatches=2, **sizes)
        other = lora_plan(TEXTS[name], SHORT, "single, single", "single, single", num_microbatches=4, **sizes)
        if not (folder / "base").exists():
            build_model(one.chain().unchanged, seed=7).save_pretrained(folder / "base")
        start = replace(RUN, lr=0.01, init=folder / "base", export_hf=folder / f"{name} adapters")
        resumed = str(folder / name / f"step-{MIDDLE:08d}")
        rest = replace(start, init=None, resume=resumed, export_hf=folder / f"{name} merged", merge=True)
        runs += [(name, one, replace(start, checkpoint_dir=folder / name)), (f"{name}, rest", other, rest)]
    run_all(folder, runs)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_under_another_plan_as_if_it_had_not_stopped(folder: Path, name: str) -> None:
    losses = json.loads((folder / "losses.json").read_text())
    expected = [loss for _, loss in losses[name][MIDDLE:]]
    assert [loss for _, loss in losses[f"{name}, rest"]] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_peft_reads_adapters_that_compute_what_the_merged_weights_do(folder: Path, name: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    before = logits_of(base)
    with_adapters = logits_of(PeftModel.from_pretrained(base, str(folder / f"{name} adapters")))
    merged = logits_of(AutoModelForCausalLM.from_pretrained(folder / f"{name} merged", dtype=torch.float32))
    assert not torch.allclose(before, with_adapters, atol=1e-3)
    assert torch.allclose(with_adapters, merged, atol=1e-4)
    first = load_folder(folder / "base")
    assert first.keys() == load_folder(folder / f"{name} merged").keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_begins_with_what_the_base_computes(folder: Path, name: str) -> None:
    """Magnitudes and copies are those of the given base, and not of first weights."""
    losses = json.loads((folder / "losses.json").read_text())
    (_, found), *_ = losses[name]
    (_, expected), *_ = losses["vera"]
    assert found == pytest.approx(expected, rel=1e-5)
