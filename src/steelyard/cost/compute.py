r"""Seconds of a layer's computation on one device: measured if the profile has times, else from a roofline.

$$t = \sigma \Big(\frac{F_m}{e_m P} + c\,\frac{b_m}{W} + \frac{F_a}{e_a P} + \frac{b - b_c}{e_b W} + \frac{b_c}{e_b V}
+ n\,\rho\Big), \qquad \sigma = 1 + g \log_2(\text{nodes}), \qquad b_c = b_s \max\big(0, 1 - \frac{b_s}{n\,C}\big)$$

The host, which launches kernels and collectives one by one, takes $n\,\ell + n_c\,\ell_c$. The time of the layer is the
maximum of both.

| symbol          | name                    | unit  | meaning                                                     |
|-----------------|-------------------------|-------|-------------------------------------------------------------|
| $F_m, F_a$      | matmul, attention FLOP  | FLOP  | traced, of one rank and one microbatch; of attention        |
|                 |                         |       | those that take as long at a usual shape (`AttentionShape`) |
|                 |                         |       | of $F_m$ those of 8-bit and fp32 operands over their rates  |
| $b_m$           | matmul bytes            | bytes | traced: operands and results of matmuls and attention       |
| $b$             | memory-bound bytes      | bytes | traced: read and written outside matmul and attention       |
| $b_s$           |                         | bytes | those that grow with the samples: activations, not weights  |
| $b_c$           |                         | bytes | those in the cache: the kernel before has written them      |
| $P, W$          | peak, memory bandwidth  | /s    | data sheet of the device                                    |
| $C, V$          | cache, its bandwidth    | –, /s | bytes of the last cache; `CACHE_BYTES_PER_S`, or $W$        |
| $e$             | `Efficiency`            | –     | fraction of the data sheet's rate that is reached           |
| $c$             | `Efficiency.operands`   | –     | part of the operands' traffic that nothing hides            |
| $n, \rho, \ell$ | kernels, ramp, launch   | –, s  | a kernel starts slowly; the host cannot launch faster       |
| $n_c, \ell_c$   | collectives, launch     | –, s  | of tensor parallelism                                       |
| $g$             | `Efficiency.straggling` | –     | the slowest rank sets the pace, and there are more of them  |

The efficiency of a matmul therefore depends on its arithmetic intensity $F_m / b_m$, without a table of shapes. The
median error on held-out kernels is 4 to 8 %, and rounding to whole tiles or waves makes it larger
(`benchmarks/kernel_rates.py`).

Not modelled: tile and wave quantisation of single shapes; clocks that fall under power limits.
"""

from dataclasses import dataclass
from functools import cache
from math import log2

from steelyard.cost.job import Job
from steelyard.levers import Effects
from steelyard.precision import SCALES_LOSS
from steelyard.profiles.profile import CollectiveCount, LayerProfile, Work
from steelyard.units import Amount, at_each, hashable, is_positive

UNSCALING_BYTES = 8
"""Additional bytes per parameter with loss scaling: one kernel reads and writes the fp32 gradients and checks that they
are finite. The all-reduce of one number by which the ranks agree is not counted."""

CACHE_BYTES_PER_S = 5e12
"""Bandwidth of the last cache of a GPU: about what read tests reach in the L2 of an H100 (Chips and Cheese, July 2023).
Assumed for all GPUs, not fitted; kernels reach as large a fraction of it as of the memory's."""

