"""The loss of data that a run does not train on, which it reports every few steps."""

from pathlib import Path

from steelyard.errors import InvalidDataError, UserError
from steelyard.modules.dimensions import take_imbalance
from steelyard.modules.own_pieces import OwnModel
from steelyard.plan.plan import Plan
from steelyard.runtime.data.prepare import SYNTHETIC
from steelyard.runtime.data.source import OwnData, SampleData, open_samples
from steelyard.runtime.options import TrainOptions
from steelyard.runtime.parallel_model import ParallelModel


def open_run_data(path: str | Path, plan: Plan, own: OwnModel | None, options: TrainOptions) -> SampleData | OwnData:
    """The samples of a run at ``path``; raises `InvalidDataError` for data that cannot be used."""
    if own is not None:
        return OwnData(Path(path), own, seed=options.seed)
    return open_samples(path, options.text, plan.chain(), seq_len=plan.seq_len, seed=options.seed)


class Evaluation:
    """Evaluates ``--eval-data``: all of its samples that make whole global batches.

    Raises `InvalidDataError` where that is none.
    """

    def __init__(self, model: ParallelModel, own: OwnModel | None, options: TrainOptions) -> None:
        self._model, self._options = model, options
        self._data = None
        if options.eval_data is None:
            return
        if str(options.eval_data) == SYNTHETIC:
            raise UserError(
                field="--eval-data",
                found=SYNTHETIC,
                expected="data that ends",
                hint="give a file or a folder",
            )
        self._data = open_run_data(options.eval_data, model.plan, own, options)
        if self._data.num_samples < model.plan.global_batch:
            raise InvalidDataError(
                field="--eval-data",
                found=f"{self._data.num_samples} samples in {options.eval_data}",
                expected=f"at least a global batch of {model.plan.global_batch}",
                hint="give more data",
            )

    def after_step(self, num_steps: int) -> float | None:
        """The mean loss after ``num_steps`` steps, where the options ask for it; a collective call."""
        is_due = num_steps % self._options.eval_every == 0 or num_steps == self._options.steps
        if self._data is None or not is_due:
            return None
        data, size = self._data, self._model.plan.global_batch
        count = data.num_samples // size
        total = 0.0
        for batch in range(count):
            total += self._model.eval_step(
                lambda samples, first=batch * size: data.read([first + sample for sample in samples])  # type: ignore[misc]
            ).item()
        self._model.clock.take_s()
        take_imbalance(self._model.layers)  # those of training alone are reported
        return total / count
