"""A plan of one strategy in the words that frameworks share: degrees, remat, batch sizes, layers of each stage."""

from dataclasses import dataclass
from typing import Self

from steelyard.plan.capabilities import block_layers, first_blocks_recomputed
from steelyard.plan.dimensions import CP, DP, FSDP, TP
from steelyard.plan.plan import Plan
from steelyard.plan.strategy import Remat
from steelyard.schedules import PipelineConfig
from steelyard.units import format_plural


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePart:
    """The layers of one stage, or of one of its chunks. Blocks are counted from 0, the first and one past the last."""

    has_embedding: bool
    blocks: range
    has_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformPlan:
    """A plan whose layers all have one strategy, up to remat."""

    dp: int
    fsdp: int
    cp: int
    cp_method: str
    """How attention sees the whole sequence under cp: gather or ulysses."""
    tp: int
    ep: int
    """Over how many data ranks experts are divided, beside those of tp."""
    has_experts: bool
    sp: bool
    zero: int
    """ZeRO stage of an fsdp level: 2 or 3."""
    remat: Remat
    """Of all blocks, or of the first ``remat_blocks`` of every stage."""
    remat_blocks: int | None
    """Blocks at the start of every stage that are recomputed; None where all have the same choice."""
    pipeline: PipelineConfig
    parts: tuple[PipelinePart, ...]
    microbatch_per_rank: int
    """Samples of a microbatch on one data rank."""
    global_batch: int
    seq_len: int
    precision: str

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The plan in these words; it must be within the means of a framework of one strategy."""
        strategy = plan.strategies[0]
        chain = plan.chain()
        blocks = block_layers(chain)
        remats = {plan.strategies[layer].remat for layer in blocks}
        mixed = len(remats) > 1
        return cls(
            dp=strategy.degree(DP),
            fsdp=strategy.degree(FSDP),
            cp=strategy.degree(CP),
            cp_method=str(strategy.variant("cp_method")),
            tp=strategy.degree(TP),
            ep=max(each.expert_degree for each in plan.strategies),
            has_experts=any(layer_type.num_experts for layer_type in chain.layer_types),
            sp=bool(strategy.variant("sp")),
            zero=int(strategy.variant("zero")),
            remat=Remat.FULL if mixed else remats.pop(),
            remat_blocks=first_blocks_recomputed(plan) if mixed else None,
            pipeline=plan.pipeline,
            parts=_parts(plan, blocks[0], blocks[-1]),
            microbatch_per_rank=plan.microbatch_samples // strategy.sample_degree,
            global_batch=plan.global_batch,
            seq_len=plan.seq_len,
            precision=plan.precision,
        )

    @property
    def data_degree(self) -> int:
        """Ways in which samples are divided."""
        return self.dp * self.fsdp

    @property
    def ranks_of_experts(self) -> int:
        """Ranks over which experts are divided whole: tp divides them too, and no expert itself."""
        return self.ep * self.tp

    @property
    def degrees(self) -> str:
        """The degrees in words, as in ``fsdp 4, tp 2 with sp, 2 stages``."""
        words = [f"dp {self.dp}"] if self.dp > 1 else []
        words += [f"fsdp {self.fsdp} (ZeRO-{self.zero})"] if self.fsdp > 1 else []
        words += [f"cp {self.cp} ({self.cp_method})"] if self.cp > 1 else []
        words += [f"tp {self.tp} {'with' if self.sp else 'without'} sp"] if self.tp > 1 else []
        words += [f"ep {self.ep}"] if self.ep > 1 else []
        words += [f"{self.pipeline.num_stages} stages"] if self.pipeline.num_stages > 1 else []
        return ", ".join(words) or "one device"

    @property
    def cuts(self) -> str:
        """The blocks of every part of the pipeline, as in ``embedding and 7 blocks, 9 blocks, 8 blocks and head``."""
        return ", ".join(
            " and ".join(
                ["embedding"] * part.has_embedding
                + [format_plural(len(part.blocks), "block")] * (len(part.blocks) > 0)
                + ["head"] * part.has_head
            )
            for part in self.parts
        )

    @property
    def remat_words(self) -> str:
        """What is recomputed, in words."""
        if self.remat_blocks is not None:
            return f"full remat of the first {self.remat_blocks} blocks of every stage"
        return "no remat" if self.remat is Remat.NONE else f"{self.remat} remat of every block"

    @property
    def carried(self) -> tuple[str, ...]:
        """What every framework carries over alike, one line each."""
        pipeline = (f"pipeline: {self.pipeline.schedule}, {self.cuts}",) if self.pipeline.num_stages > 1 else ()
        return (
            f"parallelism: {self.degrees}",
            *pipeline,
            f"remat: {self.remat_words}",
            f"batch: {format_plural(self.pipeline.num_microbatches, 'microbatch', 'microbatches')} of "
            f"{format_plural(self.microbatch_per_rank, 'sample')} on each of "
            f"{format_plural(self.data_degree, 'data rank')}; {self.global_batch} samples of {self.seq_len} tokens",
            f"precision: {self.precision}",
        )


def describe_uniform(plan: Plan) -> str:
    """The strategy of a plan in a word or two, as in ``uniform fsdp8 ep4`` or ``uniform fsdp4-tp2+sp, 2 stages``."""
    strategy = max(plan.strategies, key=lambda each: each.expert_degree)
    view = UniformPlan.of(plan)
    text = str(strategy.without_remat())
    if view.remat is not Remat.NONE:
        blocks = "" if view.remat_blocks is None else f" of {view.remat_blocks} blocks a stage"
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
