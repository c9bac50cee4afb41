"""The twin of sharded data parallelism: samples come divided, and `fully_shard` shards what a layer keeps."""

from steelyard.modules.dimensions.twin import Twin

TWIN = Twin()
