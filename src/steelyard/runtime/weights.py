"""Weights in Hugging Face's format: read straight into the shards of a plan, and written for `transformers` to load.

A folder has a ``config.json`` and either ``model.safetensors`` or several files with ``model.safetensors.index.json``.
To read, each rank opens the files that hold its parameters and reads only its slices. To write, a stage gathers one
parameter at a time on its first rank, which writes files of about `FILE_BYTES`. No rank ever holds the whole model.

`transformers` has changed some families since their files were written: it renames tensors, and joins the matrices of
all experts into one parameter. Its table ``conversion_mapping`` lists these changes; here a slice of a parameter is
mapped to slices of its stored tensors. Not modelled: changes other than renaming, stacking and concatenating along the
first dim; they are an error.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.core_model_loading import rename_source_key as renamed_key

from steelyard.arguments import checked
from steelyard.errors import InvalidCheckpointError, InvalidModelError
from steelyard.files import read_json
from steelyard.model.chain import ModelChain
from steelyard.model.read import folder_hint
from steelyard.modules.build import build_meta_model, hub_config, read_hub_config
from steelyard.modules.levers.quantized_base import PARTS
from steelyard.modules.levers.train import first_values, is_added, merged, own_name, reads_base, with_added, write_added
from steelyard.modules.prepared import stored_apart
from steelyard.modules.replicated import activation_dtype
from steelyard.modules.updates import local_part, local_slices, whole_of
from steelyard.output import command
from steelyard.plan.plan import Plan
from steelyard.runtime.checkpoint import on_first_rank
from steelyard.runtime.checks import check_export, export_part
from steelyard.runtime.parallel_model import ParallelModel
from steelyard.runtime.state import RunState

OpenTensor = Callable[[str], Any]
"""Function that opens a stored tensor by its name, as safetensors' ``get_slice`` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """Stored tensors of a parameter: entries, each of pieces that are concatenated along the first dim."""

    entries: tuple[tuple[str, ...], ...]
    is_stacked: bool
    """Whether the parameter has one more dim than its tensors, the first, which counts the entries."""
    apart: int = 1
    """Number of matrices side by side in the last dim of a tensor; more than one have a separate dim here."""

    def shape(self, open_tensor: OpenTensor) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        pieces = [tuple(open_tensor(name).get_shape()) for name in self.entries[0]]
        joined = (sum(piece[0] for piece in pieces), *pieces[0][1:]) if len(pieces) > 1 else pieces[0]
        if self.apart > 1:
            return (*joined[:-1], self.apart, joined[-1] // self.apart)
        return (len(self.entries), *joined) if self.is_stacked else joined

    def read(self, open_tensor: OpenTensor, slices: tuple[slice, ...]) -> Tensor:
        """Read a part of the parameter, and nothing else from the files."""
        if self.apart > 1:
            *others, parts, columns = slices
            width = self.shape(open_tensor)[-1]
            beside = [slice(part * width + columns.start, part * width + columns.stop) for part in range(self.apart)]
            read = [_read_entry(self.entries[0], open_tensor, (*others, each)) for each in beside[parts]]
            return torch.stack(read, dim=-2)
        if not self.is_stacked:
            return _read_entry(self.entries[0], open_tensor, slices)
        chosen = self.entries[slices[0]]
        return torch.stack([_read_entry(entry, open_tensor, slices[1:]) for entry in chosen])


def _read_entry(pieces: tuple[str, ...], open_tensor: OpenTensor, slices: tuple[slice, ...]) -> Tensor:
    if len(pieces) == 1:
        return open_tensor(pieces[0])[slices]
    rows, *others = slices
    found, first = [], 0
    for name in pieces:
        stored = open_tensor(name)
        end = first + stored.get_shape()[0]
        least, most = max(rows.start, first), min(rows.stop, end)
        if least < most:
            found.append(stored[(slice(least - first, most - first), *others)])
        first = end
    return torch.cat(found)


def stored_parameters(
    model: PreTrainedModel, stored: Iterable[str], apart: Mapping[str, int], *, text_alone: bool = False
) -> dict[str, StoredParameter]:
    """Return the names of the ``stored`` tensors that each parameter of a model (on the meta device) is made of.

    ``apart`` comes from `stored_apart`. With ``text_alone``, the model is the text part of what is stored. Tensors of
    no parameter are listed under the name that the parameter would
    have. Raises `InvalidModelError` if transformers builds a parameter in a way that is not supported here.
    """
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    own = model.state_dict()
    found: dict[str, list[tuple[str, str | None]]] = {}
    for name in stored:
        target, pattern = _in_text(name, model.base_model_prefix) if text_alone else name, None
        if target not in own:
            known = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": own}
            target, pattern = renamed_key(target, renamings, converters, **known)
        found.setdefault(target, []).append((name, pattern))
    return {
        target: replace(_joined(target, pieces, converters), apart=apart.get(target.rpartition(".")[0], 1))
        for target, pieces in found.items()
    }


def _in_text(name: str, prefix: str) -> str:
    """Return the name of a tensor in the text part of a model, whose base model has this prefix, given that in it."""
    _, found, inside = name.partition(_TEXT_MODEL)
    if not found:
        return name
    return inside if inside.startswith((f"{prefix}.", "lm_head.")) else f"{prefix}.{inside}"


def _joined(target: str, pieces: list[tuple[str, str | None]], converters: list[WeightConverter]) -> StoredParameter:
    pattern = pieces[0][1]
    converter = next((each for each in converters if pattern in each.source_patterns), None)
    if converter is None:
        return StoredParameter(entries=((pieces[-1][0],),), is_stacked=False)
    merges = [
        (type(each), each.dim) for each in converter.operations if isinstance(each, MergeModulelist | Concatenate)
    ]
    known = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)], [(Concatenate, 0)])
    if len(merges) != len(converter.operations) or merges not in known:
        raise InvalidModelError(
            field="--init",
            found=f"{target}, converted by {', '.join(type(each).__name__ for each in converter.operations)}",
            expected="a parameter that is stored unchanged, stacked, or split by rows",
            hint="load and save the model with transformers under its current names (save_original_format=False)",
        )
    by_pattern = {
        source: sorted(
            (name for name, each in pieces if each == source),
            key=lambda name: [int(number) for number in re.findall(r"\d+", name)],
        )
        for source in converter.source_patterns
    }
    columns = [names for names in by_pattern.values() if names]
    is_stacked = any(isinstance(each, MergeModulelist) for each in converter.operations)
    return StoredParameter(entries=tuple(zip(*columns, strict=False)), is_stacked=is_stacked)


