"""Traces of one layer of each type on fake tensors: work, memory and collectives of one rank, as a `Profile`.

The layer is the real `transformers` module, made tensor-parallel as in the runtime, over a process group with ranks but
without processes. Nothing is computed and no memory is used, so any model can be traced on a laptop.

Quantities that grow with the samples are traced at two sizes and stored as a line through them. Peaks are convex in the
samples (a maximum of lines), so the line is an upper bound between the two sizes and close beyond the larger. Kernel
shapes seen at both sizes are converted to those of one sample; equal ones are folded into one with a count.
"""

import datetime
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers

from steelyard.errors import InvalidModelError, UserError
from steelyard.model.chain import LayerType, ModelChain
from steelyard.model.family import KV_HEADS, QUERY_HEADS
from steelyard.modules.build import build_meta_model, prepare_model
from steelyard.modules.gpu_kernels import as_kernels, packages_of
from steelyard.modules.own_pieces import OwnModel
from steelyard.plan.stages import legal_shapes
from steelyard.plan.strategy import Remat
from steelyard.precision import LayerPrecision
from steelyard.profiles.profile import CollectiveCount, LayerProfile, Profile, ProfileIdentity, Recomputation, Work
from steelyard.profiles.shapes import DIMS, Affine, AttentionCall, Dim, Product
from steelyard.tracer.counting import OpCounts, Operations, SeenProduct
from steelyard.tracer.layer import CountedLayer, TracedLayer, fake_world, observe


