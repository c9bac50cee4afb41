"""What a user gives for a plan of their own module: checked against what was planned."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from steelyard.errors import InvalidDataError, InvalidModelError
from steelyard.model.own import OwnSplit
from steelyard.modules.own_identity import check_same_module
from steelyard.modules.own_pieces import Loss, OwnModel
from steelyard.modules.own_split import name_of_leaf


def planned_module(module: nn.Module, own: OwnSplit, loss: Loss | None) -> OwnModel:
    """The module of a plan, ready to be taken apart; raises `InvalidModelError` if it is another one."""
    if (loss is not None) != own.has_loss:
        raise InvalidModelError(
            field="loss",
            found="a loss function" if loss is not None else "no loss function",
            expected="the one that was planned with"
            if own.has_loss
            else "none: the module returns its loss, as planned",
            hint="give parallelize what find_plan was given",
        )
    check_same_module(module, own)
    for path, parameter in module.named_parameters():
        if parameter.is_meta:
            raise InvalidModelError(
                field=path,
                found="a parameter on the meta device, without values",
                expected="a module with its first weights, the same on every process",
                hint="build it on the CPU: torch.manual_seed(0), then your class",
            )
    return OwnModel(module, own, loss)


def check_read(value: Any, own: OwnSplit, num_samples: int) -> None:
    """Raises `InvalidDataError` unless what was read is what was planned, for so many samples."""
    leaves = pytree.tree_leaves_with_path(value)
    found = {name_of_leaf(path): each for path, each in leaves if isinstance(each, Tensor)}
    wanted = {each.path: each for each in own.inputs}
    if own.has_loss and not (isinstance(value, tuple | list) and len(value) == 2):
        raise _wrong(f"a {type(value).__name__}", "a pair: the inputs, and the targets")
    if found.keys() != wanted.keys():
        raise _wrong(f"tensors {', '.join(found) or 'none'}", f"tensors {', '.join(wanted)}")
    for path, each in wanted.items():
        shape, dtype = tuple(found[path].shape), str(found[path].dtype).removeprefix("torch.")
        if (shape, dtype) != ((num_samples, *each.shape), each.dtype):
            raise _wrong(
                f"{path} of {dtype} and shape {list(shape)}",
                f"{path} of {each.dtype} and shape {[num_samples, *each.shape]}, the {num_samples} samples asked for",
            )


def parts_of(value: Any, count: int) -> Iterator[Any]:
    """What was read, in so many equal parts of the samples."""
    total = next(each.shape[0] for each in pytree.tree_leaves(value) if isinstance(each, Tensor))
    for first in range(0, total, total // count):
        yield pytree.tree_map_only(Tensor, lambda each, first=first: each[first : first + total // count], value)


def _wrong(found: str, expected: str) -> InvalidDataError:
    return InvalidDataError(
        field="read",
        found=found,
        expected=expected,
        hint="return what sample= of find_plan was, for the samples asked for",
    )
