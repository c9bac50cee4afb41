r"""Seconds of a layer's computation on one device: measured where the profile has it, a roofline where not.

$$t = \max\Big(\frac{F_m}{e_m P} + \frac{F_a}{e_a P} + \frac{b}{e_b W},\; n\,\ell\Big)$$

| symbol     | name                     | unit   | meaning                                             |
|------------|--------------------------|--------|-----------------------------------------------------|
| $F_m, F_a$ | matmul, attention FLOP   | FLOP   | traced, of one rank and one microbatch               |
| $b$        | memory-bound bytes       | bytes  | traced: read and written outside matmul and attention |
| $P, W$     | peak, memory bandwidth   | /s     | data sheet of the device                             |
| $e$        | `Efficiency`             | –      | fraction of the data sheet's rate that is reached    |
| $n, \ell$  | kernels, launch floor    | –, s   | the host cannot launch faster                        |

Not modelled: efficiency by matrix shape; kernels that a compiler would fuse.
"""

from dataclasses import dataclass

from steelyard.cost.setting import Job
from steelyard.profiles.profile import LayerProfile, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of the data sheet's rates that eager PyTorch reaches on large layers, and the launch floor.

    Typical values, not fitted to any run: large bf16 matmuls reach 65–80 % of dense peak, flash attention 40–60 %,
    elementwise kernels 75–85 % of memory bandwidth; an eager kernel takes the host 4–8 µs.
    """

    matmul: float = 0.70
    attention: float = 0.45
    memory: float = 0.80
    launch_s: float = 6e-6


DEFAULT_EFFICIENCY = Efficiency()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTime:
    """Seconds of one layer and microbatch on one rank. ``includes_tp``: tensor-parallel collectives are in them."""

    forward_s: float
    backward_s: float
    includes_tp: bool


def compute_time(
    layer: LayerProfile, samples: int, job: Job, efficiency: Efficiency = DEFAULT_EFFICIENCY
) -> ComputeTime:
    """Seconds to compute the layer forward and backward for ``samples`` samples on a rank.

    Raises `UserError` where the device's rates are unknown and nothing was measured.
    """
    if layer.times:
        measured = layer.time_s(samples)
        return ComputeTime(forward_s=measured.forward_s, backward_s=measured.backward_s, includes_tp=True)
    return ComputeTime(
        forward_s=_roofline_s(layer.forward, samples, job, efficiency),
        backward_s=_roofline_s(layer.backward, samples, job, efficiency),
        includes_tp=False,
    )


def optimizer_s(num_params: float, job: Job, efficiency: Efficiency = DEFAULT_EFFICIENCY) -> float:
    """Seconds of an AdamW step over ``num_params`` parameters of one rank: reads 16 and writes 12 bytes of each."""
    if job.profile.optimizer_s_per_param is not None:
        return num_params * job.profile.optimizer_s_per_param
    return num_params * 28 / (efficiency.memory * job.cluster.device.known_memory_bytes_per_s())


def _roofline_s(work: Work, samples: int, job: Job, efficiency: Efficiency) -> float:
    device = job.cluster.device
    peak = device.peak(job.precision)
    busy = (
        work.matmul_flop.at(samples) / (efficiency.matmul * peak)
        + work.attention_flop.at(samples) / (efficiency.attention * peak)
        + work.memory_bytes.at(samples) / (efficiency.memory * device.known_memory_bytes_per_s())
    )
    return max(busy, work.num_kernels * efficiency.launch_s)
