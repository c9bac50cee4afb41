"""The engine of this project: `steelyard.runtime`, which runs every plan, or a script of the same stock calls."""

from steelyard.engines.capabilities import Capabilities
from steelyard.engines.engine import Engine, Taken
from steelyard.engines.launch import KUBEFLOW, KUBEFLOW_V1, SLURM, TORCHRUN
from steelyard.engines.pytorch import TARGET as PYTORCH
from steelyard.levers.float8 import MXFP8, Float8


def _refuse_float8(float8: Float8) -> str | None:
    return "for whose kernels no trace is made" if str(float8) == MXFP8 else None


NATIVE = Engine(
    name="native",
    capabilities=Capabilities(mixes_layers=True),
    precisions=("bf16", "fp16", "fp32"),
    levers={"float8": Taken(refuse=_refuse_float8)},
    targets=(PYTORCH, TORCHRUN, SLURM, KUBEFLOW, KUBEFLOW_V1),
)
