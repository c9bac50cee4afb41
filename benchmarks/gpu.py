r"""What the cost model says of one GPU against what the GPU does; ten minutes or less. `make gpu` runs it.

| part     | what is compared                                                                                    |
|----------|-----------------------------------------------------------------------------------------------------|
| parity   | a plan of one device against plain PyTorch, in bf16, at small width                                   |
| matmuls  | seconds by size; every third size is withheld from the fit of $F/a + b/c + \rho$                      |
| layers   | forward, backward and remat of every layer type of two models (dense, experts) at a number of       |
|          | samples that the profile was not measured at: catalogue and profile; bytes that are saved and the peak |
| training | a model of a billion parameters under each remat choice, and the largest microbatch that is predicted  |
|          | to fit, which must run: seconds, bytes allocated, bytes reserved                                      |

Run: python benchmarks/gpu.py [--json OUT] [--parts layers training …] [--budget SECONDS]

It ends with 2 and says so where there is no GPU, or one that the catalogue does not name. ``--device cpu --tiny`` runs
the same code at small sizes on the CPU, which has no catalogue rates: those columns stay empty.
"""

import argparse
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from steelyard.cost.compute import compute_time, launch_s, work_s
from steelyard.cost.job import Job
from steelyard.cost.predict import predict, predict_memory
from steelyard.errors import InvalidProfileError
from steelyard.hardware import Device, devices, is_same_device
from steelyard.integrations.run import train
from steelyard.model.chain import LayerRole, ModelChain
from steelyard.model.read import chain_from_config, load_model
from steelyard.modules.build import build_meta_model, materialize_layer, prepare_model
from steelyard.modules.layers import LayerContext, build_layer, shared_inputs_of, tensors_of
from steelyard.modules.model_inputs import random_samples
from steelyard.plan.plan import Plan
from steelyard.plan.shrink import TOLERANCES, shrunk_plan
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import Remat, Strategy
from steelyard.planning.job import job_of
from steelyard.planning.price import assemble_plan, with_price
from steelyard.planning.request import make_request
from steelyard.processes.group import current_device, process_group
from steelyard.profiler.layers import build_short_chain, layer_meshes, measure_laps, times_of
from steelyard.profiler.measure import measure
from steelyard.profiles.profile import LayerProfile, MeasuredTime, Profile
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parity_run import launch_parity
from steelyard.runtime.peak_memory import MemoryExceededError, measure_peak
from steelyard.schedules import USUAL, PipelineConfig
from steelyard.tracer.cache import cached_trace
from steelyard.units import format_bytes, format_seconds

