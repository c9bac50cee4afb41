"""Evaluation of a run: loss on held-out data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidDataError, UserError
from steelyard.modules.dimensions import take_imbalance
from steelyard.modules.own_pieces import OwnModel
from steelyard.plan.plan import Plan
from steelyard.runtime.data.prepare import SYNTHETIC
from steelyard.runtime.data.rows import Rows
from steelyard.runtime.data.source import NO_SAMPLE, CompletionData, OwnData, SampleData, open_samples
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel


def open_run_data(
    source: str | Path | Rows, plan: Plan, own: OwnModel | None, options: TrainOptions
) -> SampleData | OwnData:
    """Return the samples of a run. Raises `InvalidDataError` if the data cannot be used."""
    if own is not None:
        return OwnData(Path(str(source)), own, seed=options.seed)
    return open_samples(source, options.text, plan.chain(), seq_len=plan.seq_len, seed=options.seed)


def step_on(data: SampleData | OwnData, samples: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a step on some samples, which are a global batch."""

    def numbered(read: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
        return lambda places: read([samples[place] for place in places])

    step = {"read": numbered(data.read)}
    if not isinstance(data, CompletionData):
        return step
    beside = {"model_kwargs": numbered(data.model_kwargs)} if data.model_kwargs([NO_SAMPLE]) else {}
    return {**step, **beside, "num_targets": max(1, data.num_targets(samples))}


def open_eval_data(plan: Plan, own: OwnModel | None, options: TrainOptions) -> SampleData | OwnData | None:
    """Return the samples of ``--eval-data``, if it is given.

    Raises `InvalidDataError` if there is less than one global batch (without ``--sft``).
    """
    source = options.eval_source
    if source is None:
        return None
    if str(source) == SYNTHETIC:
        raise UserError(field="--eval-data", found=SYNTHETIC, expected="finite data", hint="pass a file or a folder")
    data = open_run_data(source, plan, own, options)
    if data.num_samples < plan.global_batch and not isinstance(data, CompletionData):
        raise InvalidDataError(
            field="--eval-data",
            found=f"{data.num_samples} samples in {source}",
            expected=f"at least a global batch of {plan.global_batch}",
            hint="provide more data",
        )
    return data


def evaluate(model: ParallelModel, data: SampleData | OwnData) -> float:
    """Return the mean loss of all samples that fill complete global batches; of rows, of all. A collective call."""
    size, places = model.plan.global_batch, [*range(data.num_samples)]
    if isinstance(data, CompletionData):
        places += [NO_SAMPLE] * (-len(places) % size)
    total, count = 0.0, 0
    for first in range(0, len(places) - size + 1, size):
        step = step_on(data, places[first : first + size])
        weight = step.get("num_targets", 1)
        total += model.eval_step(**step).item() * weight
        count += weight
    model.clock.take_s()
    take_imbalance(model.layers)  # only those of training are reported
    return total / count
