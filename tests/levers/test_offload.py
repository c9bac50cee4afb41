"""Tests of offload as a lever: its text, its cost in time and memory, and refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.cost.compute import host_copies_s, optimizer_s
from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer import layer_cost
from steelyard.cost.predict import layer_times, predict_host, predict_memory
from steelyard.engines.engine import Settings
from steelyard.errors import InvalidPlanError, UserError
from steelyard.hardware import parse_cluster
from steelyard.hardware.files import devices, find_device
from steelyard.hardware.parse import cluster_file, cluster_of
from steelyard.levers import LEVERS, Levers
from steelyard.levers.offload import CHUNK, Offload
from steelyard.plan.file import dump_json, read_plan, write_plan
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import HostUse
from steelyard.planning.advise import advise
from steelyard.planning.complete import complete, find_plan
from steelyard.planning.job import job_of
from steelyard.planning.request import make_request
from steelyard.planning.settings import price_settings
from steelyard.report.html.assumptions import _kept
from steelyard.report.plan_table import link_lines
from steelyard.runtime.dry_run import dry_run
from tests.jobs import make_job
from tests.levers.test_optimizer import CHECKED, LARGER, traced_job
from tests.runtime.models import make_plan

GIB = 2**30
OPTIONS: dict[str, Any] = {"global_batch": 8, "seq_len": 64}
OFFLOAD = {"offload": "optimizer"}


def write_cluster(folder: Path, **more: Any) -> str:
    path = folder / "cluster.yaml"
    content = {"version": 1, "num_nodes": 2, "devices_per_node": 2, "device": "a100-40gb", **more}
    path.write_text(yaml.safe_dump(content))
    return str(path)


# what is written of it


@pytest.mark.parametrize("word", Offload.values)
def test_a_text_says_one_value_and_a_value_one_text(word: str) -> None:
    assert str(Offload.parse(word)) == word
    assert Levers.of({"offload": word}).texts == ({} if word == "none" else {"offload": word})


def test_another_text_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="optimizer") as caught:
        Offload.parse("optimiser")
    assert caught.value.field == "--offload"


def test_a_plan_says_it_and_what_lies_on_the_host(tmp_path: Path) -> None:
    plan = find_plan("llama-demo", "1x2xa100-40gb", **OPTIONS, levers=OFFLOAD)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert "offload optimizer" in str(plan)
    assert plan.prediction is not None
    assert link_lines(plan, plan.prediction)[-1].endswith("24.8 GB/s on a100-40gb")
    assert "of tensors in the host memory of a node; not checked, because the cluster does not define its size" in str(
        plan
    )


def test_a_plan_without_it_says_nothing_of_hosts() -> None:
    plan = find_plan("llama-demo", "1x2xa100-40gb", **OPTIONS, levers={"offload": "none"})
    written = json.loads(dump_json(plan))
    assert "levers" not in written
    assert "host" not in written["prediction"]
    assert all("host_bytes" not in stage for stage in written["prediction"]["stages"])


# what it costs


def test_a_step_copies_sixteen_bytes_a_parameter_at_the_rate_of_the_link() -> None:
    job = make_job("llama-demo", "1x2xa100-40gb", **OPTIONS, levers=OFFLOAD)
    assert host_copies_s(24.8e9, job) == pytest.approx(1)
    assert job.effects.moved_bytes == 16


def test_every_gpu_with_memory_of_its_own_states_its_link_to_the_host() -> None:
    assert [each.name for each in devices() if each.host_bytes_per_s is None] == ["dgx-spark", "cpu"]


def test_a_faster_link_never_slows_a_plan_down() -> None:
    cluster = parse_cluster("1x2xa100-40gb")
    steps = []
    for rate in (1e9, 24.8e9, 400e9):
        found = find_plan(
            "llama-demo", cluster.on(device=replace(cluster.device, host_bytes_per_s=rate)), **OPTIONS, levers=OFFLOAD
        )
        assert found.prediction is not None
        steps.append(found.prediction.step_time_s)
    assert steps == sorted(steps, reverse=True)


def test_moments_are_on_the_host_and_not_on_the_device() -> None:
    """The 1.5 billion parameters of llama3.2-1b, head included, have moments of 8 bytes."""
    options: dict[str, Any] = {"global_batch": 1, "seq_len": 64}
    plain, offloaded = (find_plan("llama3.2-1b", "1x1xa100-80gb", **options, levers=levers) for levers in ({}, OFFLOAD))
    assert plain.prediction is not None
    assert offloaded.prediction is not None
    (before,), (after,) = plain.prediction.stages, offloaded.prediction.stages
    assert after.host_bytes == 2 * after.memory_bytes["parameters"]
    assert after.memory_bytes.get("optimizer", 0) < 4096
    assert before.memory_bytes["optimizer"] - after.host_bytes < 4096
    assert after.time_s["optimizer"] == before.time_s["optimizer"]
    assert offloaded.prediction.host is not None
    assert offloaded.prediction.host.node_bytes == after.host_bytes


LONG = LARGER | {"max_position_embeddings": 512}
WITH_REMAT = {
    **{name: (precision, stages) for name, (precision, stages) in CHECKED.items() if "selective" not in stages[0]},
    "remat": ("bf16", ("dp2, dp2 remat=full, fsdp2 remat=full, dp2, fsdp2, dp2",)),
    "context": ("bf16", ("cp2, cp2, cp2 remat=full, cp2, cp2, cp2",)),
}
GATHERED = {
    "sharded": ("bf16", ("fsdp2, fsdp2, fsdp2 remat=full, fsdp2, fsdp1-cp2, fsdp2",)),
    "tensors": ("fp32", (", ".join(["tp2"] * 6),)),
    "stages": ("bf16", ("single, single, single", "single remat=full, single, single")),
}
"""Precision and strategies per stage of plans with parameters on the host, by name."""
HELD = [
    (word, *each, num_microbatches)
    for words, divisions in ((Offload.values[1:4], WITH_REMAT), (Offload.values[4:], GATHERED))
    for word in words
    for each in divisions.values()
    for num_microbatches in (1, 4)
    if num_microbatches >= len(each[1])
]
SAMPLE = HELD[1::4]
"""Every division, and every word under two or three of them, with one microbatch and with several."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "precision", "stages", "num_microbatches"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.nightly) for case in HELD],
)
def test_predicted_bytes_are_at_least_those_found_and_little_more(
    word: str, precision: str, stages: tuple[str, ...], num_microbatches: int
) -> None:
    """Bytes on the device and on the host, for sequences that are long enough for activations to count."""
    options: dict[str, Any] = {"precision": precision, "global_batch": 16, "num_devices": 2, "seq_len": 512}
    plan = make_plan(LONG, *stages, num_microbatches=num_microbatches, **options, levers={"offload": word})
    job = replace(traced_job(plan, "adamw"), levers=plan.chosen_levers)
    for stage, (terms, on_host) in enumerate(zip(predict_memory(plan, job), predict_host(plan, job), strict=True)):
        found = dry_run(plan, plan.stages[stage].ranks[0], backend="gloo")
        peak = max((found.first_step, found.later_steps), key=lambda each: each.total_bytes)
        assert 1.0 <= sum(terms.values()) / peak.total_bytes <= 1.1, f"stage {stage}: {terms}, found {peak}"
        assert 1.0 <= on_host / found.host_bytes <= 1.1  # gradients come as what was saved goes


