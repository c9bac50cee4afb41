"""Tensors in the memory of the host, pinned where the device is a GPU, and marked so that meters of a device skip them.

On a CPU the host's memory is the device's own: such a tensor then differs from others by its mark alone.
"""

import torch
from torch import Tensor

_MARK = "lies_on_host"


def empty_on_host(part: Tensor) -> Tensor:
    """A tensor without values of the shape and type of one of the device, in memory of its host."""
    made = torch.empty(0, dtype=part.dtype, pin_memory=part.device.type == "cuda")
    setattr(made.untyped_storage(), _MARK, True)  # before it has any memory that a meter would see
    return made.resize_(part.shape)


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """Whether it is the storage of such a tensor."""
    return hasattr(storage, _MARK)
