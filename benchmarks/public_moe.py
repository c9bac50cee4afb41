"""Mixtures of experts that others trained, as they divided them, beside what we predict and what we find.

Every public run is priced as a plan of ours (the same devices, lengths, batch, stages and degrees), once as we run it
and once with what is known of its framework (`PublicRun.execution`). Blocks are cut evenly, the embedding beside the
first and the head beside the last, but for torchtitan, which counts these two as blocks. Tokens per second are of a
GPU. Memory is that of tensors on the fullest rank; what a run reports is said with it: ``allocated``, the most that
tensors took, or ``reserved``, what torch's allocator held for them.

- Qwen3-30B-A3B on 8 B200: mlc-ai/pith-train, issue 79. fsdp 8 is torchtitan's, blocks and loss compiled, with the loss
  in 8 chunks: ours is whole, so that its 8 samples at once are 4 of ours. ep 4 in 2 stages is PithTrain's, whose batch,
  schedule and recomputation are not stated: priced as 16 microbatches of 1F1B without recomputation.
- Qwen3-30B-A3B on 64 H100: mlc-ai/pith-train, pull request 40 (commit 093a9e4); what follows is read in its code of
  then and later (`modules/training.py`, `dualpipe/dualpipev.py`, `models/qwen3_moe.py`, `tasks/pretrain_lm.py`). Blocks
  beside the experts are compiled, and their activation is one kernel; nothing is computed again. Its memory is
  ``max_memory_allocated`` in units of 2^30 bytes, written as GB. Not imitated: DualPipeV, priced as interleaved 1F1B
  with as many chunks, holds 9 chunks' activations on every stage where ours holds 11 on the first; all-to-alls run
  beside other microbatches' compute, to experts once to a rank and back once for each pair; gathered parameters stay
  and whole gradients are kept for a step.
- Mixtral-8x22B on 128 H100: 455 TFLOP/s without dropped tokens, of yanring/Megatron-MoE-ModelZoo
  (`best_practice/Mixtral`; degrees and batch in `runtime_configs/benchmarking/runtime.conf`), and 49.3 % MFU, of Liu et
  al. 2025 (arXiv 2504.14960), Table 1, whose degrees and batch are taken to be the same. Both count the whole square of
  attention. States, fused kernels and Transformer Engine's linear layers, experts among them, are priced as
  Megatron-Core's. Its ep 8 without tensor parallelism of experts, over the 8 GPUs of a node, is ep 4 here, with tp 2.
- DeepSeek-V3 on 512 H100: pytorch/torchtitan, pull request 2107 (commit message of 36a4b6942). 346 tokens/s with plain
  all-to-alls, as ours, and 60.18 of memory, taken to be GiB reserved, as it prints them; 579 with DeepEP, which sends a
  token over the network once to a node. How many nodes that are depends on the routing: as the model's router chooses,
  4 of 8 groups of experts, or (``forced``) as torchtitan's routing that is forced to be even, which gives a token 8
  experts in a row, at ep 32 all on one rank.

Imbalance is 1 where routing was forced to be even, or where tokens above an expert's capacity were dropped.

Run: python benchmarks/public_moe.py [--found] [qwen3|mixtral|deepseek] ...
``--found`` prints the best plan of each job too: a search of some seconds, of DeepSeek-V3 of half a minute; for runs
that send tokens once the best with which that is so.
"""

import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from published_runs.frameworks import MIXED_18

from steelyard.cost.job import ASSUMED_IMBALANCE, DeviceGroup, Job
from steelyard.cost.kernels import job_under
from steelyard.engines.execution import EAGER, FUSED, OURS, Execution
from steelyard.engines.megatron_bridge import TE_SPEEDUP
from steelyard.engines.native import NATIVE
from steelyard.engines.torchtitan import DEEPEP
from steelyard.engines.torchtitan import TORCHTITAN as TORCHTITAN_ENGINE
from steelyard.hardware import parse_cluster
from steelyard.model.read import chain_from_config, load_model
from steelyard.plan.decisions import Decisions
from steelyard.plan.plan import Plan
from steelyard.plan.prediction import Prediction, StagePrediction
from steelyard.plan.stages import StagePart, fold_runs
from steelyard.plan.strategy import parse_strategy
from steelyard.planning.choose import plan_job
from steelyard.planning.job import job_of
from steelyard.planning.price import assemble_plan, describe, peak_bytes, summarise, with_price
from steelyard.planning.request import make_request
from steelyard.report.run_table import ALLOWANCES
from steelyard.schedules import PipelineConfig, find_schedule
from steelyard.tracer.cache import cached_trace
from steelyard.units import GB, GIB


