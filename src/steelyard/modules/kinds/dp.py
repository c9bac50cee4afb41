"""The twin of data parallelism: samples come divided, replicas sum gradients (`steelyard.modules.replicated`)."""

from steelyard.modules.kinds.twin import Twin

TWIN = Twin()
