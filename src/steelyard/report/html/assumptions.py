"""Assumptions behind the figures, each number with its source, and effects that are not modelled for a plan."""

from collections.abc import Iterator

from steelyard.cost.efficiency import catalogue_rates
from steelyard.cost.job import Job, layer_precision
from steelyard.engines import engine_of
from steelyard.engines.native import NATIVE
from steelyard.hardware import Cluster, Link
from steelyard.levers.optimizer import Optimizer
from steelyard.plan.plan import Plan, pipeline_text
from steelyard.plan.prediction import CostSource, simplicity_line
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Child, Html, section, tag
from steelyard.units import GB, TERA, format_bytes, format_count, format_seconds

PRECISIONS = {
    "bf16": "computes in bf16",
    "fp16": "computes in fp16 with a scaled loss, which the optimizer's step undoes",
    "fp32": "computes in fp32",
}
_FP32_BYTES = 8
"""Bytes of a trained parameter and its gradient."""


def assumption_section(found: ReportContents) -> Html:
    """Build the section with a line for each assumption, then the effects that are not modelled."""
    rows = [
        tag("div", tag("dt", name), tag("dd", text), class_="fact")
        for name, text in (*_plan_facts(found), *_pool_facts(found))
    ]
    return section(
        "assumptions",
        "What this rests on",
        tag("dl", rows),
        tag("h3", "Not modelled"),
        tag(
            "ul",
            [tag("li", text) for text in not_modelled(found.plan, found.pools[0] if found.pools else None)],
            class_="plain",
        ),
    )


def not_modelled(plan: Plan, job: Job | None) -> tuple[str, ...]:
    """Return effects on a step of this plan that no figure contains."""
    found = [
        "Reading data, writing checkpoints, evaluation, and steps that are slow for reasons outside the job.",
        "The first steps of a run, in which libraries choose kernels and allocators grow.",
    ]
    if job is None or not job.profile.identity.is_measured:
        found.append(
            "Matrix-product speed by exact shape (tiles, waves): only the arithmetic intensity counts. "
            "A measured profile (steelyard profile) has the shapes."
        )
    if plan.num_stages > 1:
        found.append(
            "A send that slows the sender's computation down, and a reduction of gradients that holds back the "
            "gradient sent to the stage before."
        )
    if any(strategy.tensor_degree > 1 for strategy in plan.strategies):
        found.append("Overlap of tensor-parallel collectives with compute: none is assumed.")
    if any(strategy.data_degree > 1 for strategy in plan.strategies):
        found.append("Congestion between groups of one stage that share a link: each has its full rate.")
    if any(strategy.expert_degree > 1 for strategy in plan.strategies):
        found.append("Routing that changes from step to step and from layer to layer: one imbalance stands for all.")
    found.append("Scratch space of kernels beyond the allocator slack.")
    return tuple(found)


def _plan_facts(found: ReportContents) -> Iterator[tuple[str, Child]]:
    plan, prediction = found.plan, found.prediction
    chain = plan.chain()
    yield "model", f"{plan.model.name}: {chain.num_layers} layers; config {chain.config_hash}"
    yield (
        "batch",
        f"{plan.global_batch:,} samples of {plan.seq_len:,} tokens, {format_count(plan.global_batch * plan.seq_len)} "
        "tokens a step",
    )
    yield "pipeline", pipeline_text(plan)
    alone = "" if plan.precision in PRECISIONS else f"inputs of linear layers in {plan.precision}, all else "
    yield "precision", f"{plan.precision}: {alone}{PRECISIONS[layer_precision(plan.precision)]}; {_kept(plan)}"
    bound = prediction.lower_bound_s
    proven = f"; no plan takes less than {format_seconds(bound)}" if bound > 0 else ""
    yield "proof", f"{prediction.certificate}{proven}"
    if simplicity := simplicity_line(plan.num_groups, plan.num_stages, prediction):
        yield "simplicity", simplicity
    for text in prediction.reasons:
        yield "groups of layers", text
    for text in prediction.not_searched:
        yield "not searched", text
    if prediction.pools is None:
        yield "costs", _source(prediction.profile)
    for pool in prediction.pools or ():
        if pool.num_stages:
            yield "costs", f"{pool.name}: {_source(pool.profile)}"


