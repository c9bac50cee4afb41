"""Tests of resuming: bitwise under the same plan, same losses under another plan or process count."""

import json
from collections.abc import Callable, Container
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from steelyard.modules.build import build_model
from steelyard.modules.experts import IMPLEMENTATION as EXPERTS_IMPLEMENTATION
from steelyard.plan.file import write_plan
from steelyard.plan.plan import Plan
from steelyard.runtime.checkpoint_folder import complete_checkpoints, read_info
from steelyard.runtime.options import TrainOptions
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan
from tests.runtime.processes import run_module
from tests.sample import sampled

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

LOSS_TOLERANCE = 1e-5
"""Relative tolerance of losses after a resume under another plan, because sums have another order."""
UNEVEN = {**CONFIGS["llama"], "num_hidden_layers": 2, "vocab_size": 250, "intermediate_size": 124}
"""Sizes that four ranks do not divide."""
TIED = {**CONFIGS["llama-tied"], "vocab_size": 250}
EXPERTS = {**FAMILY_CONFIGS["qwen3_moe"], "num_hidden_layers": 3, "vocab_size": 250, "max_position_embeddings": 128}
STEPS, MIDDLE = 2, 1
RUN = TrainOptions(steps=STEPS, lr=1e-2, warmup_steps=2, checkpoint_every=MIDDLE)


def _plan(config: dict[str, Any], *stages: str, **options: Any) -> Callable[[], Plan]:
    """Build the plan on demand, because its model is split then, which collecting does not wait for."""
    return cache(partial(make_plan, config, *stages, global_batch=8, **options))


PLANS: dict[str, Callable[[], Plan]] = {
    name: _plan(config, *stages, num_microbatches=m, num_devices=n, num_chunks=v, schedule=schedule)
    for name, config, stages, m, n, v, schedule in (
        ("mixed", UNEVEN, ["fsdp4, dp4, tp2-fsdp2+sp, fsdp4 zero2"], 2, 4, 1, "1f1b"),
        ("interleaved", UNEVEN, ["fsdp2 zero1", "tp2", "dp2", "fsdp2 zero1"], 4, 4, 2, "interleaved-1f1b"),
        ("chunks in a V", UNEVEN, ["dp2", "fsdp2 zero1", "tp2", "fsdp2"], 4, 4, 2, "zb-v"),
        ("other orders", UNEVEN, ["fsdp2-tp2, fsdp2-tp2, tp4, tp2-dp2"], 1, 4, 1, "1f1b"),
        ("two processes", UNEVEN, ["single, single", "single, single"], 4, 2, 1, "gpipe"),
        ("hybrid and context", UNEVEN, ["dp2-fsdp2 zero1, fsdp2-cp2, cp2-tp2+sp, dp2-fsdp2 zero2"], 2, 4, 1, "1f1b"),
        ("tied, two stages", TIED, ["fsdp2, tp2", "dp2, tp2"], 4, 4, 1, "1f1b"),
        ("tied, one stage", TIED, ["tp2-fsdp2, dp4, dp4, fsdp4"], 1, 4, 1, "1f1b"),
        ("experts", EXPERTS, ["fsdp4, dp4, fsdp4 ep4, fsdp4 ep2, fsdp4"], 2, 4, 1, "1f1b"),
        ("other experts", EXPERTS, ["dp2, fsdp2, dp2 ep2", "fsdp2 zero1 ep2 remat=full, dp2"], 2, 4, 1, "1f1b"),
        ("whole experts", EXPERTS, ["dp2, fsdp2, fsdp2, dp2, fsdp2"], 1, 2, 1, "1f1b"),
    )
}
PLANS["unlike stages"] = _plan(UNEVEN, "single", "tp2, fsdp2", "single", sizes=(1, 2, 1), num_microbatches=4)
PLANS["tied, unlike stages"] = _plan(TIED, "single", "tp2, dp2, fsdp2", sizes=(1, 2), num_microbatches=2)
RESUMED = {
    "mixed": ("mixed", "interleaved", "chunks in a V", "two processes"),
    "unlike stages": ("unlike stages", "mixed"),
    "hybrid and context": ("hybrid and context", "mixed"),
    "tied, two stages": ("tied, two stages", "tied, unlike stages"),
    "experts": ("experts", "other experts", "whole experts"),
}
INITIALISED = [("mixed", "other orders"), ("tied, two stages", "tied, one stage"), ("experts", "other experts")]
"""Runs whose weights are read in under another plan and written out again."""
ALL_PAIRS = [(base, plan) for base, plans in RESUMED.items() for plan in plans]
NIGHTLY = {("mixed", "interleaved"), *((name, name) for name in RESUMED if name not in ("mixed", "experts"))}
"""Resumes that others cover: chunks in a V are chunks, too; a checkpoint is read under its own plan as under another,
bit by bit in the runs that have most strategies, and experts."""


