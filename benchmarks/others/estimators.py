"""Others' estimators that install from the package index and need no GPU: what they state, and how they are asked.

Versions are pinned, so that a page says what was asked. An estimator that does not install or fails gives its reason
instead of estimates; nothing here raises for it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from others.questions import Question
from steelyard.plan.file import default_folder

SCRIPTS = Path(__file__).parent / "scripts"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""Names the build of torch, which is the one without a GPU where such a build is at hand."""
TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One open estimator."""

    name: str
    package: str
    """With its version, as pip takes it."""
    script: str
    call: str
    """What is called, with the arguments that matter."""
    states: str
    leaves_out: str
    environment: str
    """Several that need torch share one."""
    needs: tuple[Sequence[str], ...] = ()
    """Arguments of pip, a call each, before the package's own."""
    flags: tuple[str, ...] = ()
    """Of pip for the package itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Figures of an estimator for one run; None where it states none. Bytes of a rank, seconds of a step."""

    peak_bytes: float | None = None
    states_bytes: float | None = None
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """An estimator's estimates by the id of a run, and why others have none."""

    estimator: Estimator
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    failure: str = ""
    """Why it could not be asked at all."""


_TORCH = ("-c", str(CONSTRAINTS), "torch")
ESTIMATORS = (
    Estimator(
        name="llm-analysis",
        package="llm-analysis==0.2.2",
        environment="llm-analysis",
        script="ask_llm_analysis.py",
        call="`LLMAnalysis(…, flops_efficiency=0.5).training(…)`; 0.5 is what its source names for Megatron-LM",
        states="time of a step, peak memory of a GPU",
        leaves_out="communication and pipeline bubbles in the time; the third matrix of a gated feed-forward layer; "
        "allocator and context; devices after H100, fp8, sequence and context parallelism apart from tp",
    ),
    Estimator(
        name="ftuneai",
        package="ftuneai==0.4.1",
        environment="ftuneai",
        script="ask_ftuneai.py",
        call="`MemoryEstimator(…).estimate()`, `TimeEstimator(…).estimate(…)`",
        states="time of a job, peak memory of a GPU, full training and LoRA with ZeRO",
        leaves_out="tensor, pipeline and context parallelism, the fp32 copy of parameters, 8-bit products",
    ),
    Estimator(
        name="Megatron-Bridge",
        package="megatron-bridge==0.3.1",
        flags=("--no-deps",),
        needs=(_TORCH,),
        environment="torch",
        script="ask_megatron_bridge.py",
        call="`theoretical_memory_utils.compute_weight_and_optimizer_memory`, `compute_activation_memory`",
        states="model states, and the peak where sequence parallelism and selective recomputation are on",
        leaves_out="time; activations of any other recomputation; experts in parallel, ZeRO-2 and 3",
    ),
    Estimator(
        name="DeepSpeed",
        package="deepspeed==0.19.8",
        flags=("--no-build-isolation",),
        needs=(_TORCH, ("setuptools", "wheel")),
        environment="torch",
        script="ask_deepspeed.py",
        call="`estimate_zero2_model_states_mem_needs`, `estimate_zero3_model_states_mem_needs`, without offload",
        states="model states under ZeRO-2 and ZeRO-3",
        leaves_out="activations, time; ZeRO-1, tensor and pipeline parallelism",
    ),
    Estimator(
        name="accelerate",
        package="accelerate==1.15.0",
        needs=(_TORCH, ("transformers",)),
        environment="torch",
        script="ask_accelerate.py",
        call='`calculate_maximum_sizes` of a meta model and `estimate_training_usage(…, "bfloat16")`, as '
        "`accelerate estimate-memory` does",
        states="model states of one unsharded copy with Adam",
        leaves_out="activations, time; every kind of sharding and parallelism",
    ),
)
NOT_ASKED = {
    "gpu-estimator 0.2.0": "divides the whole memory by the fewest GPUs that hold it: no plan can be given",
    "hf-vram-calc 1.0.9": "training memory is 5.2 times the weights, for any batch, length and ZeRO stage",
    "fitcheck-llm 0.3.1": "one GPU only, fitted to a T4; no published run here is of one GPU",
    "alloc 0.0.16": "profiles a short run: needs the GPU",
    "SimuMax, Calculon, vTrain": "not on the package index",
}
"""Others of that kind that were looked at, and why they are not asked."""


def ask(estimator: Estimator, questions: Sequence[Question]) -> Answers:
    """Ask an estimator about these runs, in a process of its own; installed first where it is not."""
    folder = default_folder("estimators") / estimator.environment
    try:
        if not (folder / estimator.package).is_file():
            _install(estimator, folder)
        answer = _run([_python(folder), str(SCRIPTS / estimator.script)], json.dumps(questions))
        found = json.loads(answer.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        return Answers(estimator=estimator, failure=_reason(error))
    return Answers(estimator=estimator, estimates={row: Estimate(**each) for row, each in found.items()})


def _install(estimator: Estimator, folder: Path) -> None:
    if not folder.exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    for arguments in (*estimator.needs, (*estimator.flags, estimator.package)):
        _run([_python(folder), "-m", "pip", "install", "--quiet", *arguments])
    (folder / estimator.package).touch()


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _run(command: Sequence[str], text: str = "") -> str:
    without = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    asked = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIME_LIMIT_S,
        env=without | {"DS_BUILD_OPS": "0", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    return asked.stdout


def _reason(error: Exception) -> str:
    """The last line that a failed process wrote, or what the error says."""
    written = getattr(error, "stderr", None) or str(error)
    lines = [line for line in str(written).strip().splitlines() if line.strip() and "[notice]" not in line]
    return lines[-1].strip() if lines else type(error).__name__
