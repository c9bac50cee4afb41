"""What of a pin no strategy could have, whatever the stages and whatever is searched: asked of the kinds that it names.

Each thing that is wanted is tried alone, then all together, as the smallest strategy that has it. All that is asked for
is the chain of layers, so that a pin is refused before the model is traced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

from steelyard.cost.setting import Job
from steelyard.errors import InvalidPlanError, UserError
from steelyard.hardware import Cluster, MixedCluster
from steelyard.model.chain import LayerKind, ModelChain
from steelyard.plan.kinds import Kind, kind_named, level_kinds, variants
from steelyard.plan.kinds.kind import Batch, Divides, Level
from steelyard.plan.legality import illegal_reason
from steelyard.plan.strategy import Remat, Strategy, parse_parallel
from steelyard.planning.pins import Pin

SHOWN_REASONS = 3
Wanted = tuple[tuple[str, str], ...]
_MOST_TRIED = 64
"""Degrees up to it are tried to see whether a layer has anything that a kind could divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is planned, as far as it is known before any layer has a time."""

    chain: ModelChain
    num_devices: int | None
    global_batch: int | None
    seq_len: int

    @classmethod
    def of(cls, job: Job) -> "Request":
        """What a job asks for."""
        found = {"global_batch": job.global_batch, "seq_len": job.seq_len}
        return cls(chain=job.chain, num_devices=job.cluster.num_devices, **found)


def refuse_impossible(
    pins: Sequence[Pin],
    chain: ModelChain,
    cluster: Cluster | MixedCluster | None,
    global_batch: int | None,
    seq_len: int,
) -> None:
    """Raises `UserError` for the first pin that no strategy can have, with the reasons.

    Of a number of devices or samples that is searched for, None, none is too few.
    """
    num_devices = cluster.num_devices if cluster else None
    request = Request(chain=chain, num_devices=num_devices, global_batch=global_batch, seq_len=seq_len)
    for pin in pins:
        if reasons := impossible(request, pin):
            raise unmet(pin, reasons)


def unmet(pin: Pin, reasons: Sequence[str]) -> UserError:
    """What to tell the user of a pin that no strategy meets."""
    return UserError(
        field="--pin",
        found=repr(pin.text),
        expected=f"what some strategy of these layers may have ({'; '.join(reasons[:SHOWN_REASONS])})",
        hint="pin something else, or leave these layers to the search",
    )


def impossible(job: Request, pin: Pin) -> tuple[str, ...]:
    """Why no strategy can have what the pin asks for; empty where no such strategy is illegal by itself."""
    named = {kind for key, value in pin.wanted if value != "1" and (kind := _kind_of(key)) is not None}
    serves = tuple(f"{kind}: {reason}" for kind in _by_name(named) if (reason := kind.serves(job.chain)))
    if serves:
        return serves
    parts = [*((pair,) for pair in pin.wanted), pin.wanted]
    return next((reasons for wanted in parts if (reasons := _reasons(job, pin, wanted))), ())


def reasons_of(layers: Sequence[LayerKind], reason_of: Callable[[LayerKind], str | None]) -> tuple[str, ...]:
    """What forbids a strategy, naming the layers where it is not the same for all of them."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        if (reason := reason_of(layer)) is not None:
            found.setdefault(reason, []).append(layer.name)
    return tuple(
        reason if len(names) == len(layers) else f"for the {', '.join(names)} layers: {reason}"
        for reason, names in found.items()
    )


def _by_name(kinds: set[Kind]) -> list[Kind]:
    return sorted(kinds, key=lambda kind: kind.name)


def _reasons(job: Request, pin: Pin, wanted: Wanted) -> tuple[str, ...]:
    strategy = _smallest(wanted)
    if strategy is None or not strategy.levels:
        return ()
    layers = [job.chain.kinds[each] for each in dict.fromkeys(job.chain.layers[i] for i in _covered(job, pin))]
    if pin.first is None and not all(kind.is_level for kind in strategy.kinds):
        layers = [layer for layer in layers if _is_divisible(layer, wanted, job)] or layers
    if found := reasons_of(layers, lambda layer: _illegal(layer, strategy, wanted, job)):
        return found
    if job.num_devices and job.num_devices % strategy.num_devices:
        return (f"{strategy} takes {strategy.num_devices} ranks, which do not divide the {job.num_devices} devices",)
    return ()


def _covered(job: Request, pin: Pin) -> list[int]:
    return [layer for layer in range(job.chain.num_layers) if pin.covers(layer)]


def _kind_of(key: str) -> Kind | None:
    """The kind of parallelism that a pin's key is about."""
    if key in variants():
        return variants()[key][0]
    return next((kind for kind in level_kinds() if kind.name == key), None)


def _smallest(wanted: Wanted) -> Strategy | None:
    """The strategy of fewest devices that has all that is wanted, None where its parts contradict each other."""
    levels = [Level(kind=kind_named(key), degree=int(value)) for key, value in wanted if _is_degree(key, value)]
    levels += [level for key, value in wanted if key == "parallel" for level in parse_parallel(value)]
    chosen = {key: variants()[key][1].pin[value] for key, value in wanted if key in variants()}
    for key, value in chosen.items():
        kind, variant = variants()[key]
        if value == variant.default:
            continue
        if kind.is_level and all(level.kind is not kind for level in levels):
            levels.append(Level(kind=kind, degree=2))
        if not kind.is_level and not any(level.kind.divides_data for level in levels):
            samples = next(each for each in level_kinds() if each.divides is Divides.SAMPLES)
            levels.append(Level(kind=samples, degree=int(value)))
    for order in permutations(levels):
        try:
            return Strategy.of(order, Remat.NONE, **chosen)
        except InvalidPlanError:
            continue
    return None


def _is_degree(key: str, value: str) -> bool:
    return value != "1" and any(kind.name == key for kind in level_kinds())


def _illegal(layer: LayerKind, strategy: Strategy, wanted: Wanted, job: Request) -> str | None:
    """Why a layer cannot be divided so; of samples, those of the whole batch, where it is them that are divided."""
    divides_samples = any((kind := _kind_of(key)) and kind.divides is Divides.SAMPLES for key, _ in wanted)
    samples = job.global_batch if divides_samples and job.global_batch else strategy.sample_degree
    return illegal_reason(layer, strategy, Batch(microbatch_samples=samples, seq_len=job.seq_len))


def _is_divisible(layer: LayerKind, wanted: Wanted, job: Request) -> bool:
    """Whether the kinds that take ranks of other levels could divide the layer at some degree."""
    beside = [key for key, _ in wanted if (kind := _kind_of(key)) and not kind.is_level]
    tried = (_smallest(((key, str(degree)),)) for key in beside for degree in range(2, _MOST_TRIED + 1))
    return any(each is not None and _illegal(layer, each, (), job) is None for each in tried)
