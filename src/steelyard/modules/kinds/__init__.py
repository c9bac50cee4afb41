"""Makes one layer so on an axis of a mesh: a module for each kind of parallelism."""
