"""Makes shapes of one sample out of kernels seen at numbers of samples, equal ones folded into one with a count."""

from collections import Counter
from collections.abc import Sequence

from steelyard.errors import InvalidModelError
from steelyard.profiles.shapes import DIMS, AttentionCall, Dim, Product
from steelyard.tracer.counting import SeenAttention, SeenProduct


def folded_products(
    few: Sequence[SeenProduct], many: Sequence[SeenProduct], *, samples: tuple[int, int]
) -> tuple[Product, ...]:
    """Products of one sample from those seen, in one order, at two numbers of ``samples``.

    Of products that a loop over samples makes there are more for more samples, as many times as there are samples.
    Raises `InvalidModelError` where a layer multiplies other matrices for more samples.
    """
    looped = _looped(few, many, samples) if len(few) != len(many) else {}
    few, many = ([each for each in seen if each not in looped] for seen in (few, many))
    if len(few) != len(many):
        raise InvalidModelError(
            field="products",
            found=f"{len(few)} products for {samples[0]} samples, {len(many)} for {samples[1]}",
            expected="as many for any number of samples",
            hint="the layer's operations must not depend on the batch's size",
        )
    counts = Counter((one, _growing(one, other)) for one, other in zip(few, many, strict=True))
    products = [Product(**each._asdict(), grows="groups", count=count) for each, count in looped.items()]
    for (seen, dim), count in counts.items():
        sizes = {name: float(size) for name, size in seen._asdict().items()}
        if dim is not None:
            sizes[dim] /= samples[0]
        products.append(Product(**sizes, grows=dim, count=count))
    return tuple(products)


def _looped(
    few: Sequence[SeenProduct], many: Sequence[SeenProduct], samples: tuple[int, int]
) -> dict[SeenProduct, int]:
    """The products of which there are as many for each sample, with that number."""
    more = Counter(many)
    each_times = {seen: divmod(count, samples[0]) for seen, count in Counter(few).items()}
    return {seen: times for seen, (times, rest) in each_times.items() if not rest and more[seen] == times * samples[1]}


def _growing(few: SeenProduct, many: SeenProduct) -> Dim | None:
    """The dim of which more samples have most more, or None."""
    most = max(DIMS, key=lambda dim: getattr(many, dim) / getattr(few, dim))
    return most if getattr(many, most) > getattr(few, most) else None


def folded_attention(seen: Sequence[SeenAttention], *, samples: int) -> tuple[AttentionCall, ...]:
    """Calls of one sample from those seen at a number of ``samples``."""
    return tuple(
        AttentionCall(
            heads=each.rows / samples,
            head_dim=each.head_dim,
            queries=each.queries,
            keys=each.keys,
            is_causal=each.is_causal,
            masked=each.masked,
            backward=each.backward,
            count=count,
        )
        for each, count in Counter(seen).items()
    )