def folded_products(
    few: Sequence[SeenProduct], many: Sequence[SeenProduct], *, samples: tuple[int, int]
) -> tuple[Product, ...]:
    """Return the products of one sample from those seen, in one order, at two numbers of ``samples``.

    A loop over samples makes proportionally more products for more samples. Raises `InvalidModelError` if a layer
    multiplies different matrices for more samples.
    """
    looped = _looped(few, many, samples) if len(few) != len(many) else {}
    few, many = ([each for each in seen if each not in looped] for seen in (few, many))
    if len(few) != len(many):
        raise InvalidModelError(
            field="products",
            found=f"{len(few)} products for {samples[0]} samples, {len(many)} for {samples[1]}",
            expected="the same number for any number of samples",
            hint="the layer's operations must not depend on the batch size",
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
    """Return the products whose number is proportional to the samples, with their number per sample."""
    more = Counter(many)
    each_times = {seen: divmod(count, samples[0]) for seen, count in Counter(few).items()}
    return {seen: times for seen, (times, rest) in each_times.items() if not rest and more[seen] == times * samples[1]}


def _growing(few: SeenProduct, many: SeenProduct) -> Dim | None:
    """Return the dim that grows most with the samples, or None."""
    most = max(DIMS, key=lambda dim: getattr(many, dim) / getattr(few, dim))
    return most if getattr(many, most) > getattr(few, most) else None


SIZES = (2, 8)
"""Samples per rank at which a layer is traced; not 1, because sequence parallelism scatters one without a copy."""


def trace(
    chain: ModelChain,
    *,
    seq_len: int,
    precision: LayerPrecision,
    degrees: Iterable[int],
    own: OwnModel | None = None,
    fp32_adapters: bool = False,
    gpu_kernels: bool = False,
) -> Profile:
    """Return the traced profile of a model in every shape that parallelism dimensions give its layers at these degrees.

    ``own`` is a user's own module, which a chain alone does not give; ``fp32_adapters`` is as in `TracedLayer`; with
    ``gpu_kernels`` the kernels of `steelyard.modules.gpu_kernels` run in place of those of CPUs. A degree that does not
    divide a layer type's sizes is left out for that layer type.

    Raises `UserError` for compiled blocks whose kernels are those of packages, which a block of one function excludes.
    """
    model = build_meta_model(chain) if own is None else own.without_values()
    prepare_model(model, chain)
    module = model.module if isinstance(model, OwnModel) else model
    packages = packages_of(module)
    is_compiled = any(change.name == "compile" for change in chain.changes)
    if packages and gpu_kernels and is_compiled:
        raise UserError(
            field="--compile",
            found=f"blocks of {chain.name}, which call kernels of {', '.join(packages)}",
            expected="blocks that torch.compile traces as a whole; it does not trace these kernels",
            hint="plan without --compile",
        )
    layers: list[LayerProfile] = []
    seen = Operations()
    with _collector_paused(), as_kernels(run=gpu_kernels) as differing:
        for degree in sorted(set(degrees)):
            with fake_world(degree) as mesh:
                for number, layer_type in enumerate(chain.layer_types):
                    places = [layer for layer in range(chain.num_layers) if chain.layers[layer] == number]
                    layers += [
                        _profile(
                            TracedLayer(
                                chain=chain,
                                layer=places[min(1, len(places) - 1)],
                                seq_len=seq_len,
                                precision=precision,
                                mesh=mesh,
                                strategy=strategy,
                                model=model,
                                fp32_adapters=fp32_adapters,
                                seen=seen,
                            ),
                            layer_type,
                        )
                        for strategy in legal_shapes(layer_type, degree, seq_len)
                    ]
    return Profile(
        identity=ProfileIdentity(
            method="traced",
            model_name=chain.name,
            config_hash=chain.config_hash,
            differences=chain.differences or None,
            seq_len=seq_len,
            precision=precision,
            device="any",
            num_devices=1,
            torch=torch.__version__,
            transformers=transformers.__version__,
            packages=(packages if gpu_kernels else ()) if differing or is_compiled else None,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ),
        layers=tuple(layers),
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection within this context, because it would traverse all modules of torch again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _profile(traced: TracedLayer, layer_type: LayerType) -> LayerProfile:
    """Return the profile of a layer; of one with experts also with these divided over ranks."""
    layer = _layer_profile(traced, layer_type)
    if not layer_type.num_experts:
        return layer
    even, twice = (_layer_profile(replace(traced, exchanged=share), layer_type) for share in (1.0, 2.0))
    return layer.model_copy(update={"divided_experts": (even, twice)})


def _layer_profile(traced: TracedLayer, layer_type: LayerType) -> LayerProfile:
    """Return the profile of a layer from one observation at each of `SIZES` samples."""
    few, many = observe(traced, SIZES)
    heads = dict(layer_type.tp_divides)
    queries = heads.get(QUERY_HEADS, 1)
    served = queries / max(heads.get(KV_HEADS, queries), min(traced.strategy.tensor_degree, queries))
    """Query heads that each key-value head serves."""

    def line(value: Callable[[CountedLayer], float]) -> Affine:
        return _line(value(few.plain), value(many.plain))

    def work(few: OpCounts, many: OpCounts) -> Work:
        return _work(few, many, (*_SUMS, "fp32_flop") if traced.fp32_adapters else _SUMS)

    def repeated_bytes(counts: OpCounts) -> float:
        """Bytes of keys and values that a masked kernel reads beyond those made: one copy for every query head."""
        query_bytes = (counts.attention_bytes - counts.key_value_bytes) / 2
        return 0.0 if counts.key_value_bytes < 2 * query_bytes else counts.key_value_bytes * (1 - 1 / served)

    return LayerProfile(
        kind=layer_type.name,
        degrees=dict(traced.strategy.shape),
        **few.held,
        forward=work(few.plain.forward, many.plain.forward),
        backward=work(few.plain.backward, many.plain.backward),
        forward_collectives=_collectives(few.plain.forward, many.plain.forward),
        backward_collectives=_collectives(few.plain.backward, many.plain.backward),
        saved_bytes=line(lambda of: of.saved_bytes),
        input_bytes=line(lambda of: of.input_bytes),
        key_value_bytes=line(lambda of: of.forward.key_value_bytes - repeated_bytes(of.forward)),
        attention_bytes=line(lambda of: of.forward.attention_bytes - repeated_bytes(of.forward)),
        square_flop=line(lambda of: of.forward.square_flop),
        forward_transient_bytes=line(lambda of: of.forward_peak_bytes - of.saved_bytes),
        backward_transient_bytes=line(lambda of: of.backward_peak_bytes - of.saved_bytes),
        adapter_inputs=line(lambda of: of.adapter_inputs),
        shared_adapter_inputs=line(lambda of: of.shared_adapter_inputs),
        recomputations=tuple(
            Recomputation(
                remat="full" if remat is Remat.FULL else "selective",
                work=work(one.work, many.recomputed[remat].work),
                collectives=_collectives(one.work, many.recomputed[remat].work),
                **_lines(one, many.recomputed[remat], _RECOMPUTED),
            )
            for remat, one in few.recomputed.items()
        ),
    )


_RECOMPUTED = ("saved_bytes", "forward_transient_bytes", "backward_transient_bytes")
_SUMS = ("matmul_flop", "low_precision_flop", "attention_flop", "matmul_bytes", "memory_bytes")


def _line(low: float, high: float) -> Affine:
    slope = (high - low) / (SIZES[1] - SIZES[0])
    return Affine(constant=low - slope * SIZES[0], per_sample=slope)


def _lines(few: object, many: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: _line(getattr(few, name), getattr(many, name)) for name in names}


def _work(few: OpCounts, many: OpCounts, sums: Sequence[str]) -> Work:
    return Work(
        **_lines(few, many, sums),
        expert_weight_bytes=few.expert_weight_bytes,
        num_kernels=few.num_kernels,
        products=folded_products(few.products, many.products, samples=SIZES),
        attention=tuple(
            AttentionCall(
                heads=each.rows / SIZES[0],
                count=count,
                **{name: value for name, value in each._asdict().items() if name != "rows"},
            )
            for each, count in Counter(few.attention).items()
        ),
    )


def _collectives(few: OpCounts, many: OpCounts) -> tuple[CollectiveCount, ...]:
    return tuple(
        CollectiveCount(kind=each, count=len(calls), tensor_bytes=_line(sum(calls), sum(many.collectives[each])))
        for each, calls in sorted(few.collectives.items())
    )