@dataclass(frozen=True, kw_only=True)
class PublicRun:
    """A run that others published, as a plan of ours; ``sparse`` divides blocks with experts, ``others`` the rest."""

    name: str
    model: str
    cluster: str
    seq_len: int
    global_batch: int
    num_microbatches: int
    sparse: str
    others: str
    num_stages: int = 1
    num_chunks: int = 1
    imbalance: float = ASSUMED_IMBALANCE
    execution: Execution
    """What is known of how its framework works."""
    groups: tuple[int, int] | None = None
    """Groups of experts and how many a token's come from, where that is not as the model says."""
    counts_ends: bool = False
    """Whether the embedding and the head count as blocks when stages are cut."""
    tokens_per_s: float
    """Of one GPU."""
    memory_gib: float | None = None
    reports: Literal["allocated", "reserved"] = "reserved"
    """What this memory is."""

    def job(self, execution: Execution) -> Job:
        """The job, traced at the degrees that the run needs alone, as it is carried out so."""
        strategies = [parse_strategy(text) for text in (self.sparse, self.others)]
        chain, cluster = load_model(self.model), parse_cluster(self.cluster)
        degrees = {strategy.tensor_degree for strategy in strategies}
        job = Job(
            chain=chain,
            groups=(
                DeviceGroup(
                    profile=cached_trace(chain, seq_len=self.seq_len, precision="bf16", degrees=tuple(degrees)),
                    cluster=cluster,
                    budget_bytes=cluster.device.known_memory_bytes(),
                ),
            ),
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            precision="bf16",
            imbalance=self.imbalance,
        )
        job = job_under(job, replace(NATIVE, execution=execution))
        if self.groups is None:
            return job
        config = {**chain.config, "n_group": self.groups[0], "topk_group": self.groups[1]}
        return replace(job, chain=chain_from_config(config, name=chain.name))

    def cuts(self, num_layers: int) -> list[int]:
        """The first layer of every part of the pipeline, and the end."""
        num_parts, ends = self.num_stages * self.num_chunks, 0 if self.counts_ends else 1
        inner = [ends + round(part * (num_layers - 2 * ends) / num_parts) for part in range(1, num_parts)]
        return [0, *inner, num_layers]

    def plan(self, job: Job) -> Plan:
        """The run as a plan of ours, layers cut evenly, with its prediction."""
        size = job.cluster.num_devices // self.num_stages
        sparse, others = parse_strategy(self.sparse), parse_strategy(self.others)
        chosen = [sparse if job.chain.type_of(i).num_experts else others for i in range(job.chain.num_layers)]
        parts = []
        for part, (first, end) in enumerate(pairwise(self.cuts(len(chosen)))):
            rank = part % self.num_stages * size
            parts.append(StagePart(ranks=(rank, rank + size - 1), runs=fold_runs(first, tuple(chosen[first:end]))))
        pipeline = PipelineConfig(
            num_stages=self.num_stages,
            num_chunks=self.num_chunks,
            num_microbatches=self.num_microbatches,
            schedule=find_schedule("interleaved-1f1b" if self.num_chunks > 1 else "1f1b"),
        )
        return with_price(assemble_plan(job, pipeline, tuple(parts)), job)


_COMPILED = Execution(kernels=replace(FUSED, expert_copies=1))
"""PithTrain keeps what enters an expert and what comes out (models/qwen3_moe.py)."""
TORCHTITAN = TORCHTITAN_ENGINE.execution
_DEEPEP = TORCHTITAN_ENGINE.with_options([DEEPEP]).execution
_B200 = {"model": "qwen3-30b-a3b", "cluster": "1x8xb200-180gb", "seq_len": 8192, "global_batch": 64}
_H100 = {"model": "qwen3-30b-a3b", "cluster": "8x8xh100-80gb", "seq_len": 4096, "global_batch": 1024}
_OF_64 = {
    **_H100,
    "num_microbatches": 64,
    "num_stages": 4,
    "num_chunks": 2,
    "execution": _COMPILED,
    "reports": "allocated",
}
_MIXTRAL = {
    "model": "mixtral-8x22b",
    "cluster": "16x8xh100-80gb",
    "seq_len": 4096,
    "global_batch": 256,
    "num_microbatches": 32,
    "num_stages": 8,
    "sparse": "dp8-tp2+sp ep4",
    "others": "dp8-tp2+sp",
    "execution": Execution(states=replace(MIXED_18, zero=1), kernels=FUSED, tuned_linear_speedup=TE_SPEEDUP),
}
_MIXTRAL_FLOP = 12 * 56 * 6144**2 * (1 + 8 / 48 + 4096 / 6144 + 3 * 16384 / 6144 + 32000 / (2 * 56 * 6144))
"""FLOP of a token as Megatron-LM counts them (`num_floating_point_operations`), the whole square of attention."""
_DEEPSEEK = {
    "model": "deepseek-v3",
    "cluster": "64x8xh100-80gb",
    "seq_len": 4096,
    "global_batch": 1024,
    "num_microbatches": 16,
    "sparse": "fsdp64 ep32 remat=full",
    "others": "fsdp64 remat=full",
    "num_stages": 8,
    "num_chunks": 2,
    "imbalance": 1.0,
    "counts_ends": True,
}
RUNS = {
    "fsdp 8": PublicRun(
        name="Qwen3-30B-A3B, 8 B200: fsdp 8, selective",
        **_B200,
        num_microbatches=2,
        sparse="fsdp8 remat=selective",
        others="fsdp8",
        execution=replace(
            TORCHTITAN, kernels=replace(FUSED, selective="half of the matmuls", expert_copies=EAGER.expert_copies)
        ),
        tokens_per_s=19520,
        memory_gib=141.79,
    ),
    "ep 4": PublicRun(
        name="Qwen3-30B-A3B, 8 B200: fsdp 4, ep 4, 2 stages",
        **_B200,
        num_microbatches=16,
        sparse="fsdp4 ep4",
        others="fsdp4",
        num_stages=2,
        execution=_COMPILED,
        tokens_per_s=17500,
    ),
    "fsdp 16": PublicRun(
        name="Qwen3-30B-A3B, 64 H100: fsdp 16, ep 8, 4 stages",
        **_OF_64,
        sparse="fsdp16 ep8",
        others="fsdp16",
        tokens_per_s=4595,
        memory_gib=48.33,
    ),
    "hybrid": PublicRun(
        name="Qwen3-30B-A3B, 64 H100: dp 2 outside fsdp 8, ep 8, 4 stages",
        **_OF_64,
        sparse="dp2-fsdp8 ep8",
        others="dp2-fsdp8",
        tokens_per_s=6125,
        memory_gib=53.9,
    ),
    "mixtral": PublicRun(
        name="Mixtral-8x22B, 128 H100: tp 2, ep 4, 8 stages, dropless",
        **_MIXTRAL,
        tokens_per_s=455e12 / _MIXTRAL_FLOP,
    ),
    "folded": PublicRun(
        name="Mixtral-8x22B, 128 H100: the same, experts folded",
        **_MIXTRAL,
        imbalance=1.0,
        tokens_per_s=0.493 * 989.4e12 / _MIXTRAL_FLOP,
    ),
    "deepseek": PublicRun(
        name="DeepSeek-V3, 512 H100: fsdp 64, ep 32, 8 stages, full",
        **_DEEPSEEK,
        execution=TORCHTITAN,
        tokens_per_s=346,
        memory_gib=60.18,
    ),
    "deepep": PublicRun(
        name="DeepSeek-V3, 512 H100: the same, DeepEP",
        **_DEEPSEEK,
        execution=_DEEPEP,
        tokens_per_s=579,
    ),
    "forced": PublicRun(
        name="DeepSeek-V3, 512 H100: the same, forced routing",
        **_DEEPSEEK,
        execution=_DEEPEP,
        groups=(32, 1),
        tokens_per_s=579,
    ),
}


