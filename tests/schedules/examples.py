"""Pipeline configurations by the names of their schedules."""

from steelyard.schedules import PipelineConfig, find_schedule


def pipeline(
    num_stages: int = 1, num_microbatches: int = 1, schedule: str = "1f1b", num_chunks: int = 1
) -> PipelineConfig:
    return PipelineConfig(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        schedule=find_schedule(schedule),
    )
