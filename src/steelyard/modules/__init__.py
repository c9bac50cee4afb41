"""Modules of a model: built from its config, with tensor parallelism as each strategy specifies."""
