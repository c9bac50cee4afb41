"""Profile of a job for an engine with its own modules, which replaces the traced one.

Parameter counts stay those of the trace, because closed forms omit biases and the norms of queries and keys.
"""

from dataclasses import replace

from steelyard.cost.decoder import DecoderShape, decoder_layer, linear_names
from steelyard.cost.job import Job, layer_precision, tuned_over_experts
from steelyard.engines.config_entries import completed
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Kernels
from steelyard.model.family import LayerRole
from steelyard.precision import Precision
from steelyard.profiles.profile import LayerProfile

_SAME_FORM = 0.05
"""Maximum relative difference in parameters between an undivided layer and its closed form: biases, positions."""


def job_under(job: Job, engine: Engine) -> Job:
    """Return the job as an engine runs it.

    The profile stays unchanged, and the engine is treated as one without its own kernels, if the profile is measured,
    in fp32 or partly frozen (except plain LoRA), or if its layers do not have the closed form.
    """
    engine, profile = engine.running(job.levers, job.precision), job.profile
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
    """Return the layers of the job's profile in closed form; empty if a layer does not have that form."""
    layer_types = {layer_type.name: layer_type for layer_type in job.chain.layer_types}
    shape, found, adapters = DecoderShape.of(job.chain, job.seq_len), [], job.effects.adapters
    if completed(job.chain, job.seq_len).get("resid_pdrop"):  # as GPT-2 calls what follows attention and MLP
        kernels = replace(kernels, dropout=True)
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
        computes = layer_types[layer.kind].role is not LayerRole.EMBEDDING  # which may hold a tower that reads no text
        if computes and not layer.degrees and abs(closed.num_params / layer.num_params - 1) > _SAME_FORM:
            return ()
        found.append(_with_params_of(layer, closed))
    return tuple(found)


def kernels_of(engine: Engine, precision: Precision) -> Kernels | None:
    """Return the kernels of an engine, or None if it has none of its own.

    Below 16 bits each product of an expert has one more kernel, which casts its input. Source: Transformer Engine,
    cast.cpp, split_quantize.
    """
    kernels = engine.execution.kernels
    if kernels is None or layer_precision(precision) == precision:
        return kernels
    return replace(kernels, of_each_expert=2 * kernels.of_each_expert)


def _with_params_of(traced: LayerProfile, layer: LayerProfile) -> LayerProfile:
    names = ("num_params", "expert_params", "frozen_params", "frozen_expert_params", "buffer_bytes")
    counts = {name: getattr(traced, name) for name in names}
    divided = layer.divided_experts and tuple(each.model_copy(update=counts) for each in layer.divided_experts)
    return layer.model_copy(update=counts | {"divided_experts": divided})
