"""The twin of data parallelism: samples come divided, replicas sum gradients (`steelyard.modules.replicated`)."""

from steelyard.modules.dimensions.twin import Twin

TWIN = Twin()
