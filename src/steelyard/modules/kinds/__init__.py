"""The twin of each kind of parallelism: one layer made so on the axes of a mesh."""
