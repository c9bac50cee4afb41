"""A user's own module, given to `find_plan` or built by a function that the user names on the command line.

What is given for a plan of it is checked against what was planned.

``FILE.py:FUNCTION`` names the function. It is called without arguments and returns ``(module, sample)``, where the
module returns its loss, or ``(module, sample, loss)``; ``sample`` and ``loss`` are as for `steelyard.find_plan`. The
file is run: only one that stands on the command line is, and never one that a plan file names.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from steelyard.errors import InvalidDataError, InvalidModelError, first_line, nearest
from steelyard.model.own import BUILDER, OwnSplit
from steelyard.modules.not_split import HINT
from steelyard.modules.own_pieces import Loss, OwnModel
from steelyard.modules.own_proof import proved
from steelyard.modules.own_split import check_same_module, find_own_split, name_of_leaf, refuse_compiled
from steelyard.plan.plan import Plan

_WITH_LOSS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A module with what is read for some samples, its loss, and where its blocks are: as for `find_plan`."""

    module: nn.Module
    sample: Any
    loss: Callable[[Any, Any], Any] | None = None
    blocks: str | Sequence[str] | None = None


def own_model(built: Built) -> OwnModel:
    """How a module splits, proved; raises `InvalidModelError` naming what stands in the way."""
    refuse_compiled(built.module)
    if built.sample is None:
        raise InvalidModelError(
            field="sample",
            found="nothing",
            expected=f"what {type(built.module).__qualname__} is given for two samples or more",
            hint="add sample=: its inputs, or a pair of inputs and targets with loss= "
            "(for a model of transformers, give its config in the place of the model)",
        )
    try:
        return proved(find_own_split(built.module, built.sample, loss=built.loss, blocks=built.blocks))
    except InvalidModelError as error:
        if not isinstance(built.module, PreTrainedModel):
            raise
        hint = "plan the config of a model of transformers, and not its module"
        raise InvalidModelError(**error.parts() | {"hint": hint}) from error


def build(builder: str) -> Built:
    """What the function named by ``FILE.py:FUNCTION`` builds; runs the file. Raises `InvalidModelError`."""
    named = BUILDER.fullmatch(builder)
    if named is None:
        raise _wrong(repr(builder), "FILE.py:FUNCTION", "name a function, as in mymodel.py:build_model")
    path, name = Path(named["file"]), named["function"]
    if not path.is_file():
        raise _wrong(f"no file {path}", "a file of Python", "check the path")
    module = _run(path)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise _wrong(f"no function {name} in {path}", "one of " + (", ".join(known) or "none"), nearest(name, known))
    try:
        found = function()
    except Exception as error:
        raise _wrong(f"{name}() raises {_where(error, path)}", "a function that returns", "call it yourself") from error
    return _checked(found, name)


def build_planned(builder: str, plan: Plan) -> OwnModel:
    """What a builder builds, for a plan that was made for it; raises `InvalidModelError` for another module."""
    split = plan.chain().split
    if not isinstance(split, OwnSplit):
        raise _wrong(builder, f"none: {plan.model.name} is a model of transformers", "leave --builder out")
    built = build(builder)
    model = planned_module(built.module, split, built.loss)
    return OwnModel(model.module, split, built.loss, built.sample)


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
        raise _bad_read(f"a {type(value).__name__}", "a pair: the inputs, and the targets")
    if found.keys() != wanted.keys():
        raise _bad_read(f"tensors {', '.join(found) or 'none'}", f"tensors {', '.join(wanted)}")
    for path, each in wanted.items():
        shape, dtype = tuple(found[path].shape), str(found[path].dtype).removeprefix("torch.")
        if (shape, dtype) != ((num_samples, *each.shape), each.dtype):
            raise _bad_read(
                f"{path} of {dtype} and shape {list(shape)}",
                f"{path} of {each.dtype} and shape {[num_samples, *each.shape]}, the {num_samples} samples asked for",
            )


def _bad_read(found: str, expected: str) -> InvalidDataError:
    return InvalidDataError(
        field="read",
        found=found,
        expected=expected,
        hint="return what sample= of find_plan was, for the samples asked for",
    )


def _checked(found: Any, name: str) -> Built:
    expected = "(module, sample), where the module returns its loss, or (module, sample, loss)"
    if isinstance(found, nn.Module):
        hint = f"let {name}() return the module, and what it is given for two samples or more"
        raise _wrong(f"{name}() returns a {type(found).__name__} alone", expected, hint)
    if not isinstance(found, tuple) or len(found) not in (_WITH_LOSS - 1, _WITH_LOSS):
        shown = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise _wrong(f"{name}() returns {shown}", expected, HINT)
    module, sample, loss = (*found, None)[:_WITH_LOSS]
    if not isinstance(module, nn.Module):
        raise _wrong(f"{name}() returns a {type(module).__name__} first", expected, HINT)
    if loss is not None and not callable(loss):
        raise _wrong(f"{name}() returns a {type(loss).__name__} as loss", expected, HINT)
    return Built(module=module, sample=sample, loss=loss)


def _run(path: Path) -> ModuleType:
    """The module of a file, run under its own name; files beside it can be imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "as well"
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _wrong(f"{path} raises {_where(error, path)}", "a file that runs", f"try python {path}") from error
    return module


def _where(error: Exception, path: Path) -> str:
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if Path(each.filename) == path]
    place = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{place}: {first_line(error)}"


def _wrong(found: str, expected: str, hint: str) -> InvalidModelError:
    return InvalidModelError(field="--builder", found=found, expected=expected, hint=hint)
