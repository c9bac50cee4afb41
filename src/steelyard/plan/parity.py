"""How near the numbers of a plan must come to those of one process to count as the same."""

TOLERANCES = {"fp32": (1e-5, 1e-4), "fp16": (1e-3, 5e-2), "bf16": (5e-3, 3e-1)}
"""By precision, the largest relative difference of a loss, and the largest difference of an entry of a gradient as a
share of the largest entry of its tensor. In bf16 an entry may be off by rounding, and a token whose experts are nearly
equal may take another one: up to 0.24 was seen over the families (2 steps, 4 processes)."""
