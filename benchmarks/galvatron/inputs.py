"""What Galvatron's authors measured, as typed values; read from the YAML files of `../data/galvatron_2022`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

DATA = Path(__file__).parents[1] / "data" / "galvatron_2022"

ModelName = Literal["bert", "t5", "vit", "swin"]
NAMES: dict[ModelName, str] = {
    "bert": "bert_huge_1280",
    "t5": "t5_large_1024",
    "vit": "vit_huge_1280",
    "swin": "swin_huge",
}
GPU_COUNTS = (8, 16)
DEPTHS = (32, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The measurements of one layer type."""

    name: str
    seq: int
    hidden: int
    param_mb: float
    fwd_ms: float
    act_mb: dict[int, float]
    """per sample, by tp degree"""
    tp_allreduces: int
    """per layer, forward and backward"""

    @property
    def is_decoder(self) -> bool:
        """Whether the layer attends to the encoder as well, which takes two more all-reduces."""
        return self.tp_allreduces > 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Memory besides the layers, as measured at one place of the pipeline."""

    states_mb: float
    act_mb: float
    """per sample"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Memory besides the layers on 16 GPUs, where the two ends of a pipeline were measured apart."""

    whole: Other
    first: Other
    last: Other
    reduction_mb: float
    """per sample, what an end saves with endlessly many microbatches"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All that the rules need of one model and cluster."""

    model: ModelName
    num_gpus: int
    layers: tuple[Layer, ...]
    """one for each layer of the model, in order"""
    other: Other
    """8 GPUs"""
    outside: Outside
    """16 GPUs"""
    overhead_ms: float
    """of a model of 24 layers"""
    allreduce_ms_per_mb: dict[tuple[int, int, bool], float]
    """by pipeline degree, group size, and whether the group is of neighbouring ranks"""
    p2p_ms_per_mb: dict[int, float]
    """by pipeline degree; empty where it was not charged"""

    @property
    def is_alike(self) -> bool:
        """Whether all layers are of one type, which the published planner then cuts into equal stages."""
        return len({layer.name for layer in self.layers}) == 1


@cache
def inputs_of(model: ModelName, num_layers: int, num_gpus: int) -> Inputs:
    """The inputs of one model of 32 or 48 layers on 8 or 16 GPUs, from the authors' main repository."""
    content = yaml.safe_load((DATA / "profiled_inputs.yaml").read_text())
    entry = content["models"][NAMES[model]]
    added = yaml.safe_load((DATA / "tp16_activations.yaml").read_text()).get(NAMES[model], ())
    for layer_type, size in zip(entry.get("layer_types", [entry]), added, strict=False):
        layer_type["act_MB_per_sample_by_tp"][16] = size
    return Inputs(
        model=model,
        num_gpus=num_gpus,
        layers=_layers(entry, num_layers),
        other=Other(states_mb=_main(entry["other_model_states_MB"]), act_mb=_main(entry["other_act_MB_per_sample"])),
        outside=_outside(entry["dist16"]),
        overhead_ms=_main(entry["extra_overhead_ms"]),
        allreduce_ms_per_mb=_allreduce(content[f"allreduce_coe_{num_gpus}gpu_ms_per_MB"], num_gpus),
        p2p_ms_per_mb={int(key.removeprefix("pp")): value for key, value in content["p2p_coe_16gpu_ms_per_MB"].items()}
        if num_gpus == 16
        else {},
    )


def _main(value: Any) -> float:
    """The value of the main repository, where the review version had another."""
    return float(value["hetu"] if isinstance(value, dict) else value)


def _layers(entry: dict[str, Any], num_layers: int) -> tuple[Layer, ...]:
    if "layer_types" in entry:
        counts = entry["depths"][f"swin{num_layers}"]
        return tuple(
            _layer(f"level {index}", layer_type, layer_type["param_MB"])
            for index, (layer_type, count) in enumerate(zip(entry["layer_types"], counts, strict=True))
            for _ in range(count)
        )
    if "encoder" in entry:
        return tuple(
            _layer(name, entry | entry[name], entry[name]["param_MB_per_layer"])
            for name in ("encoder", "decoder")
            for _ in range(num_layers // 2)
        )
    return (_layer("layer", entry, entry["param_MB_per_layer"]),) * num_layers


def _layer(name: str, entry: dict[str, Any], param_mb: float) -> Layer:
    return Layer(
        name=name,
        seq=entry["seq"],
        hidden=entry["hidden"],
        param_mb=param_mb,
        fwd_ms=entry["fwd_ms"],
        act_mb=entry["act_MB_per_sample_by_tp"],
        tp_allreduces=entry.get("tp_allreduces_per_layer", 4),
    )


def _outside(entry: dict[str, Any]) -> Outside:
    whole, first, last = (
        Other(states_mb=entry[key][0], act_mb=entry[key][1]) for key in ("pp_off", "pp_first", "pp_last")
    )
    return Outside(whole=whole, first=first, last=last, reduction_mb=entry["peak_reduction_with_chunks"])


def _allreduce(table: dict[object, float], num_gpus: int) -> dict[tuple[int, int, bool], float]:
    """Keys such as ``2_4_1``; YAML reads underscores between digits as nothing, hence 241."""
    degrees = [2**power for power in range(num_gpus.bit_length())]
    named = {str(key).replace("_", ""): value for key, value in table.items()}
    return {
        (stages, size, inner): named[key]
        for stages in degrees
        for size in degrees
        for inner in (False, True)
        if (key := f"{stages}{size}{int(inner)}") in named
    }
