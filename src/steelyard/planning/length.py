"""The longest sequences that fit: doubled while they do, then narrowed down between the last two lengths.

Activations grow with the tokens and states do not, so what fits at one length fits at every shorter one that is divided
as evenly; all lengths tried are multiples of `STEP_TOKENS`. The model is traced anew at each of them. Of no length the
tables are kept, which for hundreds of devices take a gigabyte: the one that is taken is planned once more.
"""

from collections.abc import Callable

from steelyard.cost.setting import Job
from steelyard.errors import UserError
from steelyard.model.chain import ModelChain
from steelyard.planning.problem import PlanOptions
from steelyard.planning.trial import Trial, Trials, try_job

STEP_TOKENS = 1024
FIRST_TOKENS = 8192
MOST_TOKENS = 2**24
NARROWINGS = 3
"""The length found is within an eighth of the longest that fits."""


def longest_sequence(
    make: Callable[[int], Job],
    chain: ModelChain,
    options: PlanOptions,
    *,
    top: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Trials:
    """The plan of the longest sequences that fit; ``make`` gives the job of a length.

    Where nothing fits at `FIRST_TOKENS`, shorter ones are tried down to `STEP_TOKENS`, whose result it then is.
    Raises `UserError` for a model whose length is fixed.
    """
    _check_free(chain)
    most = min(chain.max_seq_len, MOST_TOKENS) if chain.learned_positions else MOST_TOKENS
    trials: dict[int, Trial] = {}

    def fits(seq_len: int) -> bool:
        progress(f"planning for sequences of {seq_len} tokens")
        trials[seq_len], _ = try_job(make(seq_len), options, size=seq_len, top=top)
        return _fits(trials[seq_len])

    def longest(stopped: str) -> Trials:
        taken = max(trials.values(), key=_worth)
        _, result = try_job(make(taken.size), options, size=taken.size, top=top)
        tried = tuple(trials[length] for length in sorted(trials))
        return Trials(tried=tried, stopped=stopped, taken=taken, result=result)

    length = min(FIRST_TOKENS, most)
    while not fits(length):
        if length <= STEP_TOKENS:
            pressed = any(trial.tokens_per_s is not None for trial in trials.values())
            words = "no plan leaves the memory margin free" if pressed else "nothing fits"
            return longest(f"{words}, however short the sequences")
        length //= 2
    while 2 * length <= most and 2 * length not in trials and fits(2 * length):
        length *= 2
    if 2 * length > most:
        return longest(f"{most} tokens are the most that {_whose_limit(chain)}")
    step = length // 2
    for _ in range(NARROWINGS):
        if step < STEP_TOKENS:
            break
        length += step if fits(length + step) else 0
        step //= 2
    return longest(_binding(trials))


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
    return "the model has positions for" if chain.learned_positions else "are tried"


def _binding(trials: dict[int, Trial]) -> str:
    """What the shortest length that does not fit lacks."""
    short = min(length for length, trial in trials.items() if not _fits(trial))
    if trials[short].tokens_per_s is not None:
        return f"{short} tokens fit under pressure alone: no plan of theirs leaves the memory margin free"
    return f"{short} tokens do not fit: {trials[short].reason}"


def _fits(trial: Trial) -> bool:
    """Whether a plan of this length leaves the margin free."""
    return trial.tokens_per_s is not None and trial.has_margin


def _worth(trial: Trial) -> tuple[bool, bool, int]:
    """The longest that leaves the margin free before the longest that fits, and that before the shortest of all."""
    has_plan = trial.tokens_per_s is not None
    return _fits(trial), has_plan, trial.size if has_plan else -trial.size
