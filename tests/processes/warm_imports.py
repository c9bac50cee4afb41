"""Imports (4 s of CPU) of the test runs, for the process that is forked instead of starting new ones.

The imported objects are excluded from garbage collection, so collections in forks copy none of their pages.
"""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # as launchers set it, and read while torch is imported

import steelyard.integrations.run
import steelyard.planning.elastic
import steelyard.processes.elastic  # torchrun
import steelyard.profiler.measure
import steelyard.runtime.elastic_plan
import steelyard.runtime.parity  # noqa: F401

IMPORTED_IN = os.getpid()

gc.collect()
gc.freeze()
