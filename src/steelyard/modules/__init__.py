"""The real modules of a model: built from its config, with tensor parallelism as a strategy says."""
