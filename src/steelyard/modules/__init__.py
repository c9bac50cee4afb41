"""The real modules of a model: built from its config, with tensor parallelism as a strategy says."""

from steelyard.modules import any_model

__all__ = ["any_model"]
