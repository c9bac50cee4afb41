"""Textbook dynamic program: minimum time per strategy of the last layer and per megabyte of budget.

One stage only. Bytes are rounded up to whole steps, so its plans fit but may be slower than the best; transients are
left out. It is the benchmark for speed, and an exact check if sizes are whole steps.
"""

import numpy as np

from steelyard.cost.tables import CostTables


def least_seconds(tables: CostTables, budget_bytes: int, step_bytes: int = 10**6) -> float:
    """Least time of one microbatch over all layers within the budget; infinite if nothing fits."""
    cells = (budget_bytes - tables.overhead_bytes) // step_bytes + 1
    if cells <= 0:
        return float(np.inf)
    best = np.zeros((len(tables.strategies), cells))
    for layer, layer_type in enumerate(tables.layers):
        num_bytes = tables.static_bytes[layer_type] + tables.pipeline.in_flight(0) * tables.activation_bytes[layer_type]
        extended = np.full_like(best, np.inf)
        for strategy in np.flatnonzero(tables.legal[layer_type]):
            size = -(-int(num_bytes[strategy]) // step_bytes)
            if size >= cells:
                continue
            before = best[0, : cells - size].copy()
            if layer > 0:
                before += tables.switch_s[layer_type, 0, strategy]
                for previous in range(1, len(tables.strategies)):
                    switch = tables.switch_s[layer_type, previous, strategy]
                    np.minimum(before, best[previous, : cells - size] + switch, out=before)
            extended[strategy, size:] = before + tables.time_s[layer_type, strategy]
        best = extended
    return float(best.min())
