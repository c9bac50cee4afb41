"""Tests of ``benchmarks/gpu.py``: the GPU code at small sizes on the CPU, and its behaviour without a GPU."""

import json
import subprocess
import sys
import time
from pathlib import Path

import gpu
import numpy as np
import pytest
import torch
from gpu import Bench, catalogue_device, catalogue_s, fitted_matmuls, largest_samples, one_device_plan, tiny_sizes

from steelyard.cost.predict import predict_memory
from steelyard.hardware.files import find_device
from steelyard.plan.strategy import Remat
from steelyard.units import GIB
from tests.processes.warm import HANG_LIMIT_S

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def bench() -> Bench:
    """A GPU of the catalogue, of which nothing is measured."""
    sizes = tiny_sizes()
    known = find_device("h100-80gb")
    return Bench(
        sizes=sizes,
        cluster="1x1xh100-80gb",
        memory=None,
        known=known,
        until_s=time.monotonic() + HANG_LIMIT_S,
        traces=gpu.traces_of(sizes),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert gpu.main() == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.processes
def test_every_part_runs_on_the_cpu_at_small_sizes(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--budget", str(HANG_LIMIT_S)]
    command += ["--json", str(output)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads(output.read_text())
    assert found["left_out"] == []
    assert found["parity"]["is_within"]
    assert [row["is_withheld"] for row in found["matmuls"]] == [False, True, False, False, True, False]
    assert {(row["kind"], row["remat"]) for row in found["layers"] if row["model"] == "tiny"} == {
        *(("embedding", remat) for remat in ("none", "full")),
        *(("block", remat) for remat in ("none", "selective", "full")),
        *(("head", remat) for remat in ("none", "full")),
    }
    for row in found["layers"]:
        assert 0.75 <= row["predicted_saved_bytes"] / row["saved_bytes"] <= 1.1, row
        assert 1.0 <= row["predicted_peak_bytes"] / row["peak_bytes"] <= 1.4, row
    assert [row["name"] for row in found["training"]] == ["none", "selective", "full", "largest that fits"]
    for row in found["training"]:
        assert row["outcome"] == "ran"
        assert 1.0 <= row["predicted_bytes"] / row["allocated_bytes"] <= 1.1, row
    for shown in ("parity in bf16: equal", "matrix products", "layers, forward", "training on one device"):
        assert shown in process.stdout


def test_the_largest_microbatch_fits_and_one_sample_more_does_not(bench: Bench) -> None:
    sizes = gpu.replace(bench.sizes, most_samples=4096)
    small = gpu.replace(bench, sizes=sizes, memory=int(1.3 * GIB))

    def fits(samples: int) -> bool:
        job = small.job(sizes.dense, None, global_batch=samples)
        stages = predict_memory(one_device_plan(job, Remat.NONE, samples=samples), job)
        return all(sum(terms.values()) <= job.budget_bytes for terms in stages)

    largest = largest_samples(small, None)
    assert 1 < largest < 4096
    assert fits(largest)
    assert not fits(largest + 1)


def test_where_nothing_fits_there_is_no_largest(bench: Bench) -> None:
    assert largest_samples(gpu.replace(bench, memory=2**20), None) == 0


def test_the_catalogue_prices_every_remat_choice_of_a_layer(bench: Bench) -> None:
    job = bench.job(bench.sizes.dense, None, global_batch=4)
    layer = job.profile.layer("block", {})
    assert layer is not None
    seconds = [catalogue_s(layer, remat, 2, job) for remat in (Remat.NONE, Remat.SELECTIVE, Remat.FULL)]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 3


def test_products_that_follow_the_law_are_fitted_and_withheld_ones_found() -> None:
    sizes = np.array([256.0, 512, 1024, 2048, 4096, 8192])
    seconds = 2 * sizes**3 / 6e14 + 6 * sizes**2 / 3e12 + 5e-6
    kept = np.array([True, False, True, True, False, True])
    assert fitted_matmuls(sizes, seconds, kept=kept) == pytest.approx(seconds, rel=1e-6)


def test_no_term_of_the_fit_is_below_zero() -> None:
    sizes = np.array([256.0, 512, 1024, 2048])
    seconds = 2 * sizes**3 / 6e14
    noisy = seconds * np.array([0.8, 1.2, 0.9, 1.1])
    assert (fitted_matmuls(sizes, noisy, kept=np.ones(4, dtype=bool)) > 0).all()


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.1, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("Nobody's GPU", 10.0, None),
    ],
)
def test_a_gpu_is_found_in_the_catalogue_by_name_and_memory(name: str, gib: float, expected: str | None) -> None:
    found = catalogue_device(name, int(gib * GIB))
    assert (found.name if found else None) == expected
