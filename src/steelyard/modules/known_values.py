"""Tensors without values: blanks, which have none, and what is known of meta and fake tensors all the same.

A blank stands for what depends on a parameter that is not there. It says that it is on a device and has nothing in
memory; an operation that is given one computes nothing and returns one. What does not depend on parameters is computed
as ever, and where a value of a blank would be needed, there is an error and no wrong result.

Within `KnownValues` a forward pass runs on meta and fake tensors that asks for values. Known are the samples' token ids
(`tell`), what factories make (zeros, ranges), and all that follows from known values alone, as masks and positions do.
What is chosen among unknown values (``topk``, ``argmax``, ``sort``) is taken to be chosen evenly: of E experts every
one gets the same share of the tokens, which is the mean over all routings. Values are computed, on the host, only when
they are asked for (``tolist``, ``nonzero``, ``bool``, indices of a mask); a value that is asked for and not known is
the error that it is without this.

Not modelled: writing into a view of a known tensor changes nothing but the view.
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
"""Operations that read of a tensor its shape and type alone."""


class Blank(Tensor):
    """A tensor without values; ``meta`` has its shape and type."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> "Blank":
        """Create a blank like a tensor on the meta device."""
        options = {"strides": meta.stride(), "storage_offset": meta.storage_offset(), "dtype": meta.dtype}
        found = Tensor._make_wrapper_subclass(cls, meta.shape, **options, device=device, requires_grad=False)
        found.meta = meta
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation without computing values."""
        return _of_blanks(func, args, kwargs or {})


class Blanks(TorchDispatchMode):
    """Mode that hides operations on blanks from modes that count operations or keep their results."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, Blank) for each in pytree.tree_leaves((args, kwargs))):
            return _of_blanks(func, args, kwargs)
        return func(*args, **kwargs)


def blank_of(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Blank:
    """A blank of a shape and a type."""
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
                found=f"{func}, which writes what depends on parameters into a tensor of shape {list(value.shape)}",
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
"""Functions that read so much of their second tensor."""
_CHOICES = frozenset(("topk", "max", "min", "sort"))
_UNKNOWN = frozenset(
    ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "empty", "empty_like", "new_empty", "bernoulli")
)
_UNKNOWN |= frozenset(("multinomial", "dropout", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"))
_NUMBERS = frozenset(("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__format__"))


def tell(tensor: Tensor, values: Tensor) -> None:
    """Attach known ``values`` to a tensor of the same shape."""
    tensor._known = lambda: values


class KnownValues(TorchFunctionMode):
    """Mode in which functions of tensors without values record and read the known values of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        """Whether a value was requested that a tensor does not have."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of a function, with its known values attached."""
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
            return 0 if name == "item" else func(*args)  # which models compare or assert on; no branch
        try:
            found = func(*args, **kwargs)
        except RuntimeError:  # asked for values where there are none; errors of fake tensors are of this kind, too
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
        """The arguments of an indexing, with the places of a mask's entries for it and numbers for single ones."""
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
    """Whether a tensor without values is a whole number that is known, as may stand for a size."""
    return not (tensor.ndim or tensor.is_floating_point() or has_values(tensor)) and is_known(tensor)


def _as_size(tensor: Tensor) -> Any:
    with _disable_current_modes():
        return known_of(tensor).item() if _is_known_size(tensor) else tensor


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor is neither a meta nor a fake one, nor a blank."""
    return not (tensor.is_meta or isinstance(tensor, Blank) or is_fake(tensor))


def is_known(tensor: Tensor) -> bool:
    """Whether a tensor has values, or these are known."""
    return has_values(tensor) or getattr(tensor, "_known", None) is not None


@contextmanager
def without_values(
    samples: Iterable[Tensor], token: int = 0, first: tuple[int | None, int] = (None, 0)
) -> Iterator[KnownValues | None]:
    """Make a forward pass treat samples without values as filled with ``token``; samples with values are unchanged.

    ``first`` is a different token for the first places of token ids, and the number of these places.
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
    """Return token ids [B, S] with the first ``count`` places set to ``token``; unchanged if it is None."""
    if token is None:
        return ids
    found = ids.clone()
    found[:, :count] = token
    return found


def plain_token(config: Any) -> int:
    """The first token that has no meaning of its own by a config, which gives one of a kind or a list of them."""
    given = (value for key, value in vars(config).items() if key.endswith(("_token_id", "_index", "_token_index")))
    taken = {token for value in given for token in (value if isinstance(value, list | tuple) else [value])}
    return next(token for token in count() if token not in taken)


def known_of(tensor: Tensor) -> Tensor:
    """The values of a tensor that has them, or of which they are known, on the host."""
    return tensor.detach().cpu() if has_values(tensor) else tensor._known()


def values_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """The shape and values of a tensor without values of which these are known; None for any other."""
    value = getattr(tensor, "_known", None)
    if value is None:
        return None
    found = value()
    return (*found.shape, *found.flatten().tolist())


def _later(func: Any, args: Any, kwargs: Any, name: str) -> Callable[[], Any]:
    """Return a function that computes the result from known values at its first call."""
    known: list[Any] = []
    writes = (name.endswith("_") and not name.startswith("__")) or name == "__setitem__" or name.startswith("__i")
    given, form = pytree.tree_flatten((args, kwargs))
    given = [_before(each) for each in given]  # what is known of it now: it may be written into

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
    """Return a function for a tensor's values: known, else zeros of its shape and dtype. Devices become the CPU."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value in ("meta", "cuda")):
        return torch.device("cpu")
    if not isinstance(value, Tensor):
        return value
    if has_values(value):
        return lambda: value.detach().cpu()
    shape, dtype = value.shape, value.dtype
    return getattr(value, "_known", None) or (lambda: torch.zeros((), dtype=dtype).expand(shape))


def _valueless(values: Any, like: Tensor) -> Any:
    """Convert results to tensors on the device of ``like`` with known values; numbers and lists stay unchanged."""

    def bare(each: Tensor) -> Tensor:
        found = torch.empty(each.shape, dtype=each.dtype, device=like.device)
        tell(found, each)
        return found

    return pytree.tree_map_only(Tensor, bare, values)


def _keep(found: Any, value: Callable[[], Any] | None, args: Any, name: str) -> None:
    """Notes what is known of a function's results, and of the tensor that it wrote into."""
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
    """Places chosen among those of the last dim of a tensor: one after the other, so that each is chosen as often."""
    shape, number = chosen.shape, among.shape[-1]
    return lambda: (torch.arange(shape.numel()) % number).view(shape)