def test_what_blocks_save_is_on_the_host_and_copied_both_ways_in_every_microbatch() -> None:
    options: dict[str, Any] = {"global_batch": 8, "seq_len": 1024}
    plain, offloaded = (
        make_job("llama-demo", "1x1xa100-40gb", **options, levers=levers) for levers in ({}, {"offload": "activations"})
    )
    config, stages = dict(plain.chain.config), ", ".join(["single"] * plain.chain.num_layers)
    plan = make_plan(config, stages, num_microbatches=4, num_devices=1, precision="bf16", **options)
    before, after = (layer_times(plan, job)[1] for job in (plain, offloaded))
    (held,), (bytes_before,), (bytes_after,) = (
        predict_host(plan, offloaded),
        predict_memory(plan, plain),
        predict_memory(plan, offloaded),
    )
    assert "offload" not in before.forward_s
    assert after.forward_s["offload"] == after.backward_s["offload"] == pytest.approx(held / 8 / 24.8e9)
    assert bytes_before["activations"] - bytes_after["activations"] == held
    assert bytes_after["working set"] <= bytes_before["working set"] + held / 8


def test_selective_remat_beside_activations_on_the_host_is_refused() -> None:
    stages = "dp2, dp2 remat=selective, dp2, dp2"
    options: dict[str, Any] = {"num_microbatches": 2, "global_batch": 16, "num_devices": 2}
    with pytest.raises(InvalidPlanError, match="no remat or full remat"):
        make_plan("llama-tied", stages, **options, levers={"offload": "activations"})
    make_plan("llama-tied", stages, **options, levers=OFFLOAD)


