"""Checks of options, outputs and host before a plan runs and before anything takes memory. Imports no torch.

Outputs are checked before the first step because a run takes days. Without the host check, a plan for GPUs would run on
the CPU until the kernel kills it.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from steelyard.errors import InvalidCheckpointError, InvalidClusterError, InvalidDataError, InvalidPlanError, UserError
from steelyard.hardware import Backend, DeviceType
from steelyard.levers import Levers
from steelyard.levers.optimizer import Optimizer
from steelyard.model.read import folder_hint
from steelyard.output import check_file, check_folder
from steelyard.plan.plan import Plan
from steelyard.runtime.options import TrainOptions
from steelyard.units import format_bytes, format_plural

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Optional files that transformers reads with a ``tokenizer.json``."""


def tokenizer_files(path: Path | None) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files, by the names that transformers uses; none for text read as bytes.

    ``path`` is a ``tokenizer.json`` of any name, or its folder. Raises `InvalidDataError` if it cannot be read.
    """
    if path is None:
        return {}
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        beside = {name: file.with_name(name) for name in _BESIDE}
        found = {name: each.read_bytes() for name, each in beside.items() if each.is_file()}
        return {"tokenizer.json": file.read_bytes()} | found
    except OSError as error:
        raise InvalidDataError(
            field="tokenizer",
            found=f"{file}: {error.strerror}",
            expected="a tokenizer.json, or a folder that contains one",
            hint=folder_hint(path),
        ) from error


def check_outputs(options: TrainOptions) -> None:
    """Check that metrics, TensorBoard files, record and weights can be written, and that trackers are installed.

    Call it in the process that writes them. Raises `UserError` if a check fails.
    """
    if options.metrics is not None:
        check_file(options.metrics, "--metrics", makes_folder=True)
    if options.record is not None:
        check_file(options.record, "--record")
    if options.tensorboard is not None:
        check_folder(options.tensorboard, "--tensorboard")
    asked = {"--tensorboard": ["tensorboard"] * (options.tensorboard is not None), "--report-to": options.trackers}
    for name, packages in asked.items():
        if missing := [each for each in packages if find_spec(each) is None]:
            raise UserError(
                field=name,
                found=f"no package {', '.join(missing)}",
                expected="the packages that write the reports",
                hint=f"pip install {' '.join(missing)}, or leave the option out (--metrics writes the same numbers)",
            )
    if options.export_hf is not None:
        check_export(options.export_hf)


def check_export(path: Path) -> None:
    """Raise `UserError` if ``path`` exists or cannot be written."""
    if path.exists():
        raise InvalidCheckpointError(
            field="--export-hf",
            found=f"{path}, which already exists",
            expected="the path of a folder that does not exist yet",
            hint="choose another path, or move the existing folder",
        )
    check_folder(export_part(path), "--export-hf")


def export_part(path: Path) -> Path:
    """Return the path where weights are written until they are complete."""
    return path.with_name(f".{path.name}.part")


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def check_host(plan: Plan, ranks: range, *, device: str | None) -> None:
    """Raise `UserError` unless this host can run these ranks on the plan's device type.

    ``device`` forces another device type. On the CPU, GPUs are hidden from this process and its children. If there are
    no GPUs to use, the predicted bytes of all ranks are compared with free memory; without a prediction this check is
    skipped. A plan without a device type runs on the devices that are available.
    """
    device_type = device or device_type_of(plan)
    num_gpus = 0
    if device_type != "cpu":
        import torch  # takes seconds, which a plan for the CPU does not need

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_type == "gpu" and num_gpus < len(ranks):
        raise InvalidPlanError(
            field="cluster",
            found=f"a plan for {format_plural(plan.num_devices, 'GPU')} ({plan.cluster}), {len(ranks)} on this "
            f"host, which has {num_gpus or 'none'}",
            expected=f"{format_plural(len(ranks), 'GPU')} available to torch",
            hint="start it on the GPU hosts (for several hosts: `steelyard export --to torchrun`), check here "
            "whether it fits with `steelyard check`, or force CPU processes with --device cpu",
        )
    if device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    plan.chosen_levers.check_host("gpu" if num_gpus else "cpu")
    if num_gpus == 0:
        _check_memory(plan, ranks)


def device_type_of(plan: Plan) -> DeviceType | None:
    """Return the plan's device type, or None if neither its cluster nor its prediction tells it."""
    try:
        return plan.pools()[0].device.type
    except InvalidClusterError:
        is_for_gpus = plan.prediction is not None and plan.prediction.backend is Backend.NCCL
        return "gpu" if is_for_gpus else None


