"""Evaluation of a run: loss on held-out data, reported every few steps."""

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


class Evaluation:
    """Evaluation on ``--eval-data``: all samples that fill complete global batches; of rows, all.

    Raises `InvalidDataError` if there is less than one global batch (without ``--sft``).
    """

    def __init__(self, model: ParallelModel, own: OwnModel | None, options: TrainOptions) -> None:
        self._model, self._options = model, options
        self._data = None
        source = options.eval_source
        if source is None:
            return
        if str(source) == SYNTHETIC:
            raise UserError(
                field="--eval-data",
                found=SYNTHETIC,
                expected="finite data",
                hint="pass a file or a folder",
            )
        self._data = open_run_data(source, model.plan, own, options)
        if self._data.num_samples < model.plan.global_batch and not isinstance(self._data, CompletionData):
            raise InvalidDataError(
                field="--eval-data",
                found=f"{self._data.num_samples} samples in {source}",
                expected=f"at least a global batch of {model.plan.global_batch}",
                hint="provide more data",
            )

    def after_step(self, num_steps: int) -> float | None:
        """Return the mean loss after ``num_steps`` steps, or None if no evaluation is due; a collective call."""
        is_due = num_steps % self._options.eval_every == 0 or num_steps == self._options.steps
        if self._data is None or not is_due:
            return None
        data, size = self._data, self._model.plan.global_batch
        places = [*range(data.num_samples)]
        if isinstance(data, CompletionData):
            places += [NO_SAMPLE] * (-len(places) % size)
        total, count = 0.0, 0
        for first in range(0, len(places) - size + 1, size):
            step = step_on(data, places[first : first + size])
            weight = step.get("num_targets", 1)
            total += self._model.eval_step(**step).item() * weight
            count += weight
        self._model.clock.take_s()
        take_imbalance(self._model.layers)  # only those of training are reported
        return total / count
