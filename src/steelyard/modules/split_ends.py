"""Which modules are of the embedding, of what lies between two lists of blocks, and of the head."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from steelyard.model.family import Task
from steelyard.modules.made_of import depends, own_parameters, parameters_of
from steelyard.modules.paths import is_below, is_below_any, outermost
from steelyard.modules.recording import Recording
from steelyard.modules.stubbed_model import holds_parameters


def resting_modules(model: PreTrainedModel, logits: Tensor) -> tuple[str, ...]:
    """The outermost modules of which no parameter is trained: frozen, or nothing that the logits are made of."""
    reached = parameters_of([logits])

    def rests(module: nn.Module) -> bool:
        own = list(module.parameters())
        return bool(own) and not any(id(each) in reached for each in own)

    found: list[str] = []
    for path, module in model.named_modules():
        if rests(module) and not is_below_any(path, found):
            found.append(path)
    return tuple(found)


def find_ends(seen: Recording, entering: Tensor) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The paths of the modules that hold the parameters of the embedding, of what lies between two lists, and the head.

    And of these the modules that hold blocks: they are the embedding's where its result, ``entering``, depends on their
    own parameters, or nothing does. A module that is not called, and whose parameters another holds that is, belongs to
    neither. What reads states of a tower is called between its blocks, and lies behind them.
    """
    model = seen.model
    blocks_of = {path: seen.blocks(path) for path in seen.chains}
    of_blocks = {module for each in blocks_of.values() for block in each.values() for module in block.modules()}
    of_blocks |= {model.get_submodule(path) for path in seen.chains}
    owners = {path: module for path, module in model.named_modules() if holds_parameters(module)}
    outside = [path for path, module in owners.items() if module not in of_blocks]
    spans = []
    for path, blocks in blocks_of.items():
        paths = [f"{path}.{name}" for name in blocks]
        inside = [place for place, called in enumerate(seen.called) if is_below_any(called, paths)]
        spans.append((inside[0], inside[-1]))
    held = {id(each) for path in outside if path in seen.called for each in own_parameters(model, path)}
    ends: list[list[str]] = [[] for _ in range(len(spans) + 1)]
    tied: list[str] = []
    holders = [path for path in outside if any(is_below(blocks, path) for blocks in seen.chains) or not path]
    if "" in holders:
        raise seen.refusal("parameters of the model itself, which holds the blocks")
    for path in (path for path in outside if path not in holders):
        if path not in seen.called and held.issuperset(map(id, own_parameters(model, path))):
            tied.append(path)
            continue
        when = _calls(seen, path)
        when = [_past(place, spans[0]) for place in when] if seen.task is Task.IMAGE_TEXT else when
        where = {sum(last < place for _, last in spans) for place in when}
        if any(first < place < last for first, last in spans for place in when) or len(where) > 1:
            raise seen.refusal(f"{path}, which is called between blocks")
        ends[where.pop()].append(_at_rest(seen, path))
    in_head = {id(each) for path in ends[-1] for each in model.get_submodule(path).parameters()}
    leaving = pytree.tree_leaves(list(seen.chains.values())[-1][-1].outputs)
    for path in tied:
        own = own_parameters(model, path)
        if in_head.isdisjoint(map(id, own)) and depends(seen.logits, own, leaving):
            ends[-1].append(path)
    in_head |= {id(each) for path in ends[-1] for each in own_parameters(model, path)}
    for path in (path for end in ends[:-1] for path in end):
        own = [each for each in model.get_submodule(path).parameters() if id(each) not in in_head]
        if depends(seen.logits, own, leaving):
            raise seen.refusal(f"{path}, which lies before its blocks and which its head reads past them")
    if not all(ends):
        raise seen.refusal(f"no parameters {'before' if ends[-1] else 'behind'} its blocks")
    found = [outermost(each) for each in ends]
    for path in holders:
        own = own_parameters(model, path)
        end = -1 if depends(seen.logits, own) and not depends(entering, own) else 0
        found[end] = (*found[end], path)
    return found, tuple(holders)


def _past(place: int, span: tuple[int, int]) -> int:
    """The place of a call, which is behind all of a span where it is in it."""
    return span[1] + 1 if span[0] < place <= span[1] else place


def ends_by_use(
    seen: Recording, entering: Tensor, embedding: Sequence[str], between: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The embedding's modules and those between two lists, where a table of tokens is read before the first list.

    The embedding's are those that its result is made of. Blocks of the first list that nothing reads lie between.
    """
    model, reached = seen.model, parameters_of([entering])
    early = [path for path in embedding if reached & {id(each) for each in model.get_submodule(path).parameters()}]
    first = next(iter(seen.chains))
    unread = [f"{first}.{name}" for name, _ in model.get_submodule(first).named_children()][len(seen.chains[first]) :]
    late = [*(path for path in embedding if path not in early), *between]
    return tuple(early), outermost([next((block for block in unread if is_below(path, block)), path) for path in late])


def _calls(seen: Recording, path: str) -> list[int]:
    """When a module is called; of one that is not, when the module first is that holds it: the two stay together.

    So lie with the embedding the parts that no sample reaches, as a tower for images in a model that reads text.
    """
    when = [place for place, called in enumerate(seen.called) if called == path]
    return when or _calls(seen, path.rpartition(".")[0])[:1]


def _at_rest(seen: Recording, path: str) -> str:
    """A module; where it is not called, the outermost that holds it and of which nothing is called."""
    while path not in seen.called and not any(is_below(called, path.rpartition(".")[0]) for called in seen.called):
        path = path.rpartition(".")[0]
    return path


def shared_parameters(seen: Recording, holders: Mapping[int, Sequence[str]]) -> Iterator[tuple[tuple[int, str], ...]]:
    """The parameters that layers share; ``holders`` has the paths of a layer's modules by its number."""
    model, where = seen.model, dict[nn.Parameter, list[str]]()
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if holds_parameters(model.get_submodule(path.rpartition(".")[0])):
            where.setdefault(parameter, []).append(path)
    for paths in (paths for paths in where.values() if len(paths) > 1):
        copies = sorted((layer, path) for layer, each in holders.items() for path in paths if is_below_any(path, each))
        if len(copies) == len({layer for layer, _ in copies}):
            yield from [tuple(copies)] if len(copies) > 1 else []
        elif not _one_module(model, paths) and any(path.rpartition(".")[0] in seen.called for path in paths):
            raise seen.refusal(f"a parameter that {', '.join(paths[:3])} share")


def _one_module(model: PreTrainedModel, paths: Sequence[str]) -> bool:
    """Whether one module stands in several places, so that its parameters have several paths."""
    return len({model.get_submodule(path.rpartition(".")[0]) for path in paths}) == 1