_TEXT_MODEL = "language_model."
"""Path of the text part in models of images and text."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_BYTES = 2 * 2**30
"""Bytes after which a file is closed."""
_NOT_COMPARED = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"),
    *("initializer_range",),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "output_attentions"),
    *("output_hidden_states", "return_dict", "chunk_size_feed_forward", "pretraining_tp", "id2label", "label2id"),
)
"""Entries of a config that do not change what the weights compute in training."""
_NUM_NAMED = 3


def load_weights(path: Path, state: RunState, chain: ModelChain, *, seed: int = 0) -> list[str]:
    """Fill this rank's parameters from a Hugging Face folder; return notices for the user.

    Values are converted to the dtype of the parameters. Parameters that levers add are initialised from ``seed``.
    Raises `InvalidCheckpointError` if the folder is not one, if its config is of another model, or if a tensor is
    missing or has another shape.
    """
    check_weights(path, chain)
    with ExitStack() as stack:
        folder = WeightFolder(path, stack)
        model = build_meta_model(chain.unchanged)
        alone = bool(chain.split.text_alone)
        stored = stored_parameters(model, folder.names, stored_apart(build_meta_model(chain)), text_alone=alone)
        may_lack = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()) - stored.keys()
        takers = state.takers()
        inside = tuple(f"{name.removesuffix('.weight')}.{part}" for name in takers for part in PARTS)
        for copy in range(state.names.num_copies):
            weights = {
                name: each
                for name, each in state.weights(copy=copy).items()
                if not (name in may_lack or is_added(name))
            }
            weights = {name: each for name, each in weights.items() if not name.startswith(inside)}
            missing = [name for name in (*weights, *takers) if name not in stored]
            if missing:
                raise _bad_init(
                    f"{path} without {_some(missing)}",
                    "every parameter of the plan's model, under its transformers name",
                    "load and save the model with transformers, which writes all of them under current names",
                )
            for name, parameter in weights.items():
                found = stored[name]
                shape = found.shape(folder.tensor)
                if shape != tuple(parameter.shape):
                    raise _bad_init(
                        f"{name} of shape {list(shape)} in {folder.path}",
                        f"{name} of shape {list(parameter.shape)}",
                        "plan for the config of these weights",
                    )
                local = local_part(parameter.detach())
                if local.numel():
                    local.copy_(found.read(folder.tensor, local_slices(parameter)))
        for name, module in takers.items():
            module.take(stored[name].read(folder.tensor, tuple(slice(0, size) for size in module.shape)))
    if reads_base(chain):
        _begin_beside(state, chain, seed)
    extra = sorted(
        name
        for target in stored.keys() - {*state.names.by_path.values(), *takers}
        for name in sum(stored[target].entries, ())
        if not name.endswith((".inv_freq", ".masked_bias", ".attn.bias", "lm_head.weight", "position_ids"))
    )
    return [f"ignored {len(extra)} tensors of {path} that are not in the model: {_some(extra)}"] if extra else []


def _begin_beside(state: RunState, chain: ModelChain, seed: int) -> None:
    """Initialise the parameters that levers add, given the loaded weights; a collective call of a stage's ranks."""
    model, weights = build_meta_model(chain), state.weights()
    for each in _with_added(weights, chain, model):
        tensors = {name: whole_of(weights[own].detach()) for name, own in each.names.items()}
        found = first_values(model, chain, each.path, tensors, seed=seed, layer=each.layer)
        for name, first in found.items():
            kept = weights[each.names[name]]
            local_part(kept.detach()).copy_(first[local_slices(kept)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithAdded:
    """Module of a layer to which levers add parameters: its path, and names in a run by paths in the module."""

    layer: int
    path: str
    names: Mapping[str, str]


def _with_added(weights: Mapping[str, Tensor], chain: ModelChain, model: PreTrainedModel) -> Iterator[_WithAdded]:
    """Yield the modules with added parameters whose weights this rank has, in the order of layers."""
    for layer in range(chain.num_layers):
        for path, inside in with_added(model, chain, layer).items():
            names = {name: own_name(f"{path}.{name}") for name in inside}
            if weights.keys() >= set(names.values()):
                yield _WithAdded(layer=layer, path=path, names=names)


class WeightFolder:
    """Tensors of a Hugging Face folder; each file is opened when one of its tensors is first requested."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._files = _tensor_files(path)
        self._stack = stack
        self._opened: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._files)

    def tensor(self, name: str) -> Any:
        """Return a tensor whose parts can be read. Raises `InvalidCheckpointError` if its file does not have it."""
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(_open(self.path / file))
        try:
            return self._opened[file].get_slice(name)
        except SafetensorError as error:
            raise _bad_init(
                f"{self.path / file} without {name}", "the file listed in the index", "download it again"
            ) from error


def check_weights(path: Path, chain: ModelChain) -> None:
    """Raise `InvalidCheckpointError` unless the folder holds weights and a config that agrees with the chain's."""
    try:
        content = read_json(path / "config.json")
    except (OSError, ValueError) as error:
        raise _bad_init(
            f"no readable config.json in {path}",
            "a Hugging Face folder: config.json and safetensors",
            folder_hint(path),
        ) from error
    config = read_hub_config(str(content.get("model_type", "")), content)
    if chain.split.text_alone:
        config = config.get_text_config()
    found, expected = config.to_dict(), hub_config(chain).to_dict()
    for key in ("model_type", *expected):
        if _is_compared(key) and _compared(found.get(key)) != _compared(expected.get(key)):
            raise _bad_init(
                f"{key} = {found.get(key)!r} in {path / 'config.json'}",
                f"{key} = {expected.get(key)!r}, the value of the plan's model {chain.name}",
                f"plan for these weights: {command('plan', path / 'config.json')} …",
            )
    _tensor_files(path)


def _is_compared(key: str) -> bool:
    return key not in _NOT_COMPARED and "dropout" not in key


def _compared(value: Any) -> Any:
    """Return an entry of a config without the entries of nested configs that are not compared."""
    if not isinstance(value, Mapping):
        return value
    return {key: _compared(each) for key, each in value.items() if _is_compared(str(key))}


def export_weights(
    path: Path, state: RunState, plan: Plan, *, tokenizer: Mapping[str, bytes], merge: bool = False
) -> None:
    """Write the weights and the config for `transformers`, in the precision that the plan computes in.

    For a model with adapters, write only these, for `peft`, or with ``merge`` the weights with the adapters merged into
    them. ``tokenizer`` gives the content of its files by name. A collective call. The folder gets its name after
    everything is written. Raises `InvalidCheckpointError` if it cannot be written.
    """
    part = export_part(path)
    dtype = activation_dtype(plan.precision)
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        chain = plan.chain()
        alone = chain.has_adapters and not merge
        mine = _write_stage(part, state, chain, plan, dtype, alone=alone)
        found: list[list[tuple[str, dict[str, int]]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine)
        if dist.get_rank() == 0:
            files = [entry for each in found for entry in each]
            model = build_meta_model(chain.unchanged)
            if alone:
                write_added(part, [part / name for name, _ in files], model, chain)
            else:
                _name_files(part, files)
                model.config.architectures = [type(model).__name__]
                model.config.dtype = dtype
                model.config.save_pretrained(part)
            for name, content in tokenizer.items():
                (part / name).write_bytes(content)
            part.rename(path)
        dist.barrier()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise InvalidCheckpointError(
            field="--export-hf",
            found=f"{path}: {str(error).splitlines()[0]}",
            expected="a new folder on a disk with enough free space",
            hint="free disk space and export again from the last checkpoint (--resume)",
        ) from error


@checked
def save_weights(trainer: ParallelModel, folder: str | Path, *, merge: bool = False) -> None:
    """Write the weights of a model in a user's own loop to a new folder for ``from_pretrained``; a collective call.

    Adapters are written alone, for `peft`, or with ``merge`` merged into the weights. Raises `InvalidCheckpointError`
    if the folder exists or cannot be written, and `InvalidModelError` for a user's own module.
    """
    if trainer.chain.split.module:
        raise InvalidModelError(
            field="save_weights",
            found=f"{trainer.chain.split.module}, a module of your own",
            expected="a transformers model, which from_pretrained reads",
            hint="steelyard.save_checkpoint writes its parameters, by their names in the module",
        )
    on_first_rank(lambda: check_export(Path(folder)))
    export_weights(Path(folder), RunState(trainer, []), trainer.plan, tokenizer={}, merge=merge)


def _tensor_files(path: Path) -> dict[str, str]:
    """Return the file of every tensor in a folder by the tensor's name."""
    index = path / INDEX_FILE
    if index.is_file():
        try:
            files = dict[str, str](read_json(index)["weight_map"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise _bad_init(f"{index}, which is damaged", "an index with a weight_map", "download it again") from error
        missing = sorted({file for file in files.values() if not (index.parent / file).is_file()})
        if missing:
            raise _bad_init(
                f"no {_some(missing)} in {index.parent}", f"every file listed in {index.name}", "download them again"
            )
        return files
    if not (path / SINGLE_FILE).is_file():
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        raise _bad_init(
            f"no {SINGLE_FILE} and no {INDEX_FILE} in {path}" + (f", but {_some(others)}" if others else ""),
            "weights as safetensors",
            "save the model with transformers' save_pretrained, which writes safetensors",
        )
    with _open(path / SINGLE_FILE) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _bad_init(f"{path}: {error}", "a complete safetensors file", "download it again") from error


def _write_stage(
    part: Path, state: RunState, chain: ModelChain, plan: Plan, dtype: torch.dtype, *, alone: bool
) -> list[tuple[str, dict[str, int]]]:
    """Write the files of this rank's stage; on its first rank return them, each with the bytes of its tensors."""
    first_rank = plan.stages[plan.stage_of(dist.get_rank())].ranks[0]
    is_writer = dist.get_rank() == first_rank
    files: list[tuple[str, dict[str, int]]] = []
    for tensors in _gathered(state, dtype, chain, keep=is_writer, alone=alone):
        if is_writer:
            name = f"stage-{first_rank:05d}-{len(files):05d}"
            save_file(tensors, part / name, metadata={"format": "pt"})
            files.append((name, {key: tensor.nbytes for key, tensor in tensors.items()}))
    return files


def _gathered(
    state: RunState, dtype: torch.dtype, chain: ModelChain, *, keep: bool, alone: bool
) -> Iterator[dict[str, Tensor]]:
    """Yield the whole parameters of this rank's stage, some at a time, in the shapes that ``transformers`` uses.

    With ``alone``, yield only the parameters that levers have added; without, the others with the added ones merged.
    """
    tensors: dict[str, Tensor] = {}
    num_bytes = 0
    weights = state.weights()
    model = build_meta_model(chain)
    apart = stored_apart(model)
    changed = {} if alone else {own: each for each in _with_added(weights, chain, model) for own in each.names.values()}
    whole_now: dict[str, Tensor] = {}
    """Merged parameters of one module."""
    for name, parameter in weights.items():
        if is_added(name) is not alone:
            continue
        if name in changed and name not in whole_now:
            each = changed[name]
            around = {key: whole_of(weights[own].detach()) for key, own in each.names.items()}
            found = merged(model, chain, each.path, around)
            whole_now = {f"{each.path}.{key}": tensor for key, tensor in found.items()}
        whole = whole_now[name] if name in changed else whole_of(parameter.detach())
        kept_dtype = dtype if isinstance(parameter, nn.Parameter) else whole.dtype
        num_bytes += whole.numel() * kept_dtype.itemsize
        if name.rpartition(".")[0] in apart:
            whole = whole.flatten(-2)
        if keep:
            tensors[name] = whole.to(device="cpu", dtype=kept_dtype, copy=True).contiguous()
        if num_bytes >= FILE_BYTES:
            yield tensors
            tensors, num_bytes = {}, 0
    if num_bytes:
        yield tensors


def _name_files(part: Path, files: list[tuple[str, dict[str, int]]]) -> None:
    """Rename the files to Hugging Face's names, and write the index if there are several."""
    if len(files) == 1:
        (part / files[0][0]).rename(part / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (file, tensors) in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (part / file).rename(part / name)
        weight_map.update(dict.fromkeys(tensors, name))
    total = sum(size for _, tensors in files for size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (part / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _bad_init(found: str, expected: str, hint: str) -> InvalidCheckpointError:
    return InvalidCheckpointError(field="--init", found=found, expected=expected, hint=hint)
