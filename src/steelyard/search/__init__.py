"""Finds plans: strategy space (decision tree), frontiers, per-layer dynamic program, partition."""
