"""The plan: one versioned JSON file with the training strategy of a model and its predicted cost.

The planner passes nothing but a plan to the runtime. A plan validates itself when it is read; a valid plan can be run
by as many processes as it has ranks. ``prediction`` is absent in a plan written by hand.
"""

from bisect import bisect_right
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from steelyard.errors import InvalidPlanError
from steelyard.files import FilePart
from steelyard.hardware import Cluster, HardwareFile, PoolsFile, cluster_of, parse_pools
from steelyard.levers import Asked, Levers
from steelyard.limits import Microbatches, Samples, Tokens
from steelyard.model.chain import Freeze, ModelChain, frozen_chain
from steelyard.model.own import Split
from steelyard.model.read import planned_model
from steelyard.plan.decisions import Decisions
from steelyard.plan.dimensions.dimension import Batch
from steelyard.plan.prediction import (
    HOURS_PER_DAY,
    SECONDS_PER_HOUR,
    Prediction,
    Training,
    gain_text,
    layers_text,
    simplicity_line,
)
from steelyard.plan.stages import StagePart, StagePlan, count_groups, illegal_reason
from steelyard.plan.strategy import Strategy
from steelyard.precision import LayerPrecision, Precision
from steelyard.schedules import USUAL, PipelineConfig, find_schedule
from steelyard.schedules.name import ScheduleName
from steelyard.units import format_bytes, format_plural, format_seconds, format_tera


def notebook_html(value: object) -> str:
    """Return the notebook HTML of a value. It loads `steelyard.report`, a layer above this one, only when called."""
    text: str = import_module("steelyard.report.html.notebook").fragment(value)
    return text


class PlanModel(FilePart):
    """The model: a packaged name, or any name with its Hugging Face config."""

    name: str
    config: dict[str, Any] | None = None
    config_hash: str | None = None
    split: Split | None = None
    """Split of the model by its structure; found again if absent. A user's own module has no config."""
    frozen: Freeze | None = None
    """Frozen parameters; absent if everything is trained."""


class Fallback(FilePart):
    """Another plan of the same model, batch and devices, to switch to when memory runs out or to measure."""

    num_microbatches: Microbatches
    schedule: ScheduleName = USUAL.name
    pass_order: tuple[str, ...] = Field(default=(), exclude_if=lambda rows: not rows)
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    prediction: Prediction | None = None


OTHER_PLANS = ("fallbacks", "next_best")
"""Fields of a plan that hold other plans of the same model."""


