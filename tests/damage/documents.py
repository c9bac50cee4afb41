"""One valid file of each type that steelyard reads, small enough that a search takes milliseconds."""

import json
import tempfile
from pathlib import Path
from typing import Any

import steelyard.modules  # noqa: F401  which splits the model
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.plan.decisions import Decisions
from steelyard.planning.problem import make_tables, problem_of
from steelyard.profiles.record import RankRecord, RunRecord, StepRecord
from steelyard.search.problem import Problem, save_problem
from tests.cost import examples
from tests.modules.split_configs import split_config

CONFIG = examples.CONFIG | {
    "num_hidden_layers": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "dtype": "float32",
    "architectures": ["LlamaForCausalLM"],
}
CLUSTER: dict[str, Any] = {
    "version": 1,
    "name": "lab",
    "num_nodes": 1,
    "devices_per_node": 4,
    "device": {
        "name": "round",
        "kind": "gpu",
        "memory_GiB": 4,
        "peak_TFLOPs": {"bf16": 100, "fp32": 10},
        "memory_bandwidth_GBps": 1000,
    },
    "intra_link": {"name": "intra", "bandwidth_GBps": 100, "latency_us": 1},
    "inter_link": {"name": "ethernet-100", "ports_per_node": 4},
}
SPLIT_TYPE = "speech_to_text"
REAL_TYPES = (SPLIT_TYPE, "gemma4_text", "llava")
"""Types with two lists of blocks, with cross-layer inputs, and with images among the tokens."""
FROZEN = {"num_params": 10, "of_params": 1000, "parts": [{"layers": [0, 1]}]}
ASKED = {"num_stages": 1, "num_microbatches": 1, "max_degrees": {"tp": 1}, "modes": {"zero": [3]}}


def whole() -> dict[str, Any]:
    """The content of every sort of file by its name; those of one job, so that they belong together."""
    model = chain_from_config(CONFIG, name="small")
    job = examples.job(examples.cluster(1, 4), global_batch=4, num_hidden_layers=2)
    profile = examples.profile(model)
    profile = profile.model_copy(
        update={"layers": tuple(each for each in profile.layers if sum(each.degrees.values()) <= 4)}
    )
    problem = problem_of(job, make_tables(job, Decisions(num_stages=2, num_microbatches=2)))
    plan = {
        "version": 1,
        "model": {"name": "small", "config": CONFIG},
        "cluster": "lab",
        "seq_len": examples.SEQ_LEN,
        "global_batch": 4,
        "num_microbatches": 2,
        "precision": "bf16",
        "schedule": "1f1b",
        "stages": [
            {
                "ranks": [0, 1],
                "runs": [{"layers": [0, 0], "parallel": "fsdp2"}, {"layers": [1, 1], "parallel": "tp2", "sp": True}],
            },
            {
                "ranks": [2, 3],
                "runs": [
                    {"layers": [2, 2], "parallel": "tp2", "remat": "full"},
                    {"layers": [3, 3], "parallel": "fsdp2", "zero": 2},
                ],
            },
        ],
        "prediction": _prediction(model),
    }
    own = _own_split()
    return {
        "config": CONFIG,
        "cluster": CLUSTER,
        "profile": profile.model_dump(mode="json", exclude_none=True),
        "plan": plan,
        "other": plan | {"schedule": "interleaved-1f1b", "stages": _in_chunks()},
        "split": _on_one_device(7, name="split", config=split_config(SPLIT_TYPE), split=_every_place(), frozen=FROZEN),
        "own": _on_one_device(len(own["layers"]), name="own", split=own),
        "problem": _saved(problem),
        "record": _record(model),
        "run": {"version": 1, "plan": "plan.json", "step_time_s": 0.5},
    }


def real_split(model_type: str) -> dict[str, Any]:
    """Return the plan of a small model of a type on one device, split; the whole model if torch is available."""
    config = split_config(model_type)
    split = chain_from_config(config, name="split").split.model_dump(mode="json", exclude_none=True)
    plan = _on_one_device(len(split["layers"]), name="split", config=config, split=split)
    return {**plan, "hardware": {**CLUSTER, "devices_per_node": 1}}


