"""The profile of a job as an engine with modules of its own computes it, in place of what was traced.

Parameters stay those that were traced: closed forms leave out biases and the norms of queries and keys.
"""

from dataclasses import replace

from steelyard.cost.decoder import DecoderShape, decoder_layer
from steelyard.cost.job import Job, layer_precision
from steelyard.engines.engine import Engine
from steelyard.engines.kernels import Kernels
from steelyard.hardware.values import Device
from steelyard.model.chain import LayerType
from steelyard.plan.plan import Precision
from steelyard.profiles.profile import LayerProfile


def job_under(job: Job, engine: Engine) -> Job:
    """The job as an engine runs it. What was measured, is in fp32 or is frozen in parts stays as it was."""
    profile, kernels = job.profile, kernels_of(engine, job.precision)
    imbalance = 1.0 if engine.execution.balances_experts else job.imbalance
    if kernels is not None and not profile.identity.is_measured and job.precision != "fp32":
        layer_types = {layer_type.name: layer_type for layer_type in job.chain.layer_types}
        shape = DecoderShape.of(job.chain, job.seq_len)
        slowdown = tuned_over_experts(engine, job.cluster.device)

        def under(layer: LayerProfile) -> LayerProfile:
            layer_type: LayerType = layer_types[layer.kind]
            if layer_type.likeness:
                return layer
            found = decoder_layer(
                shape,
                kernels,
                layer_type,
                tp=layer.degrees.get("tp", 1),
                sp="sp" in layer.degrees,
                imbalance=imbalance,
                slowdown=slowdown,
            )
            return _with_params_of(layer, found)

        profile = profile.model_copy(update={"layers": tuple(under(layer) for layer in profile.layers)})
    return replace(job.on(profile=profile), engine=engine, imbalance=imbalance)


def kernels_of(engine: Engine, precision: Precision) -> Kernels | None:
    """The kernels of an engine that has its own; below 16 bits each expert's input is cast in one more for a product.

    Source: Transformer Engine, cast.cpp, split_quantize.
    """
    kernels = engine.execution.kernels
    if kernels is None or layer_precision(precision) == precision:
        return kernels
    return replace(kernels, of_each_expert=2 * kernels.of_each_expert)


def tuned_over_experts(engine: Engine, device: Device) -> float:
    """How many times as fast as matmuls of experts an engine's other linear layers are, which its kernels suit."""
    return engine.execution.tuned_linear_speedup if "fp8" in device.peak_flop_per_s else 1.0


def _with_params_of(traced: LayerProfile, layer: LayerProfile) -> LayerProfile:
    counts = {name: getattr(traced, name) for name in ("num_params", "expert_params", "buffer_bytes")}
    divided = layer.divided_experts and tuple(each.model_copy(update=counts) for each in layer.divided_experts)
    return layer.model_copy(update=counts | {"divided_experts": divided})