def stage_pool(plan: Plan, stage: int) -> str:
    """Return the name of a stage's device group; empty if all devices are identical or the plan does not tell."""
    try:
        return plan.stage_pools()[stage].name if plan.is_mixed else ""
    except InvalidClusterError:
        return ""


def _check_memory(plan: Plan, ranks: range) -> None:
    free = free_bytes()
    if plan.prediction is None or free is None:
        return
    needed = sum(plan.prediction.stages[plan.stage_of(rank)].total_bytes for rank in ranks)
    if needed > free:
        raise InvalidPlanError(
            field="memory",
            found=f"a plan whose {format_plural(len(ranks), 'process', 'processes')} on this host need up to "
            f"{format_bytes(needed)}",
            expected=f"at most {format_bytes(free)}, the free memory of this host",
            hint=f"free memory on this host, or plan with less: --memory {free // len(ranks) // 2**20}MiB",
        )


def free_bytes() -> int | None:
    """Bytes that new processes on this host can allocate before the kernel kills one; None if unknown.

    Available memory including swap, limited to what the control group of this process can still allocate.
    """
    try:
        lines = [line.split() for line in MEMINFO.read_text().splitlines()]
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
        free = (kib["MemAvailable"] + kib.get("SwapFree", 0)) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        held = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(held["inactive_file"])
        return min(free, max(0, int((CGROUP / "memory.max").read_text()) - used))
    except (OSError, ValueError, KeyError):  # no such group, or no limit (memory.max is "max")
        return free


def check_world_size(plan: Plan, world_size: int) -> None:
    """Raise `InvalidPlanError` unless the number of processes equals the plan's number of ranks."""
    if world_size != plan.num_devices:
        raise InvalidPlanError(
            field="stages.ranks",
            found=f"a plan for {plan.num_devices} processes",
            expected=f"a plan for {world_size} processes, the number that was started",
            hint=f"start {plan.num_devices} processes, or plan for {world_size} devices",
        )


def check_elastic(options: TrainOptions) -> None:
    """Raise `UserError` if an elastic run has no checkpoints to resume from, or if ``--pool`` lacks ``--elastic``."""
    if options.pool is not None and not options.elastic:
        raise UserError(
            field="--pool",
            found=repr(options.pool),
            expected="--elastic, and a plan over several device groups",
            hint="leave --pool out, because without --elastic the plan assigns ranks to device groups",
        )
    if options.elastic and options.checkpoint_dir is None:
        raise UserError(
            field="--elastic",
            found="no --checkpoint-dir",
            expected="a checkpoint folder, from which the remaining processes resume",
            hint="add --checkpoint-dir DIR on a file system shared by all hosts, and --checkpoint-every STEPS",
        )
    if options.elastic and options.checkpoint_every >= options.steps:
        raise UserError(
            field="--elastic",
            found=f"--checkpoint-every {options.checkpoint_every}, so no checkpoint before the last of "
            f"{options.steps} steps",
            expected="an earlier checkpoint, from which the remaining processes resume",
            hint="lower --checkpoint-every",
        )


def check_engine(plan: Plan) -> None:
    """Raise `InvalidPlanError` if the plan is for another engine."""
    if plan.engine is not None:
        raise InvalidPlanError(
            field="engine",
            found=plan.engine,
            expected="a plan for steelyard's own runtime",
            hint=f"export it for {plan.engine} with `steelyard export`, or plan without --engine",
        )


def check_optimizer(plan: Plan, options: TrainOptions) -> None:
    """Raise `UserError` if the optimizer is not the plan's, because the plan reserves memory for that one's states."""
    if options.optimizer is not None:
        Levers.of({Optimizer.name: options.optimizer})  # one that steelyard has
    planned = plan.chosen_levers.value(Optimizer).word
    if options.optimizer not in (None, planned):
        raise UserError(
            field="--optimizer",
            found=f"{options.optimizer}, but the plan is for {planned}",
            expected="the plan's optimizer, for which its time and memory were predicted",
            hint=f"plan with it (steelyard plan … --optimizer {options.optimizer}), or leave the option out",
        )


def check_builder(plan: Plan, builder: str | None) -> None:
    """Raise `InvalidPlanError` if the plan is for another engine, or if a builder is given although the plan is not for
    the user's own module, or the reverse."""
    check_engine(plan)
    module = plan.chain().split.module
    if bool(module) == (builder is not None):
        return
    raise InvalidPlanError(
        field="--builder",
        found=f"nothing, but the plan is for {module}"
        if module
        else f"{builder!r}, but the plan is for {plan.model.name}",
        expected="the function that builds it, because code in a plan file is never executed"
        if module
        else "no builder, because this model has a config",
        hint="add --builder FILE.py:FUNCTION of planning; the file is executed" if module else "leave --builder out",
    )
