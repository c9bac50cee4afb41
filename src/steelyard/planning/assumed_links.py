r"""A profile of one device for plans of many: layers as they were measured, links as the cluster says.

Layers in shapes that one device cannot have (tp above 1) are traced and priced by the catalogue's rates, all scaled by

$$r = \frac{\sum_k n_k\, t_k^\text{measured}}{\sum_k n_k\, t_k^\text{catalogue}}$$

over the $n_k$ layers of each type $k$ of the model, so that shapes compare as one kind of measurement. A device without
rates in the catalogue has its measured shape alone, and its plans no tp.

Not measured, and assumed: every collective and transfer (the links of the cluster), what the end of a step takes with
many devices beyond what it takes with one, compute and communication side by side (`Profile.overlap_slowdown`), and on
CPUs what sharding a layer adds and how processes of one host share its cores.
"""

from collections.abc import Callable
from dataclasses import replace

from steelyard.cost.compute import compute_time
from steelyard.cost.efficiency import Efficiency, efficiency_of
from steelyard.cost.job import Job
from steelyard.profiles.profile import LayerProfile, Profile


def with_assumed_links(job: Job, trace: Callable[[], Profile]) -> Job:
    """The job with all that its profile of one device lacks; ``trace`` counts the model's layers in other shapes."""
    device, network = job.cluster.device, job.cluster.inter_link
    if device.needs_profile:
        return job
    measured = job.profile.shapes
    others = (layer for layer in trace().layers if frozenset(layer.degrees.items()) not in measured)
    profile = job.profile.model_copy(update={"layers": (*job.profile.layers, *others)})
    rates = efficiency_of(device.name, network.name if network else "")
    return job.on(profile=profile, rates=slowed(rates, measured_over_catalogue(job)))


def measured_over_catalogue(job: Job) -> float:
    """What the layers of the model take together by the profile, over what the catalogue's rates say of them."""
    seconds = {True: 0.0, False: 0.0}
    for number in range(job.chain.num_layers):
        layer = job.layer(job.chain.type_of(number).name, {})
        if layer is not None and layer.times:
            samples = layer.times[-1].samples
            for is_measured, each in ((True, layer), (False, layer.model_copy(update={"times": ()}))):
                seconds[is_measured] += _both_ways_s(each, samples, job)
    return seconds[True] / seconds[False] if seconds[False] else 1.0


def _both_ways_s(layer: LayerProfile, samples: float, job: Job) -> float:
    found = compute_time(layer, samples, job)
    return float(max(found.forward_s, found.forward_launch_s) + max(found.backward_s, found.backward_launch_s))


def slowed(rates: Efficiency, factor: float) -> Efficiency:
    """The rates with which every kernel of a device takes ``factor`` times as long."""
    return replace(
        rates,
        matmul=rates.matmul / factor,
        operands=rates.operands * factor,
        attention=rates.attention / factor,
        memory=rates.memory / factor,
        ramp_s=rates.ramp_s * factor,
        launch_s=rates.launch_s * factor,
    )
