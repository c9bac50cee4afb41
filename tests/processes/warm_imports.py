"""What processes of the tests' runs import, 4 s of CPU: for the process that is forked in place of starting them.

Nothing of it is garbage, so collections in forks leave it alone and copy none of its pages.
"""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # as launchers set it, and read while torch is imported

import steelyard.planning.elastic
import steelyard.processes.elastic  # torchrun
import steelyard.profiler.measure
import steelyard.runtime.parity
import steelyard.runtime.train  # noqa: F401

IMPORTED_IN = os.getpid()

gc.collect()
gc.freeze()
