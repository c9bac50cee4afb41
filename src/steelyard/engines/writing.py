"""Exports of plans: targets, the requests that they write, and the resulting files, which open with a statement.

Frameworks of one strategy describe a plan by degrees, remat, batch sizes and the layers of each stage (`UniformPlan`).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from steelyard.engines.capabilities import block_layers, first_blocks_recomputed
from steelyard.errors import UserError
from steelyard.hardware import Cluster
from steelyard.levers.weights import Weights
from steelyard.model.chain import ModelChain
from steelyard.plan.dimensions import CP, DP, FSDP, TP
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.precision import Precision
from steelyard.processes.allocator import SETTING, VARIABLE
from steelyard.schedules import PipelineConfig
from steelyard.units import format_plural


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePart:
    """The layers of one stage, or of one of its chunks; ``blocks`` are numbers of blocks, from 0."""

    has_embedding: bool
    blocks: range
    has_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformPlan:
    """A plan whose layers all have one strategy, up to remat."""

    dp: int
    fsdp: int
    shards: int
    """Ranks over which states are sharded: those of fsdp together with those of cp."""
    cp: int
    cp_method: str
    """Method by which attention sees the whole sequence under cp: gather or ulysses."""
    tp: int
    ep: int
    """Number of data ranks over which experts are divided, in addition to the ranks of tp."""
    has_experts: bool
    sp: bool
    zero: int
    """ZeRO stage of an fsdp level: 2 or 3."""
    remat: Remat
    """Remat of all blocks, or of the first ``remat_blocks`` of every stage."""
    remat_blocks: int | None
    """Number of blocks recomputed at the start of every stage; None if all have the same choice."""
    pipeline: PipelineConfig
    parts: tuple[PipelinePart, ...]
    microbatch_per_rank: int
    """Samples of a microbatch on one data rank."""
    global_batch: int
    seq_len: int
    precision: Precision
    on_host: bool
    """Whether parameters, gradients and optimizer states lie in host memory."""
    is_narrow: bool
    """Whether parameters, gradients and optimizer states are kept in bf16."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the uniform form of a plan, which a framework of one strategy must be able to express."""
        strategy = plan.strategies[0]
        chain = plan.chain()
        blocks = block_layers(chain)
        remats = {plan.strategies[layer].remat for layer in blocks}
        mixed = len(remats) > 1
        return cls(
            dp=strategy.degree(DP),
            fsdp=strategy.degree(FSDP),
            shards=strategy.state_shards,
            cp=strategy.degree(CP),
            cp_method=str(strategy.mode("cp_method")),
            tp=strategy.degree(TP),
            ep=max(each.expert_degree for each in plan.strategies),
            has_experts=chain.has_experts,
            sp=bool(strategy.mode("sp")),
            zero=int(strategy.mode("zero")),
            remat=Remat.FULL if mixed else remats.pop(),
            remat_blocks=first_blocks_recomputed(plan) if mixed else None,
            pipeline=plan.pipeline,
            parts=_parts(plan, blocks[0], blocks[-1]),
            microbatch_per_rank=plan.microbatch_samples // strategy.sample_degree,
            global_batch=plan.global_batch,
            seq_len=plan.seq_len,
            precision=plan.precision,
            on_host=plan.chosen_levers.effects.parameters_on_host,
            is_narrow=not plan.chosen_levers.value(Weights).is_default,
        )

    @property
    def data_degree(self) -> int:
        """Number of data ranks over which samples are divided."""
        return self.dp * self.fsdp

    @property
    def ranks_of_experts(self) -> int:
        """Ranks over which whole experts are divided, including those of tp; 1 without experts."""
        return self.ep * self.tp if self.has_experts else 1

    @property
    def carried(self) -> tuple[str, ...]:
        """Lines on the parts of a plan that every framework carries over."""
        words = [f"dp {self.dp}"] if self.dp > 1 else []
        words += [f"fsdp {self.fsdp} (ZeRO-{self.zero})"] if self.shards > 1 else []
        words += [f"cp {self.cp} ({self.cp_method})"] if self.cp > 1 else []
        words += [f"tp {self.tp} {'with' if self.sp else 'without'} sp"] if self.tp > 1 else []
        words += [f"ep {self.ep}"] if self.ep > 1 else []
        words += [f"{self.pipeline.num_stages} stages"] if self.pipeline.num_stages > 1 else []
        cuts = ", ".join(
            " and ".join(
                ["embedding"] * part.has_embedding
                + [format_plural(len(part.blocks), "block")] * (len(part.blocks) > 0)
                + ["head"] * part.has_head
            )
            for part in self.parts
        )

        remat = "no remat" if self.remat is Remat.NONE else f"{self.remat} remat of every block"
        if self.remat_blocks is not None:
            remat = f"full remat of the first {self.remat_blocks} blocks per stage"
        return (
            f"parallelism: {', '.join(words) or 'one device'}",
            *((f"pipeline: {self.pipeline.schedule}, {cuts}",) if self.pipeline.num_stages > 1 else ()),
            f"remat: {remat}",
            f"batch: {format_plural(self.pipeline.num_microbatches, 'microbatch', 'microbatches')} of "
            f"{format_plural(self.microbatch_per_rank, 'sample')} on each of "
            f"{format_plural(self.data_degree, 'data rank')}; {self.global_batch} samples of {self.seq_len} tokens",
            f"precision: {self.precision}",
        )


