"""Carries a plan out: mesh, sharding, pipeline and data, on stock PyTorch."""
