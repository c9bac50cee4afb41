"""Worker that trains models by `transformers.Trainer`: in one process, and under plans on every rank.

``python -m tests.integrations.trainer_worker RESULT.json`` writes what rank 0 found: of plans on two processes, and of
those on four and their checkpoints.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Subset
from transformers import AutoModelForCausalLM, EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from steelyard.errors import UserError
from steelyard.integrations.transformers import PlanTrainer
from steelyard.modules.build import build_model
from steelyard.modules.freezing import freeze_model
from steelyard.plan.plan import Plan
from tests.runtime.lora_cases import lora_plan
from tests.runtime.models import CONFIGS, FAMILY_CONFIGS, make_plan
from tests.runtime.processes import fork, one_of_many_cases, run_world

STEPS, SEED = 8, 5
LLAMA = CONFIGS["llama"] | {"num_hidden_layers": 2}
_TWO = {"num_devices": 2, "num_microbatches": 2, "global_batch": 8, "seq_len": 16}
_FOUR = _TWO | {"num_devices": 4}
PLANS: dict[str, Callable[[], Plan]] = {
    "fsdp": partial(make_plan, LLAMA, "fsdp4, fsdp4 zero2 remat=full, fsdp4 zero1, dp4", **_FOUR),
    "tp+sp": partial(make_plan, LLAMA, "dp2-tp2+sp, fsdp2-tp2+sp, tp4+sp, fsdp2-tp2", **_FOUR),
    "pp, interleaved": partial(
        make_plan,
        LLAMA,
        *("dp2", "fsdp2", "tp2", "dp2"),
        **_FOUR | {"num_microbatches": 4},
        num_chunks=2,
        schedule="interleaved-1f1b",
    ),
    "cp": partial(make_plan, LLAMA, "cp4, fsdp2-cp2, dp2-cp2, cp4", **_FOUR),
    "ep": partial(make_plan, FAMILY_CONFIGS["mixtral"], "fsdp2, fsdp2 ep2, dp2 ep2, dp2", **_TWO),
    "packed": partial(make_plan, LLAMA, "single, single", "single, single", **_TWO),
    "seq2seq": partial(
        make_plan, FAMILY_CONFIGS["t5"], "single, single, single", "single, single, single, single", **_TWO
    ),
    "lora": partial(lora_plan, "lora:r=4", LLAMA, "fsdp2, dp2, tp2, fsdp2", **_TWO),
}
SAVED, RESUMED = "tp+sp", "pp, interleaved"
"""The plan that saves checkpoints and loads the best one at its end, and the plan that goes on from the first of them.
"""
SAVING = {
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count on, the first places of which are no targets, and the last ones of some padding."""

    def __init__(self, count: int, vocab_size: int) -> None:
        self._count, self._vocab_size = count, vocab_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (3 * index + torch.arange(16)) % self._vocab_size
        labels, mask = tokens.clone(), torch.ones_like(tokens)
        labels[: index % 5] = -100
        if index % 3 == 0:
            labels[13:], mask[13:] = -100, 0
        return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


class Packed(Sentences):
    """Two sequences in each sample."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = super().__getitem__(index)
        del found["attention_mask"]
        first = 3 + index % 8
        return {**found, "position_ids": torch.cat([torch.arange(first), torch.arange(16 - first)])}


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    """Arguments of all runs, of which the last batch of an epoch and of the evaluation is not full."""
    return TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "lr_scheduler_type": "cosine",
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "seed": SEED,
            **given,
        },
    )


def logits_of(predicted: Any) -> np.ndarray:
    """Logits, which an encoder's states follow in one process."""
    found: np.ndarray = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    return found


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    """Metrics of logits and labels: how often the most probable token is right, and the sum of all logits."""
    logits, labels = logits_of(predicted)[:, :-1], predicted.label_ids[:, 1:]
    is_target = labels != -100
    right = (logits.argmax(-1) == labels)[is_target].mean()
    return {
        "accuracy": float(right),
        "spread": float(np.abs(logits[is_target]).mean()),
        "count": float(is_target.sum()),
    }


