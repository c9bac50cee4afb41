r"""Memory of a GPU that no allocator of tensors accounts for: the process, and the buffers of its NCCL communicators.

A rank has a communicator for every group that its layers' collectives go over, and one for the stages of a pipeline:

| bytes             | of                                                                                       |
|-------------------|------------------------------------------------------------------------------------------|
| `PROCESS_BYTES`   | context and libraries of the process                                                     |
| `PAIR_BYTES`      | a communicator of two ranks                                                              |
| `GROUP_BYTES`     | one of more, however many: rings and trees have as many neighbours                       |
| `PEER_BYTES`      | a stage beside it in the node                                                            |
| `NETWORK_BYTES`   | those in other nodes together                                                            |

Source: NVIDIA/nccl issues 964 (544 and 688 MiB on 4 A100), 986 (number of ranks), 1685 (448 MiB for each of 7 peers)
and 2363 (512 MiB for the network); pull request 2366 (484 MiB of a process). Issue 111 of LUMI-AI-Guide has 0.65
GiB for each communicator of RCCL. Not modelled: what an all-to-all takes for each rank of the node (3 GiB in issue
1685; strategies that differ by so much are hard to search), groups that engines make for barriers and norms, buffers of
DeepEP, and that Hopper's links take more channels (verl pull request 6408: 7 GB for tp 2, pp 2, dp 2 of Megatron on 8
H100). Published runs do not decide: of those whose whole memory is known all else is predicted up to 5 GiB too high.
"""

from steelyard.cost.job import JobConfig
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
"""Stages before and behind."""


def context_bytes(config: JobConfig) -> int:
    """Bytes of the process and its pipeline's communicator on a GPU; a CPU has none of its own."""
    job, stages = config.job, config.pipeline.num_stages
    if not job.cluster.device.is_gpu:
        return 0
    if stages == 1:
        return PROCESS_BYTES
    beside = min(_NEIGHBOURS, stages - 1)
    is_near = 2 * config.devices_per_stage <= job.cluster.devices_per_node
    return PROCESS_BYTES + _of_ranks(stages) + (beside * PEER_BYTES if is_near else NETWORK_BYTES)


def communicator_bytes(layer_type: LayerType, strategy: Strategy, config: JobConfig) -> int:
    """Bytes of the communicators that a layer under a strategy uses inside a stage."""
    if not config.job.cluster.device.is_gpu:
        return 0
    load = layer_load(layer_profile(layer_type, strategy, config), strategy, config)
    groups = {
        traffic_group(each.over, dimension, strategy, config.devices_per_stage)
        for dimension in strategy.dimensions
        for each in dimension.traffic(load)
    }
    return sum(_of_ranks(group.size) for group in groups if group.size > 1)


def _of_ranks(count: int) -> int:
    return GROUP_BYTES if count > 2 else PAIR_BYTES
