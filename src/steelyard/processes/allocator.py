"""How PyTorch's allocator is set in the processes of a run, so that a nearly full GPU holds fewer holes.

With expandable segments a freed part of a segment serves tensors of any size, where fixed segments of unlike sizes lie
beside each other and are given back and asked for again. Source: docs of PyTorch's CUDA memory management; names as in
torch 2.13 (``c10/cuda/CUDAAllocatorConfig.h``), which reads them before the first tensor on a GPU. Not for CUDA graphs
that hold collectives (pytorch issue 158029); the runtime captures none.
"""

import os

VARIABLE = "PYTORCH_ALLOC_CONF"
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", VARIABLE)
"""Its older names too; torch takes the first that is set, be it to nothing."""
SETTING = "expandable_segments:True"


def set_allocator() -> None:
    """Sets the allocator of this process and those it starts, unless the user has set it; before torch is used."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLE] = SETTING


def allocator_setting() -> str:
    """What the allocator of this process is set to; empty where it is not."""
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "")
