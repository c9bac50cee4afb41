"""The longest sequences that fit: doubled while they do, then narrowed down between the last two lengths.

Activations grow with the tokens and states do not, so what fits at one length fits at every shorter one that is divided
as evenly; all lengths tried are multiples of `STEP_TOKENS`. The model is traced anew at each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.cost.setting import Job
from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.planning.choose import PlanningResult, plan_job
from steelyard.planning.problem import PlanOptions

STEP_TOKENS = 1024
FIRST_TOKENS = 8192
MOST_TOKENS = 2**24
NARROWINGS = 3
"""The length found is within an eighth of the longest that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTrial:
    """A length that was tried: tokens/s of its best plan, or None and why there is none."""

    seq_len: int
    tokens_per_s: float | None
    reason: str
    result: PlanningResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestSequence:
    """The lengths tried, rising, the plan of the longest that fits, and what binds beyond it."""

    trials: tuple[LengthTrial, ...]
    stopped: str
    result: PlanningResult


def longest_sequence(
    make: Callable[[int], Job],
    chain: ModelChain,
    options: PlanOptions,
    *,
    top: int,
    progress: Callable[[str], None] = lambda _: None,
) -> LongestSequence:
    """The plan of the longest sequences that fit; ``make`` gives the job of a length.

    Where nothing fits at `FIRST_TOKENS`, shorter ones are tried down to `STEP_TOKENS`, whose result it then is.
    Raises `UserError` for a model whose length is fixed.
    """
    _check_free(chain)
    most = min(chain.max_seq_len, MOST_TOKENS) if chain.layout.learned_positions else MOST_TOKENS
    trials: dict[int, LengthTrial] = {}

    def fits(seq_len: int) -> bool:
        progress(f"planning for sequences of {seq_len} tokens")
        trials[seq_len] = _try(make(seq_len), options, top)
        return trials[seq_len].tokens_per_s is not None and trials[seq_len].result.has_margin

    length = min(FIRST_TOKENS, most)
    while not fits(length):
        if length <= STEP_TOKENS:
            pressed = any(trial.tokens_per_s is not None for trial in trials.values())
            words = "no plan leaves the memory margin free" if pressed else "nothing fits"
            return _longest(trials, f"{words}, however short the sequences")
        length //= 2
    while 2 * length <= most and 2 * length not in trials and fits(2 * length):
        length *= 2
    if 2 * length > most:
        return _longest(trials, f"{most} tokens are the most that {_whose_limit(chain)}")
    step = length // 2
    for _ in range(NARROWINGS):
        if step < STEP_TOKENS:
            break
        length += step if fits(length + step) else 0
        step //= 2
    return _longest(trials, _binding(trials))


def _check_free(chain: ModelChain) -> None:
    if chain.family.task.reads_text:
        return
    raise UserError(
        field="--seq-len",
        found=f"max for {chain.name}",
        expected=f"{chain.max_seq_len}, the patches of an image",
        hint=f"give --seq-len {chain.max_seq_len}",
    )


def _whose_limit(chain: ModelChain) -> str:
    return "the model has positions for" if chain.layout.learned_positions else "are tried"


def _binding(trials: dict[int, LengthTrial]) -> str:
    """What the shortest length that does not fit lacks."""
    short = min(length for length, trial in trials.items() if not (trial.tokens_per_s and trial.result.has_margin))
    if trials[short].tokens_per_s is not None:
        return f"{short} tokens fit under pressure alone: no plan of theirs leaves the memory margin free"
    return f"{short} tokens do not fit: {trials[short].reason}"


def _longest(trials: dict[int, LengthTrial], stopped: str) -> LongestSequence:
    ordered = tuple(trials[length] for length in sorted(trials))
    fitting = [trial for trial in ordered if trial.tokens_per_s is not None]
    fitting = [trial for trial in fitting if trial.result.has_margin] or fitting
    return LongestSequence(trials=ordered, stopped=stopped, result=(fitting[-1] if fitting else ordered[0]).result)


def _try(job: Job, options: PlanOptions, top: int) -> LengthTrial:
    result = plan_job(job, options, top=top)
    prediction = result.plan.prediction if result.plan else None
    speed = prediction.tokens_per_s_per_device * job.cluster.num_devices if prediction else None
    return LengthTrial(seq_len=job.seq_len, tokens_per_s=speed, reason=result.miss_text, result=result)
