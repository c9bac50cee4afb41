"""Which parameters a tensor was made of, by the graph of its gradients."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn


def nodes_behind(results: Sequence[Tensor], last: Collection[object] = ()) -> set[Any]:
    """The nodes of autograd through which tensors were made, none of them behind those that are to be the ``last``."""
    left, seen = [each.grad_fn for each in results], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions] if node not in last else []
    return seen


def parameters_of(results: Sequence[Tensor], last: Collection[object] = ()) -> set[int]:
    """The identities of the parameters that tensors were made of, other than by way of the ``last`` nodes."""
    return {id(getattr(node, "variable", None)) for node in nodes_behind(results, last)}


def depends(result: Tensor, parameters: Collection[nn.Parameter], leaving: Collection[object] = ()) -> bool:
    """Whether a tensor was made of one of these parameters, other than by way of what is ``leaving`` the blocks."""
    last = {each.grad_fn for each in leaving if isinstance(each, Tensor)}
    return not parameters_of([result], last).isdisjoint(map(id, parameters))


def own_parameters(model: nn.Module, path: str) -> list[nn.Parameter]:
    """The parameters that a module holds itself."""
    return list(model.get_submodule(path).parameters(recurse=False))
