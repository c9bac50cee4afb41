r"""Illegal and dominated strategies of each layer type, with the reasons that `explain` gives.

A strategy $s$ is dominated by $d$ for the layer type $k$ if $d$ can always replace $s$: with $t_{kd} \le t_{ks}$,
$u_{kd} \le u_{ks}$, $a_{kd} + n\,b_{kd} \le a_{ks} + n\,b_{ks}$ for the microbatches $n$ in flight on every stage, and
no resharding to it or from it more expensive. The dynamic program drops such strategies stage by stage (`layers`); here
a strategy must be dominated on all stages. The first of two equal strategies stays. Leaving a dominated strategy out
never changes the best step time within any budget.

| symbol        | name             | unit  | meaning                                       |
|---------------|------------------|-------|-----------------------------------------------|
| $t$           | `time_s`         | s     | one microbatch                                |
| $a$, $b$, $u$ | see `CostTables` | bytes | static, per microbatch in flight, short-lived |
| $n$           | `in_flight`      | –     | microbatches alive on a stage                 |
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from steelyard.cost.tables import LAST, CostTables
from steelyard.plan.choices import StrategyVerdict
from steelyard.plan.strategy import Strategy
from steelyard.search.layers import columns_no_larger

NOT_ALLOWED = "the tables do not allow it"


def strategy_verdicts(
    tables: CostTables, why_illegal: Callable[[int, Strategy], str | None] = lambda *_: None
) -> tuple[StrategyVerdict, ...]:
    """Return a verdict for each layer type and strategy of a configuration.

    ``why_illegal`` gives the reason for the index of a layer type and a strategy.
    """
    dominator = dominators(tables)
    return tuple(
        _verdict(tables, layer_type, index, int(dominator[layer_type, index]), why_illegal)
        for layer_type, name in enumerate(tables.layer_types)
        if not name.endswith(LAST)
        for index in range(len(tables.strategies))
    )


def dominators(tables: CostTables) -> NDArray[np.int64]:
    """Return [K, S] an undominated strategy that dominates this one; −1 if it is undominated or illegal itself."""
    found = np.full(tables.legal.shape, -1, dtype=np.int64)
    for layer_type, beats in enumerate(_beats(tables)):
        beaten = beats.any(axis=0)
        for index in np.flatnonzero(beaten):
            found[layer_type, index] = np.flatnonzero(beats[:, index] & ~beaten)[0]
    return found


def _beats(tables: CostTables) -> NDArray[np.bool_]:
    """Return [K, S, S] whether the first can always replace the second; of two equal ones, the one listed first."""
    may_beat = tables.legal[:, :, None] & tables.legal[:, None, :] & ~np.eye(len(tables.strategies), dtype=bool)
    for table in (tables.time_s, tables.transient_bytes):
        may_beat &= table[:, :, None] <= table[:, None, :]
    may_beat &= _no_dearer_switches(tables)
    for in_flight in {tables.pipeline.in_flight(stage) for stage in range(tables.pipeline.num_stages)}:
        num_bytes = tables.held_bytes(in_flight)
        may_beat &= num_bytes[:, :, None] <= num_bytes[:, None, :]
    for side in tables.cross_layer_inputs:
        as_source = np.all(side.seconds[:, None, :] <= side.seconds[None, :, :], axis=2)
        as_reader = np.all(side.seconds[:, :, None] <= side.seconds[:, None, :], axis=0)
        may_beat[tables.layers[side.source]] &= as_source
        may_beat[sorted({tables.layers[reader] for reader in side.readers})] &= as_reader
    mutual = may_beat & may_beat.transpose(0, 2, 1)
    return np.asarray(may_beat & (~mutual | np.triu(np.ones(may_beat.shape[1:], dtype=bool), k=1)))


def _no_dearer_switches(tables: CostTables) -> NDArray[np.bool_]:
    """Return [K, S, S] whether resharding after the first costs no legal receiver more than after the second, and
    resharding to the first costs the layer type no more than to the second."""
    switches = tables.switches
    paid = np.where(tables.legal[:, None, :], switches, 0.0).transpose(0, 2, 1)
    as_sender = columns_no_larger(paid.reshape(-1, len(tables.strategies)))
    received = switches[:, tables.legal.any(axis=0), :]
    return as_sender & np.stack([columns_no_larger(each) for each in received])


def _verdict(
    tables: CostTables, layer_type: int, index: int, dominator: int, why_illegal: Callable[[int, Strategy], str | None]
) -> StrategyVerdict:
    name, strategy = tables.layer_types[layer_type], tables.strategies[index]
    if not tables.legal[layer_type, index]:
        reason = why_illegal(layer_type, strategy) or NOT_ALLOWED
        return StrategyVerdict(kind=name, strategy=str(strategy), verdict="illegal", reason=reason)
    if dominator >= 0:
        reason = _compared(tables, layer_type, index, dominator)
        return StrategyVerdict(kind=name, strategy=str(strategy), verdict="dominated", reason=reason)
    return StrategyVerdict(kind=name, strategy=str(strategy), verdict="undominated")


def _compared(tables: CostTables, layer_type: int, index: int, dominator: int) -> str:
    """Say in which quantities the dominating strategy is better; it is worse in none."""
    better = [
        name
        for name, table in (
            ("time", tables.time_s),
            ("static memory", tables.static_bytes),
            ("activations", tables.activation_bytes),
            ("working set", tables.transient_bytes),
        )
        if table[layer_type, dominator] < table[layer_type, index]
    ]
    of = tables.strategies[dominator]
    return f"{of} needs less {' and '.join(better)} and no more of anything else" if better else f"{of} costs the same"
