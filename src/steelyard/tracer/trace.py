"""Traces one layer of each type on fake tensors: work, memory and collectives of one rank, as a `Profile`.

The layer is the real `transformers` module, made tensor-parallel as the runtime does it, over a process group that
has ranks but no processes. Nothing is computed and no memory is used, so any model can be traced on a laptop.

Quantities that grow with the samples are traced at two sizes and kept as a line through them. Peaks are convex in the
samples (a maximum of lines), so the line is an upper bound between the two sizes and close beyond the larger. Shapes of
kernels that are seen at both sizes become those of one sample, equal ones folded into one with a count.
"""

import datetime
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import transformers

from steelyard.errors import InvalidModelError
from steelyard.model.chain import LayerType, ModelChain
from steelyard.model.family import KV_HEADS, QUERY_HEADS
from steelyard.modules.build import build_meta_model, prepare_model
from steelyard.modules.own_pieces import OwnModel
from steelyard.plan.strategy import Remat
from steelyard.precision import LayerPrecision
from steelyard.profiles.profile import (
    Collective,
    CollectiveCount,
    LayerProfile,
    Profile,
    ProfileIdentity,
    Recomputation,
    Shape,
    Work,
)
from steelyard.profiles.shapes import DIMS, Affine, AttentionCall, Dim, Product
from steelyard.tracer.counting import OpCounts, Operations, SeenProduct
from steelyard.tracer.layer import Observation, TracedLayer, fake_world, observe
from steelyard.tracer.packaged import legal_shapes


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


SIZES = (2, 8)
"""Samples per rank at which a layer is traced. Sequence parallelism scatters a single sample without a copy."""

_Direction = Callable[[Observation], OpCounts]
_Line = Callable[[Callable[[Observation], float]], Affine]


def trace(
    chain: ModelChain,
    *,
    seq_len: int,
    precision: LayerPrecision,
    degrees: Iterable[int],
    own: OwnModel | None = None,
    fp32_adapters: bool = False,
) -> Profile:
    """The traced profile of a model in every shape that parallelism dimensions give its layers at these degrees.

    ``own`` is a user's own module, which a chain alone does not give; ``fp32_adapters`` is as `TracedLayer` has it.
    A degree that does not divide a layer type's sizes is left out for that layer type.
    """
    model = build_meta_model(chain) if own is None else own.without_values()
    prepare_model(model, chain)
    layers: list[LayerProfile] = []
    seen = Operations()
    with _collector_paused():
        for degree in sorted({1, *degrees}):
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
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ),
        layers=tuple(layers),
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for garbage cycles meanwhile: it would go through all modules of torch again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _profile(traced: TracedLayer, layer_type: LayerType) -> LayerProfile:
    """What is seen of a layer; of one with experts also where ranks divide them."""
    heads = dict(layer_type.tp_divides)
    queries = heads.get(QUERY_HEADS, 1)
    shape, degree = traced.strategy.shape, traced.strategy.tensor_degree
    served = queries / max(heads.get(KV_HEADS, queries), min(degree, queries))

    def seen(of: TracedLayer) -> LayerProfile:
        return layer_profile(layer_type.name, shape, observe(of, SIZES), queries_of_a_key=served)

    layer = seen(traced)
    if not layer_type.num_experts:
        return layer
    even, twice = (seen(replace(traced, exchanged=share)) for share in (1.0, 2.0))
    return layer.model_copy(update={"divided_experts": (even, twice)})