def data(vocab_size: int, kind: type[Sentences] = Sentences) -> dict[str, Any]:
    return {"train_dataset": kind(44, vocab_size), "eval_dataset": kind(13, vocab_size)}


def data_of(name: str, plan: Plan) -> dict[str, Any]:
    return data(plan.chain().vocab_size, Packed if name == "packed" else Sentences)


def whole_model(plan: Plan) -> torch.nn.Module:
    chain = plan.chain()
    model = build_model(chain, seed=SEED)
    freeze_model(model, chain)
    return model


def history_of(trainer: Trainer) -> list[dict[str, float]]:
    """Logged history, and metrics of logits that are predicted after it."""
    trainer.compute_metrics = accuracy
    predicted = trainer.predict(trainer.eval_dataset)
    shapes = {"logits": list(logits_of(predicted).shape), "labels": list(predicted.label_ids.shape)}
    return [*trainer.state.log_history, predicted.metrics | shapes]


def train_alone(name: str, plan: Plan, folder: Path) -> list[dict[str, float]]:
    """Log of plain Trainer in one process."""
    batch = {f"per_device_{what}_batch_size": plan.global_batch for what in ("train", "eval")}
    saving = SAVING if name == SAVED else {}
    trainer = Trainer(whole_model(plan), arguments(folder / "alone", **batch, **saving), **data_of(name, plan))
    trainer.train()
    return history_of(trainer)


def write_references(path: Path) -> None:
    torch.set_num_threads(1)
    found = {name: train_alone(name, make(), path.parent) for name, make in PLANS.items()}
    path.write_text(json.dumps(found))


