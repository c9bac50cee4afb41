r"""GPU memory beyond tensors: the CUDA context, the buffers of NCCL communicators, and the slack of torch's allocator.

A rank has one communicator for every group of its layers' collectives, and one for the stages of a pipeline:

| bytes             | of                                                                                       |
|-------------------|------------------------------------------------------------------------------------------|
| `PROCESS_BYTES`   | context and libraries of the process                                                     |
| `PAIR_BYTES`      | a communicator of two ranks                                                              |
| `GROUP_BYTES`     | a communicator of more ranks: the number of neighbours in rings and trees is constant    |
| `PEER_BYTES`      | each neighbouring stage in the same node                                                 |
| `NETWORK_BYTES`   | all neighbouring stages in other nodes                                                   |

Source: NVIDIA/nccl issues 964 (544 and 688 MiB on 4 A100), 986 (number of ranks), 1685 (448 MiB for each of 7 peers)
and 2363 (512 MiB for the network); pull request 2366 (484 MiB of a process). Issue 111 of LUMI-AI-Guide has 0.65
GiB for each communicator of RCCL. Not modelled: buffers of an all-to-all for each rank of the node (3 GiB in issue
1685; strategies that differ by so much are hard to search), groups that engines create for barriers and norms, buffers
of DeepEP, and the larger number of channels of Hopper's links (verl pull request 6408: 7 GB for tp 2, pp 2, dp 2 of
Megatron on 8 H100). Published runs are inconclusive: if their total memory is known, the rest of it is predicted up to
5 GiB too high.
"""

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.job import Job, JobConfig
from steelyard.cost.layer_load import layer_load, layer_profile, traffic_group
from steelyard.model.chain import LayerType
from steelyard.plan.strategy import Strategy
from steelyard.units import MIB

PROCESS_BYTES = 512 * MIB
PAIR_BYTES = 544 * MIB
GROUP_BYTES = 688 * MIB
PEER_BYTES = 448 * MIB
NETWORK_BYTES = 512 * MIB
_NEIGHBOURS = 2
"""Maximum number of neighbouring stages: the previous and the next one."""


def context_bytes(config: JobConfig) -> int:
    """Bytes of the CUDA context and the pipeline's communicator on a GPU; 0 on a CPU."""
    job, stages = config.job, config.pipeline.num_stages
    if not job.cluster.device.is_gpu:
        return 0
    if stages == 1:
        return PROCESS_BYTES
    beside = min(_NEIGHBOURS, stages - 1)
    is_near = 2 * config.devices_per_stage <= job.cluster.devices_per_node
    return PROCESS_BYTES + _of_ranks(stages) + (beside * PEER_BYTES if is_near else NETWORK_BYTES)


def communicator_bytes(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> int:
    """Bytes of the communicators of a layer under a strategy inside a stage."""
    if not config.job.cluster.device.is_gpu:
        return 0
    load = layer_load(layer_profile(layer_type, strategy, config), strategy, config)
    groups = {
        traffic_group(each.over, dimension, strategy, config.devices_per_stage)
        for dimension in strategy.dimensions
        for each in dimension.traffic(load)
    }
    return sum(_of_ranks(group.size) for group in groups if group.size > 1)


def slack_fraction(job: Job) -> float:
    """Reserved over allocated memory minus one, measured or assumed; 0 on a CPU, whose allocator reserves nothing."""
    if not job.cluster.device.is_gpu:
        return 0.0
    measured = job.profile.reserved_over_allocated
    return job.execution.reserve if measured is None else measured - 1


def apart_slack(job: Job) -> float:
    """The slack that bytes outside torch's allocator do not have (`Execution.kept_apart`); 0 if none lie there."""
    return slack_fraction(job) if job.execution.kept_apart else 0.0


def counted_bytes(apart_bytes: NDArray[np.int64], job: Job) -> NDArray[np.int64]:
    """Bytes outside torch's allocator divided by 1 + slack, to compare them with a budget that is divided so."""
    slack = apart_slack(job)
    return apart_bytes - (slack / (1 + slack) * apart_bytes).astype(np.int64)


def counted_context_bytes(config: JobConfig) -> int:
    """Bytes of `context_bytes` as `counted_bytes`."""
    return int(counted_bytes(np.array(context_bytes(config)), config.job))


def _of_ranks(count: int) -> int:
    return GROUP_BYTES if count > 2 else PAIR_BYTES