def _kept(plan: Plan) -> str:
    """Describe the storage of a trained parameter between steps."""
    optimizer = plan.chosen_levers.value(Optimizer)
    effects = engine_of(plan.engine or NATIVE.name).effects(plan.chosen_levers)
    num_on_host = effects.host_bytes + (_FP32_BYTES if effects.steps_on_host else 0)
    on_host = f", {num_on_host:.3g} of them in host memory" if num_on_host else ""
    matrices = f", {_FP32_BYTES + effects.matrices.state_bytes:.3g} in hidden matrices" if effects.matrices else ""
    states = "both moments of AdamW" if optimizer.is_default else f"the states of {optimizer}"
    return (
        f"parameters and gradients are kept in fp32, with {states} "
        f"{_FP32_BYTES + effects.state_bytes + effects.host_bytes:.3g} bytes of a trained parameter{on_host}{matrices}"
    )


def _source(profile: CostSource) -> str:
    if profile.is_measured:
        links = "; links assumed, as below" if profile.links_assumed else ""
        return f"measured on {profile.num_devices} × {profile.device}, {profile.created}{links}"
    return (
        f"each layer type traced on fake tensors with torch {profile.torch} and transformers "
        f"{profile.transformers}, {profile.created}; rates from the catalogue below"
        + ("" if profile.rates is None else f", {profile.rates}")
    )


def _pool_facts(found: ReportContents) -> Iterator[tuple[str, Child]]:
    """Yield the assumptions about the devices, for each pool by name if there are several."""
    for job in found.pools:
        if len(found.pools) > 1:
            yield "pool", tag("b", job.cluster.name)
        yield from _job_facts(job)
        if job.group.outer_link is not None:
            yield "between pools", _link_facts(job.group.outer_link)


def _job_facts(job: Job) -> Iterator[tuple[str, Child]]:
    cluster, device = job.cluster, job.cluster.device
    yield "cluster", f"{cluster.num_nodes} × {cluster.devices_per_node} × {device.name}"
    memory = "" if device.memory_bytes is None else f"{format_bytes(device.memory_bytes)} that a device may hold"
    if device.needs_profile:
        yield "device", f"{device.name}: {memory}; its speed was measured"
        if job.assumes_links:
            yield from _links(cluster)
        return
    yield (
        "device",
        [
            f"{device.name}: {job.peak_flop_per_s / TERA:,.0f} TFLOP/s in {layer_precision(job.precision)}, "
            f"{device.known_memory_bytes_per_s() / GB:,.0f} GB/s, {memory}",
            tag("small", device.source),
        ],
    )
    yield from _links(cluster)
    rates = job.efficiency
    entry = str(catalogue_rates(device.name)) if job.group.rates is None else "as given"
    entry = "with which layers take what was measured" if job.assumes_links else entry
    yield (
        "reached",
        f"{rates.matmul:.0%} of the peak in large matrix products and {rates.attention:.0%} in attention, {entry}; "
        f"{rates.memory:.0%} of the memory's rate, {rates.links.intra:.0%} of the link inside a node and "
        f"{rates.links.inter:.0%} of the one between nodes, fitted to published runs for all devices alike",
    )
    if any(layer_type.num_experts for layer_type in job.chain.layer_types):
        yield "routing", f"{job.imbalance:g} times the mean load on the busiest expert rank: assumed"
    if job.time_factor != 1.0:
        runs = "a measured run" if job.group.num_calibrating < 2 else f"{job.group.num_calibrating} measured runs"
        yield "calibration", f"all times multiplied by {job.time_factor:.3f}, from {runs}"
    yield (
        "upper bound",
        "the fullest moment of each stage, by the layer at work; what is short-lived counts with its peak",
    )


def _links(cluster: Cluster) -> Iterator[tuple[str, Child]]:
    yield "inside a node", _link_facts(cluster.intra_link, cluster.devices_per_node)
    if cluster.inter_link is not None and cluster.num_nodes > 1:
        yield "between nodes", _link_facts(cluster.inter_link)


def link_text(link: Link, num_devices: int = 1) -> str:
    """Describe a link by name and rate, for a link between this number of devices of a node."""
    return f"{link.name}: {link.rate_text(num_devices)} for a device and direction"


def _link_facts(link: Link, num_devices: int = 1) -> Child:
    return [f"{link_text(link, num_devices)}, {format_seconds(link.latency_s)} latency", tag("small", link.source)]
