"""The largest and the smallest that do: the global batch that is worth its size, the longest sequence that fits, the
fewest devices that hold a plan. Each asks `Study.plan` for one size after another.

The batch is doubled while throughput grows and it fits. The published planners grow it until memory is full. Where
microbatches can be added without end, memory never is: throughput only nears a limit, since what is done once a step is
spread over ever more samples. So growth also ends where doubling gains next to nothing (`LEAST_GAIN`).

The sequence is doubled while it fits, then narrowed down between the last two lengths. Activations grow with the tokens
and states do not, so what fits at one length fits at every shorter one that is divided as evenly; all lengths tried are
multiples of `STEP_TOKENS`. The model is traced anew at each of them. Of no length the tables are kept, which for
hundreds of devices take a gigabyte: the one that is taken is planned once more.

Devices are tried from the fewest upwards: divisors of a node on one node, beyond that whole nodes.

Source: Miao et al. 2022, Algorithm 1 (the outer loop over batch sizes).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from steelyard.errors import UserError
from steelyard.planning.choose import PlanningResult, plan_request
from steelyard.planning.request import PlanRequest
from steelyard.planning.variants import Study, Variant, device_counts, on_devices
from steelyard.planning.why_not import refuse_impossible
from steelyard.units import format_count, format_plural

LEAST_GAIN = 0.01
"""Throughput that a batch twice as large must gain to be worth it."""
MAX_DOUBLINGS = 10
"""Batches up to about a thousand samples per device are tried."""
STEP_TOKENS = 1024
FIRST_TOKENS = 8192
MOST_TOKENS = 2**24
NARROWINGS = 3
"""The length found is within an eighth of the longest that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A size of a job that was tried: tokens/s of its best plan, or None and why there is none.

    What the search found is not kept in it: the tables of many sizes take gigabytes.
    """

    size: int
    """Samples of a step, or tokens of a sample."""
    tokens_per_s: float | None
    reason: str
    has_margin: bool
    """Whether the plan leaves the margin of the job free."""

    @property
    def text(self) -> str:
        """What came of it, in words."""
        if self.tokens_per_s is None:
            return f"does not fit: {self.reason}"
        return f"{format_count(self.tokens_per_s)} tokens/s" + ("" if self.has_margin else ", under pressure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What was tried, smallest first, why nothing else was, and which was chosen, with its plan."""

    tried: tuple[Trial, ...]
    stopped: str
    taken: Trial
    result: PlanningResult

    def lines(self, words: str) -> list[str]:
        """Return a line for each size that was tried, named by ``words``, and why no other was."""
        found = []
        for trial in self.tried:
            taken = " (taken)" if trial is self.taken and trial.tokens_per_s is not None else ""
            found.append(f"{words.format(trial.size)}: {trial.text}{taken}")
        return [*found, f"stopped: {self.stopped}"]


def _try(study: Study, variant: Variant, size: int) -> tuple[Trial, PlanningResult]:
    """The trial of a variant whose batch or length is ``size``, and what the search found."""
    result = study.plan(variant)
    assert not isinstance(result, str), "other sizes leave the decisions as they are"
    prediction = result.plan.prediction if result.plan else None
    speed = prediction.tokens_per_s_per_device * study.request.cluster.num_devices if prediction else None
    return Trial(size=size, tokens_per_s=speed, reason=result.miss_text, has_margin=result.has_margin), result


def largest_batch(study: Study, *, progress: Callable[[str], None] = lambda _: None) -> Trials:
    """Return the plan of the global batch beyond which doubling gains less than `LEAST_GAIN`, or nothing fits.

    Starts from one sample per device, or from half as many, and so on, where that does not fit. The batch of the
    study's job plays no part.
    """

    def attempt(count: int) -> tuple[Trial, PlanningResult]:
        progress(f"planning for a global batch of {count}")
        larger = Variant(name=f"{count} samples", change=lambda request: replace(request, global_batch=count))
        return _try(study, larger, count)

    best, result = attempt(study.job.cluster.num_devices)
    trials = [best]

    def grown(stopped: str) -> Trials:
        ordered = sorted(trials, key=lambda trial: trial.size)
        return Trials(tried=tuple(ordered), stopped=stopped, taken=best, result=result)

    while best.tokens_per_s is None and best.size % 2 == 0:
        best, result = attempt(best.size // 2)
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
            return grown(f"{trial.size} samples fit under pressure alone: no plan leaves the memory margin free")
        gain = trial.tokens_per_s / best.tokens_per_s - 1
        if gain < LEAST_GAIN:
            return grown(f"{trial.size} samples change throughput by {gain:+.2%} only")
        best, result = trial, larger
    return grown(f"{MAX_DOUBLINGS} doublings were tried")


def longest_sequence(request: PlanRequest, *, progress: Callable[[str], None] = lambda _: None) -> Trials:
    """Return the plan of the longest sequences that fit.

    Where nothing fits at `FIRST_TOKENS`, shorter ones are tried down to `STEP_TOKENS`, whose result it then is.
    Raises `UserError` for a model whose length is fixed.
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

    def attempt(seq_len: int) -> tuple[Trial, PlanningResult]:
        longer = Variant(name=f"{seq_len} tokens", change=lambda request: replace(request, seq_len=seq_len))
        refuse_impossible(longer.change(request))
        return _try(study, longer, seq_len)

    def fits(seq_len: int) -> bool:
        progress(f"planning for sequences of {seq_len} tokens")
        trials[seq_len], _ = attempt(seq_len)
        return _fits(trials[seq_len])

    def longest(stopped: str) -> Trials:
        taken = max(trials.values(), key=_worth)
        _, result = attempt(taken.size)
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
        return longest(f"{short} tokens fit under pressure alone: no plan of theirs leaves the memory margin free")
    return longest(f"{short} tokens do not fit: {trials[short].reason}")


def _fits(trial: Trial) -> bool:
    """Whether a plan of this length leaves the margin free."""
    return trial.tokens_per_s is not None and trial.has_margin


def _worth(trial: Trial) -> tuple[bool, bool, int]:
    """The longest that leaves the margin free before the longest that fits, and that before the shortest of all."""
    has_plan = trial.tokens_per_s is not None
    return _fits(trial), has_plan, trial.size if has_plan else -trial.size


def fewest_devices(study: Study, *, progress: Callable[[str], None] = lambda _: None) -> PlanningResult:
    """Return the fastest plan on the fewest devices of a request's cluster that hold any, or that none does.

    Its notes say why no plan was found on fewer.
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
