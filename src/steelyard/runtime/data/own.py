"""Samples for a user's own module: tensors of a file, by the names that they have in the sample, or that sample."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils import _pytree as pytree

from steelyard.errors import InvalidDataError
from steelyard.modules.own_pieces import OwnModel
from steelyard.runtime.data.order import SampleOrder
from steelyard.runtime.data.prepare import SYNTHETIC, check_data_path


class OwnData:
    """Samples in an order that the seed decides: rows of a safetensors file, or of the module's own sample."""

    def __init__(self, path: Path, model: OwnModel, *, seed: int) -> None:
        own = model.split
        self._leaves, self._tree = pytree.tree_flatten(model.sample)
        if str(path) == SYNTHETIC:
            tensors: list[Any] = [each for each in self._leaves if isinstance(each, Tensor)]
            counts = {tensors[0].shape[0]}
        else:
            tensors = _opened(path, [each.path for each in own.inputs])
            counts = {each.get_shape()[0] for each in tensors}
            for wanted, found in zip(own.inputs, tensors, strict=True):
                if tuple(found.get_shape()[1:]) != wanted.shape:
                    raise InvalidDataError(
                        found=f"{wanted.path} of shape {found.get_shape()} in {path}",
                        expected=f"{wanted.shape} for each sample, as in the one that was planned with",
                        hint="write samples of that shape, or plan with another sample",
                    )
        if len(counts) > 1 or 0 in counts:
            raise InvalidDataError(
                found=f"tensors of {', '.join(map(str, sorted(counts)))} samples in {path}",
                expected="as many samples in each, 1 or more",
                hint="write the tensors of the same samples",
            )
        self.num_samples = counts.pop()
        self._tensors = tensors
        self._order = SampleOrder(num_samples=self.num_samples, seed=seed)

    def read(self, samples: list[int]) -> Any:
        """What the sample that was planned with is, for these samples."""
        rows = [self._order.data_sample(sample) for sample in samples]
        taken = iter(torch.stack([each[row : row + 1][0] for row in rows]) for each in self._tensors)
        leaves = [next(taken) if isinstance(each, Tensor) else each for each in self._leaves]
        return pytree.tree_unflatten(leaves, self._tree)


def _opened(path: Path, names: list[str]) -> list[Any]:
    """Tensors of a file of which rows can be read; raises `InvalidDataError` where one is missing."""
    check_data_path(path)
    try:
        file = safe_open(path, framework="pt")
        there = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise InvalidDataError(
            found=f"{path}: {str(error).splitlines()[0]}",
            expected="a safetensors file, or synthetic",
            hint=f"write it with safetensors.torch.save_file, tensors {', '.join(names)}",
        ) from error
    missing = [name for name in names if name not in there]
    if missing:
        raise InvalidDataError(
            found=f"{path} with {', '.join(there) or 'nothing'}",
            expected=f"tensors {', '.join(names)}, samples first",
            hint=f"add {', '.join(missing)}",
        )
    return [file.get_slice(name) for name in names]
