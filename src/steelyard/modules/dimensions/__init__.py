"""The twins of the parallelism dimensions: each makes a layer so on a mesh axis. One for each of
`steelyard.plan.dimensions`.

What becomes of states over ranks that divide samples is said in `data_parallel` here, for all dimensions alike.
"""

from steelyard.modules.dimensions import cp, dp, ep, fsdp, tp
from steelyard.modules.dimensions.ep import exchange_alone, take_imbalance
from steelyard.modules.dimensions.twin import Division, Twin

TWINS: dict[str, Twin] = {"tp": tp.TWIN, "cp": cp.TWIN, "ep": ep.TWIN, "dp": dp.TWIN, "fsdp": fsdp.TWIN}
"""By the name of the dimension, in the order in which they divide a layer."""

__all__ = ["TWINS", "Division", "Twin", "exchange_alone", "take_imbalance"]
