"""Plans shared by the tests of exports: one strategy with and without a pipeline, and a mix per layer."""

from typing import Any

import yaml

from steelyard.engines import ENGINE_OF_TARGET, target_of
from steelyard.engines.writing import Draft, Request, describe_uniform, export_plan
from steelyard.errors import InvalidPlanError
from steelyard.hardware import parse_cluster
from steelyard.model.read import load_model
from steelyard.plan.file import parse_value
from steelyard.plan.plan import Plan

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LAST_BLOCK = 32
"""Layer of llama3-8b; the head is the one behind it."""


def run(first: int, last: int, parallel: str, **changes: Any) -> dict[str, Any]:
    return {"layers": [first, last], "parallel": parallel, **changes}


def read(content: dict[str, Any]) -> Plan:
    return parse_value(content, Plan, InvalidPlanError, what="plan")


def uniform(parallel: str, *, devices: int, remat: str = "none", model: str = "llama3-8b", **changes: Any) -> Plan:
    """One stage, one strategy; remat of every block."""
    last = load_model(model).num_layers - 1
    same = {key: changes.pop(key) for key in ("sp", "zero", "cp_method") if key in changes}
    runs = [
        run(0, 0, parallel, **same),
        run(1, last - 1, parallel, remat=remat, **same),
        run(last, last, parallel, **same),
    ]
    content = {
        "version": 1,
        "model": {"name": model},
        "cluster": f"1x{devices}xa100-80gb",
        "seq_len": 4096,
        "global_batch": 64,
        "num_microbatches": 4,
        "precision": "bf16",
        "stages": [{"ranks": [0, devices - 1], "runs": runs}],
    }
    return read(content | changes)


def uneven_pipeline(*, schedule: str = "1f1b", first_recomputed: int = 0, parallel: str = "fsdp2-tp2") -> Plan:
    """Two stages of llama3-8b on 8 devices, cut behind block 11; the first blocks of each may be recomputed."""
    parts = []
    cuts = [(0, 12), (13, 33)] if schedule == "1f1b" else [(0, 8), (9, 16), (17, 24), (25, 33)]
    for first, last in cuts:
        begin, end = max(first, 1), min(last, LAST_BLOCK)
        runs = [run(0, 0, parallel, sp=True)] if first == 0 else []
        if first_recomputed:
            runs.append(run(begin, begin + first_recomputed - 1, parallel, sp=True, remat="full"))
        runs.append(run(begin + first_recomputed, end, parallel, sp=True))
        runs += [run(33, 33, parallel, sp=True)] if last > LAST_BLOCK else []
        parts.append(runs)
    of_stages = [parts[stage::2] for stage in range(2)]
    stages = [
        {"ranks": [4 * stage, 4 * stage + 3], **({"chunks": own} if len(own) > 1 else {"runs": own[0]})}
        for stage, own in enumerate(of_stages)
    ]
    content = {
        "version": 1,
        "model": {"name": "llama3-8b"},
        "cluster": "1x8xa100-80gb",
        "seq_len": 4096,
        "global_batch": 64,
        "num_microbatches": 8,
        "precision": "bf16",
        "schedule": schedule,
        "stages": stages,
    }
    return read(content)


def mixed(*, devices: int = 4, **changes: Any) -> Plan:
    """Six tiny blocks on two stages of two ranks, every layer its own way."""
    first = [run(0, 0, "dp2"), run(1, 2, "fsdp2", remat="full"), run(3, 3, "fsdp2", zero=2)]
    second = [
        run(4, 4, "tp2", sp=True),
        run(5, 5, "tp2", remat="selective"),
        run(6, 6, "dp2"),
        run(7, 7, "tp2", sp=True),
    ]
    content = {
        "version": 1,
        "model": {"name": "tiny", "config": TINY},
        "cluster": f"1x{devices}xcpu",
        "seq_len": 32,
        "global_batch": 8,
        "num_microbatches": 4,
        "precision": "fp32",
        "stages": [{"ranks": [0, 1], "runs": first}, {"ranks": [2, 3], "runs": second}],
    }
    return read(content | changes)


def exported(plan: Plan, to: str, *, unsupported: tuple[str, ...] = (), image: str | None = "an-image") -> Draft:
    target = target_of(to)
    headline = "the plan" if ENGINE_OF_TARGET[target.name].capabilities.mixes_layers else describe_uniform(plan)
    cluster = parse_cluster(plan.cluster)
    return export_plan(
        target, Request(plan=plan, headline=headline, unsupported=unsupported, cluster=cluster, image=image)
    )


def text_of(plan: Plan, to: str, suffix: str) -> str:
    """The content of the target's file that ends so."""
    return next(content for name, content in exported(plan, to).files if name.endswith(suffix))


def container_of(content: str) -> dict[str, Any]:
    """The container that a job of Kubeflow, of v2 or v1, runs on each host."""
    spec = list(yaml.safe_load_all(content))[1]["spec"]
    if "pytorchReplicaSpecs" in spec:
        pod = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    else:
        pod = spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    found: dict[str, Any] = pod["containers"][0]
    return found


def divided_experts(
    model: str,
    *,
    ep: int,
    num_layers: int,
    dense: int = 0,
    parallel: str = "fsdp8",
    sp: bool = False,
    **of_experts: Any,
) -> Plan:
    """One stage of 8 devices whose blocks but the first ``dense`` ones divide their experts."""
    last, same = num_layers + 1, {"sp": True} if sp else {}
    experts = run(dense + 1, num_layers, parallel, ep=ep, **same, **of_experts)
    runs = [run(0, dense, parallel, **same), experts, run(last, last, parallel, **same)]
    return read(
        {
            "version": 1,
            "model": {"name": model},
            "cluster": "1x8xh100-80gb",
            "seq_len": 4096,
            "global_batch": 64,
            "num_microbatches": 4,
            "precision": "bf16",
            "stages": [{"ranks": [0, 7], "runs": runs}],
        }
    )
