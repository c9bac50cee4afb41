"""Recording of a forward pass of a `transformers` model without values: the modules called, and the calls of blocks.

The blocks are the list of modules with the most parameters whose modules are called once each, in order; some tasks
have two such lists. The autograd graph shows which parameters a tensor depends on.
"""

from collections import UserDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig, PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.family import Task
from steelyard.model.split import is_below
from steelyard.modules.called import CalledModules
from steelyard.modules.known_values import plain_token, without_values
from steelyard.modules.model_inputs import (
    Read,
    beside_features,
    blank,
    first_tokens,
    forward_options,
    given_samples,
    ids_beside,
    one_sequence_each,
)
from steelyard.modules.not_split import failed_pass, not_split


def nodes_behind(results: Sequence[Tensor], last: Collection[object] = ()) -> set[Any]:
    """Return the autograd nodes through which tensors were made, down to the ``last`` ones and not beyond these."""
    left, seen = [each.grad_fn for each in results], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions] if node not in last else []
    return seen


def parameters_of(results: Sequence[Tensor], last: Collection[object] = ()) -> set[int]:
    """Return the ids of the parameters that tensors depend on, other than through the ``last`` nodes."""
    return {id(getattr(node, "variable", None)) for node in nodes_behind(results, last)}


def depends(result: Tensor, parameters: Collection[nn.Parameter], leaving: Collection[object] = ()) -> bool:
    """Return whether a tensor depends on any of these parameters, other than through values ``leaving`` the blocks."""
    last = {each.grad_fn for each in leaving if isinstance(each, Tensor)}
    return not parameters_of([result], last).isdisjoint(map(id, parameters))


def own_parameters(model: nn.Module, path: str) -> list[nn.Parameter]:
    """Return the parameters that a module holds itself."""
    return list(model.get_submodule(path).parameters(recurse=False))