class Plan(FilePart):
    """A strategy for every layer, stages, microbatches and schedule. Valid once constructed.

    ``global_batch`` and the microbatch count samples of ``seq_len`` tokens. Raises `InvalidPlanError` naming the field
    if the parts contradict each other or the model.
    """

    version: Literal[1] = 1
    model: PlanModel
    cluster: str
    """Name of the cluster; for heterogeneous pools, the names of the pools used, in rank order, joined by a plus."""
    hardware: HardwareFile | None = None
    """Description of the cluster if its name is not enough: it came from a file, or its network was chosen."""
    seq_len: Tokens
    global_batch: Samples
    num_microbatches: Microbatches
    """Microbatches per step; gradients are accumulated over them."""
    precision: Precision
    schedule: ScheduleName = USUAL.name
    pass_order: tuple[str, ...] = Field(default=(), exclude_if=lambda rows: not rows)
    """Row of each stage in torch's CSV format, if the schedule orders passes by times; absent for its usual order."""
    engine: str | None = None
    """Name of the engine that runs the plan; absent for steelyard's own runtime."""
    levers: dict[str, str] = Field(default_factory=dict, exclude_if=lambda texts: not texts)
    """Changes alongside strategies (`steelyard.levers`), as written in the options of `steelyard plan`."""
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    asked: Decisions | None = None
    """The user's decisions; absent if everything was left to the search, or the plan was written by hand."""
    prediction: Prediction | None = None
    training: Training | None = None
    """Duration and cost of training on the requested number of tokens; absent if none was requested."""
    fallbacks: tuple[Fallback, ...] = ()
    """Plans to switch to when memory runs out, in order of falling memory."""
    next_best: tuple[Fallback, ...] = ()
    """Plans that `steelyard measure` runs alongside this one: the fastest plan if this one is simpler, then the best
    plans found of other pipeline configurations, fastest first."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        chain = self.chain()
        if self.model.config_hash not in (None, chain.config_hash):
            where = "of the packaged model" if self.model.config is None else "in this file"
            raise InvalidPlanError(
                field="model.config_hash",
                found=repr(self.model.config_hash),
                expected=f"{chain.config_hash!r}, the hash of the config {where}",
                hint="the config was changed after planning: plan again, or remove config_hash to keep the change",
            )
        if self.precision not in get_args(LayerPrecision) and self.engine is None:
            raise InvalidPlanError(
                field="precision",
                found=f"{self.precision} without an engine",
                expected=", ".join(get_args(LayerPrecision)) + ", or an engine that computes in it",
                hint="name the engine, as in engine: megatron",
            )
        chain.check_seq_len(self.seq_len)
        self.chosen_levers.check(Asked(chain=chain, levers=self.levers, precision=self.precision))
        _check_ranks(self)
        if self.global_batch % self.num_microbatches:
            raise InvalidPlanError(
                field="num_microbatches",
                found=str(self.num_microbatches),
                expected=f"a divisor of the global batch of {self.global_batch} samples",
                hint="change num_microbatches or global_batch",
            )
        self.pipeline.check()
        _check_coverage(self, chain)
        _check_strategies(self, chain)
        if self.prediction is not None and len(self.prediction.stages) != self.num_stages:
            raise InvalidPlanError(
                field="prediction.stages",
                found=f"{len(self.prediction.stages)} stages",
                expected=f"one prediction for each of the {self.num_stages} stages of the plan",
                hint="remove the prediction, which belongs to another plan",
            )
        for name in OTHER_PLANS:
            for other in getattr(self, name):
                _plan_of(self, other)
        return self

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))

    _repr_html_ = notebook_html

    def chain(self) -> ModelChain:
        """Build the model of the plan as a chain. Raise `InvalidModelError` if its config is not known."""
        model = self.model
        chain = planned_model(model.name, model.config, model.split)
        return frozen_chain(self.chosen_levers.change(chain), model.frozen)

    @property
    def chosen_levers(self) -> Levers:
        """Changes alongside strategies. Raises `UserError` if one is not a lever."""
        return Levers.of(self.levers)

    def shared_heads(self, chain: ModelChain) -> tuple[int, str, int] | None:
        """Return a tp degree above the number of heads of a kind, and the name and number of these heads; None if there
        is none.

        Every tensor-parallel rank then holds the weights of all of these heads.
        """
        for layer, strategy in enumerate(self.strategies):
            if (shared := chain.type_of(layer).shared_by(strategy.tensor_degree)) is not None:
                return strategy.tensor_degree, *shared
        return None

    def machines(self) -> Cluster:
        """Return the cluster of the plan, which has one device type.

        Raise `InvalidClusterError` if the file has only a name and it is unknown, and `InvalidPlanError` if the plan
        uses heterogeneous pools (see `pools`).
        """
        found = self.hardware_value()
        if found.is_mixed:
            raise InvalidPlanError(
                field="cluster",
                found=f"a plan over {len(found.pools)} device groups ({found.name})",
                expected="a plan on one device type",
                hint="plan for one of the groups",
            )
        return found

    def hardware_value(self) -> Cluster:
        """Return the cluster of the plan, of one pool or several. Raise `InvalidClusterError` as `machines` does."""
        return parse_pools(self.cluster) if self.hardware is None else cluster_of(self.hardware, name=self.cluster)

    @property
    def is_mixed(self) -> bool:
        """Whether the stages lie in heterogeneous pools of devices."""
        return isinstance(self.hardware, PoolsFile) or (self.hardware is None and "+" in self.cluster)

    def pools(self) -> tuple[Cluster, ...]:
        """Return the pools of devices in rank order; one if all devices are identical."""
        return self.hardware_value().pools

    def stage_pools(self) -> tuple[Cluster, ...]:
        """Return the pool of each stage."""
        ends = list(accumulate(pool.num_devices for pool in self.pools()))
        return tuple(self.pools()[bisect_right(ends, stage.ranks[0])] for stage in self.stages)

    def fallback_plan(self, index: int) -> "Plan":
        """Return a fallback as a plan, with the fallbacks after it. Raise `InvalidPlanError` if it is inconsistent."""
        return _plan_of(self, self.fallbacks[index]).model_copy(update={"fallbacks": self.fallbacks[index + 1 :]})

    def as_fallback(self) -> Fallback:
        """Return this plan as a fallback of another plan of the same model, without its rejected alternatives."""
        prediction = self.prediction.model_copy(update={"alternatives": ()}) if self.prediction else None
        return Fallback(
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            pass_order=self.pass_order,
            stages=self.stages,
            prediction=prediction,
        )

    def contenders(self) -> "tuple[Plan, ...]":
        """Return this plan and the next best ones, each without fallbacks and further plans."""
        alone = self.model_copy(update=dict.fromkeys(OTHER_PLANS, ()))
        return (alone, *(_plan_of(self, other) for other in self.next_best))

    def with_training(self, tokens: int, *, price: float | None = None) -> "Plan":
        """Return the plan with duration and cost of training in whole steps; ``price`` is dollars per device-hour."""
        steps = -(-tokens // (self.global_batch * self.seq_len))
        hours = steps * self.step_s / SECONDS_PER_HOUR
        training = Training(
            tokens=tokens,
            steps=steps,
            days=hours / HOURS_PER_DAY,
            device_hours=hours * self.num_devices,
            price_per_device_hour=price,
            cost=None if price is None else hours * self.num_devices * price,
        )
        return self.model_copy(update={"training": training})

    @property
    def step_s(self) -> float:
        """Predicted seconds per step; the plan must have a prediction."""
        assert self.prediction is not None, "asked of a plan that is priced"
        return self.prediction.step_time_s

    @property
    def num_devices(self) -> int:
        """Number of ranks of the whole plan."""
        return sum(self.stage_sizes)

    @property
    def parts(self) -> tuple[StagePart, ...]:
        """Parts of the pipeline in layer order, as `PipelineConfig.stage_of` places them."""
        pipeline, on_stages = self.pipeline, [stage.parts for stage in self.stages]
        return tuple(
            on_stages[pipeline.stage_of(index)][index // pipeline.num_stages] for index in range(pipeline.num_parts)
        )

    @property
    def num_groups(self) -> int:
        """Number of groups of layers (`count_groups`)."""
        return count_groups(self.parts)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Number of ranks of each stage."""
        return tuple(stage.num_devices for stage in self.stages)

    @property
    def num_chunks(self) -> int:
        """Number of model parts per stage: more than one if the schedule takes chunks."""
        return len(self.stages[0].parts)

    @property
    def pipeline(self) -> PipelineConfig:
        """The pipeline configuration."""
        return PipelineConfig(
            num_stages=self.num_stages,
            num_chunks=self.num_chunks,
            num_microbatches=self.num_microbatches,
            schedule=find_schedule(self.schedule),
            pass_order=self.pass_order,
        )

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return next(index for index, stage in enumerate(self.stages) if stage.ranks[0] <= rank <= stage.ranks[1])

    @property
    def microbatch_samples(self) -> int:
        """Samples of one microbatch over all ranks of a stage."""
        return self.global_batch // self.num_microbatches

    @property
    def rank_samples(self) -> tuple[int, ...]:
        """Micro-batch size, in samples per rank: each size that a layer has. Under cp these are parts of samples."""
        return tuple(sorted({self.microbatch_samples // each.sample_degree for each in self.strategies}))

    @property
    def batch(self) -> Batch:
        """Sizes that strategies divide in addition to the layers: samples of a microbatch and tokens of a sequence."""
        return Batch(microbatch_samples=self.microbatch_samples, seq_len=self.seq_len)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Strategy of each layer of the model, in order."""
        return tuple(strategy for part in self.parts for strategy in part.strategies)


def _plan_of(plan: Plan, fallback: Fallback) -> Plan:
    """Return the plan with the values of its fallback, and no other plans."""
    own = {name: getattr(plan, name) for name in Plan.model_fields if name not in (*OTHER_PLANS, "training")}
    return Plan(**own | {name: getattr(fallback, name) for name in Fallback.model_fields})


def _check_ranks(plan: Plan) -> None:
    takes_chunks = find_schedule(plan.schedule).takes_chunks
    for index, stage in enumerate(plan.stages):
        _check_chunks(plan, index, stage, takes_chunks=takes_chunks)
    expected_first = 0
    for index, stage in enumerate(plan.stages):
        first, last = stage.ranks
        size = plan.stages[0].num_devices if takes_chunks else stage.num_devices
        if first != expected_first or last - first + 1 != size or size < 1:
            raise InvalidPlanError(
                field=f"stages[{index}].ranks",
                found=f"[{first}, {last}]",
                expected=f"[{expected_first}, {expected_first + max(size, 1) - 1}]: consecutive ranks"
                + (", as many as the first stage has" if takes_chunks else ""),
                hint="number the ranks of the stages one after another",
            )
        expected_first = last + 1
    if takes_chunks and plan.num_stages < 2:
        raise InvalidPlanError(
            field="stages",
            found=f"1 stage under {plan.schedule}",
            expected="two or more stages with two or more chunks each",
            hint=f"use the {USUAL.name} schedule",
        )
    if plan.is_mixed:
        _check_pools(plan)


def _check_chunks(plan: Plan, index: int, stage: StagePlan, *, takes_chunks: bool) -> None:
    """Check that a stage has its layers once, in as many chunks as the schedule takes and the first stage has."""
    own, form = ("chunks", "the runs of each chunk") if takes_chunks else ("runs", "the runs of its layers")
    given = [name for name in ("runs", "chunks") if getattr(stage, name) is not None]
    if given != [own]:
        raise InvalidPlanError(
            field=f"stages[{index}].{own}",
            found=" and ".join(given) or "nothing",
            expected=f"only {own}, {form}, under {plan.schedule}",
            hint=f"write every stage once, with its layers under {own}, or change the schedule",
        )
    first, chunks = plan.stages[0].chunks or (), stage.chunks or ()
    if len(chunks) != len(first):
        raise InvalidPlanError(
            field=f"stages[{index}].chunks",
            found=f"{len(chunks)} chunks",
            expected=f"{len(first)}, as many as the first stage has",
            hint="give every stage the same number of chunks",
        )


def _place(plan: Plan, index: int) -> str:
    """Return the location in the file of the runs of a part."""
    chunk, stage = index // plan.num_stages, plan.pipeline.stage_of(index)
    return f"stages[{stage}].chunks[{chunk}]" if plan.num_chunks > 1 else f"stages[{stage}].runs"


def _check_pools(plan: Plan) -> None:
    """Check that the stages take all ranks of the plan's pools, and that each lies within one pool."""
    pools = plan.pools()
    ends = list(accumulate(pool.num_devices for pool in pools))
    if plan.num_devices != ends[-1]:
        raise InvalidPlanError(
            field="stages",
            found=f"{plan.num_devices} ranks",
            expected=f"{ends[-1]}, the devices of {plan.cluster}",
            hint="list in cluster the device groups that the plan uses, in the order of its ranks",
        )
    if find_schedule(plan.schedule).takes_chunks:
        raise InvalidPlanError(
            field="schedule",
            found=f"{plan.schedule} over {len(pools)} device groups",
            expected="a schedule without chunks",
            hint=f"use the {USUAL.name} schedule",
        )
    for index, stage in enumerate(plan.stages):
        place = bisect_right(ends, stage.ranks[0])
        if stage.ranks[1] >= ends[place]:
            raise InvalidPlanError(
                field=f"stages[{index}].ranks",
                found=f"[{stage.ranks[0]}, {stage.ranks[1]}]: ranks of {pools[place].name} and {pools[place + 1].name}",
                expected=f"ranks of one device group; {pools[place].name} ends with rank {ends[place] - 1}",
                hint="end the stage where the device group ends",
            )


def _check_coverage(plan: Plan, chain: ModelChain) -> None:
    expected_first = 0
    for index, part in enumerate(plan.parts):
        for run_index, run in enumerate(part.runs):
            first, last = run.layers
            if first != expected_first or last < first or last >= chain.num_layers:
                raise InvalidPlanError(
                    field=f"{_place(plan, index)}[{run_index}].layers",
                    found=f"[{first}, {last}]",
                    expected=f"layers from layer {expected_first} on, within 0 to {chain.num_layers - 1} ({chain.name} "
                    f"has {chain.num_layers} layers: embedding, {chain.num_layers - 2} blocks, head)",
                    hint="cover every layer once and in order",
                )
            expected_first = last + 1
    if expected_first != chain.num_layers:
        raise InvalidPlanError(
            field="stages",
            found=f"layers 0 to {expected_first - 1}",
            expected=f"layers 0 to {chain.num_layers - 1} ({chain.name} has {chain.num_layers} layers)",
            hint="add the missing layers to the last stage",
        )


def _check_strategies(plan: Plan, chain: ModelChain) -> None:
    levers = plan.chosen_levers
    if plan.pipeline.schedule.splits_backward and (reason := levers.weight_pass_refusal()):
        raise InvalidPlanError(
            field="schedule",
            found=f"{plan.schedule} with {reason}",
            expected="a schedule without weight passes",
            hint="use another schedule, or plan without that lever",
        )
    for index, part in enumerate(plan.parts):
        for run_index, run in enumerate(part.runs):
            where = f"{_place(plan, index)}[{run_index}]"
            try:
                strategy = run.strategy
            except InvalidPlanError as error:
                raise InvalidPlanError(**error.parts() | {"field": f"{where}.{error.field}"}) from error
            if strategy.num_devices != part.num_devices:
                raise InvalidPlanError(
                    field=f"{where}.parallel",
                    found=f"{strategy.parallel}, which spans {strategy.num_devices} devices",
                    expected=f"degrees whose product is the {part.num_devices} devices of the stage",
                    hint="change a degree, or the ranks of the stage",
                )
            for layer_type in {chain.layers[layer] for layer in range(run.layers[0], run.layers[1] + 1)}:
                of_lever = levers.refusal(strategy)
                reason = of_lever or illegal_reason(chain.layer_types[layer_type], strategy, plan.batch)
                if reason is not None:
                    raise InvalidPlanError(
                        field=f"{where}.parallel",
                        found=f"{strategy} for the {chain.layer_types[layer_type].plain_name} layers",
                        expected=f"a strategy that the layer allows: {reason}",
                        hint=f"change the strategy, or leave out {levers}"
                        if of_lever
                        else "change the degree, num_microbatches or global_batch",
                    )


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the answer with the source of its costs, then a line per run of equal layers."""
    for label, text in answer_lines(plan, everything=True):
        yield f"{label}: {text}" if label else text
    chain = plan.chain()
    for index, part in enumerate(plan.parts):
        for run in part.runs:
            ranks = f"ranks {part.ranks[0]}–{part.ranks[1]}"
            yield f"stage {part_name(plan, index)}, {ranks}: {layers_text(chain, *run.layers)}: {run.strategy}"


def answer_lines(plan: Plan, *, everything: bool = False) -> Iterator[tuple[str, str]]:
    """Yield what is decided and predicted in lines, each after its label, which is empty for the first.

    The source of the costs, if it is the usual one, and how MFU is counted are left out unless ``everything`` is asked
    for.
    """
    yield "", decision(plan)
    yield "Plan", pipeline_text(plan)
    prediction = plan.prediction
    if prediction is not None:
        fullest, source = prediction.fullest, prediction.profile
        taken, budget = prediction.stages[fullest].total_bytes, prediction.stage_budgets()[fullest]
        where = f" (stage {fullest})" if plan.num_stages > 1 else ""
        free = f"; {prediction.margin_text}" if prediction.margin_text else ""
        counts_mfu = prediction.mfu is not None and prediction.mfu_attention
        is_assumed = source.rates is not None and source.rates.is_assumed
        is_unusual = source.is_measured or source.time_factor != 1.0 or is_assumed  # not traced at fitted rates
        lines = {
            "Gain": gain_text(prediction, has_decisions=plan.asked is not None),
            "Memory": f"{format_bytes(taken)} of {format_bytes(budget)} on the fullest device{where}{free}",
            "Host": str(prediction.host or ""),
            "Accuracy": prediction.accuracy,
            "MFU": f"counts {prediction.mfu_attention} attention" if counts_mfu and everything else "",
            "Search": str(prediction.certificate),
            "Order": prediction.order_line,
            "Groups": simplicity_line(plan.num_groups, plan.num_stages, prediction),
            "Costs": prediction.costs if is_unusual or everything else "",
        }
        yield from ((label, text) for label, text in lines.items() if text)
    if plan.training is not None:
        yield "Training", str(plan.training)


def decision(plan: Plan) -> str:
    """Return the model, the devices, and the speed of the plan."""
    job = f"{plan.model.name} on {plan.cluster}"
    if plan.prediction is None:
        return f"{job}: a plan without a prediction"
    found = plan.prediction
    speeds = [f"{found.tokens_per_s_per_device:,.0f} tokens/s"]
    speeds += [] if found.model_flop_per_s is None else [f"{format_tera(found.model_flop_per_s)} TFLOP/s"]
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.1%}"
    return f"{job}: {format_seconds(found.step_time_s)} per step, {' and '.join(speeds)} per device{mfu}"


def pipeline_text(plan: Plan) -> str:
    """Return stages, schedule, microbatches and precision, and changes such as frozen layers and levers."""
    sizes = sorted(set(plan.stage_sizes))
    size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    stages = "no pipeline"
    if plan.num_stages > 1:
        chunks = f", {plan.num_chunks} chunks each" if plan.num_chunks > 1 else ""
        devices = "device" if size == "1" else "devices"
        stages = f"{plan.num_stages} stages of {size} {devices} ({plan.schedule}{chunks})"
    count = format_plural(plan.num_microbatches, "microbatch", "microbatches")
    per_rank = " or ".join(map(str, plan.rank_samples))
    batch = f"{count} of {plan.microbatch_samples} × {plan.seq_len} tokens ({per_rank} per rank)"
    by = "" if plan.engine is None else f", run by {plan.engine}"
    return "; ".join((f"{stages}, {batch}, {plan.precision}{by}", *change_lines(plan)))


def change_lines(plan: Plan) -> Iterator[str]:
    """Yield a line each for inputs of an own module, frozen parameters, heads held by several ranks, and levers."""
    split = plan.model.split
    if split is not None and split.features is not None:
        yield split.features.words(plan.seq_len)
        if not plan.model.frozen:
            yield (
                f"trained: everything except {' and '.join(split.resting)}" if split.resting else "trained: everything"
            )
    if plan.model.frozen is not None:
        yield f"frozen: {plan.model.frozen}"
    if (shared := plan.shared_heads(plan.chain())) is not None:
        degree, name, size = shared
        yield f"tp {degree} over {size} {name}: every rank holds the weights of all {size} and computes with one"
    if plan.levers:
        yield str(plan.chosen_levers)


def part_name(plan: Plan, index: int) -> str:
    """Return the stage number of a part of the pipeline and, if interleaved, its chunk."""
    chunk, stage = index // plan.num_stages, plan.pipeline.stage_of(index)
    return str(stage) if plan.num_chunks == 1 else f"{stage}, chunk {chunk}"