def describe_uniform(plan: Plan) -> str:
    """Return a short form of a plan's strategy, as in ``uniform fsdp8 ep4`` or ``uniform fsdp4-tp2+sp, 2 stages``."""
    strategy = max(plan.strategies, key=lambda each: each.expert_degree)
    view = UniformPlan.of(plan)
    text = str(strategy.without_remat())
    if view.remat is not Remat.NONE:
        blocks = "" if view.remat_blocks is None else f" of {view.remat_blocks} blocks per stage"
        text += f" remat={view.remat}{blocks}"
    return f"uniform {text}" + (f", {plan.num_stages} stages" if plan.num_stages > 1 else "")


def _parts(plan: Plan, first_block: int, last_block: int) -> tuple[PipelinePart, ...]:
    return tuple(
        PipelinePart(
            has_embedding=part.first_layer == 0,
            blocks=range(
                max(part.first_layer, first_block) - first_block, min(part.last_layer, last_block) - first_block + 1
            ),
            has_head=part.last_layer == plan.parts[-1].last_layer,
        )
        for part in plan.parts
    )


ROUTERS_BY_RANK = "the auxiliary loss of routers over all data ranks: the model computes it per data rank"
"""Line on the part of router training that trainers of Hugging Face's models do not carry over."""
RENDEZVOUS_PORT = 29500
"""Port on the first host where the processes of several hosts meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A plan that a target can express, with further information for its files."""

    plan: Plan
    headline: str
    """The plan in one line, with the cost of the restriction."""
    unsupported: tuple[str, ...]
    """Parts of the originally requested plan that the target cannot express."""
    kept: tuple[str, ...] = ()
    """Decisions of the user before the search that are kept."""
    given_up: tuple[str, ...] = ()
    """Decisions of the user that are given up, each with the reason."""
    cluster: Cluster | None = None
    """Cluster of the plan; None if its name is not known here."""
    image: str | None = None
    """Container image for targets that start containers."""

    @property
    def hosts(self) -> str:
        """Hosts on which the launch line is run, in words."""
        if self.cluster is None:
            return "on every host"
        return "on the host" if self.cluster.num_nodes == 1 else f"on each of the {self.cluster.num_nodes} hosts"

    @property
    def variables(self) -> str:
        """Assignments of the variables that a script needs to start its processes; empty on one host."""
        where = "" if self.cluster and self.cluster.num_nodes == 1 else "NODE_RANK=RANK MASTER_ADDR=FIRST_HOST "
        return where if self.cluster else f"NNODES=HOSTS NPROC_PER_NODE=DEVICES {where}"

    @property
    def torchrun(self) -> str:
        """Shell command that starts the processes of each host; names in capitals are to be filled in."""
        if self.cluster is not None and self.cluster.num_nodes == 1:
            return f"torchrun --standalone --nproc-per-node {self.cluster.devices_per_node}"
        nodes, devices = (
            (self.cluster.num_nodes, self.cluster.devices_per_node) if self.cluster else ("HOSTS", "DEVICES")
        )
        meeting = f"--rdzv-backend c10d --rdzv-endpoint FIRST_HOST:{RENDEZVOUS_PORT}"
        return f"torchrun --nnodes {nodes} --nproc-per-node {devices} {meeting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Files without their opening statement, and the content of the statement; `export_plan` combines both."""

    files: tuple[tuple[str, str], ...]
    """Name and content, the main file first."""
    launch: str
    """Command that starts the run on each host; names in capitals are to be filled in."""
    script: tuple[str, str] | None = None
    """Main file that is the same for every plan and therefore has no statement; it reads the other files, which have
    its name, from its own folder."""
    carried: tuple[str, ...] = ()
    """Parts of the plan that are carried over; empty for those of every framework of one strategy."""
    left_out: tuple[str, ...] = ()
    usage: tuple[str, ...] = ()
    """Further steps in addition to the launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A way to write a plan: the files that some software reads."""

    name: str
    software: str
    """Software that reads the files, with the version whose names were used."""
    summary: str
    write: Callable[[Request], Draft]
    weights: str
    """Instructions to convert checkpoints from and to the format of Hugging Face."""
    vocabulary_unit: int | None = None
    """Factor such that the vocabulary is padded to a multiple of it times tp; None: it is not padded."""
    starts_all_hosts: bool = False
    """Whether the launch line is given once instead of on each host."""
    starts_steelyard: bool = False
    """Whether it starts steelyard's own runtime, which sets PyTorch's allocator by itself."""
    precisions: tuple[Precision, ...] | None = None
    """Precisions that it writes; None for all of its engine."""
    routers: str = "the auxiliary loss of routers"
    """Line on the part of router training that is not carried over."""


