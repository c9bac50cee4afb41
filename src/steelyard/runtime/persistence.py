"""Files that a run reads and writes: initial weights, checkpoints, exported weights.

A run starts with fresh weights, with those of ``--init``, or from a checkpoint (``--resume``). A process that torchrun
has restarted resumes from the newest checkpoint of ``--checkpoint-dir``, if there is one by then.
"""

import json
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO

import torch.distributed as dist
from torch.optim import Optimizer

from steelyard.errors import InvalidCheckpointError, UserError
from steelyard.output import say, write_file
from steelyard.processes.failure import Standing, read_standing, restart_count, write_standing
from steelyard.processes.start import LOST_VARIABLE, TAKEN_IN_VARIABLE
from steelyard.processes.stop import StoppedError
from steelyard.runtime.checkpoint import Checkpointer, on_first_rank, read_checkpoint, whole_checkpoint
from steelyard.runtime.checkpoint_folder import (
    CheckpointInfo,
    changes,
    checkpoint_path,
    checkpoint_to_resume,
    lock_folder,
    plan_hash,
)
from steelyard.runtime.checks import tokenizer_files
from steelyard.runtime.data.rows import Rows
from steelyard.runtime.options import AUTO, TrainOptions
from steelyard.runtime.parallel_model import ParallelModel
from steelyard.runtime.state import RunState
from steelyard.runtime.weights import export_weights, load_weights
from steelyard.units import format_plural


