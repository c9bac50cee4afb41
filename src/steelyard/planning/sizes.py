"""Search over sizes: the largest useful global batch, the longest sequence that fits, the fewest devices that hold a
plan. Each calls `Study.plan` for one size after another.

The batch is doubled while throughput grows and it fits. The published planners grow it until memory is full. With
unlimited microbatches, memory never is full: throughput only approaches a limit, because the per-step overhead is
spread over more and more samples. So growth also ends if doubling gains almost nothing (`LEAST_GAIN`).

The sequence is doubled while it fits, then narrowed down between the last two lengths. Activations grow with the tokens
and states do not, so if one length fits, every shorter one that is divided as evenly fits too. All lengths tried are
multiples of `STEP_TOKENS`. The model is traced again at each of them. No tables are kept, because they take a gigabyte
for hundreds of devices, so the chosen length is planned once more.

Devices are tried from the fewest upwards: divisors of a node on one node, then whole nodes.

Source: Miao et al. 2022, Algorithm 1 (the outer loop over batch sizes).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from steelyard.errors import UserError
from steelyard.planning.choose import PlanningResult, plan_request
from steelyard.planning.request import PlanRequest
from steelyard.planning.variants import Study, Variant, device_counts, on_devices
from steelyard.planning.why_not import refuse_impossible
from steelyard.units import format_count, format_plural

LEAST_GAIN = 0.01
"""Minimum throughput gain, as a fraction, for which the batch is doubled."""
MAX_DOUBLINGS = 10
"""Maximum number of doublings, up to about a thousand samples per device."""
STEP_TOKENS = 1024
FIRST_TOKENS = 8192
MOST_TOKENS = 2**24
NARROWINGS = 3
"""Number of narrowing steps. The length found is within an eighth of the longest that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A size of a job that was tried, with the tokens/s of its best plan, or None and the reason.

    It does not keep the result of the search, because the tables of many sizes take gigabytes.
    """

    size: int
    """Samples per step, or tokens per sample."""
    tokens_per_s: float | None
    reason: str
    has_margin: bool
    """Whether the plan leaves the reserved memory fraction of the job free."""

    @property
    def text(self) -> str:
        """Description of the outcome."""
        if self.tokens_per_s is None:
            return f"does not fit: {self.reason}"
        return f"{format_count(self.tokens_per_s)} tokens/s" + ("" if self.has_margin else ", under pressure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Sizes that were tried, smallest first, the reason to stop, and the chosen one with its plan."""

    tried: tuple[Trial, ...]
    stopped: str
    taken: Trial
    result: PlanningResult

    def lines(self, words: str) -> list[str]:
        """Return a line for each size that was tried, formatted by ``words``, and the reason to stop."""
        found = []
        for trial in self.tried:
            taken = " (taken)" if trial is self.taken and trial.tokens_per_s is not None else ""
            found.append(f"{words.format(trial.size)}: {trial.text}{taken}")
        return [*found, f"stopped: {self.stopped}"]


def _try(study: Study, variant: Variant, size: int) -> tuple[Trial, PlanningResult | None]:
    """Return the trial of a variant whose batch or length is ``size``, and the result of its search; None if the size
    leaves no legal plan."""
    result = study.plan(variant)
    if isinstance(result, str):
        return Trial(size=size, tokens_per_s=None, reason=result, has_margin=False), None
    prediction = result.plan.prediction if result.plan else None
    speed = prediction.tokens_per_s_per_device * study.request.cluster.num_devices if prediction else None
    return Trial(size=size, tokens_per_s=speed, reason=result.miss_text, has_margin=result.has_margin), result


