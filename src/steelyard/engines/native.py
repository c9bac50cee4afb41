"""The engine of this project: `steelyard.runtime`, which runs every plan, or a script of the same stock calls."""

from steelyard.engines.capabilities import Capabilities
from steelyard.engines.engine import Engine
from steelyard.engines.launch import KUBEFLOW, KUBEFLOW_V1, SLURM, TORCHRUN
from steelyard.engines.pytorch import TARGET as PYTORCH

NATIVE = Engine(
    name="native",
    capabilities=Capabilities(mixes_layers=True),
    precisions=("bf16", "fp16", "fp32"),
    targets=(PYTORCH, TORCHRUN, SLURM, KUBEFLOW, KUBEFLOW_V1),
)
