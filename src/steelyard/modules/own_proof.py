"""Build a user's own module and prove its split and the tensor parallelism of its blocks numerically.

The module is passed to `find_plan` or built by a function that the user names on the command line as
``FILE.py:FUNCTION``. The function takes no arguments and returns ``(module, sample)``, if the module returns its loss,
or ``(module, sample, loss)``; ``sample`` and ``loss`` are as for `steelyard.find_plan`. The file is run, so only a file
named on the command line is used, never one that a plan file names. A module given with a plan is checked against the
planned module.

The layers of the chain, run one after another on the sample, must give the loss and all gradients of the original
module, in fp32, with random weights and without dropout; and the loss must be the mean over samples. Tensor parallelism
is then tried for each block type (`steelyard.modules.split_tp`). It is accepted only if two ranks, run as threads, give
the results of one: all outgoing activations, and the gradients of incoming activations and of every parameter.
"""

import copy
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from steelyard.errors import InvalidDataError, InvalidModelError, UserError, first_line, nearest
from steelyard.model.chain import ModelChain
from steelyard.model.family import LayerRole
from steelyard.model.own import BUILDER, OwnLayerType, OwnSplit
from steelyard.model.read import planned_model
from steelyard.modules.dimensions.tp import apply_tensor_parallel
from steelyard.modules.kept_splits import read_kept
from steelyard.modules.layers import ChainLayer, LayerContext, build_layer, tensors_of
from steelyard.modules.not_split import HINT
from steelyard.modules.own_pieces import Loss, OwnBatch, OwnModel, loss_of, parts_of
from steelyard.modules.own_split import (
    FoundSplit,
    check_same_module,
    check_sample,
    find_own_split,
    name_of_leaf,
    refuse_compiled,
)
from steelyard.modules.pieces import SharedInputs
from steelyard.modules.split_tp import Block, Styles, divided_rows
from steelyard.modules.stubbed_model import call_arguments
from steelyard.modules.two_ranks import difference, gradients_of, on_two_ranks, tried, undivided
from steelyard.plan.file import default_folder, digest, keep
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat

_logger = logging.getLogger(__name__)

OWN_VERSION = 5
"""Version of splitting and proving; bump when either changes."""
MOST_PARAMS = 2**28
"""Maximum number of parameters of a module, or of a block for tensor parallelism, that is proved numerically."""
TOLERANCE = 1e-4
"""Maximum difference of a loss or gradient, relative to the largest entry of its tensor."""
TP_TOLERANCE = 1e-3
"""Maximum relative difference between two ranks and one; rounding affects gradients near zero (of a key's bias)."""
_CPU = torch.device("cpu")


def proved(found: FoundSplit) -> OwnModel:
    """Prove the split of a module and find the styles of its blocks; the result is cached next to the traces.

    Raises `InvalidModelError` if the layers give other results than the module.
    """
    model = found.model
    key = {"own": model.split.model_dump_json(), "version": OWN_VERSION, "torch": torch.__version__}
    path = default_folder() / f"own-{digest(key)}.json"
    known = read_kept(path, OwnSplit, "proved again, because the cached proof cannot be read")
    if known is not None:
        return OwnModel(model.module, known, model.loss, model.sample)
    if model.split.num_params > MOST_PARAMS:
        notice = "%s has %d parameters, too many for a numerical proof"
        _logger.warning(notice, model.split.module, model.split.num_params)
    else:
        _check_pieces(_with_values(model))
    layer_types = tuple(
        _divided(found, number) if layer_type.role is LayerRole.BLOCK else layer_type
        for number, layer_type in enumerate(model.split.kinds)
    )
    own = model.split.model_copy(update={"kinds": layer_types, "no_bf16": _bf16_fault(model)})
    keep(path, own.model_dump_json())
    return OwnModel(model.module, own, model.loss, model.sample)