def export_plan(target: Target, request: Request) -> Draft:
    """Write the files of a target for a plan that its engine can run: a script, then the others with their statement.

    Raises `UserError` if they cannot be written.
    """
    draft, plan = target.write(request), request.plan
    levers = (f"levers: {plan.chosen_levers}",) if plan.levers else ()
    own = draft.carried or UniformPlan.of(plan).carried
    carried = (*own, *levers, *((f"kept as asked: {', '.join(request.kept)}",) if request.kept else ()))
    trains_other = plan.chain().trains_routers and not target.starts_steelyard
    other_parts = plan.chain().left_out()
    left_out = (
        *((f"other parts of the model: {other_parts}",) if other_parts else ()),
        *(*request.unsupported, *draft.left_out, *((target.routers,) if trains_other else ())),
    )
    # as `steelyard train` sets it
    allocator = f"export {VARIABLE}={SETTING} (reduces memory fragmentation)"
    has_gpus = request.cluster is None or request.cluster.device.is_gpu
    usage = (
        f"{'once' if target.starts_all_hosts else request.hosts}: {draft.launch}",
        *draft.usage,
        f"weights: {target.weights}",
        *_vocabulary(target, plan),
        *((f"before launching: {allocator}",) if has_gpus and not target.starts_steelyard else ()),
    )
    lines = (
        f"For {target.software}, written by steelyard export.",
        *(("Given up:",) if request.given_up else ()),
        *(f"  {line}" for line in request.given_up),
        f"{plan.model.name} on {plan.cluster}: {plan.global_batch} samples of {plan.seq_len} tokens per "
        f"step, {plan.precision}, {format_plural(plan.num_devices, 'device')}.",
        request.headline,
        "Carried over:",
        *(f"  {line}" for line in carried),
        "Not carried over:" if left_out else "Not carried over: nothing; the whole plan is carried over.",
        *(f"  {line}" for line in left_out),
        "How to use it:",
        *(f"  {line}" for line in usage),
    )
    # unprintable characters in names of a plan must not break out of the comment
    lines = tuple("".join(letter if letter.isprintable() else " " for letter in line) for line in lines)
    files = [(name, _opened(name, content, lines)) for name, content in draft.files]
    script = (draft.script,) if draft.script else ()
    return replace(draft, files=(*script, *files), carried=carried, left_out=left_out)


def refuse_own_module(name: str, chain: ModelChain) -> None:
    """Raise `UserError` for the user's own module, which no file can describe."""
    if chain.split.module:
        raise UserError(
            field="--to",
            found=f"{name} for {chain.split.module}, your own module",
            expected="a transformers model, which other frameworks build from its config",
            hint="train it with steelyard.parallelize (docs/how-to/your-own-model.md)",
        )


def refuse_untold(name: str, chain: ModelChain) -> None:
    """Raise `UserError` for the user's own module, and for frozen parameters other than those under adapters."""
    refuse_own_module(name, chain)
    if chain.freeze is not None and not (chain.has_adapters and len(chain.freeze.patterns) == 1):
        raise UserError(
            field="--to",
            found=f"{name} for a plan that freezes {chain.freeze.of}",
            expected="a plan that trains the whole model, because exports do not carry frozen parameters",
            hint="train it with steelyard train, or plan without --freeze",
        )


def refuse_as_transformers(name: str, chain: ModelChain) -> None:
    """Raise `UserError` as `refuse_untold`, and for attention that only our runtime fuses."""
    refuse_untold(name, chain)
    if chain.family.fuses_sinks:
        raise UserError(
            field="--to",
            found=f"{name} for {chain.name}, whose attention has sinks",
            expected="eager attention, as transformers trains these",
            hint='train it with steelyard train, or give a config.json with "attn_implementation": "eager"',
        )


def _vocabulary(target: Target, plan: Plan) -> tuple[str, ...]:
    """Return a line on the padded size of the vocabulary, for a model that has one."""
    chain = plan.chain()
    if not chain.family.task.reads_text:
        return ()
    if target.vocabulary_unit is None:
        return (f"vocabulary: {chain.vocab_size} tokens, not padded",)
    unit = target.vocabulary_unit * plan.strategies[0].degree(TP)
    padded = -(-chain.vocab_size // unit) * unit
    return (f"vocabulary: {chain.vocab_size} tokens, padded to {padded}, a multiple of {unit}",)


_ENCODING = "# -*- coding: utf-8 -*-\n"


def _opened(name: str, content: str, lines: Sequence[str]) -> str:
    """Return the content with the statement as a comment before it, after a ``#!`` line, or as a key in JSON."""
    if name.endswith(".json"):
        opened: dict[str, Any] = {"_comment": list(lines), **json.loads(content)}
        return json.dumps(opened, indent=2, ensure_ascii=False) + "\n"
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    if name.endswith(".py"):
        comment = _ENCODING + comment  # else a name in the first two lines could set another encoding
    if content.startswith("#!"):
        first, rest = content.split("\n", 1)
        return f"{first}\n{comment}\n{rest}"
    return f"{comment}\n{content}"