BF16_BYTES = 2
GROUP_TIMEOUT_S = 300.0
SINGLE = Strategy.of()
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is that is measured."""

    dense: ModelChain
    experts: ModelChain
    seq_len: int
    samples: tuple[int, ...]
    """Of a rank, that layers are profiled at."""
    withheld: int
    """Samples that they are compared at."""
    global_batch: int
    steps: int
    most_samples: int
    """Of the largest microbatch that is tried."""
    matmuls: tuple[int, ...]
    repetitions: int
    layers_s: float
    """The most seconds in which the layers of a model are profiled."""


def full_sizes() -> Sizes:
    return Sizes(
        dense=load_model("llama3.2-1b"),
        experts=load_model("olmoe-1b-7b"),
        seq_len=2048,
        samples=(1, 4),
        withheld=2,
        global_batch=8,
        steps=8,
        most_samples=256,
        matmuls=(256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288),
        repetitions=20,
        layers_s=60.0,
    )


def tiny_sizes() -> Sizes:
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    common |= {"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64}
    sparse = {"model_type": "mixtral", **common, "num_local_experts": 4, "num_experts_per_tok": 2}
    return Sizes(
        dense=chain_from_config({"model_type": "llama", **common}, name="tiny"),
        experts=chain_from_config(sparse, name="tiny with experts"),
        seq_len=32,
        samples=(1, 4),
        withheld=2,
        global_batch=4,
        steps=3,
        most_samples=4,
        matmuls=(32, 48, 64, 96, 128, 192),
        repetitions=3,
        layers_s=1.5,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all parts share."""

    sizes: Sizes
    cluster: str
    memory: str | int | None
    """Budget of the device; None for all that the catalogue says it has."""
    known: Device | None
    """The catalogue's device; None where it has no rates."""
    until_s: float
    traces: Mapping[str, Profile]
    """By model; made before there is a process group, which tracing refuses."""

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self.until_s - time.monotonic())

    def job(self, chain: ModelChain, profile: Profile | None, *, global_batch: int) -> Job:
        """A job on the device: by the profile, or by the catalogue where there is none."""
        return job_of(
            make_request(
                chain,
                self.cluster,
                global_batch=global_batch,
                seq_len=self.sizes.seq_len,
                precision="bf16",
                memory=self.memory,
                profile=profile or self.traces[chain.name],
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer type under one remat choice, at the withheld number of samples."""

    model: str
    kind: str
    remat: str
    measured_s: float
    profile_s: float
    catalogue_s: float | None
    saved_bytes: int
    predicted_saved_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One plan that was trained end to end; nothing is measured where it ran out of memory."""

    name: str
    samples: int
    catalogue_s: float | None
    profile_s: float | None
    measured_s: float | None
    predicted_bytes: int
    budget_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRow:
    """Square matrix products of one size."""

    size: int
    measured_s: float
    fitted_s: float
    is_withheld: bool


def compare_parity(bench: Bench) -> Mapping[str, Any]:
    """Losses and gradients of a plan of one device beside plain PyTorch, in processes of their own."""
    job = bench.job(bench.sizes.dense, None, global_batch=bench.sizes.global_batch)
    plan = one_device_plan(job, Remat.FULL, samples=job.global_batch)
    found = launch_parity(shrunk_plan(plan), num_steps=2, max_processes=1)
    loss, gradient = TOLERANCES["bf16"]
    is_within = found["loss_error"] <= loss and found["gradient_error"] <= gradient
    return {name: found[name] for name in ("loss_error", "gradient_error")} | {"is_within": is_within}


def measure_matmuls(bench: Bench) -> tuple[MatmulRow, ...]:
    """Seconds of n × n by n × n in bf16, and what sizes that were not withheld say of them."""
    sizes, device = bench.sizes.matmuls, current_device()
    seconds = np.array([_matmul_s(size, device, bench.sizes.repetitions) for size in sizes])
    withheld = np.array([index % 3 == 1 for index in range(len(sizes))])
    fitted = fitted_matmuls(np.array(sizes, dtype=float), seconds, kept=~withheld)
    return tuple(
        MatmulRow(size=size, measured_s=float(a), fitted_s=float(b), is_withheld=bool(c))
        for size, a, b, c in zip(sizes, seconds, fitted, withheld, strict=True)
    )


def fitted_matmuls(sizes: Array, seconds: Array, *, kept: NDArray[np.bool_]) -> Array:
    """[N] seconds by FLOP, bytes and a start, no term below zero, of least relative squares over the sizes ``kept``."""
    terms = np.stack([2 * sizes**3, 3 * BF16_BYTES * sizes**2, np.ones_like(sizes)], axis=1)
    used = list(range(terms.shape[1]))
    while True:
        scaled = terms[kept][:, used] / seconds[kept, None]
        found = np.linalg.lstsq(scaled / scaled.max(axis=0), np.ones(kept.sum()), rcond=None)[0] / scaled.max(axis=0)
        if (found >= 0).all() or len(used) == 1:
            return terms[:, used] @ np.maximum(found, 0.0)
        used.pop(int(np.argmin(found)))


def _matmul_s(size: int, device: torch.device, repetitions: int) -> float:
    """The median seconds of one product."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = []
    for _ in range(repetitions + 3):
        _wait(device)
        began_s = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        seconds.append(time.perf_counter() - began_s)
    return float(np.median(seconds[3:]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_layers(bench: Bench) -> tuple[tuple[LayerRow, ...], dict[str, Profile]]:
    """Every layer type of both models under every remat choice, and the profiles by model."""
    rows: list[LayerRow] = []
    profiles: dict[str, Profile] = {}
    for chain in (bench.sizes.dense, bench.sizes.experts):
        profiles[chain.name] = measure(
            chain,
            seq_len=bench.sizes.seq_len,
            precision="bf16",
            samples=bench.sizes.samples,
            trace=bench.traces[chain.name],
            budget_s=min(bench.sizes.layers_s, bench.left_s() / 6),
            progress=_say,
        )
        withheld = _measured_at_withheld(chain, bench)
        for layer_type in chain.layer_types:
            layer, found = profiles[chain.name].layer(layer_type.name, {}), withheld[layer_type.name]
            assert layer is not None, "every layer type was profiled"
            rows += _layer_rows(chain, layer_type.name, layer, found, bench)
    return tuple(rows), profiles


def _say(line: str, done: float) -> None:
    print(f"measuring: {done:4.0%} {line.strip()}", file=sys.stderr)


def _measured_at_withheld(chain: ModelChain, bench: Bench) -> dict[str, tuple[MeasuredTime, ...]]:
    device = current_device()
    short = build_short_chain(
        chain,
        [layer_type.name for layer_type in chain.layer_types],
        strategy=SINGLE,
        seq_len=bench.sizes.seq_len,
        precision="bf16",
        device=device,
        mesh=layer_meshes(1, device.type),
    )
    laps = measure_laps(
        short, (bench.sizes.withheld,), budget_s=min(bench.sizes.layers_s / 3, bench.left_s() / 12), least=3
    )
    return times_of(short, [laps])


def _layer_rows(
    chain: ModelChain, layer_type: str, layer: LayerProfile, found: Sequence[MeasuredTime], bench: Bench
) -> Iterator[LayerRow]:
    samples, job = bench.sizes.withheld, _catalogue_job(chain, bench)
    place = next(index for index in range(chain.num_layers) if chain.type_of(index).name == layer_type)
    for remat in Remat:
        if remat is Remat.SELECTIVE and chain.type_of(place).role is not LayerRole.BLOCK:
            continue
        held = layer if remat is Remat.NONE else layer.recomputation(remat)
        saved, peak = layer_bytes(chain, place, remat, bench)
        expected = held.saved_bytes.at(samples)
        short_lived = max(held.forward_transient_bytes.at(samples), held.backward_transient_bytes.at(samples))
        yield LayerRow(
            model=chain.name,
            kind=layer_type,
            remat=str(remat),
            measured_s=_seconds(found[0], remat),
            profile_s=_seconds(layer.time_s(samples), remat),
            catalogue_s=None if job is None else catalogue_s(layer, remat, samples, job),
            saved_bytes=saved,
            predicted_saved_bytes=int(expected),
            peak_bytes=peak,
            predicted_peak_bytes=int(expected + short_lived + BF16_BYTES * layer.num_params),
        )


def _catalogue_job(chain: ModelChain, bench: Bench) -> Job | None:
    return None if bench.known is None else bench.job(chain, None, global_batch=bench.sizes.global_batch)


def _seconds(time_s: MeasuredTime, remat: Remat) -> float:
    again = {Remat.NONE: 0.0, Remat.SELECTIVE: time_s.selective_s, Remat.FULL: time_s.full_s}[remat]
    return time_s.forward_s + time_s.backward_s + (again or 0.0)


def catalogue_s(layer: LayerProfile, remat: Remat, samples: int, job: Job) -> float:
    """Forward, backward and recomputation of a layer by the catalogue's rates, host included."""
    found = compute_time(layer.model_copy(update={"times": ()}), samples, job)
    passes = [(found.forward_s, found.forward_launch_s), (found.backward_s, found.backward_launch_s)]
    if remat is not Remat.NONE:
        again = layer.recomputation(remat)
        passes.append((work_s(again.work, samples, job), launch_s(again.work, (), job)))
    return sum(max(each) for each in passes)


def layer_bytes(chain: ModelChain, place: int, remat: Remat, bench: Bench) -> tuple[int, int]:
    """Bytes that one layer in bf16 keeps for its backward pass, input included, and its peak with gradients."""
    device, samples = current_device(), bench.sizes.withheld
    model = build_meta_model(chain)
    prepare_model(model, chain)
    materialize_layer(model, chain, place, seed=0, device=device)
    layer = build_layer(model, chain, place, remat).to(torch.bfloat16)
    side = shared_inputs_of((layer,), model, chain, device)
    inputs, labels = (
        each.to(device)
        for each in random_samples(chain, samples, bench.sizes.seq_len, torch.Generator().manual_seed(0))
    )
    if place:
        shape = (samples, *chain.hidden_shape(place - 1, bench.sizes.seq_len))
        inputs = torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()
    context = LayerContext(
        side=side(bench.sizes.seq_len, torch.bfloat16, device),
        labels_BS=labels,
        num_targets=labels.numel(),
    )
    held = [*layer.parameters(), *layer.buffers(), inputs, labels]
    with measure_peak(held, device) as meter:
        before = _live_bytes(meter, device)
        outputs = tensors_of(layer(inputs, context))
        after = _live_bytes(meter, device)
        torch.autograd.backward(outputs, [None if each.dim() == 0 else torch.ones_like(each) for each in outputs])
    entered = inputs.numel() * inputs.element_size()
    left = sum(each.numel() * each.element_size() for each in outputs)
    return after - before + entered - left, meter.peak_bytes - before + entered


def _live_bytes(meter: Any, device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else int(meter.live_bytes)


def measure_training(bench: Bench, profile: Profile | None) -> tuple[TrainingRow, ...]:
    """Plans of one device, end to end: each remat choice, and the largest microbatch that is predicted to fit."""
    sizes = bench.sizes
    half = sizes.global_batch // 2
    rows = [_trained(str(remat), remat, half, sizes.global_batch, bench, profile) for remat in Remat]
    largest = largest_samples(bench, profile)
    if largest:
        rows.append(_trained("largest that fits", Remat.NONE, largest, largest, bench, profile))
    return tuple(rows)


def largest_samples(bench: Bench, profile: Profile | None) -> int:
    """Samples of the largest microbatch without remat that is predicted to fit, found by doubling, then halving."""

    def fits(samples: int) -> bool:
        job = _any_job(bench, profile, global_batch=samples)
        stages = predict_memory(one_device_plan(job, Remat.NONE, samples=samples), job)
        return all(sum(terms.values()) <= job.budget_bytes for terms in stages)

    found = 0
    step = 1 << (bench.sizes.most_samples.bit_length() - 1)
    while step:
        if found + step <= bench.sizes.most_samples and fits(found + step):
            found += step
        step //= 2
    return found


def _any_job(bench: Bench, profile: Profile | None, *, global_batch: int) -> Job:
    """By the catalogue where it knows the device, else by the profile."""
    return bench.job(bench.sizes.dense, None if bench.known else profile, global_batch=global_batch)


def one_device_plan(job: Job, remat: Remat, *, samples: int) -> Plan:
    """All layers on one device under a remat choice, in microbatches of so many samples."""
    layer_types = [job.chain.type_of(layer) for layer in range(job.chain.num_layers)]
    allowed = [remat is not Remat.SELECTIVE or layer_type.role is LayerRole.BLOCK for layer_type in layer_types]
    strategies = tuple(Strategy.of(remat=remat if each else Remat.NONE) for each in allowed)
    pipeline = PipelineConfig(num_stages=1, num_microbatches=job.global_batch // samples, schedule=USUAL)
    return assemble_plan(job, pipeline, (StagePart(ranks=(0, 0), runs=fold_runs(0, strategies)),))


def _trained(
    name: str, remat: Remat, samples: int, global_batch: int, bench: Bench, profile: Profile | None
) -> TrainingRow:
    chain = bench.sizes.dense
    job = _any_job(bench, profile, global_batch=global_batch)
    plan = one_device_plan(job, remat, samples=samples)
    predicted = max(sum(terms.values()) for terms in predict_memory(plan, job))
    by_profile = None if profile is None else bench.job(chain, profile, global_batch=global_batch)
    measured_s, allocated, reserved, outcome = None, None, None, "not run: predicted not to fit"
    if predicted <= job.budget_bytes:
        measured_s, allocated, reserved, outcome = _run(with_price(plan, job), bench)
    return TrainingRow(
        name=name,
        samples=samples,
        catalogue_s=predict(plan, job).step_time_s if bench.known else None,
        profile_s=None if by_profile is None else _priced_s(plan, by_profile),
        measured_s=measured_s,
        predicted_bytes=predicted,
        budget_bytes=job.budget_bytes,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        outcome=outcome,
    )


def _priced_s(plan: Plan, job: Job) -> float | None:
    """Seconds of a step by the profile; None where it was not measured so far."""
    try:
        return predict(plan, job).step_time_s
    except InvalidProfileError:
        return None


def _run(plan: Plan, bench: Bench) -> tuple[float | None, int | None, int | None, str]:
    """Seconds of a step, bytes allocated and reserved at most, and how it ended."""
    device = current_device()
    _forget(device)
    try:
        with redirect_stdout(sys.stderr):
            record = train(plan, "synthetic", TrainOptions(steps=bench.sizes.steps))
    except MemoryExceededError:
        return None, None, None, "OUT OF MEMORY"
    finally:
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        _forget(device)
    return record.median_step_s, max(rank.peak_bytes for rank in record.ranks), reserved, "ran"


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process, as one that torchrun started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    before = {name: os.environ.get(name) for name in world}
    os.environ.update(world)
    try:
        with process_group(GROUP_TIMEOUT_S):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def traces_of(sizes: Sizes) -> dict[str, Profile]:
    """What layers of both models do, counted."""
    return {
        chain.name: cached_trace(chain, seq_len=sizes.seq_len, precision="bf16", degrees=(1,))
        for chain in (sizes.dense, sizes.experts)
    }


PARTS = ("parity", "matmuls", "layers", "training")


def run_parts(bench: Bench, parts: Sequence[str]) -> dict[str, Any]:
    """The results of these parts, and the parts for which no time was left."""
    found: dict[str, Any] = {"left_out": []}
    bench = replace(bench, traces=traces_of(bench.sizes))
    profiles: dict[str, Profile] = {}

    def layers() -> list[dict[str, Any]]:
        rows, measured = measure_layers(bench)
        profiles.update(measured)
        return [asdict(row) for row in rows]

    inside: dict[str, Callable[[], Any]] = {
        "matmuls": lambda: [asdict(row) for row in measure_matmuls(bench)],
        "layers": layers,
        "training": lambda: [asdict(row) for row in measure_training(bench, profiles.get(bench.sizes.dense.name))],
    }
    if "parity" in parts:
        found["parity"] = compare_parity(bench)
    with alone():
        for name, part in inside.items():
            if name in parts:
                if bench.left_s():
                    found[name] = part()
                else:
                    found["left_out"].append(name)
    return found


def show(found: Mapping[str, Any], console: Console) -> None:
    """All tables."""
    if "parity" in found:
        parity = found["parity"]
        verdict = "equal" if parity["is_within"] else "DIFFERENT"
        errors = f"losses by {parity['loss_error']:.1e}, gradients by {parity['gradient_error']:.1e}"
        console.print(f"parity in bf16: {verdict}, {errors}")
    if "matmuls" in found:
        console.print(_matmul_table(found["matmuls"]))
    if "layers" in found:
        console.print(_layer_table(found["layers"]))
    if "training" in found:
        console.print(_training_table(found["training"]))
    if found["left_out"]:
        console.print(f"no time was left for {', '.join(found['left_out'])}: raise --budget")


def _table(title: str, columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns.split("|"):
        table.add_column(column, justify="left" if column in ("", "outcome") else "right")
    return table


def _matmul_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("matrix products in bf16", "n|measured|fitted|ratio|")
    for row in rows:
        withheld = "withheld" if row["is_withheld"] else ""
        table.add_row(str(row["size"]), *_times(row["measured_s"], row["fitted_s"]), withheld)
    return table


def _layer_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = "|measured|profile|ratio|catalogue|ratio|saved|ratio|peak|ratio"
    table = _table("layers, forward and backward, samples that were not profiled", columns)
    for row in rows:
        catalogue = _times(row["measured_s"], row["catalogue_s"])[1:]
        saved = _sizes(row["saved_bytes"], row["predicted_saved_bytes"])
        peak = _sizes(row["peak_bytes"], row["predicted_peak_bytes"])
        name = f"{row['model']} {row['kind']}, remat {row['remat']}"
        table.add_row(name, *_times(row["measured_s"], row["profile_s"]), *catalogue, *saved, *peak)
    return table


def _training_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = "|measured|profile|ratio|catalogue|ratio|allocated|predicted / it|reserved / allocated|outcome"
    table = _table("training on one device", columns)
    for row in rows:
        allocated, reserved = row["allocated_bytes"], row["reserved_bytes"]
        over = "–" if reserved is None else f"{reserved / allocated:.2f}"
        catalogue = _times(row["measured_s"], row["catalogue_s"])[1:]
        held = _sizes(allocated, row["predicted_bytes"])
        name = f"{row['name']}, {row['samples']} samples"
        table.add_row(name, *_times(row["measured_s"], row["profile_s"]), *catalogue, *held, over, row["outcome"])
    return table


def _times(measured_s: float | None, predicted_s: float | None) -> tuple[str, str, str]:
    ratio = "–" if measured_s is None or predicted_s is None else f"{predicted_s / measured_s:.2f}"
    shown = ("–" if each is None else format_seconds(each) for each in (measured_s, predicted_s))
    return (*shown, ratio)  # type: ignore[return-value]


def _sizes(measured: int | None, predicted: int) -> tuple[str, str]:
    return ("–", "–") if not measured else (format_bytes(measured), f"{predicted / measured:.2f}")


def catalogue_device(name: str, memory_bytes: int) -> Device | None:
    """The catalogue's device of a driver's name, of those that differ in memory the nearest."""
    named = [each for each in devices() if each.is_gpu and each.memory_bytes and is_same_device(name, each)]
    return min(named, key=lambda each: abs((each.memory_bytes or 0) - memory_bytes), default=None)


def bench_of(options: argparse.Namespace) -> Bench | str:
    """What is measured on, or why nothing is."""
    sizes = tiny_sizes() if options.tiny else full_sizes()
    until_s, no_traces = time.monotonic() + options.budget, dict[str, Profile]()
    if options.device == "cpu":
        return Bench(sizes=sizes, cluster="1x1xcpu", memory="2GiB", known=None, until_s=until_s, traces=no_traces)
    if not torch.cuda.is_available():
        return (
            f"no GPU that torch {torch.__version__} sees: nothing was measured (--device cpu --tiny tries the script)"
        )
    properties = torch.cuda.get_device_properties(0)
    known = catalogue_device(properties.name, properties.total_memory)
    if known is None:
        return f"{properties.name} is not in the catalogue (steelyard devices): nothing was measured"
    memory = min(properties.total_memory, known.memory_bytes or properties.total_memory)
    cluster = f"1x1x{known.name}"
    return Bench(sizes=sizes, cluster=cluster, memory=memory, known=known, until_s=until_s, traces=no_traces)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no part begins")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the results are written")
    options = parser.parse_args()
    bench = bench_of(options)
    if isinstance(bench, str):
        print(bench, file=sys.stderr)
        return 2
    began_s = time.monotonic()
    found = run_parts(bench, options.parts)
    machine = torch.cuda.get_device_name(0) if bench.known else "cpu"
    found |= {"machine": machine, "torch": torch.__version__, "seconds": time.monotonic() - began_s}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    console = Console() if Console().is_terminal else Console(width=150)
    show(found, console)
    console.print(f"{machine}, torch {torch.__version__}, {found['seconds']:.0f} s")
    failed = [row["name"] for row in found.get("training", ()) if row["outcome"] == "OUT OF MEMORY"]
    return 1 if failed or not found.get("parity", {"is_within": True})["is_within"] else 0


if __name__ == "__main__":
    sys.exit(main())