HOST_BYTES_PER_S = 100e9
"""Memory bandwidth of a node's CPUs during a parameter update: 28 bytes for each of 10 billion parameters in 2.57 s on
two Xeon 8168 (DeepSpeed's CPUAdam; Ren et al. 2021, table 4)."""
ADDED_ON_HOST = 12
"""Bytes moved to add a gradient entry to another, and also to read it for its norm and clip it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTime:
    """Seconds of one layer on one rank and one microbatch, or microbatches of several sizes.

    ``includes_shape``: whether they include the collectives of dimensions that change the layer's shape.

    ``…_launch_s``: host time to launch the kernels and collectives.
    """

    forward_s: Amount
    backward_s: Amount
    includes_shape: bool
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0


def compute_time(layer: LayerProfile, samples: Amount, job: Job) -> ComputeTime:
    """Seconds to compute the layer forward and backward for ``samples`` samples on a rank, cached in the job.

    Raises `UserError` if the device's rates are unknown and nothing was measured.
    """
    return job.once(("compute", layer, hashable(samples)), lambda: _compute_time(layer, samples, job))


def _compute_time(layer: LayerProfile, samples: Amount, job: Job) -> ComputeTime:
    if layer.times:
        measured = cache(layer.time_s)
        return ComputeTime(
            forward_s=at_each(samples, lambda each: measured(each).forward_s),
            backward_s=at_each(samples, lambda each: measured(each).backward_s),
            includes_shape=True,
        )
    return ComputeTime(
        forward_s=work_s(layer.forward, samples, job),
        backward_s=work_s(layer.backward, samples, job),
        includes_shape=False,
        forward_launch_s=launch_s(layer.forward, layer.forward_collectives, job),
        backward_launch_s=launch_s(layer.backward, layer.backward_collectives, job, is_backward=True),
    )


def optimizer_s(num_params: float, job: Job, update_bytes: float | None = None) -> float:
    """Seconds of an optimizer step over ``num_params`` parameters of one rank, including unscaling of their gradients.

    An optimizer without measurements takes as long per byte as AdamW. ``update_bytes``: bytes moved per parameter, if
    different from the optimizer's.
    """
    profile, measured = job.profile, job.profile.optimizers.get(job.effects.optimizer)
    num_bytes = job.effects.update_bytes if update_bytes is None else update_bytes
    num_bytes += UNSCALING_BYTES if job.precision == SCALES_LOSS else 0
    if job.effects.steps_on_host and job.cluster.device.is_gpu:
        return float(host_work_s(num_params * (num_bytes + ADDED_ON_HOST), job))
    if profile.optimizer_s_per_param is not None:
        if measured is not None and update_bytes is None and job.precision != SCALES_LOSS:
            return num_params * measured
        return num_params * profile.optimizer_s_per_param * num_bytes / Effects().update_bytes
    return float(moving_s(num_params * num_bytes, job))


def products_s(flop: float, num_bytes: float, layer: LayerProfile, job: Job) -> float:
    """Seconds of bf16 matrix products whose operands and results have ``num_bytes`` bytes.

    On a device without a known peak, the measured rate is used, or in profiles without one the FLOP rate of the layer's
    forward pass, in its precision.
    """
    device, rate = job.cluster.device, job.efficiency
    if device.needs_profile and job.profile.bf16_flop_per_s is not None:
        return flop / job.profile.bf16_flop_per_s
    if device.needs_profile and layer.times:
        longest = layer.times[-1]
        return flop * longest.forward_s / layer.forward.matmul_flop.at(longest.samples)
    return flop / (rate.matmul * device.peak("bf16")) + rate.operands * num_bytes / device.known_memory_bytes_per_s()


def host_copies_s(num_bytes: Amount, job: Job) -> Amount:
    """Seconds to copy ``num_bytes`` between a device and its host, without other work.

    If the device has no rate of host copies, the bytes count as read and written in its memory.
    """
    rate = job.cluster.device.host_bytes_per_s
    if rate is not None:
        return num_bytes / rate
    if job.profile.optimizer_s_per_param is not None:
        return 2 * num_bytes * job.profile.optimizer_s_per_param / Effects().update_bytes
    return moving_s(2 * num_bytes, job)


def host_work_s(num_bytes: Amount, job: Job) -> Amount:
    """Seconds of the host's CPUs to read and write ``num_bytes`` for each of its devices at the same time."""
    if job.cluster.device.is_gpu:
        return num_bytes * job.cluster.devices_per_node / HOST_BYTES_PER_S
    return host_copies_s(num_bytes / 2, job)


def step_overhead_s(job: Job) -> float:
    """Per-step overhead in seconds that no layer accounts for: measured, or from the device's calibration."""
    if job.cluster.device.needs_profile or job.profile.identity.is_measured:
        return job.profile.step_overhead_s * job.time_factor
    fixed = job.efficiency.step_s + job.efficiency.step_per_node_s * job.cluster.num_nodes
    return (fixed + job.execution.step_s) * job.time_factor


def moving_s(num_bytes: Amount, job: Job) -> Amount:
    """Seconds of a memory-bound kernel that reads and writes ``num_bytes`` of device memory."""
    return num_bytes / (job.efficiency.memory * job.cluster.device.known_memory_bytes_per_s())


def _activations_moving_s(work: Work, samples: Amount, job: Job) -> Amount:
    """Seconds of a layer's memory-bound kernels. Activations that the cache still has move at its bandwidth.

    A kernel reads what the one before wrote; as its traffic, here that of the mean kernel, approaches the size of the
    cache, less of it is still there.
    """
    device, num_bytes = job.cluster.device, work.memory_bytes.at(samples)
    if device.cache_bytes is None:
        return moving_s(num_bytes, job)
    activations = num_bytes - work.memory_bytes.constant
    of_cache = activations / (max(1, work.num_kernels) * device.cache_bytes)
    cached = activations * at_each(1 - of_cache, lambda part: max(0.0, part))
    share = device.known_memory_bytes_per_s() / max(CACHE_BYTES_PER_S, device.known_memory_bytes_per_s())
    return moving_s(num_bytes - cached * (1 - share), job)


def launch_s(work: Work, collectives: tuple[CollectiveCount, ...], job: Job, *, is_backward: bool = False) -> float:
    """Seconds of the host to launch these kernels and collectives one by one, in Python or from a backward pass."""
    if not job.execution.eager_launch:
        return 0.0
    rate = job.efficiency
    traced_s = rate.traced_backward_launch_s if is_backward else rate.traced_launch_s
    kernel_s = traced_s if job.execution.kernels is None else rate.launch_s
    return work.num_kernels * kernel_s + sum(each.count for each in collectives) * rate.collective_launch_s


def wait_s(job: Job) -> float:
    """Seconds that a device is idle while its host reads a result before it launches the next collective."""
    return job.efficiency.collective_launch_s if job.execution.eager_launch else 0.0


def work_s(work: Work, samples: Amount, job: Job) -> Amount:
    """Seconds of work on the device, without launching it."""
    peak, rate = job.peak_flop_per_s, job.efficiency
    memory_bytes_per_s = job.cluster.device.known_memory_bytes_per_s()
    low, fp32 = work.low_precision_flop.at(samples), work.fp32_flop.at(samples)
    busy = (
        (work.matmul_flop.at(samples) - low - fp32 + low / job.low_precision_speedup)
        / (rate.matmul * peak * job.linear_speedup)
        + (fp32 / (rate.matmul * job.cluster.device.peak("fp32")) if is_positive(fp32) else 0.0)
        + rate.operands * work.matmul_bytes.at(samples) / memory_bytes_per_s
        + rate.attention_shape.flop(work, samples) / (rate.attention * peak)
        + _activations_moving_s(work, samples, job)
        + work.num_kernels * rate.ramp_s
    )
    return busy * (1 + rate.straggling * log2(job.cluster.num_nodes))
