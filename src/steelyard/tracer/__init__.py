"""Counts a real layer on fake tensors and writes profiles."""
