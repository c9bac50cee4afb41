"""Configuration of PyTorch's allocator in the processes of a run, to reduce fragmentation of a nearly full GPU.

With expandable segments a freed part of a segment serves tensors of any size; fixed segments of different sizes are
released and requested again. Source: docs of PyTorch's CUDA memory management; names as in torch 2.13
(``c10/cuda/CUDAAllocatorConfig.h``), which reads them before the first tensor on a GPU. Not for CUDA graphs that hold
collectives (pytorch issue 158029); the runtime captures none.
"""

import os

VARIABLE = "PYTORCH_ALLOC_CONF"
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", VARIABLE)
"""`VARIABLE` and its older names; torch takes the first that is set, even if it is empty."""
SETTING = "expandable_segments:True"


def set_allocator() -> None:
    """Configure the allocator of this process and its children unless the user has. Call it before torch is used."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLE] = SETTING


def allocator_setting() -> str:
    """Return the allocator configuration of this process, empty if there is none."""
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "")
