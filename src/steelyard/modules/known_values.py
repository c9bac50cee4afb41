"""Tensors without values: blanks, and meta and fake tensors whose values are known.

A blank stands for a tensor that depends on a missing parameter. It reports a device but uses no memory; an operation on
a blank computes nothing and returns a blank. Tensors that do not depend on parameters are computed as usual. If the
value of a blank is needed, an error is raised instead of returning a wrong result.

`KnownValues` lets a forward pass that reads values run on meta and fake tensors. Known are the samples' token ids
(`tell`), the results of factories (zeros, ranges), and all tensors that depend on known values alone, such as masks and
positions. Choices among unknown values (``topk``, ``argmax``, ``sort``) are assumed even: each of E experts gets the
same share of the tokens, the mean over all routings. Values are computed on the host, and only if they are read
(``tolist``, ``nonzero``, ``bool``, indices of a mask). Reading an unknown value raises the same error as without
`KnownValues`.

Not modelled: writing into a view of a known tensor changes only the view.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from steelyard.errors import InvalidModelError
from steelyard.modules.not_split import HINT

META = torch.device("meta")
FILLED = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))
"""Operations that read only the shape and dtype of a tensor."""


class Blank(Tensor):
    """Tensor without values; ``meta`` has its shape and dtype."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> "Blank":
        """Create a blank with the shape and dtype of a meta tensor."""
        options = {"strides": meta.stride(), "storage_offset": meta.storage_offset(), "dtype": meta.dtype}
        found = Tensor._make_wrapper_subclass(cls, meta.shape, **options, device=device, requires_grad=False)
        found.meta = meta
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return blanks without computing anything."""
        return _of_blanks(func, args, kwargs or {})


class Blanks(TorchDispatchMode):
    """Mode that hides operations on blanks from other modes, which count or record computations."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, Blank) for each in pytree.tree_leaves((args, kwargs))):
            return _of_blanks(func, args, kwargs)
        return func(*args, **kwargs)


def blank_of(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Blank:
    """Create a blank of a shape and a dtype."""
    with _disable_current_modes():
        return Blank(torch.empty(tuple(shape), dtype=dtype, device=META), device)


def _of_blanks(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    (first, *_) = (each for each in given if isinstance(each, Blank))
    name = func._schema.name.partition("::")[2]
    if name in FILLED and isinstance(args[0], Blank):
        like = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
        return func(like, *args[1:], **kwargs)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, Tensor) and not isinstance(value, Blank):
            raise InvalidModelError(
                field="forward",
                found=f"{func}, which writes values that depend on parameters into a tensor of shape "
                f"{list(value.shape)}",
                expected="new tensors, outside the blocks",
                hint=HINT,
            )
    device = kwargs.get("device") or first.device
    with _disable_current_modes():
        places, names = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
        found = func(*places, **(names | ({"device": META} if "device" in kwargs else {})))
        known = {id(each.meta): each for each in given if isinstance(each, Blank)}
        return pytree.tree_map_only(
            Tensor, lambda each: known[id(each)] if id(each) in known else Blank(each, device), found
        )


def _on_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Blank):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