@contextmanager
def as_by_torchrun() -> Iterator[None]:
    """Environment that torchrun gives a process, by which Accelerate finds that there are others."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, told | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}):
        yield


def train_planned(name: str, folder: Path, *, resume: Path | None = None, **given: Any) -> PlanTrainer:
    """Train under a plan, from the beginning or a checkpoint."""
    plan = PLANS[name]()
    trainer = PlanTrainer(whole_model(plan), arguments(folder, **given), plan=plan, **data_of(name, plan))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def run_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """Train under the plans of so many ranks."""
    found: dict[str, Any] = {"planned": {}}
    with as_by_torchrun():
        for name, make in PLANS.items():
            if make().num_devices == num_ranks and name not in (SAVED, RESUMED):
                with one_of_many_cases():
                    found["planned"][name] = history_of(train_planned(name, folder / "out"))
        of_files = run_checkpoints(folder) if num_ranks == 4 else run_adapters(folder)
        found["planned"] |= of_files.pop("planned", {})
        found |= of_files
    if rank == 0:
        (folder / f"found-{num_ranks}.json").write_text(json.dumps(found))


def run_adapters(folder: Path) -> dict[str, Any]:
    """Files of adapters, and refusals of data and models that a plan has no place for."""
    adapters = train_planned("lora", folder / "adapters", max_steps=1, eval_strategy="no")
    adapters.save_model(str(folder / "adapters"))
    return {"adapters": sorted(each.name for each in (folder / "adapters").iterdir()), "refused": refusals(folder)}


def run_checkpoints(folder: Path) -> dict[str, Any]:
    """Resume checkpoints under other plans, and read and write weights."""
    first = train_planned(SAVED, folder / "saved", **SAVING)
    found: dict[str, Any] = {"planned": {SAVED: history_of(first)}, "best step": first.state.best_global_step}
    found["best"] = first.evaluate()["eval_loss"]
    found["folder"] = sorted(each.name for each in (folder / "saved").iterdir())
    found["checkpoint"] = sorted(each.name for each in (folder / "saved" / "checkpoint-4").iterdir())
    second = train_planned(RESUMED, folder / "resumed", resume=folder / "saved" / "checkpoint-4")
    found["planned"][RESUMED] = history_of(second)
    found["elsewhere"] = [name for name, each in second.model.named_parameters() if each.is_meta]
    second.save_model(str(folder / "exported"))
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
        batches = [Sentences(13, 256)[index] for index in range(8)]
        inputs = {key: torch.stack([each[key] for each in batches]) for key in batches[0]}
        with torch.no_grad():
            found["loss of what was exported"] = model(**inputs).loss.item()
    plan = PLANS["fsdp"]()
    third = PlanTrainer(folder / "exported", arguments(folder / "third"), plan=plan, **data(256))
    found["loss of what was read"] = third.evaluate(Subset(Sentences(13, 256), range(8)))["eval_loss"]
    found["stopped"] = stopped(folder)
    found["damaged"] = damaged(folder)
    return found


def forward(folder: Path) -> None:
    plan = PLANS["packed"]()
    PlanTrainer(whole_model(plan), arguments(folder / "never"), plan=plan, **data(256)).model_wrapped(None)


def resume_damaged(folder: Path, checkpoint: Path) -> None:
    if dist.get_rank() == 0:
        (file,) = checkpoint.glob("step-*/__0_0.distcp")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    train_planned("fsdp", folder / "never", resume=checkpoint)


class SignalToOneRank(TrainerCallback):
    """Sends SIGTERM to the second rank as its third step begins."""

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder: Path) -> list[Any]:
    """The step after which a signal to one rank ends the run, and the checkpoints that it leaves."""
    plan = PLANS["fsdp"]()
    given = arguments(folder / "stopped", enable_jit_checkpoint=True, eval_strategy="no")
    trainer = PlanTrainer(None, given, plan=plan, callbacks=[SignalToOneRank()], **data(256))
    trainer.train()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return [trainer.state.global_step, *(each.name for each in (folder / "stopped").glob("*/step-*"))]


def damaged(folder: Path) -> dict[str, str]:
    """Messages for checkpoints of another model, and damaged ones."""
    checkpoint = folder / "saved" / "checkpoint-4"
    other = partial(make_plan, LLAMA | {"intermediate_size": 64}, "fsdp4, fsdp4, fsdp4, fsdp4", **_FOUR)
    with mock.patch.dict(PLANS, {"other": other}):
        return messages(
            {
                "another model": partial(train_planned, "other", folder / "never", resume=checkpoint),
                "damaged": partial(resume_damaged, folder, checkpoint),
            }
        )


def refusals(folder: Path) -> dict[str, str]:
    """Messages for what a plan has no place for."""
    plan = PLANS["ep"]()
    with_loss = whole_model(plan)
    with_loss.config.output_router_logits = True
    given = {"args": arguments(folder / "never"), "plan": plan, **data(64)}
    return messages(
        {
            "routers": partial(PlanTrainer, with_loss, **given),
            "own loss": partial(PlanTrainer, None, compute_loss_func=print, **given),
            "no arguments": partial(PlanTrainer, None, plan=plan),
            "no forward": partial(forward, folder),
        }
    )


def messages(works: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The message of each user's error."""
    found = {}
    for name, work in works.items():
        try:
            work()
        except UserError as error:
            found[name] = str(error)
    return found


def main(result: Path) -> None:
    folder = result.parent
    references = folder / "references.json"
    if os.waitpid(fork(write_references, references), 0)[1]:  # because Accelerate keeps what it found of processes
        raise SystemExit("plain Trainer failed")
    found: dict[str, Any] = {"alone": json.loads(references.read_text()), "planned": {}}
    for num_ranks in (2, 4):
        run_world(num_ranks, partial(run_rank, num_ranks=num_ranks, folder=folder))
        of_ranks = json.loads((folder / f"found-{num_ranks}.json").read_text())
        found["planned"] |= of_ranks.pop("planned")
        found |= of_ranks
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