def test_what_is_on_the_device_for_the_step_is_no_more_than_a_chunk() -> None:
    effects = Levers.of(OFFLOAD).effects
    assert effects.buffer_bytes == 8 * CHUNK
    assert (effects.state_bytes, effects.host_bytes, effects.moved_bytes) == (0, 8, 16)


def test_advice_offers_it_and_a_search_never_takes_it_by_itself() -> None:
    asked = make_request("llama-demo", "1x1xa100-40gb", **OPTIONS)
    found = {each.options: each for each in advise(asked, asked=False).changes}
    assert found["--offload optimizer"].result == "exact"
    assert found["--offload optimizer"].saved_bytes > 0
    assert found["--offload optimizer+activations"].result == "exact"
    assert not find_plan("llama-demo", "1x1xa100-40gb", **OPTIONS).levers


# left to the search


def test_the_search_takes_it_where_nothing_fits_without_and_says_why() -> None:
    """A 7B on a card of 24 GB gets the plan of the explicit value."""
    options: dict[str, Any] = {"global_batch": 1, "seq_len": 512}
    result = complete(make_request("llama2-7b", "1x1xrtx-4090", **options, levers={"offload": "auto"}))
    assert result.plan == find_plan("llama2-7b", "1x1xrtx-4090", **options, levers={"offload": "parameters"})
    assert re.search(
        r"^offload parameters: [\d.]+ s a step, nothing fits without it; without it on 1x8xrtx-4090 [\d.]+ m?s a step$",
        result.notes[0],
    )


def test_the_search_leaves_it_out_where_it_gains_nothing() -> None:
    result = complete(make_request("llama-demo", "1x2xa100-40gb", **OPTIONS, levers={"offload": "auto"}))
    assert result.plan == find_plan("llama-demo", "1x2xa100-40gb", **OPTIONS)
    assert result.notes[0].startswith("offload none: ")
    assert "; offload optimizer takes " in result.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "taken"),
    [("1200MiB", "parameters+activations"), pytest.param("1300MiB", "activations", marks=pytest.mark.nightly)],
)
def test_no_value_is_faster_than_the_one_that_the_search_takes(memory: str, taken: str) -> None:
    """The link is so fast that offload gains if recomputation is the alternative."""
    cluster = parse_cluster("1x2xa100-40gb")
    fast = cluster.on(device=replace(cluster.device, host_bytes_per_s=4e12))
    options: dict[str, Any] = {**OPTIONS, "seq_len": 1024, "memory": memory, "levers": {"offload": "auto"}}
    found = find_plan("llama-demo", fast, **options)
    assert found.levers == {"offload": taken}
    for word in Offload.values:
        other = find_plan("llama-demo", fast, **options | {"levers": {"offload": word}})
        assert found.step_s <= 1.02 * other.step_s