def _on_one_device(num_layers: int, **model: Any) -> dict[str, Any]:
    """A plan by hand, and what was asked before it."""
    fallback = {
        "num_microbatches": 1,
        "stages": [{"ranks": [0, 0], "runs": [{"layers": [0, num_layers - 1], "parallel": "single"}]}],
    }
    return {
        **{"version": 1, "model": model, "cluster": "lab", "hardware": CLUSTER, "seq_len": 16, "global_batch": 4},
        **{"precision": "fp32", "asked": ASKED, "fallbacks": [fallback], "next_best": [fallback], **fallback},
    }


def _own_split() -> dict[str, Any]:
    """A module with skips, so that several tensors flow; and a parameter that its ends share."""
    from steelyard.modules.own_split import find_own_split  # needs torch, which the process of the cases must not have
    from tests.modules.own_models import CASES

    case = CASES["unet"]
    found = find_own_split(case.module(), case.sample, loss=case.loss, blocks=case.blocks)
    own = found.model.split.model_dump(mode="json", exclude_none=True)
    return own | {"shared": [[[0, "model.x"], [len(own["layers"]) - 1, "model.x"]]]}


def _every_place() -> dict[str, Any]:
    """A split in which every number stands that may stand in one; no model splits so."""
    split = json.loads((Path(__file__).parents[1] / "runtime" / f"{SPLIT_TYPE}_split.json").read_text())
    call = {"argument": 0, "result": 1, "num_results": 2, "number": 3, "order": [1, 0, 2], "inner": [8, 8], "places": 6}
    features = split["features"] | {"token": 2, "places": 3, "grid": [1, 6, 1]}
    past = {"argument": 1, "readers": [5], "shape": [0, 64], "most": [0, 64]}
    return split | {
        **{"call": call, "features": features, "called": [0, 1], "image": [3, 8, 8]},
        "encoder": split["encoder"] | {"order": [0, 2, 1], "call": call},
        "streams": [past | {"maker": 4, "result": 1}, past | {"maker": 1, "entry": ["k", 0]}],
    }


def _in_chunks() -> list[dict[str, Any]]:
    """Two stages, each with two of the four layers, which do not follow each other."""
    return [
        {"ranks": [2 * stage, 2 * stage + 1], "chunks": [[_run(stage, "fsdp2")], [_run(stage + 2, "tp2")]]}
        for stage in range(2)
    ]


def _run(layer: int, parallel: str) -> dict[str, Any]:
    return {"layers": [layer, layer], "parallel": parallel}


def _prediction(model: ModelChain) -> dict[str, Any]:
    stage = {"time_s": {"compute": 0.25, "tp": 0.1}, "memory_bytes": {"parameters": 1000, "activations": 2000}}
    identity = examples.profile(model).identity.model_dump(mode="json", exclude_none=True)
    return {
        "step_time_s": 1.5,
        "tokens_per_s_per_device": 100.0,
        "mfu": 0.4,
        "budget_bytes": 2**32,
        "stages": [stage, stage],
        "certificate": {"status": "gap", "gap": 0.1},
        "lower_bound_s": 1.2,
        "profile": identity,
        "backend": "nccl",
        "alternatives": [{"description": "dp4", "reason": "does not fit"}],
        "baselines": [{"name": "DDP", "step_time_s": 2.0, "setting": "1 stage", "strategies": "dp4"}],
    }


def _record(model: ModelChain) -> dict[str, Any]:
    return RunRecord(
        model_name="small",
        config_hash=model.config_hash,
        device="round",
        num_devices=4,
        strategies=("fsdp2", "tp2+sp", "tp2 remat=full", "fsdp2 zero2"),
        num_warmup_steps=1,
        median_step_s=0.5,
        tokens_per_s=128.0,
        steps=tuple(StepRecord(step=step, loss=5.5, time_s=0.5, grad_norm=1.0) for step in (1, 2, 3)),
        ranks=tuple(
            RankRecord(rank=rank, stage=rank // 2, peak_bytes=10, memory_method="counted", num_params=3, busy_s=0.2)
            for rank in range(4)
        ),
        predicted_step_s=1.5,
        predicted_busy_s=(0.3, 0.4),
        predicted_peak_bytes=(3000, 3000),
    ).model_dump(mode="json", exclude_none=True)


def _saved(problem: Problem) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        save_problem(path, problem)
        return json.loads(path.read_text())