def layer_profile(
    layer_type: str, shape: Shape, observations: list[Observation], *, queries_of_a_key: float = 1.0
) -> LayerProfile:
    """The profile of a layer type in a shape from one observation at each of `SIZES` samples.

    ``queries_of_a_key`` is how many query heads each key-value head serves.
    """

    def line(value: Callable[[Observation], float]) -> Affine:
        low, high = (value(observation) for observation in observations)
        slope = (high - low) / (SIZES[1] - SIZES[0])
        return Affine(constant=low - slope * SIZES[0], per_sample=slope)

    def forward(of: Observation) -> OpCounts:
        return of.plain.forward

    def backward(of: Observation) -> OpCounts:
        return of.plain.backward

    return LayerProfile(
        kind=layer_type,
        degrees=dict(shape),
        **observations[0].held,
        forward=_work(forward, observations, line),
        backward=_work(backward, observations, line),
        forward_collectives=_collectives(forward, observations, line),
        backward_collectives=_collectives(backward, observations, line),
        saved_bytes=line(lambda o: o.plain.saved_bytes),
        input_bytes=line(lambda o: o.plain.input_bytes),
        key_value_bytes=line(lambda o: forward(o).key_value_bytes - _repeated_bytes(forward(o), queries_of_a_key)),
        attention_bytes=line(lambda o: forward(o).attention_bytes - _repeated_bytes(forward(o), queries_of_a_key)),
        square_flop=line(lambda o: forward(o).square_flop),
        forward_transient_bytes=line(lambda o: o.plain.forward_peak_bytes - o.plain.saved_bytes),
        backward_transient_bytes=line(lambda o: o.plain.backward_peak_bytes - o.plain.saved_bytes),
        adapter_inputs=line(lambda o: o.plain.adapter_inputs),
        shared_adapter_inputs=line(lambda o: o.plain.shared_adapter_inputs),
        recomputations=tuple(_recomputation(remat, observations, line) for remat in observations[0].recomputed),
    )


def _repeated_bytes(counts: OpCounts, queries_of_a_key: float) -> float:
    """What a kernel with a mask reads of keys and values beyond what the layer makes: once for every query head."""
    query_bytes = (counts.attention_bytes - counts.key_value_bytes) / 2
    if counts.key_value_bytes < 2 * query_bytes:
        return 0.0
    return counts.key_value_bytes * (1 - 1 / queries_of_a_key)


def _recomputation(remat: Remat, observations: list[Observation], line: _Line) -> Recomputation:
    return Recomputation(
        remat="full" if remat is Remat.FULL else "selective",
        work=_work(lambda o: o.recomputed[remat].work, observations, line),
        collectives=_collectives(lambda o: o.recomputed[remat].work, observations, line),
        saved_bytes=line(lambda o: o.recomputed[remat].saved_bytes),
        forward_transient_bytes=line(lambda o: o.recomputed[remat].forward_transient_bytes),
        backward_transient_bytes=line(lambda o: o.recomputed[remat].backward_transient_bytes),
    )


def _work(direction: _Direction, observations: list[Observation], line: _Line) -> Work:
    return Work(
        matmul_flop=line(lambda o: direction(o).matmul_flop),
        low_precision_flop=line(lambda o: direction(o).low_precision_flop),
        attention_flop=line(lambda o: direction(o).attention_flop),
        matmul_bytes=line(lambda o: direction(o).matmul_bytes),
        expert_weight_bytes=direction(observations[0]).expert_weight_bytes,
        memory_bytes=line(lambda o: direction(o).memory_bytes),
        num_kernels=direction(observations[0]).num_kernels,
        products=folded_products(*(direction(o).products for o in observations), samples=SIZES),
        attention=tuple(
            AttentionCall(
                heads=each.rows / SIZES[0],
                count=count,
                **{name: value for name, value in each._asdict().items() if name != "rows"},
            )
            for each, count in Counter(direction(observations[0]).attention).items()
        ),
    )


def _collectives(direction: _Direction, observations: list[Observation], line: _Line) -> tuple[CollectiveCount, ...]:
    def num_bytes(collective: Collective) -> Affine:
        return line(lambda o: sum(direction(o).collectives[collective]))

    return tuple(
        CollectiveCount(kind=collective, count=len(calls), tensor_bytes=num_bytes(collective))
        for collective, calls in sorted(direction(observations[0]).collectives.items())
    )