def _with_values(model: OwnModel) -> OwnModel:
    """Return a CPU copy with fixed random fp32 weights, without dropout, and with a sample that has values."""
    module, generator = model.module, torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        values = (
            torch.randn(parameter.shape, generator=generator)
            * (parameter.shape[-1] if parameter.dim() > 1 else 100) ** -0.5
        )
        shift = 1.0 if parameter.dim() == 1 and parameter.numel() > 1 else 0.0
        memo[id(parameter)] = nn.Parameter(values + shift, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = (
            torch.zeros_like(buffer, device=_CPU) if buffer.is_meta else buffer.detach().to(_CPU, copy=True)
        )
    generator = torch.Generator().manual_seed(1)
    sample = pytree.tree_map_only(Tensor, lambda each: _sample_values(each, generator), model.sample)
    return OwnModel(copy.deepcopy(module, memo).eval(), model.split, model.loss, sample)


def _sample_values(each: Tensor, generator: torch.Generator) -> Tensor:
    if not each.is_meta:
        return each.detach().to(_CPU)
    blank = torch.zeros(each.shape, dtype=each.dtype)
    return torch.randn(each.shape, generator=generator).to(each.dtype) if each.is_floating_point() else blank


def _check_pieces(model: OwnModel) -> None:
    own, module = model.split, model.module
    expected = _whole_results(model)
    chain = model.chain
    module.zero_grad()
    layers = [build_layer(model, chain, number, Remat.NONE) for number in range(chain.num_layers)]
    flow = _run_layers(model, layers, torch.float32)
    flow.backward()
    found: dict[str, Tensor] = {"logits": flow.detach()}
    first_of = {copies[1]: copies[0] for copies in own.shared}
    for number, layer in enumerate(layers):
        for path, parameter in layer.named_parameters():
            if parameter.grad is not None:
                name = own.model_path(*first_of.get((number, path), (number, path)))
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    wrong = difference(expected, found, chain, TOLERANCE)
    if wrong:
        raise InvalidModelError(
            field="model",
            found=f"{own.module}: running its layers in order differs from the module: "
            f"{wrong.replace('logits', 'the loss')}",
            expected="layers that give the loss and the gradients of the whole module",
            hint=HINT,
        )


def _run_layers(model: OwnModel, layers: Sequence[ChainLayer], dtype: torch.dtype) -> Tensor:
    """Return the loss of the sample, computed layer by layer."""
    batch = OwnBatch(model.sample, model.split, model.arguments(_CPU), dtype=dtype, device=_CPU)
    flow: Any = torch.zeros(batch.num_samples)
    for number, layer in enumerate(layers):
        flow = layer.run_alone(layer, flow, _context(number, batch))
    return flow


def _bf16_fault(model: OwnModel) -> str:
    """Return why the layers fail with bf16 parameters, as under FSDP's mixed precision; empty if they do not."""
    if model.split.num_params > MOST_PARAMS:
        return ""
    filled = _with_values(model)
    for parameter in filled.module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    chain = model.chain
    layers = [build_layer(filled, chain, number, Remat.NONE) for number in range(chain.num_layers)]
    try:
        _run_layers(filled, layers, torch.bfloat16)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)[:160]}"
    return ""


def _whole_results(model: OwnModel) -> dict[str, Tensor]:
    """Return the loss and gradients of the module; raises `InvalidModelError` if the loss is no mean over samples."""
    try:
        loss = _loss(model, model.sample)
        loss.backward()
    except UserError:
        raise
    except Exception as error:
        raise InvalidModelError(
            field="sample",
            found=f"{model.split.module} fails on it: {type(error).__name__}: {first_line(error)[:200]}",
            expected="samples that the module can train on",
            hint="try loss(model(*inputs), targets).backward() on them",
        ) from error
    loss = loss.detach()
    gradients = gradients_of(model.module.named_parameters())
    count = check_sample(model.sample, has_loss=model.split.has_loss)
    each = [_loss(model, part).detach() for part in parts_of(model.sample, count)]
    mean = sum(each, start=torch.zeros(())) / count
    if not abs(float(mean - loss)) <= TOLERANCE * max(abs(float(loss)), *(abs(float(one)) for one in each)):
        raise InvalidModelError(
            field="loss",
            found=f"{float(loss):.6g} for {count} samples, and {float(mean):.6g} on average for each of them alone",
            expected="the mean over independently computed samples",
            hint="average the same number of terms for every sample; give masked terms a weight of zero",
        )
    return {"logits": loss, **gradients}


def _loss(model: OwnModel, read: Any) -> Tensor:
    inputs, targets = read if model.split.has_loss else (read, None)
    places, names = call_arguments(inputs)
    return loss_of(model.module(*places, **names), targets, model.loss)


def _context(number: int, batch: OwnBatch) -> LayerContext:
    side = SharedInputs(position_ids=torch.empty(0))
    return LayerContext(side=side, num_targets=batch.num_samples, batch={number: batch})


