"""What the names on the page mean: as a tooltip where they stand, and all of them together at its end."""

from collections.abc import Iterable

from steelyard.plan.dimensions import DIMENSIONS
from steelyard.report.html.contents import ReportContents
from steelyard.report.html.markup import Html, section, tag

WORDS = {
    "MFU": "model FLOP utilisation: FLOP of forward and backward (attention as the model has it, recomputation not "
    "counted) over the devices' peak",
    "stage": "a part of the layers on a group of devices of its own",
    "microbatch": "the samples that pass through the layers at once; a step adds up the gradients of all of them",
    "remat": "recomputing activations in the backward pass instead of keeping them (activation checkpointing)",
    "bubble": "time in which a stage has nothing to do but wait for another one",
    "compute": "forward and backward of the layers",
    "host": "what launching kernels takes longer than the device needs for them",
    "pipeline": "handing activations and gradients between stages",
    "switch": "redistribution of the hidden state between two layers that divide it differently",
    "optimizer": "update of the parameters, and what it keeps for each: two moments, and a copy in fp32",
    "waiting": "the pipeline's bubbles",
    "fixed": "once a step, whatever its size: the loop, reading data, loss and gradient norm",
    "gathered parameters": "whole parameters of the layers in flight, which lie sharded otherwise",
    "activations": "saved for the backward pass, of all microbatches in flight",
    "working set": "the largest short-lived memory of one layer: what it makes and frees while it computes",
    "pipeline buffers": "gradients that stages exchange, and what arrives ahead of the pass that needs it",
    "context": "process, libraries and communicators",
    "allocator slack": "what the allocator reserves beyond what it gives out",
    "imbalance": "waiting for the rank whose experts most tokens take",
}


def meaning(name: str) -> str | None:
    """What a name means; None for one that needs no words."""
    return DIMENSIONS[name].term if name in DIMENSIONS else WORDS.get(name)


def term(name: str) -> Html:
    """A name with its meaning as a tooltip."""
    return tag("b", name, title=meaning(name))


def glossary_section(found: ReportContents) -> Html:
    """The names that this page uses, with their meanings."""
    names = [name for name in dict.fromkeys(_used(found)) if meaning(name)]
    rows = [tag("div", tag("dt", name), tag("dd", meaning(name)), class_="fact") for name in names]
    return section("glossary", "What the names mean", tag("dl", rows))


def _used(found: ReportContents) -> Iterable[str]:
    prediction = found.prediction
    if prediction.mfu is not None:
        yield "MFU"
    yield "microbatch"
    if found.plan.num_stages > 1:
        yield from ("stage", "bubble", "waiting")
    for strategy in found.plan.strategies:
        yield from (dimension.name for dimension in strategy.dimensions)
    for stage in prediction.stages:
        yield from (*stage.time_s, "fixed", *stage.memory_bytes)