class Persistence:
    """State of a run on disk as one rank sees it; every method is a collective call.

    ``data`` is the location of the data and ``data_samples`` the number of samples of an epoch; a resumed run
    recognises its data by them.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizers: Iterable[Optimizer],
        options: TrainOptions,
        *,
        data: Path | Rows,
        data_samples: int,
    ) -> None:
        self._model, self._options = model, options
        self._state = RunState(model, optimizers)
        self._data_samples = data_samples
        self._data = data
        self._checkpointer: Checkpointer | None = None
        self._lock: TextIO | None = None
        self._tokenizer: dict[str, bytes] = {}
        """Tokenizer files to export with the weights, as they were when the run began."""
        self.num_steps = 0
        """Number of steps trained before this run."""
        self.num_samples = 0
        """Number of samples that those steps read."""

    def begin(self) -> None:
        """Load the weights or checkpoint that the options name and prepare the folder of checkpoints."""
        options = self._options
        for name, given in (("--init", options.init), ("--export-hf", options.export_hf)):
            if given is not None and self._model.chain.split.module:
                raise UserError(
                    field=name,
                    found=f"{given} for {self._model.chain.split.module}",
                    expected="no Hugging Face folder, because this module is not a transformers model",
                    hint="load initial weights in the builder; read trained weights from a checkpoint "
                    "(--checkpoint-dir)",
                )
        if options.merge and (not self._model.chain.has_adapters or self._state.takers()):
            quantized = self._model.chain.has_adapters
            raise UserError(
                field="--merge",
                found="adapters on quantized weights" if quantized else "a plan without adapters",
                expected="adapters on unquantized weights",
                hint="export the adapters and merge them into the unquantized base with peft (merge_and_unload)"
                if quantized
                else "leave it out",
            )
        # maximum number of restarts by torchrun over all hosts
        told: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
        taken_in = "hosts or devices have come back" if TAKEN_IN_VARIABLE in os.environ else ""
        dist.all_gather_object(told, (restart_count(), taken_in or os.environ.get(LOST_VARIABLE, "")))
        restarts = max(count for count, _ in told)
        if restarts:
            _say(f"restarted ({restarts}): {next((why for _, why in told if why), 'a process was lost')}")
        on_first_rank(self._lock_folder)
        resumed, known = whole_checkpoint(lambda known: checkpoint_to_resume(options, known, is_restart=restarts > 0))
        if options.export_hf is not None:
            self._tokenizer = tokenizer_files(options.text.tokenizer)
        if resumed is not None:
            path, notices = resumed
            info = read_checkpoint(path, self._state, self._model.plan, self._model.device)
            changed = changes(info, path, options, self._data, self._data_samples)
            self.num_steps, self.num_samples = info.step, 0 if "data" in changed else info.num_samples
            if options.metrics is not None:
                on_first_rank(lambda: _keep_lines(options.metrics, info.step))
            lost = read_standing().num_steps - info.step
            again = f"; {format_plural(lost, 'step')} lost and repeated" if restarts and lost > 0 else ""
            anew = "" if restarts or options.resume != AUTO else " (--no-resume starts a new run)"
            _say(*notices, f"resumed after step {info.step} from {path}{again}{anew}", *changed.values())
        elif options.init is not None:
            notices = load_weights(options.init, self._state, self._model.chain, seed=options.seed)
            _say(*notices, f"initial weights from {options.init}")
        if options.checkpoint_dir is not None:
            self._checkpointer = Checkpointer(
                options.checkpoint_dir,
                keep_last=options.keep_last,
                resumed=resumed[0] if resumed else None,
                known=known,
                sets_aside=options.no_resume and not restarts,
                timeout_s=options.timeout_s,
            )

    def _lock_folder(self) -> None:
        """Lock the folder of checkpoints until this process ends, even by a signal."""
        if self._options.checkpoint_dir is not None:
            self._lock = lock_folder(self._options.checkpoint_dir)

    def first_sample(self, step: int) -> int:
        """Return the first sample of a step (from 0); a resumed run continues after the samples already read."""
        return self.num_samples + (step - self.num_steps) * self._model.plan.global_batch

    def after_step(self, num_steps: int) -> None:
        """Raise if an earlier save has failed, and note the progress of an elastic run."""
        if self._checkpointer is None:
            return
        self._checkpointer.check()
        if self._options.elastic:
            saved = max(self._checkpointer.last_step, self.num_steps)
            write_standing(Standing(num_steps=num_steps, num_saved=saved), os.environ)

    def save(self, num_steps: int) -> None:
        """Save the state after ``num_steps`` steps."""
        assert self._checkpointer is not None, "--checkpoint-dir"
        plan, chain = self._model.plan, self._model.chain
        self._checkpointer.save(
            self._state,
            CheckpointInfo(
                step=num_steps,
                num_samples=self.first_sample(num_steps),
                seed=self._options.seed,
                data_samples=self._data_samples,
                options=self._options.of_run(self._data),
                model_name=chain.name,
                config_hash=chain.config_hash,
                plan_hash=plan_hash(plan),
                num_processes=dist.get_world_size(),
            ),
            self._model.device,
        )

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Wait for a checkpoint in progress after an error in the context, so that its work is not lost.

        The peers, which wait for this rank in the step, still write their parts.
        """
        try:
            yield
        except Exception:
            if self._checkpointer is not None:
                with suppress(InvalidCheckpointError, RuntimeError):
                    self._checkpointer.wait()
            raise

    def stop(self, num_steps: int, number: int) -> NoReturn:
        """Wait for the checkpoint after ``num_steps`` steps and raise `StoppedError` for signal ``number``."""
        folder, checkpointer = self._options.checkpoint_dir, self._checkpointer
        assert folder is not None, "else none can be asked"
        assert checkpointer is not None, "likewise"
        checkpointer.wait()
        raise StoppedError(
            f"stopped by {signal.Signals(number).name} after step {num_steps} of {self._options.steps}; "
            f"saved in {checkpoint_path(folder, num_steps)}\n  to continue: run the same command again",
            exit_code=128 + number,
        )

    def end(self) -> None:
        """Wait for the last checkpoint, export the weights and unlock the folder of checkpoints."""
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if self._options.export_hf is not None:
            merge, reader = self._options.merge, "transformers"
            if self._model.chain.has_adapters and not merge:
                reader = "peft"
            export_weights(
                self._options.export_hf, self._state, self._model.plan, tokenizer=self._tokenizer, merge=merge
            )
            _say(f"weights for {reader} written to {self._options.export_hf}")
        if self._lock is not None:
            self._lock.close()


def _keep_lines(metrics: Path | None, num_steps: int) -> None:
    """Drop from a metrics file the steps that will be trained again."""
    if metrics is not None and metrics.is_file():
        kept = []
        for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
            with suppress(ValueError, KeyError, TypeError):  # a line that a kill has truncated
                kept += [line] if float(json.loads(line)["step"]) <= num_steps else []
        write_file(metrics, "".join(kept), "--metrics")


def _say(*lines: str) -> None:
    if dist.get_rank() == 0:
        for line in lines:
            say(line + "\n")