SAMPLES, TOKENS, LONGER, LONGEST = 2, 16, 24, 8192


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block: its arguments and its result."""

    places: tuple[Any, ...]
    names: Mapping[str, Any]
    outputs: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to be split, on the meta device, with its config and its task."""

    model: PreTrainedModel
    config: PreTrainedConfig
    task: Task
    read: Read
    """Input of the first layer if it reads no token ids."""

    def refusal(self, found: str) -> InvalidModelError:
        """Return the error for a model with something that prevents its split."""
        return not_split(self.config, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording(Subject):
    """Result of one forward pass: the paths of the modules called, in order, and the calls of the blocks."""

    called: Sequence[str]
    chains: Mapping[str, Sequence[Call]]
    """Calls of the blocks of each list, by the list's path; an encoder comes first."""
    places: Mapping[str, Sequence[int]]
    """Indices of these blocks in each list."""
    samples: Tensor
    """Input of the first layer."""
    tokens: int
    """Tokens of each sample."""
    decoder_ids: Tensor
    """Token ids of the decoder; the samples if there is no encoder."""
    logits: Tensor
    modules: CalledModules
    keywords: Mapping[str, str | None]
    """Name under which each module called is given its first tensor; None if it is given by position."""
    named: Mapping[str, Mapping[str, Any]]
    """Keyword arguments of every module called."""
    asks_for_values: bool

    def blocks(self, path: str) -> dict[str, nn.Module]:
        """Return the blocks of a list that are called, by their names in it."""
        named = list(self.model.get_submodule(path).named_children())
        return dict(named[place] for place in self.places[path][: len(self.chains[path])])

    def entering(self, encoded: object) -> dict[str, str | None]:
        """Return the keywords; a name under which a module also gets the encoder's output follows after a plus sign."""
        found = dict(self.keywords)
        for path, names in self.named.items():
            for name in (name for name, each in names.items() if each is encoded and name != found[path]):
                found[path] = f"{found[path] or ''}+{name}"
        return found


def first_state(seen: Recording) -> Tensor:
    """Return the first tensor that the first block is given."""
    (first, *_) = next(iter(seen.chains.values()))
    return next(each for each in (*first.places, *first.names.values()) if isinstance(each, Tensor))


def record_pass(of: Subject, more: int = TOKENS) -> Recording:
    """Record a forward pass on the meta device, with hooks on all modules, of ``more`` tokens after an image's."""
    model, task, read = of.model, of.task, of.read
    tokens = more + first_tokens(read)[1]
    paths = {module: path for path, module in model.named_modules()}
    lists = _lists_of(nn.ModuleList, model) | _lists_of(nn.Sequential, model)
    inside = {  # modules of each block of the largest list, with their paths in it; they may occur elsewhere too
        block: {each: inner for inner, each in block.named_modules(prefix=f"{path}.{name}")}
        for path in [*lists][:1]
        for name, block in model.get_submodule(path).named_children()
    }
    called: list[str] = []
    calls: dict[str, list[tuple[int, Call]]] = {path: [] for path in lists}
    place_of = {block: (path, place) for path, blocks in lists.items() for place, block in enumerate(blocks)}

    keywords: dict[str, str | None] = {}
    named: dict[str, Mapping[str, Any]] = {}

    def before(module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any]) -> None:
        paths.update(inside.get(module, {}))
        called.append(paths[module])
        keywords[paths[module]], named[paths[module]] = keyword_of(places, names), names

    def after(module: nn.Module, places: tuple[Any, ...], names: Mapping[str, Any], outputs: Any) -> None:
        path, place = place_of[module]
        calls[path].append((place, Call(places, names, outputs)))

    def watched(_block: nn.Module, places: tuple[Any, ...], names: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return places, {n: Watched(each) if isinstance(each, UserDict) else each for n, each in names.items()}

    try:
        with torch.device("meta"):
            given = given_samples(read, blank(read, SAMPLES, tokens, torch.device("meta")))
            (samples,) = given.values()
            if beside := ids_beside(task):
                given[beside] = blank(None, SAMPLES, tokens, torch.device("meta"))
        with (
            ExitStack() as hooks,
            one_sequence_each(),
            torch.device("meta"),
            without_values(given.values(), plain_token(of.config), first_tokens(read)) as known,
            CalledModules(model) as modules,
            _called_with_hooks(place_of),
        ):
            for module in list(paths):
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            for block in place_of:
                hooks.enter_context(block.register_forward_pre_hook(watched, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(after, with_kwargs=True))
            of_features = beside_features(model, read, given.get(beside))
            outputs = model(**given, **of_features, **forward_options(model))
    except Exception as error:
        raise failed_pass(of.config, error) from error
    if any(isinstance(model.get_submodule(path), nn.modules.batchnorm._BatchNorm) for path in called):
        raise of.refusal("batch norms, which would see one rank's microbatch instead of the whole batch")
    places = {path: [place for place, _ in each] for path, each in calls.items()}
    # lists whose blocks are called one after another; if there are none, those that skip some: blocks for inputs that
    # no sample has, such as text blocks that read an image
    whole = [path for path, blocks in lists.items() if places[path] == list(range(len(blocks)))]
    part = [path for path, each in places.items() if len(each) > 1 and each == sorted(set(each))]
    chosen = _chosen(of, {path: [call for _, call in calls[path]] for path in whole or part}, called)
    return Recording(
        model=model,
        config=of.config,
        task=task,
        read=read,
        called=called,
        chains=chosen,
        places={path: places[path] for path in chosen},
        samples=samples,
        tokens=tokens,
        decoder_ids=given[beside] if beside else samples,
        logits=outputs.logits,
        modules=modules,
        keywords=keywords,
        named=named,
        asks_for_values=known is not None and known.asked,
    )


def _chosen(of: Subject, chains: Mapping[str, Sequence[Call]], called: Sequence[str]) -> dict[str, Sequence[Call]]:
    """Return the largest list whose modules are called one after another, for some tasks two, in order of execution."""
    count = 2 if of.task.has_two_lists else 1
    if of.task is Task.IMAGE_TEXT:  # modules that read several states of a tower may be a list as well
        chains = {path: each for path, each in chains.items() if _is_chain(each)}
    if len(chains) < count:
        lists_wanted = "two lists" if count > 1 else "list"
        raise of.refusal(f"no {lists_wanted} of modules that are each called once, in sequence")
    chosen = sorted(list(chains)[:count], key=lambda path: next(n for n, e in enumerate(called) if is_below(e, path)))
    found = {path: chains[path] for path in chosen}
    if of.task is Task.IMAGE_TEXT:
        (_, (entered, *_)) = found.values()
        reached = parameters_of(tensors_given(entered))
        blocks = list(of.model.get_submodule(chosen[0]).children())
        last = max(
            (n for n, block in enumerate(blocks) if reached & {id(each) for each in block.parameters()}), default=0
        )
        found[chosen[0]] = found[chosen[0]][: last + 1]
    return found


def _is_chain(calls: Sequence[Call]) -> bool:
    """Return whether every module of a list is given something that the one before returned."""
    returned = [{id(leaf) for leaf in pytree.tree_leaves(call.outputs)} for call in calls]
    return all(
        {id(each) for each in tensors_given(call)} & before for before, call in zip(returned, calls[1:], strict=False)
    )


def keyword_of(places: Sequence[Any], names: Mapping[str, Any]) -> str | None:
    """Return the name under which a module is given its first tensor; None if by position, or if it is given none."""
    if any(isinstance(each, Tensor) for each in places):
        return None
    return next((name for name, each in names.items() if isinstance(each, Tensor)), None)


def tensors_given(call: Call) -> list[Tensor]:
    """Return the tensors among the arguments of a block, including those in mappings."""
    given = [each.data if isinstance(each, UserDict) else each for each in (*call.places, *call.names.values())]
    return [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]


@contextmanager
def _called_with_hooks(blocks: Collection[nn.Module]) -> Iterator[None]:
    """Run the hooks of blocks within this context, even if a model calls their ``forward`` directly."""

    called: set[nn.Module] = set()

    def forward(block: nn.Module, *places: Any, **names: Any) -> Any:
        return type(block).forward(block, *places, **names) if block in called else block(*places, **names)

    with ExitStack() as stack:
        for block in (block for block in blocks if "forward" not in vars(block)):
            stack.enter_context(block.register_forward_pre_hook(lambda module, _given: called.add(module)))
            stack.enter_context(block.register_forward_hook(lambda module, *_: called.discard(module)))
            block.forward = partial(forward, block)
            stack.callback(vars(block).pop, "forward")
        yield


def _lists_of(list_type: type[nn.ModuleList | nn.Sequential], model: nn.Module) -> dict[str, list[nn.Module]]:
    found: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        inside = any(is_below(path, outer) for outer in found)
        if isinstance(module, list_type) and len(module) and not inside:
            found[path] = list(module)
    size = {path: sum(p.numel() for block in blocks for p in block.parameters()) for path, blocks in found.items()}
    place = {path: place for place, path in enumerate(found)}
    return {path: found[path] for path in sorted(found, key=lambda path: (-size[path], -place[path]))}


def argument_of(call: Call, name: int | str) -> Tensor:
    """Return the argument of a block at this position or under this name."""
    return call.names[name] if isinstance(name, str) else call.places[name]


class Watched(UserDict[Any, Any]):
    """A mapping given to blocks, as one of them sees it: the entries that the block reads and those that it writes."""

    def __init__(self, mapping: UserDict[Any, Any]) -> None:
        super().__init__()
        self.data = mapping.data
        self.read: dict[Any, Any] = {}
        self.written: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        self.read[key] = super().__getitem__(key)
        return self.read[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.written[key] = value