def test_values_that_cannot_be_had_are_left_out_with_the_reason() -> None:
    levers = {"offload": "auto", "optimizer": "adamw-8bit"}
    result = complete(make_request("llama-demo", "1x2xa100-40gb", **OPTIONS, levers=levers))
    assert result.plan is not None
    assert "; not --offload optimizer together with another optimizer" in result.notes[0]


@pytest.mark.parametrize(
    "more",
    [{"global_batch": "max"}, {"seq_len": "max"}, {"objective": "devices"}, {"cluster": "1x1xa100-80gb+1x1xa100-40gb"}],
)
def test_one_thing_at_a_time_is_left_to_the_search(more: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        make_request("llama-demo", **{"cluster": "1x2xa100-40gb", **OPTIONS, **more}, levers={"offload": "auto"})
    assert caught.value.field.startswith("--offload")


def test_what_is_priced_has_a_value() -> None:
    request = make_request("llama-demo", "1x2xa100-40gb", **OPTIONS, levers={"offload": "auto"})
    with pytest.raises(UserError, match="one of none, optimizer"):
        job_of(request)


# the host


def test_a_cluster_file_says_the_memory_of_its_hosts(tmp_path: Path) -> None:
    cluster = parse_cluster(write_cluster(tmp_path, host_memory_GiB=512))
    assert cluster.host_memory_bytes == 512 * GIB
    assert cluster_of(cluster_file(cluster), name="again") == cluster
    assert "host_memory_GiB" not in cluster_file(parse_cluster(write_cluster(tmp_path))).model_dump()


def test_a_described_device_keeps_the_link_of_its_name_or_says_its_own(tmp_path: Path) -> None:
    own = {"name": "a100-40gb", "memory_GiB": 20, "peak_TFLOPs": {"bf16": 300}, "memory_bandwidth_GBps": 1500}
    links = {"intra_link": "nvlink-3", "inter_link": "infiniband-hdr"}
    cluster = parse_cluster(write_cluster(tmp_path, device=own, **links))
    assert cluster.device.host_bytes_per_s == find_device("a100-40gb").host_bytes_per_s
    assert "host_GBps" not in json.loads(cluster_file(cluster).model_dump_json())["device"]
    cluster = parse_cluster(write_cluster(tmp_path, device={**own, "host_GBps": 12}, **links))
    assert cluster.device.host_bytes_per_s == 12e9
    assert cluster_of(cluster_file(cluster), name="again") == cluster


def test_the_memory_of_a_host_is_that_of_all_its_ranks(tmp_path: Path) -> None:
    plan = find_plan("llama-demo", write_cluster(tmp_path, host_memory_GiB=1), **OPTIONS, levers=OFFLOAD)
    assert plan.prediction is not None
    assert plan.prediction.host is not None
    held = [
        stage.host_bytes
        for place, stage in enumerate(plan.prediction.stages)
        for _ in range(plan.stages[place].num_devices)
    ]
    assert plan.prediction.host.node_bytes == max(sum(held[:2]), sum(held[2:]))
    assert plan.prediction.host.memory_bytes == GIB


# what is refused


@pytest.mark.slow
def test_more_than_the_host_has_is_refused_and_not_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.planning.advise.LEVERS", {"offload": LEVERS["offload"]})
    cluster = write_cluster(tmp_path, host_memory_GiB=0.001)
    with pytest.raises(UserError) as caught:
        find_plan("llama-demo", cluster, **OPTIONS, levers=OFFLOAD)
    assert caught.value.field == "host_memory_GiB"
    assert "more than its 1.02 MiB" in caught.value.found
    found = advise(make_request("llama-demo", cluster, **OPTIONS), asked=False)
    assert any("--offload optimizer" in each and "more than its 1.02 MiB" in each for each in found.left_out)
    assert not any(each.options == "--offload optimizer" for each in found.changes)


@pytest.mark.parametrize(
    ("memory_bytes", "words"),
    [
        (20, "of 20 B"),
        (19, "of 19 B; pinned tensors may take up to twice their size"),
        (9, "more than its 9 B"),
        (None, "not checked, because the cluster does not define its size"),
    ],
)
def test_what_is_said_of_host_memory_is_what_is_known(memory_bytes: int | None, words: str) -> None:
    use = HostUse(node_bytes=10, memory_bytes=memory_bytes)
    assert str(use).endswith(words)
    assert use.fits == (memory_bytes != 9)


@pytest.mark.parametrize("word", ["adamw-8bit", "adafactor", "sgd"])
def test_another_optimizer_beside_its_moments_on_the_host_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="together with another optimizer"):
        find_plan("llama-demo", "1x2xa100-40gb", **OPTIONS, levers={**OFFLOAD, "optimizer": word})
    levers = {"offload": "activations", "optimizer": word}
    assert find_plan("llama-demo", "1x2xa100-40gb", **OPTIONS, levers=levers).levers == levers


