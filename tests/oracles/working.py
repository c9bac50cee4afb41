"""What a stage holds as each of its layers works, straight from the definition in `steelyard.cost.working`."""

from collections.abc import Sequence

from steelyard.cost.tables import CostTables
from steelyard.cost.working import WorkingBytes


def stage_bytes(
    tables: CostTables, working: WorkingBytes, stage: int, span: tuple[int, int], strategies: Sequence[int]
) -> int:
    """Bytes at the fullest moment of a stage that holds the layers of a span; strategies are of all layers."""
    places = [(int(layer == span[1] - 1), tables.layers[layer], strategies[layer]) for layer in range(*span)]
    held = working.held_bytes(tables.pipeline.in_flight(stage))
    total, freed, most = sum(int(held[place]) for place in places), 0, 0
    for index in reversed(range(len(places))):
        before = [place for place in places[:index] if working.reduced_bytes[place] >= 0]
        behind = [place for place in places[index + 1 :] if working.reduced_bytes[place] >= 0]
        own, is_sharded = places[index], working.reduced_bytes[places[index]] >= 0
        ahead = int(working.ahead_bytes[before[-1]]) if before and is_sharded else 0
        first = behind or [place for place in places if working.reduced_bytes[place] >= 0 and working.reduces_again]
        reduced = int(working.reduced_bytes[first[0]]) if first else 0
        taken = int(working.working_bytes[own]) + reduced
        if is_sharded:
            taken = max(taken, int(working.reducing_bytes[own]))
        most = max(most, total - freed + taken + ahead)
        freed += int(working.freed_bytes[own])
    return working.overhead_bytes[stage] + most
