"""A plan in sentences: the decision, what it is predicted to cost, and the names of its parts and layers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from steelyard.model.chain import LayerRole, ModelChain
from steelyard.plan.prediction import Baseline, Prediction
from steelyard.units import format_bytes, format_plural, format_seconds

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan

SAME_SHARE = 5e-4
"""Step times that differ by less than this share are called the same."""
NO_STRATEGY = "has no legal strategy", "have no legal strategy"


def plan_lines(plan: "Plan") -> Iterator[str]:
    """The decision, a line for every run of equal layers, and how sure it is that no plan is better."""
    chain = plan.chain()
    yield headline(plan)
    for index, part in enumerate(plan.parts):
        for run in part.runs:
            ranks = f"ranks {part.ranks[0]}–{part.ranks[1]}"
            yield f"stage {part_name(plan, index)}, {ranks}: {layers_text(chain, *run.layers)}: {run.strategy}"
    if plan.prediction is not None:
        yield f"{plan.prediction.certificate}; costs {plan.prediction.costs}"


def headline(plan: "Plan") -> str:
    """The decision in one sentence."""
    stages = format_plural(plan.num_stages, "stage") + (f" ({plan.schedule})" if plan.num_stages > 1 else "")
    if plan.num_chunks > 1:
        stages += f" of {format_plural(plan.num_chunks, 'chunk')}"
    microbatches = format_plural(plan.num_microbatches, "microbatch", "microbatches")
    text = (
        f"{plan.model.name} on {plan.cluster}: {stages}, {microbatches} of "
        f"{plan.microbatch_samples} × {plan.seq_len} tokens, {plan.precision}"
    )
    prediction, split = plan.prediction, plan.model.split
    if split is not None and split.features is not None:
        resting = f"all but {' and '.join(split.resting)}, which rest" if split.resting else "everything"
        text += f"\n{split.features.words(plan.seq_len)}" + ("" if plan.model.frozen else f"\ntrained: {resting}")
    if plan.model.frozen is not None:
        text += f"\nfrozen: {plan.model.frozen}"
    if (shared := plan.shared_heads(plan.chain())) is not None:
        degree, name, size = shared
        text += f"\ntp {degree} over {size} {name}: every rank holds the weights of all {size} and computes with one"
    if prediction is None:
        return text
    compared = baseline_line(prediction)
    mfu = "" if prediction.mfu is None else f", MFU {prediction.mfu:.1%}{_counted(prediction)}"
    return (
        f"{text}\n{format_seconds(prediction.step_time_s)} a step, "
        f"{prediction.tokens_per_s_per_device:,.0f} tokens/s/device{mfu}, "
        f"{_fullest(prediction)} per device"
        + (f" ({prediction.margin_text})" if prediction.margin_text else "")
        + f"\n{prediction.accuracy}"
        + (f"\n{compared}" if compared else "")
        + (f"\n{plan.training}" if plan.training else "")
    )


def _fullest(prediction: Prediction) -> str:
    """The bytes of the device with least room left, and those of its budget."""
    taken, budget = prediction.stages[prediction.fullest].total_bytes, prediction.stage_budgets()[prediction.fullest]
    return f"{format_bytes(taken)} of {format_bytes(budget)}"


def _counted(prediction: Prediction) -> str:
    return f" ({prediction.mfu_attention} attention)" if prediction.mfu_attention else ""


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


def part_name(plan: "Plan", index: int) -> str:
    """The number of the stage of a part of the pipeline and, interleaved, which chunk of it."""
    chunk, stage = divmod(index, plan.num_stages)
    return str(stage) if plan.num_chunks == 1 else f"{stage}, chunk {chunk}"


def layers_text(chain: ModelChain, first: int, last: int) -> str:
    """Consecutive layers by name, both ends included: ``embedding, blocks 0–6``."""
    has_embedding = chain.kind_of(first).role is LayerRole.EMBEDDING
    has_head = chain.kind_of(last).role is LayerRole.HEAD
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
