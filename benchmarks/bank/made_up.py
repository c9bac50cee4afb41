"""A profile as measured on CPU processes that share cores, with made-up seconds for layers that were traced."""

from steelyard.cost.job import Job
from steelyard.profiles.profile import CollectiveProfile, LayerProfile, MeasuredTime, Profile, ShardingTime


def measured_profile(job: Job) -> Profile:
    """A profile as measured on CPU processes that share cores: made-up seconds for the layers that were traced."""
    count = job.cluster.num_devices
    groups = [size for size in range(2, count + 1) if count % size == 0]
    rates = {"all_reduce": 1.1e9, "all_gather": 1.7e9, "reduce_scatter": 1.3e9, "all_to_all": 0.9e9, "send_recv": 2.9e9}
    return Profile(
        identity=job.profile.identity.model_copy(update={"method": "measured", "device": "cpu", "num_devices": count}),
        layers=tuple(_measured_layer(each) for each in job.profile.layers),
        collectives=tuple(
            CollectiveProfile(
                kind=collective,
                group_size=size,
                strided=strided,
                latency_s=(2e-4 + 1e-4 * strided) * size,
                bytes_per_s=rate / size,
                max_relative_error=0.1,
            )
            for collective, rate in rates.items()
            for size in groups
            for strided in (False, True)
            if not (strided and size == count)
        ),
        optimizer_s_per_param=3.1e-9,
        step_overhead_s=2.3e-3,
        sharding=tuple(ShardingTime(group_size=size, seconds=3.7e-4 * size) for size in groups),
        busy_speeds=tuple(1.0 + 0.6 * (count - busy) / count for busy in range(1, count + 1)),
    )


def _measured_layer(layer: LayerProfile) -> LayerProfile:
    choices = {each.remat for each in layer.recomputations}
    per_sample_s = layer.forward.matmul_flop.per_sample / 9.7e10 + 1e-4
    times = tuple(
        MeasuredTime(
            samples=samples,
            forward_s=3e-4 + per_sample_s * samples**0.98,
            backward_s=5e-4 + 2.1 * per_sample_s * samples**0.97,
            selective_s=0.2 * per_sample_s * samples if "selective" in choices else None,
            full_s=1.02 * per_sample_s * samples if "full" in choices else None,
        )
        for samples in (1, 2, 4, 8, 16)
    )
    return layer.model_copy(update={"times": times})