def left_to_the_night(pairs: list[tuple[str, str]]) -> list[Any]:
    """The pairs as parameters of a test, those of `NIGHTLY` marked."""
    return [pytest.param(*pair, marks=pytest.mark.nightly if pair in NIGHTLY else ()) for pair in pairs]


PAIRS = left_to_the_night(ALL_PAIRS)
OTHER_PAIRS = left_to_the_night([(base, plan) for base, plan in ALL_PAIRS if base != plan])
SAME = sampled(RESUMED, [base for base in RESUMED if (base, base) not in NIGHTLY])


class Runs:
    """Losses and files of all runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: dict[str, Any] = {}

    def job(self, name: str, plan: str, options: TrainOptions) -> dict[str, Any]:
        path = self.folder / f"{plan}.json"
        write_plan(PLANS[plan](), path)
        return {
            "name": name,
            "plan": str(path),
            "data": str(self.folder / "tokens.npy"),
            "arguments": options.arguments(),
            "processes": PLANS[plan]().num_devices,
        }

    def checkpoints(self, name: str) -> Path:
        return self.folder / "checkpoints" / name

    def weights(self, name: str) -> Path:
        return self.folder / "weights" / name

    def jobs(self, left_out: Container[tuple[str, str]]) -> list[dict[str, Any]]:
        found = []
        for base, plans in RESUMED.items():
            options = replace(
                RUN,
                checkpoint_dir=self.checkpoints(base),
                export_hf=self.weights(base),
                tokenizer=self.folder / "tokenizer",
            )
            found.append(self.job(base, base, options))
            for plan in (each for each in plans if (base, each) not in left_out):
                middle = self.checkpoints(base) / f"step-{MIDDLE:08d}"
                name = f"{base} → {plan}"
                options = replace(RUN, resume=str(middle), checkpoint_dir=self.checkpoints(name))
                found.append(self.job(name, plan, options))
        for base, plan in INITIALISED:
            name = f"weights: {base} → {plan}"
            again = replace(RUN, steps=1, init=self.weights(base), export_hf=self.weights(name), lr=0.0)
            found.append(self.job(name, plan, again))
        return sorted(found, key=lambda job: -job["processes"])


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("checkpoints"))
    np.save(runs.folder / "tokens.npy", np.random.default_rng(0).integers(0, 250, 20_000).astype(np.uint16))
    write_tokenizer(runs.folder / "tokenizer")
    jobs, result = runs.folder / "jobs.json", runs.folder / "result.json"
    asked = [item for item in request.session.items if item.path == request.path]
    left_out = () if any(item.get_closest_marker("nightly") for item in asked) else NIGHTLY
    jobs.write_text(json.dumps(runs.jobs(left_out)))
    runs.losses = run_module("tests.runtime.run_worker", jobs, result=result)
    return runs


def write_tokenizer(folder: Path) -> None:
    """One of whole words."""
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({"?": 0, "to": 1, "be": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "?"}')


def test_transformers_loads_the_tokenizer_that_was_given(runs: Runs) -> None:
    tokenizer = AutoTokenizer.from_pretrained(runs.weights("mixed"))
    assert (tokenizer("to be").input_ids, tokenizer.eos_token) == ([1, 2], "?")


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint as a whole, without the states of random generators."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("rng.")
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


@pytest.mark.parametrize(("base", "plan"), PAIRS)
def test_a_resumed_run_goes_on_with_the_step_after_the_checkpoint(runs: Runs, base: str, plan: str) -> None:
    assert [step for step, _ in runs.losses[f"{base} → {plan}"]] == list(range(MIDDLE + 1, STEPS + 1))


@pytest.mark.parametrize("base", SAME)
def test_under_the_same_plan_losses_are_equal_bit_by_bit(runs: Runs, base: str) -> None:
    assert runs.losses[f"{base} → {base}"] == runs.losses[base][MIDDLE:]


@pytest.mark.parametrize("base", SAME)
def test_under_the_same_plan_the_last_state_is_equal_bit_by_bit(runs: Runs, base: str) -> None:
    expected = stored(runs.checkpoints(base) / f"step-{STEPS:08d}")
    found = stored(runs.checkpoints(f"{base} → {base}") / f"step-{STEPS:08d}")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("base", "plan"), OTHER_PAIRS)
def test_under_another_plan_losses_are_those_of_the_first(runs: Runs, base: str, plan: str) -> None:
    found = [loss for _, loss in runs.losses[f"{base} → {plan}"]]
    expected = [loss for _, loss in runs.losses[base][MIDDLE:]]
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize(("base", "plan"), OTHER_PAIRS)
def test_a_checkpoint_has_the_same_names_shapes_and_moments_under_every_plan(runs: Runs, base: str, plan: str) -> None:
    expected = stored(runs.checkpoints(base) / f"step-{STEPS:08d}")
    found = stored(runs.checkpoints(f"{base} → {plan}") / f"step-{STEPS:08d}")
    assert {name: value.shape for name, value in found.items()} == {n: value.shape for n, value in expected.items()}
    for name in (name for name in expected if name.endswith("exp_avg")):  # of which a tenth is the last step's gradient
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-4 * expected[name].abs().max().item())


@pytest.mark.parametrize("base", RESUMED)
def test_a_checkpoint_holds_every_parameter_of_the_model_and_adams_moments(runs: Runs, base: str) -> None:
    tensors = stored(runs.checkpoints(base) / f"step-{STEPS:08d}")
    model = build_model(PLANS[base]().chain(), seed=0)
    for name, parameter in model.named_parameters():
        assert tensors[f"model.{name}"].shape == parameter.shape
        assert tensors[f"optimizer.{name}.exp_avg"].shape == parameter.shape
        assert tensors[f"optimizer.{name}.step"].item() == STEPS
    assert len(tensors) == 4 * len(list(model.parameters()))


def test_a_record_has_how_uneven_the_routing_of_divided_experts_was(runs: Runs) -> None:
    assert all(1 <= found < 4 for found in runs.losses["experts: imbalance"])
    assert set(runs.losses["mixed: imbalance"]) == {None}


def test_the_last_checkpoints_are_kept_and_no_other(runs: Runs) -> None:
    assert [path.name for path in complete_checkpoints(runs.checkpoints("mixed"))] == [
        f"step-{MIDDLE:08d}",
        f"step-{STEPS:08d}",
    ]
    assert sorted(path.name for path in runs.checkpoints("mixed").iterdir()) == [
        ".lock",
        f"step-{MIDDLE:08d}",
        f"step-{STEPS:08d}",
    ]


def test_a_checkpoint_knows_the_samples_that_were_read(runs: Runs) -> None:
    info = read_info(runs.checkpoints("mixed") / f"step-{STEPS:08d}")
    assert (info.step, info.num_samples) == (STEPS, STEPS * PLANS["mixed"]().global_batch)


@pytest.mark.parametrize("base", RESUMED)
def test_exported_weights_are_those_of_the_last_checkpoint(runs: Runs, base: str) -> None:
    tensors = stored(runs.checkpoints(base) / f"step-{STEPS:08d}")
    exported = load_folder(runs.weights(base))
    assert {f"model.{name}" for name in exported} == {name for name in tensors if name.startswith("model.")}
    assert all(torch.equal(value, tensors[f"model.{name}"]) for name, value in exported.items())


@pytest.mark.parametrize("base", RESUMED)
def test_transformers_loads_what_was_exported_with_the_logits_of_the_checkpoint(runs: Runs, base: str) -> None:
    tensors = stored(runs.checkpoints(base) / f"step-{STEPS:08d}")
    model = build_model(PLANS[base]().chain(), seed=0).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    same = {"attn_implementation": "sdpa"}
    if base == "experts":
        same["experts_implementation"] = EXPERTS_IMPLEMENTATION
    loaded = AutoModelForCausalLM.from_pretrained(runs.weights(base), **same).eval()
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(("base", "plan"), INITIALISED)
def test_weights_that_another_plan_reads_and_writes_are_the_same(runs: Runs, base: str, plan: str) -> None:
    expected, found = load_folder(runs.weights(base)), load_folder(runs.weights(f"weights: {base} → {plan}"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def load_folder(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}
