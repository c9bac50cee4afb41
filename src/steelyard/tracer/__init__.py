"""Count the work and memory of a real layer on fake tensors, and write profiles."""