def test_an_engine_that_does_not_run_it_is_refused() -> None:
    with pytest.raises(UserError, match="with the engine megatron"):
        make_request("llama-demo", "1x2xa100-40gb", **OPTIONS, levers=OFFLOAD, engine="megatron")


def test_a_gpu_without_a_known_link_to_its_host_is_refused() -> None:
    cluster = parse_cluster("1x2xa100-40gb")
    unknown = cluster.on(device=replace(cluster.device, name="mine", host_bytes_per_s=None))
    with pytest.raises(UserError, match="host_GBps"):
        find_plan("llama-demo", unknown, **OPTIONS, levers=OFFLOAD)


# parameters


def test_parameters_cross_the_link_in_every_pass_and_are_updated_by_the_host() -> None:
    """4 bytes there for each pass, 4 back, 12 of the host's memory to add a gradient, 28 of AdamW, 12 of clipping."""
    job = make_job("llama-demo", "1x1xa100-40gb", global_batch=8, seq_len=64, levers={"offload": "parameters"})
    config, stages = dict(job.chain.config), ", ".join(["single"] * job.chain.num_layers)
    options: dict[str, Any] = {"global_batch": 8, "seq_len": 64, "num_devices": 1, "precision": "bf16"}
    times, params = {}, 0.0
    for count in (1, 4):
        plan = make_plan(config, stages, num_microbatches=count, **options, levers={"offload": "parameters"})
        times[count] = layer_times(plan, job)[1]
        (held,) = predict_host(plan, job)
        params = times[count].forward_s["offload"] * 24.8e9 / 4
        assert held > 16 * params * (job.chain.num_layers - 2)
    assert times[1].backward_s["offload"] == pytest.approx(8 * params / 24.8e9)
    assert times[4].backward_s["offload"] == pytest.approx(8 * params / 24.8e9 + 12 * params / 100e9)
    assert optimizer_s(params, job) == pytest.approx(40 * params / 100e9)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [("dp2", "fsdp"), ("fsdp2 zero2", "ZeRO-3"), ("fsdp2 remat=selective", "no remat or full remat")],
)
def test_layers_whose_parameters_cannot_lie_on_the_host_are_refused(strategy: str, reason: str) -> None:
    with pytest.raises(InvalidPlanError, match=reason):
        make_plan(
            "llama-tied",
            ", ".join([strategy] * 4),
            num_microbatches=2,
            global_batch=16,
            num_devices=2,
            levers={"offload": "parameters+activations"},
        )


# the optimizer under an engine that steps on the host


