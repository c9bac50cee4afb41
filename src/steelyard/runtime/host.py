"""What this host has for a plan: devices of the type that it is for, and for processes of the CPU the memory they take.

Asked before anything is allocated: without it a plan for GPUs runs on the CPU until the kernel ends it.
"""

import os
from pathlib import Path

from steelyard.errors import InvalidClusterError, InvalidPlanError
from steelyard.hardware import Backend, DeviceType
from steelyard.plan.plan import Plan
from steelyard.units import format_bytes, format_plural

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def check_host(plan: Plan, ranks: range, *, device: str | None) -> None:
    """Raises `InvalidPlanError` unless this host can run these ranks of a plan on devices of the type that it is for.

    ``device`` insists on another device type. On the CPU the GPUs are hidden from this process and those that it
    starts, and the predicted bytes of all ranks are compared with the memory that is free. A plan that does not say its
    type runs on what there is; one without a prediction has nothing to compare.
    """
    device_type = device or device_type_of(plan)
    num_gpus = 0 if device_type == "cpu" else _num_gpus()
    if device_type == "gpu" and num_gpus < len(ranks):
        raise InvalidPlanError(
            field="cluster",
            found=f"a plan for {format_plural(plan.num_devices, 'GPU')} ({plan.cluster}), {len(ranks)} of them on this "
            f"host, which has {num_gpus or 'none'}",
            expected=f"{format_plural(len(ranks), 'GPU')} that torch can use",
            hint="start it where they are (several hosts: `steelyard export --to torchrun`), see here whether it fits "
            "with `steelyard check`, or insist on processes of this host's CPU with --device cpu",
        )
    if device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if num_gpus == 0:
        _check_memory(plan, ranks)


def device_type_of(plan: Plan) -> DeviceType | None:
    """The device type that a plan is for; None where neither its cluster nor its prediction says it."""
    try:
        return plan.pools()[0].device.type
    except InvalidClusterError:
        is_for_gpus = plan.prediction is not None and plan.prediction.backend is Backend.NCCL
        return "gpu" if is_for_gpus else None


def stage_pool(plan: Plan, stage: int) -> str:
    """The name of the pool of devices that a stage lies in; empty where all are alike, or the plan does not say."""
    try:
        return plan.stage_pools()[stage].name if plan.is_mixed else ""
    except InvalidClusterError:
        return ""


def _num_gpus() -> int:
    import torch  # takes seconds, which a plan for the CPU need not wait for

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_memory(plan: Plan, ranks: range) -> None:
    free = free_bytes()
    if plan.prediction is None or free is None:
        return
    needed = sum(plan.prediction.stages[plan.stage_of(rank)].total_bytes for rank in ranks)
    if needed > free:
        raise InvalidPlanError(
            field="memory",
            found=f"a plan whose {format_plural(len(ranks), 'process', 'processes')} on this host take up to "
            f"{format_bytes(needed)}",
            expected=f"at most the {format_bytes(free)} that are free here",
            hint=f"end what else holds memory, or plan with less of it: --memory {free // len(ranks) // 2**20}MiB",
        )


def free_bytes() -> int | None:
    """Bytes that new processes of this host may take before the kernel ends one; None where it does not say.

    What is free or can be freed, swap included, and no more than the control group of this process may still take.
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
    except (OSError, ValueError, KeyError):  # no such group, or no limit, which it calls max
        return free
