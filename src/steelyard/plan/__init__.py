"""The plan: a strategy per layer, stages, microbatches and schedule, as versioned JSON that checks itself."""
