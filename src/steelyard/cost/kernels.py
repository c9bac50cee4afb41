"""The profile of a job as an engine with modules of its own computes it, in place of what was traced.

Parameters stay those that were traced: closed forms leave out biases and the norms of queries and keys.
"""

from dataclasses import replace

from steelyard.cost.decoder import DecoderShape, decoder_layer, linear_names
from steelyard.cost.job import Job, layer_precision
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Kernels
from steelyard.hardware.values import Device
from steelyard.precision import Precision
from steelyard.profiles.profile import LayerProfile

_SAME_FORM = 0.05
"""Part by which the parameters of an undivided layer may differ where it is of the closed form: biases, positions."""


def job_under(job: Job, engine: Engine) -> Job:
    """The job as an engine runs it.

    What was measured, is in fp32, is frozen in parts, but for plain LoRA, or has other layers than the closed forms
    stays as it was, and the engine is one without kernels of its own.
    """
    engine, profile = engine.running(job.levers), job.profile
    kernels = kernels_of(engine, job.precision)
    imbalance = 1.0 if engine.execution.balances_experts else job.imbalance
    layers: tuple[LayerProfile, ...] = ()
    if kernels is not None and not profile.identity.is_measured and job.precision != "fp32":
        layers = _under(kernels, job, imbalance, tuned_over_experts(engine, job.cluster.device))
    if layers:
        profile = profile.model_copy(update={"layers": layers})
    elif kernels is not None:
        engine = replace(engine, execution=replace(engine.execution, kernels=None))
    return replace(job.on(profile=profile), engine=engine, imbalance=imbalance)


def _under(kernels: Kernels, job: Job, imbalance: float, slowdown: float) -> tuple[LayerProfile, ...]:
    """The layers of the job's profile in closed form; empty where one of them is not of that form."""
    layer_types = {layer_type.name: layer_type for layer_type in job.chain.layer_types}
    shape, found, adapters = DecoderShape.of(job.chain, job.seq_len), [], job.effects.adapters
    if shape is None or (adapters and not adapters.targets <= {*linear_names(shape)}):
        return ()
    if adapters is None and any(layer_type.likeness for layer_type in layer_types.values()):
        return ()
    for layer in job.profile.layers:
        closed = decoder_layer(
            shape,
            kernels,
            layer_types[layer.kind],
            tp=layer.degrees.get("tp", 1),
            sp="sp" in layer.degrees,
            imbalance=imbalance,
            slowdown=slowdown,
            low=job.effects.low_precision,
            adapters=adapters,
        )
        if not layer.degrees and abs(closed.num_params / layer.num_params - 1) > _SAME_FORM:
            return ()
        found.append(_with_params_of(layer, closed))
    return tuple(found)


def kernels_of(engine: Engine, precision: Precision) -> Kernels | None:
    """The kernels of an engine that has its own; below 16 bits each expert's input is cast in one more for a product.

    Source: Transformer Engine, cast.cpp, split_quantize.
    """
    kernels = engine.execution.kernels
    if kernels is None or layer_precision(precision) == precision:
        return kernels
    return replace(kernels, of_each_expert=2 * kernels.of_each_expert)


def tuned_over_experts(engine: Engine, device: Device) -> float:
    """Return how many times as fast as matmuls of experts an engine's other linear layers are."""
    return engine.execution.tuned_linear_speedup if "fp8" in device.peak_flop_per_s else 1.0


def _with_params_of(traced: LayerProfile, layer: LayerProfile) -> LayerProfile:
    names = ("num_params", "expert_params", "frozen_params", "frozen_expert_params", "buffer_bytes")
    counts = {name: getattr(traced, name) for name in names}
    divided = layer.divided_experts and tuple(each.model_copy(update=counts) for each in layer.divided_experts)
    return layer.model_copy(update=counts | {"divided_experts": divided})