def _divided(found: FoundSplit, number: int) -> OwnLayerType:
    """Return a block type with its proved styles, or with the reasons why there are none."""
    model, layer_type = found.model, found.model.split.kinds[number]
    layer = model.split.layers.index(number)
    path = model.split.blocks[layer - 1]
    block = model.module.get_submodule(path)
    if sum(parameter.numel() for parameter in block.parameters()) > MOST_PARAMS:
        return undivided(
            layer_type, [f"a block of more than {MOST_PARAMS} parameters is too large for a numerical proof"]
        )
    called = {p.removeprefix(f"{path}."): keyword for p, keyword in found.keywords.items() if p.startswith(f"{path}.")}
    proof = cache(lambda: _BlockProof(_with_values(model), number, layer))
    ways = tried(Block(block, called).suppositions(), lambda styles: on_two_ranks(partial(proof(), styles=styles)))
    if not ways or ways[-1][1]:
        return undivided(layer_type, (reason for _, reason in ways))
    styles = ways[-1][0]
    return layer_type.model_copy(
        update={"styles": dict(styles), "no_tp": "", "tp_divides": tuple(_sizes(block, styles))}
    )


def _sizes(block: nn.Module, styles: Styles) -> Iterator[tuple[str, int]]:
    """Yield the sizes that a tensor-parallel degree must divide, with their names for messages."""
    for path, style in styles.items():
        word, *arguments = style.split(":")
        place = {"enter": 1, "region": 1, "whole": 0}.get(word, len(arguments))
        names = [name for words in arguments[place : place + 1] for name in words.split(",") if name]
        part = path.removeprefix("block.")
        yield from ((f"{name} of {part}", getattr(block.get_submodule(part), name)) for name in names)
    yield from divided_rows(block, styles)


class _BlockProof:
    """Block type with values, and the results of one rank to compare with those of two ranks."""

    def __init__(self, model: OwnModel, number: int, layer: int) -> None:
        self._model, self._number, self._layer = model, number, layer
        batch = OwnBatch(model.sample, model.split, model.arguments(_CPU), dtype=torch.float32, device=_CPU)
        batch.arguments(layer - 1)
        self._context = _context(layer, batch)
        generator = torch.Generator().manual_seed(2)
        shapes = model.split.type_of(layer - 1).shapes
        self._flow = [torch.randn((batch.num_samples, *shape), generator=generator) for shape in shapes]
        self._outgoing = [
            torch.randn((batch.num_samples, *shape), generator=generator) for shape in model.split.kinds[number].shapes
        ]
        self._expected = self._results(build_layer(model, self._chain({}), layer, Remat.NONE))

    def __call__(self, mesh: DeviceMesh, styles: Styles) -> str:
        """Return how the results of two ranks of this mesh differ under these styles; empty if they do not."""
        chain = self._chain(styles)
        layer = copy.deepcopy(build_layer(self._model, chain, self._layer, Remat.NONE))
        apply_tensor_parallel(layer, chain, mesh, sp=False)
        return difference(self._expected, self._results(layer), chain, TP_TOLERANCE)

    def _chain(self, styles: Styles) -> ModelChain:
        own = self._model.split
        layer_types = list(own.kinds)
        layer_types[self._number] = layer_types[self._number].model_copy(update={"styles": dict(styles), "no_tp": ""})
        return planned_model(own.module, None, own.model_copy(update={"kinds": tuple(layer_types)}))

    def _results(self, layer: ChainLayer) -> dict[str, Tensor]:
        flow = [each.clone().requires_grad_() for each in self._flow]
        layer.zero_grad()
        outputs = tensors_of(layer.run_alone(layer, tuple(flow), self._context))
        torch.autograd.backward(outputs, self._outgoing)
        found = {"logits": torch.cat([each.detach().flatten() for each in outputs])}
        inputs = ((f"its input {place}", each) for place, each in enumerate(flow))
        return found | gradients_of([*inputs, *layer.named_parameters()])


