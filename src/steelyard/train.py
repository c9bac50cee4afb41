"""One process of a training run: ``torchrun --nproc-per-node N -m steelyard.train plan.json --data PATH``.

`steelyard train` starts the processes of one host by itself (`steelyard.runtime.launch`).
"""

import os

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that set PyTorch's allocator, which reads them before its first tensor on a GPU."""
if not any(name in os.environ for name in ALLOCATOR):
    os.environ[ALLOCATOR[0]] = "expandable_segments:True"  # leaves fewer holes, so that a full device goes on longer

from steelyard.runtime.process import main  # noqa: E402

if __name__ == "__main__":
    main()
