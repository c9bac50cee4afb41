"""Sentences about a plan: what it is compared with, and the names of its layers."""

from collections.abc import Iterable, Iterator, Sequence

from steelyard.model.chain import LayerRole, ModelChain
from steelyard.plan.prediction import Baseline, Prediction
from steelyard.units import format_bytes, format_seconds

SAME_SHARE = 5e-4
"""Step times that differ by less than this share are called the same."""
NO_STRATEGY = "has no legal strategy", "have no legal strategy"


def baseline_line(prediction: Prediction) -> str:
    """What is gained over the best of the plain plans, and what that is; empty where none was searched."""
    if not prediction.baselines:
        return ""
    missing = " and ".join(misfits(prediction.baselines))
    fitting = [(each.step_time_s, each) for each in prediction.baselines if each.step_time_s is not None]
    if not fitting:
        return f"{missing}: there is no plain plan"
    step_s, best = min(fitting, key=lambda pair: pair[0])
    gain = 1 - prediction.step_time_s / step_s
    words = against(gain, "as fast as")
    text = f"{words} the best plain plan, {best.name} ({best.strategies}; {best.setting}: {format_seconds(step_s)})"
    return f"{text}; {missing}" if missing else text


def against(gain: float, same: str) -> str:
    """``2.2% less time than``, or the words for what takes the same."""
    if abs(gain) <= SAME_SHARE:
        return same
    return f"{abs(gain):.1%} {'less' if gain > 0 else 'more'} time than"


def misfits(baselines: Iterable[Baseline]) -> Iterator[str]:
    """Which plain plans there are none of, and why: ``plain DDP and plain FSDP do not fit (2 GiB and 1 GiB short)``."""
    none = [each for each in baselines if each.step_time_s is None]
    for is_legal, one, several in ((True, "does not fit", "do not fit"), (False, *NO_STRATEGY)):
        alike = [each for each in none if (each.missing_bytes is not None) == is_legal]
        if alike:
            short = _listed([format_bytes(each.missing_bytes) for each in alike if each.missing_bytes is not None])
            verdict = (one if len(alike) == 1 else several) + (f" ({short} short)" if short else "")
            yield f"{_listed([each.name for each in alike])} {verdict}"


def _listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def layers_text(chain: ModelChain, first: int, last: int) -> str:
    """Consecutive layers by name, both ends included: ``embedding, blocks 0–6``."""
    has_embedding = chain.type_of(first).role is LayerRole.EMBEDDING
    has_head = chain.type_of(last).role is LayerRole.HEAD
    names = ["embedding"] if has_embedding else []
    start, end = first + has_embedding, last - has_head
    if start == end:
        names.append(chain.layer_name(start))
    elif start < end:
        words = chain.layer_name(start), chain.layer_name(end)
        numbers = [each.removeprefix("block ") for each in words]
        plain = all(each.isdigit() for each in numbers)
        names.append(f"blocks {'–'.join(numbers)}" if plain else " to ".join(words))
    return ", ".join([*names, *(["head"] if has_head else [])])