_WITH_LOSS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A module with the data of some samples, its loss and the paths of its blocks, as for `find_plan`."""

    module: nn.Module
    sample: Any
    loss: Callable[[Any, Any], Any] | None = None
    blocks: str | Sequence[str] | None = None


def own_model(built: Built) -> OwnModel:
    """Return a module with its proved split; raises `InvalidModelError` that names the obstacle."""
    refuse_compiled(built.module)
    if built.sample is None:
        raise InvalidModelError(
            field="sample",
            found="nothing",
            expected=f"sample inputs of {type(built.module).__qualname__} for two or more samples",
            hint="add sample=: its inputs, or with loss= a pair of inputs and targets",
        )
    try:
        return proved(find_own_split(built.module, built.sample, loss=built.loss, blocks=built.blocks))
    except InvalidModelError as error:
        if not isinstance(built.module, PreTrainedModel):
            raise
        hint = "for a transformers model, plan its config, not the module"
        raise InvalidModelError(**error.parts() | {"hint": hint}) from error


def build(builder: str) -> Built:
    """Run a file and return the result of its builder, ``FILE.py:FUNCTION``; raises `InvalidModelError` on failure."""
    named = BUILDER.fullmatch(builder)
    if named is None:
        raise _wrong(repr(builder), "FILE.py:FUNCTION", "name a function, as in mymodel.py:build_model")
    path, name = Path(named["file"]), named["function"]
    if not path.is_file():
        raise _wrong(f"no file {path}", "a Python file", "check the path")
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
    """Build the module of a plan; raises `InvalidModelError` if it is a different module."""
    split = plan.chain().split
    if not isinstance(split, OwnSplit):
        raise _wrong(builder, f"none: {plan.model.name} is a transformers model", "leave --builder out")
    return build_split(builder, split)


def build_split(builder: str, split: OwnSplit) -> OwnModel:
    """Build a module with a known split; raises `InvalidModelError` if it is a different module."""
    built = build(builder)
    return planned_module(built.module, split, built.loss, built.sample)


def planned_module(module: nn.Module, own: OwnSplit, loss: Loss | None, sample: Any = None) -> OwnModel:
    """Check the module of a plan and add its split; raises `InvalidModelError` if it differs or lacks values."""
    if (loss is not None) != own.has_loss:
        raise InvalidModelError(
            field="loss",
            found="a loss function" if loss is not None else "no loss function",
            expected="the loss function of the plan"
            if own.has_loss
            else "none, because the module returns its loss, as planned",
            hint="pass the same loss= to parallelize as to find_plan",
        )
    check_same_module(module, own)
    for path, parameter in module.named_parameters():
        if parameter.is_meta:
            raise InvalidModelError(
                field=path,
                found="a parameter on the meta device, without values",
                expected="a module with initial weights, identical on every process",
                hint="build it on the CPU: torch.manual_seed(0), then your class",
            )
    return OwnModel(module, own, loss, sample)


def check_read(value: Any, own: OwnSplit, num_samples: int) -> None:
    """Raise `InvalidDataError` unless the data has the planned tensors, for ``num_samples`` samples."""
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
                f"{path} of {each.dtype} and shape {[num_samples, *each.shape]}, for {num_samples} samples",
            )


def _bad_read(found: str, expected: str) -> InvalidDataError:
    return InvalidDataError(
        field="read",
        found=found,
        expected=expected,
        hint="return the same structure as sample= of find_plan, for the requested number of samples",
    )


def _checked(found: Any, name: str) -> Built:
    expected = "(module, sample) if the module returns its loss, or else (module, sample, loss)"
    if isinstance(found, nn.Module):
        hint = f"let {name}() return the module and its inputs for two or more samples"
        raise _wrong(f"{name}() returns only a {type(found).__name__}", expected, hint)
    if not isinstance(found, tuple) or len(found) not in (_WITH_LOSS - 1, _WITH_LOSS):
        shown = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise _wrong(f"{name}() returns {shown}", expected, HINT)
    module, sample, loss = (*found, None)[:_WITH_LOSS]
    if not isinstance(module, nn.Module):
        raise _wrong(f"{name}() returns a {type(module).__name__} first", expected, HINT)
    if loss is not None and not callable(loss):
        raise _wrong(f"{name}() returns a {type(loss).__name__} as the loss", expected, HINT)
    return Built(module=module, sample=sample, loss=loss)


def _run(path: Path) -> ModuleType:
    """Run a file as a module named after it and return it; the file can import files of its folder."""
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
        raise _wrong(f"{path} raises {_where(error, path)}", "a file without errors", f"try python {path}") from error
    return module


def _where(error: Exception, path: Path) -> str:
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if Path(each.filename) == path]
    place = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{place}: {first_line(error)}"


def _wrong(found: str, expected: str, hint: str) -> InvalidModelError:
    return InvalidModelError(field="--builder", found=found, expected=expected, hint=hint)
