"""Tensors in host memory, pinned if the device is a GPU, and marked so that device memory meters skip them.

On a CPU, host memory is device memory, so only the mark distinguishes such a tensor.
"""

import os

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from steelyard.modules.updates import local_part

_MARK = "lies_on_host"


def empty_on_host(part: Tensor) -> Tensor:
    """Return an uninitialised host tensor with the shape and dtype of a device tensor."""
    made = torch.empty(0, dtype=part.dtype, pin_memory=part.device.type == "cuda")
    setattr(made.untyped_storage(), _MARK, True)  # before it has any memory that a meter would see
    return made.resize_(part.shape)


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage belongs to a marked host tensor."""
    return hasattr(storage, _MARK)


def rest_on_host(layer: FSDPModule, device_type: str) -> None:
    """Prepare a layer that FSDP sharded with `CPUOffloadPolicy`, in place.

    On a CPU, FSDP copies nothing because host and device memory are the same. Parameters are then copied and marked
    once, and gradients after every backward pass. On GPUs, the host runs the optimizer, so its cores are divided over
    the local ranks.
    """
    if device_type != "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        return
    for each in (each for group in layer._get_fsdp_state()._fsdp_param_groups for each in group.fsdp_params):
        before, shard = each.sharded_param, each._sharded_param_data
        local = local_part(before.detach())
        each._sharded_param_data = empty_on_host(shard).copy_(shard)
        part = each._sharded_param_data.as_strided(local.shape, local.stride(), local.storage_offset())
        each.sharded_param = nn.Parameter(each.to_sharded_dtensor(part), requires_grad=before.requires_grad)
        each._setattr_on_modules(each.sharded_param)
        if before.requires_grad:
            each.sharded_param.register_post_accumulate_grad_hook(_gradient_to_host)


def _gradient_to_host(parameter: Tensor) -> None:
    gradient = parameter.grad
    assert isinstance(gradient, DTensor), "what FSDP has sharded"
    part = local_part(gradient)
    if not is_on_host(part.untyped_storage()):
        parameter.grad = DTensor(empty_on_host(part).copy_(part), gradient._spec, requires_grad=False)