def largest_batch(study: Study, *, progress: Callable[[str], None] = lambda _: None) -> Trials:
    """Return the plan of the largest global batch before doubling gains less than `LEAST_GAIN` or nothing fits.

    It starts from one sample per device and halves that until something fits. The batch of the study's job is ignored.
    """

    def attempt(count: int) -> tuple[Trial, PlanningResult | None]:
        progress(f"planning for a global batch of {count}")
        larger = Variant(name=f"{count} samples", change=lambda request: replace(request, global_batch=count))
        return _try(study, larger, count)

    best, result = attempt(study.job.cluster.num_devices)
    trials = [best]

    def grown(stopped: str) -> Trials:
        return _trials(trials, stopped, best, result, option="--global-batch")

    while best.tokens_per_s is None and best.size % 2 == 0:
        best, smaller = attempt(best.size // 2)
        result = smaller or result
        trials.append(best)
    if best.tokens_per_s is None:
        return grown("nothing fits, however small the batch")
    if len(trials) > 1:
        return grown(f"{trials[-2].size} samples do not fit")
    for _ in range(MAX_DOUBLINGS):
        trial, larger = attempt(2 * best.size)
        trials.append(trial)
        if trial.tokens_per_s is None:
            return grown(f"{trial.size} samples do not fit")
        if best.has_margin and not trial.has_margin:
            return grown(f"{trial.size} samples only fit under pressure: no plan leaves the memory margin free")
        gain = trial.tokens_per_s / best.tokens_per_s - 1
        if gain < LEAST_GAIN:
            return grown(f"{trial.size} samples change throughput by {gain:+.2%} only")
        best, result = trial, larger
    return grown(f"{MAX_DOUBLINGS} doublings were tried")


def longest_sequence(request: PlanRequest, *, progress: Callable[[str], None] = lambda _: None) -> Trials:
    """Return the plan of the longest sequences that fit.

    If nothing fits at `FIRST_TOKENS`, shorter lengths are tried down to `STEP_TOKENS`, whose result is returned if
    nothing fits at all. Raises `UserError` for a model with a fixed length.
    """
    chain = request.chain
    if not chain.family.task.reads_text:
        raise UserError(
            field="--seq-len",
            found=f"max for {chain.name}",
            expected=f"{chain.max_seq_len}, the patches of an image",
            hint=f"give --seq-len {chain.max_seq_len}",
        )
    most = min(chain.max_seq_len, MOST_TOKENS) if chain.learned_positions else MOST_TOKENS
    trials: dict[int, Trial] = {}
    study = Study(request)

    def attempt(seq_len: int) -> tuple[Trial, PlanningResult | None]:
        longer = Variant(name=f"{seq_len} tokens", change=lambda request: replace(request, seq_len=seq_len))
        refuse_impossible(longer.change(request))
        return _try(study, longer, seq_len)

    def fits(seq_len: int) -> bool:
        progress(f"planning for sequences of {seq_len} tokens")
        trials[seq_len], _ = attempt(seq_len)
        return _fits(trials[seq_len])

    def longest(stopped: str) -> Trials:
        taken = max(trials.values(), key=_worth)
        return _trials(trials.values(), stopped, taken, attempt(taken.size)[1], option="--seq-len")

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
        whose = "the model has positions for" if chain.learned_positions else "are tried"
        return longest(f"{most} tokens are the most that {whose}")
    step = length // 2
    for _ in range(NARROWINGS):
        if step < STEP_TOKENS:
            break
        length += step if fits(length + step) else 0
        step //= 2
    short = min(length for length, trial in trials.items() if not _fits(trial))
    if trials[short].tokens_per_s is not None:
        return longest(f"{short} tokens only fit under pressure: no plan leaves the memory margin free")
    return longest(f"{short} tokens do not fit: {trials[short].reason}")


def _trials(
    trials: Iterable[Trial], stopped: str, taken: Trial, result: PlanningResult | None, *, option: str
) -> Trials:
    """Return these trials in the order of their sizes. Raises `UserError` if no size left a legal plan."""
    if result is None:
        raise UserError(
            field=option,
            found="max",
            expected="a size for which some plan is legal",
            hint=f"change the other options: with {taken.size} there is {taken.reason}",
        )
    tried = sorted(trials, key=lambda trial: trial.size)
    return Trials(tried=tuple(tried), stopped=stopped, taken=taken, result=result)


def _fits(trial: Trial) -> bool:
    """Return whether there is a plan of this length that leaves the reserved memory fraction free."""
    return trial.tokens_per_s is not None and trial.has_margin


def _worth(trial: Trial) -> tuple[bool, bool, int]:
    """Return the sort key of a trial: the longest that leaves the reserved fraction free, the longest that fits, the
    shortest of all."""
    has_plan = trial.tokens_per_s is not None
    return _fits(trial), has_plan, trial.size if has_plan else -trial.size


def fewest_devices(study: Study, *, progress: Callable[[str], None] = lambda _: None) -> PlanningResult:
    """Return the fastest plan on the fewest devices of a request's cluster that hold one, or the miss if none do.

    Its notes give the reasons why no plan was found on fewer devices.
    """
    job, notes = study.job, list[str]()
    counts = (job.cluster.num_devices,) if job.has_measured_links else device_counts(job.cluster)
    for count in counts:
        devices = format_plural(count, "device")
        progress(f"planning for {devices}")
        result = study.plan(on_devices(job, count))
        if not isinstance(result, str) and result.plan is not None:
            return replace(result, notes=(*notes, f"{devices}: fits"))
        notes.append(f"{devices}: does not fit: {result if isinstance(result, str) else result.miss_text}")
    return replace(plan_request(study.request, job), notes=tuple(notes))