def predicted(run: PublicRun, execution: Execution | None = None) -> Prediction:
    """What we predict of a run, as its framework works or otherwise as said."""
    prediction = run.plan(run.job(execution or run.execution)).prediction
    assert prediction is not None, "the plan is priced"
    return prediction


def tensor_bytes(stage: StagePrediction) -> int:
    """Bytes of the tensors of a rank."""
    return sum(size for term, size in stage.memory_bytes.items() if term not in ALLOWANCES)


def show(run: PublicRun) -> None:
    """A line: predicted as we run it and as its framework does, against published."""
    ours, theirs = predicted(run, OURS), predicted(run)
    print(
        f"{run.name:62s} {ours.tokens_per_s_per_device:6,.0f} ours, {theirs.tokens_per_s_per_device:6,.0f} theirs, "
        f"{run.tokens_per_s:6,.0f} public tok/s, ratio {theirs.tokens_per_s_per_device / run.tokens_per_s:.2f}; ",
        end="",
    )
    tensors = [max(map(tensor_bytes, each.stages)) / GB for each in (ours, theirs)]
    memory = "" if run.memory_gib is None else f", {run.memory_gib * GIB / GB:.1f} {run.reports}"
    print(f"tensors {tensors[0]:.1f}, {tensors[1]:.1f} GB{memory}")


def show_found(run: PublicRun) -> None:
    """A line: the best plan of the job of a run in our runtime, or with its way to send tokens, as far as we search."""
    job = job_of(
        make_request(
            run.model,
            run.cluster,
            global_batch=run.global_batch,
            seq_len=run.seq_len,
            precision="bf16",
            memory=None,
            profile=None,
            imbalance=run.imbalance,
        )
    )
    plan = plan_job(job_under(job, _sending(run)), Decisions()).plan
    assert plan is not None, "these jobs fit"
    assert plan.prediction is not None, "the plan is priced"
    found = plan.prediction
    mfu = f"{found.mfu:.1%} MFU" if found.mfu is not None else ""
    print(f"  found for {run.model} on {run.cluster}: {found.tokens_per_s_per_device:,.0f} tok/s, {mfu}, ", end="")
    print(f"{peak_bytes(plan) / GB:.1f} GB: {describe(plan.pipeline)}; {summarise(plan)}; {found.certificate}")


def _sending(run: PublicRun) -> Execution:
    return replace(OURS, dispatcher=run.execution.dispatcher)


def main() -> None:
    """Prints a line for each run whose model is named, and for each job what is found."""
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    jobs = set()
    for run in RUNS.values():
        if names and not any(run.model.startswith(name) for name in names):
            continue
        show(run)
        job = run.model, run.cluster, _sending(run)
        if "--found" in sys.argv and job not in jobs:
            show_found(run)
        jobs.add(job)


if __name__ == "__main__":
    main()