def offloaded(cluster: str, zero: int, **asked: Any) -> tuple[Plan, Job]:
    request = make_request("llama-demo", cluster, **OPTIONS, levers=OFFLOAD, engine="deepspeed")
    return price_settings(request, request.engine, "bf16", Settings(zero=zero, sp=False, **asked))


@pytest.mark.parametrize(
    ("cluster", "zero", "parameters", "gradients"),
    [
        ("1x1xa100-40gb", 2, 2, 0),
        ("1x2xa100-40gb", 3, 1, 0),
        ("1x2xa100-40gb", 2, 2, 0),
        ("1x2xa100-40gb", 1, 2, 2),
    ],
)
def test_the_device_keeps_parameters_in_16_bits_and_the_host_all_in_fp32(
    cluster: str, zero: int, parameters: int, gradients: int
) -> None:
    """Bytes per parameter, of 18 on a host 2 in a buffer of 16 bits. ZeRO-1 keeps gradients between microbatches."""
    plan, job = offloaded(cluster, zero)
    assert plan.prediction is not None
    (stage,), count = plan.prediction.stages, plan.num_devices
    held = stage.memory_bytes
    params = stage.host_bytes * count / 18
    layers = (job.layer(job.chain.type_of(number).name, {}) for number in range(job.chain.num_layers))
    assert params == pytest.approx(sum(each.num_params for each in layers if each))
    assert held["parameters"] == pytest.approx(parameters * params, rel=1e-3)
    assert held.get("gradients", 0) == pytest.approx(gradients * params, rel=1e-3)
    assert held.get("optimizer", 0) < 4096
    assert _kept(plan).endswith("16 bytes of a trained parameter, 16 of them in host memory")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_go_to_the_host_which_steps_and_parameters_come_back(zero: int) -> None:
    """4 bytes there, at most as long as they take alone; 2 back; 40 of the memory of a host that 2 devices share."""
    plan, job = offloaded("1x2xa100-40gb", zero)
    config = JobConfig(job=job, pipeline=plan.pipeline)
    times = layer_cost(job.chain.type_of(1), plan.strategies[1], config)
    params = times.once_s["optimizer"] * 100e9 / 40 / 2
    layer = job.layer(job.chain.type_of(1).name, {})
    assert layer is not None
    assert params == pytest.approx(layer.num_params / 2, rel=1e-3)
    back_s, there_s = 2 * params / 24.8e9, 4 * params / 24.8e9
    assert times.forward_s.get("offload", 0) == 0
    if zero == 1:
        assert "offload" not in times.backward_s
        assert back_s < times.once_s["offload"] <= back_s + there_s * 1.01
    else:
        assert 0 < times.backward_s["offload"] <= there_s * 1.01
        assert times.once_s["offload"] == pytest.approx(back_s)


def test_only_engines_that_step_on_the_host_round_updates_differently() -> None:
    results = {}
    for engine in ("native", "deepspeed"):
        asked = make_request("llama-demo", "1x1xa100-40gb", **OPTIONS, engine=engine)
        found = {each.options: each for each in advise(asked, asked=False).changes}
        results[engine] = [found[f"--offload {word}"].result for word in ("optimizer", "parameters")]
    assert results == {"native": ["exact", "rounding"], "deepspeed": ["rounding", "rounding"]}


def test_what_no_engine_but_ours_offloads_is_refused_elsewhere() -> None:
    for engine, word in (("deepspeed", "activations"), ("accelerate", "optimizer")):
        with pytest.raises(UserError, match=f"--offload {word} with the engine {engine}, which cannot offload"):
            make_request("llama-demo", "1x2xa100-40gb", **OPTIONS, levers={"offload": word}, engine=engine)


# parameters beside others


def test_a_quantized_base_beside_parameters_on_the_host_is_refused() -> None:
    with pytest.raises(UserError, match="together with --base"):
        find_plan("llama-demo", "1x1xa100-40gb", **OPTIONS, levers={"offload": "parameters", "train": "qlora"})
