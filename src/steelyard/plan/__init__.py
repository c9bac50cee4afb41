"""The decision: a strategy per layer, stages, microbatches and schedule; checks itself; versioned JSON."""