_AS = frozenset(("type_as", "view_as", "expand_as", "reshape_as"))
"""Functions that read only the shape and dtype of their second tensor."""
_CHOICES = frozenset(("topk", "max", "min", "sort"))
_UNKNOWN = frozenset(
    ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "empty", "empty_like", "new_empty", "bernoulli")
)
_UNKNOWN |= frozenset(("multinomial", "dropout", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"))
_NUMBERS = frozenset(("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__format__"))


def tell(tensor: Tensor, values: Tensor) -> None:
    """Register ``values`` as the known values of a tensor of the same shape."""
    tensor._known = lambda: values


class KnownValues(TorchFunctionMode):
    """Mode in which functions of tensors without values record and read the known values of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        """Whether a value was read that a tensor does not have."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function and record the known values of its result."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__getitem__", "__setitem__"):
            args = self._with_places(args)
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        read = () if name in FILLED else tensors[:1] if name in _AS else tensors
        value = _later(func, args, kwargs, name) if name not in _UNKNOWN and all(map(is_known, read)) else None
        if name in _NUMBERS and not has_values(tensors[0]):
            self.asked = True
            if value is not None:
                return value()
            return 0 if name == "item" else func(*args)  # models compare or assert on it, but do not branch
        try:
            found = func(*args, **kwargs)
        except RuntimeError:  # read of missing values; errors of fake tensors are RuntimeErrors, too
            sizes = [each for each in tensors if _is_known_size(each)]
            if (value is None and not sizes) or all(has_values(each) for each in tensors):
                raise
            self.asked = True
            if value is not None:
                return _valueless(value(), tensors[0])
            places, names = pytree.tree_map_only(Tensor, _as_size, (args, kwargs))
            found = func(*places, **names)
        _keep(found, value, args, name)
        return found

    def _with_places(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an indexing, with masks replaced by indices and scalar tensors by numbers."""
        tensor, index, *rest = args
        found: list[Any] = []
        for each in index if isinstance(index, tuple) else (index,):
            asks = isinstance(each, Tensor) and not has_values(each) and (each.dtype == torch.bool or not each.ndim)
            if not (asks and is_known(each)):
                found.append(each)
                continue
            self.asked = True
            with _disable_current_modes():
                values = known_of(each)
                places = values.nonzero(as_tuple=True) if values.dtype == torch.bool else (values.item(),)
            found += [_valueless(place, each) for place in places]
        return (tensor, tuple(found) if isinstance(index, tuple) or len(found) > 1 else found[0], *rest)


def _is_known_size(tensor: Tensor) -> bool:
    """Return whether a tensor without values is a known integer scalar, which may be a size."""
    return not (tensor.ndim or tensor.is_floating_point() or has_values(tensor)) and is_known(tensor)


def _as_size(tensor: Tensor) -> Any:
    with _disable_current_modes():
        return known_of(tensor).item() if _is_known_size(tensor) else tensor


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor is no meta tensor, no fake tensor and no blank."""
    return not (tensor.is_meta or isinstance(tensor, Blank) or is_fake(tensor))


def is_known(tensor: Tensor) -> bool:
    """Return whether a tensor has values or known values."""
    return has_values(tensor) or getattr(tensor, "_known", None) is not None


@contextmanager
def without_values(
    samples: Iterable[Tensor], token: int = 0, first: tuple[int | None, int] = (None, 0)
) -> Iterator[KnownValues | None]:
    """Run a forward pass in which samples without values consist of one token; samples with values are unchanged.

    ``first`` is a different token for the first token ids, if given, and their number.
    """
    bare = [each for each in samples if not has_values(each)]
    if not bare:
        yield None
        return
    for each in bare:
        with _disable_current_modes():
            known = torch.full((), token, dtype=each.dtype, device="cpu").expand(each.shape)
            tell(each, known if each.is_floating_point() else with_first(known, *first))
    with KnownValues() as known:
        yield known


def with_first(ids: Tensor, token: int | None, count: int) -> Tensor:
    """Return token ids [B, S] whose first ``count`` entries are ``token``, if one is given."""
    if token is None:
        return ids
    found = ids.clone()
    found[:, :count] = token
    return found


def plain_token(config: Any) -> int:
    """Return the first token that the config does not list as a special token."""
    given = (value for key, value in vars(config).items() if key.endswith(("_token_id", "_index", "_token_index")))
    taken = {token for value in given for token in (value if isinstance(value, list | tuple) else [value])}
    return next(token for token in count() if token not in taken)


def known_of(tensor: Tensor) -> Tensor:
    """Return the values or known values of a tensor, on the host."""
    return tensor.detach().cpu() if has_values(tensor) else tensor._known()


def values_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return the shape and known values of a tensor without values; None if its values are unknown or it has values."""
    value = getattr(tensor, "_known", None)
    if value is None:
        return None
    found = value()
    return (*found.shape, *found.flatten().tolist())


def _later(func: Any, args: Any, kwargs: Any, name: str) -> Callable[[], Any]:
    """Return a callable that computes the result from known values on its first call."""
    known: list[Any] = []
    writes = (name.endswith("_") and not name.startswith("__")) or name == "__setitem__" or name.startswith("__i")
    given, form = pytree.tree_flatten((args, kwargs))
    given = [_before(each) for each in given]  # its current known values, because it may be written to

    def value() -> Any:
        if not known:
            with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
                places, names = pytree.tree_unflatten([each() if callable(each) else each for each in given], form)
                places = (places[0].clone(), *places[1:]) if writes and places else places
                made = func(*places, **names)
                known.append(places[0] if made is None else made)
        return known[0]

    return value


def _before(value: Any) -> Any:
    """Return a callable for a tensor's values (zeros if unknown); a device becomes the CPU, other values stay."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value in ("meta", "cuda")):
        return torch.device("cpu")
    if not isinstance(value, Tensor):
        return value
    if has_values(value):
        return lambda: value.detach().cpu()
    shape, dtype = value.shape, value.dtype
    return getattr(value, "_known", None) or (lambda: torch.zeros((), dtype=dtype).expand(shape))


def _valueless(values: Any, like: Tensor) -> Any:
    """Replace tensors by empty ones on the device of ``like`` with these known values; keep numbers as they are."""

    def bare(each: Tensor) -> Tensor:
        found = torch.empty(each.shape, dtype=each.dtype, device=like.device)
        tell(found, each)
        return found

    return pytree.tree_map_only(Tensor, bare, values)


def _keep(found: Any, value: Callable[[], Any] | None, args: Any, name: str) -> None:
    """Record the known values of a function's results and of the tensor that it wrote into."""
    if name == "__setitem__":
        args[0]._known = value
    elif isinstance(found, Tensor) and not has_values(found):
        found._known = value or (_even(found, args[0]) if name.startswith("arg") else None)
    elif isinstance(found, tuple | list) and found and all(isinstance(each, Tensor) for each in found):
        for place, each in enumerate(found):
            if not has_values(each):
                each._known = value and partial(lambda of, at: of()[at], value, place)
        if value is None and name in _CHOICES and len(found) > 1:
            found[1]._known = _even(found[1], args[0])


def _even(chosen: Tensor, among: Tensor) -> Callable[[], Tensor]:
    """Return indices into the last dim of a tensor in cyclic order, so that each is chosen equally often."""
    shape, number = chosen.shape, among.shape[-1]
    return lambda: (torch.arange(shape.numel()) % number).view(shape)
