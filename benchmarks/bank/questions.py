"""The bank: every problem by its name, in an order that never changes."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from bank import answers
from bank.answers import EXECUTIONS, FAMILIES, FRAMEWORKS, GB, Written, job_of, measured
from bank.records import Record

Question = Callable[[], Record]


CONFIGS = {
    "deepseek-v3": ("32x8xh200-141gb", 512, 4096, "bf16"),
    "gpt-neox-20b": ("2x8xa100-40gb", 64, 2048, "bf16"),
    "llama-demo": ("1x4xa10", 16, 256, "fp32"),
    "llama2-13b": ("1x8xa100-pcie-80gb", 32, 4096, "bf16"),
    "llama2-70b": ("4x8xa100-80gb", 64, 4096, "bf16"),
    "llama2-7b": ("1x8xv100-32gb", 32, 2048, "fp32"),
    "llama3-405b": ("16x8xh100-80gb", 128, 8192, "bf16"),
    "llama3-70b": ("8x8xh100-80gb", 128, 8192, "bf16"),
    "llama3-8b": ("1x8xa100-80gb", 64, 4096, "bf16"),
    "llama3.2-1b": ("1x4xrtx-4090", 32, 2048, "bf16"),
    "llama3.2-3b": ("1x8xl40s", 32, 4096, "bf16"),
    "qwen3-0.6b": ("1x1xrtx-3060", 4, 512, "bf16"),
    "mistral-7b": ("1x8xh200-141gb", 64, 8192, "bf16"),
    "mixtral-8x22b": ("8x8xh100-80gb", 512, 8192, "bf16"),
    "pythia-1.4b": ("1x6xa10", 48, 2048, "bf16"),
    "pythia-6.9b": ("2x8xl4", 64, 2048, "bf16"),
    "qwen2.5-0.5b": ("1x2xrtx-3090", 16, 2048, "fp32"),
    "qwen2.5-72b": ("2x8xmi300x", 32, 8192, "bf16"),
    "qwen2.5-7b": ("1x8xb200-180gb", 64, 8192, "bf16"),
    "qwen3-30b-a3b": ("1x8xh100-80gb", 64, 16384, "bf16"),
}
"""A cluster, batch, sequence length and precision for packaged models of every size."""


LESS_MEMORY = {
    "llama3-8b": ("26GiB", "22GiB", "10GiB"),
    "llama2-70b": ("50GiB", "40GiB"),
    "llama2-7b": ("18GiB",),
    "pythia-1.4b": ("8GiB", "5GiB"),
    "pythia-6.9b": ("14GiB",),
    "llama3.2-1b": ("12GiB",),
    "llama3-405b": ("72GiB",),
    "mixtral-8x22b": ("50GiB",),
    "qwen2.5-72b": ("90GiB",),
}
"""Budgets below what the devices have, down to some in which nothing fits."""


CHOSEN: Mapping[str, Mapping[str, Any]] = {
    "one stage": {"num_stages": 1},
    "2 stages, 1f1b alone": {"num_stages": 2, "schedules": ("1f1b",)},
    "4 stages, 2 microbatches": {"num_stages": 4, "num_microbatches": 2},
    "interleaved alone": {"schedules": ("interleaved-1f1b",)},
    "8 microbatches": {"num_microbatches": 8},
    "without remat": {"remats": ("none",)},
    "full remat alone": {"remats": ("full",)},
    "zero 1": {"modes": {"zero": (1,)}},
    "zero 2": {"modes": {"zero": (2,)}},
    "zero 3": {"modes": {"zero": (3,)}},
    "without tp": {"max_degrees": {"tp": 1}},
    "tp up to 2": {"max_degrees": {"tp": 2}},
    "even cuts": {"partition": "even"},
    "memory-balanced cuts": {"partition": "memory-balanced"},
    "cuts of Galvatron-BMW": {"partition": "bmw"},
    "pinned blocks": {"pins": ("blocks 0-7: tp=2, sp=on", "blocks 20-27: remat=full")},
    "pinned ends": {"pins": ("embedding: fsdp8", "head: tp=8")},
    "pinned configuration": {"pins": ("stages=2, microbatches=16", "schedule=interleaved-1f1b")},
    "pinned to what is impossible": {"pins": ("blocks 0-3: tp=3",)},
    "a wrong number of stages": {"num_stages": 3},
}
"""Decisions taken beforehand, for one model."""


def planning_questions() -> Iterator[tuple[str, Question]]:
    """A plan for packaged models, for small ones of every family, in less memory and under decisions."""
    for name, config in CONFIGS.items():
        for memory in (None, *LESS_MEMORY.get(name, ())):
            job = partial(job_of, name, *config, memory)
            yield f"plan {name}, memory {memory or 'all'}", partial(answers.planned, job)
    for family in FAMILIES:
        for cluster, precision in (("1x4xa100-40gb", "bf16"), ("2x4xv100-16gb", "fp32")):
            seq_len = 0 if family in ("vit", "swin") else 1024
            job = partial(job_of, family, cluster, 32, seq_len, precision)
            yield f"plan small {family} on {cluster}", partial(answers.planned_with_fallbacks, job)
    job = partial(job_of, "llama3.2-3b", "1x8xa100-40gb", 32, 4096, "bf16", "16GiB")
    for name, options in CHOSEN.items():
        yield f"plan llama3.2-3b, {name}", partial(answers.planned, job, **options)
    job = partial(job_of, "llama3.2-1b", "1x8xa100-80gb", 32, 2048)
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b"):
        for stages in (2, 4, 8):
            options = {"schedules": (schedule,), "num_stages": stages}
            yield f"plan llama3.2-1b, {stages} stages, {schedule}", partial(answers.planned, job, **options)


def around_questions() -> Iterator[tuple[str, Question]]:
    """Questions around a plan: baselines, frontiers, other devices and batches, what other frameworks can run."""
    tight = partial(job_of, "llama3.2-3b", "1x8xa100-40gb", 32, 4096, "bf16", "16GiB")
    nodes = partial(job_of, "llama2-7b", "2x4xa100-40gb", 32, 2048, "bf16", "26GiB")
    t5 = partial(job_of, "t5", "1x4xa100-40gb", 32, 1024)
    for name, job in (("llama3.2-3b", tight), ("llama2-7b on two nodes", nodes), ("small t5", t5)):
        yield f"explain {name}", partial(answers.explained, job)
        yield f"explain all of {name}", partial(answers.explained, job, everything=True)
        yield f"tables {name}", partial(answers.tabled, job)
        yield f"frontier {name}", partial(answers.traded_off, job)
        for target in FRAMEWORKS:
            yield f"within {target}, {name}", partial(answers.fitted, job, target)
    for pin in ("tp=8", "blocks: remat=none", "stages=4", "stages=3", "head: dp8"):
        yield f"why not {pin}", partial(answers.insisted, tight, pin)
    job = partial(job_of, "llama3-8b", "2x8xa100-80gb", 32, 4096, "bf16", "40GiB")
    yield "fewest devices for llama3-8b", partial(answers.fewest, job)
    job = partial(job_of, "llama3.2-1b", "1x4xa100-40gb", 4, 2048)
    yield "largest batch of llama3.2-1b", partial(answers.grown, job)


UNLIKE = "fsdp8, dp8 remat=full, fsdp4-tp2+sp, dp2-tp4, tp4-dp2+sp, tp2-fsdp4 remat=selective, fsdp2-tp4 zero2, dp4-tp2"


HANDWRITTEN = {
    "dp": Written(("dp8*8",), 1),
    "fsdp, accumulating": Written(("fsdp8*8",), 4),
    "zero 2": Written(("fsdp8 zero2*8",), 4),
    "every layer its own": Written((UNLIKE,), 2),
    "two stages": Written(("fsdp4*4", "tp4+sp*3, dp4"), 8),
    "copies sent to a stage": Written(("tp4*4", "fsdp4 remat=full*4"), 4),
    "four stages, gpipe": Written(("dp2*2", "fsdp2*2", "tp2*2", "tp2+sp*2"), 4, "gpipe"),
    "four stages": Written(("fsdp2*2", "fsdp2 remat=full*2", "dp2*2", "fsdp2*2"), 8),
    "interleaved": Written(("fsdp4*2", "dp4*2", "fsdp4 remat=full*2", "tp4+sp*2"), 4, "interleaved-1f1b", 2),
    "interleaved, four chunks": Written(("fsdp4", "tp4+sp") * 4, 8, "interleaved-1f1b", 4),
    "interleaved, four stages": Written(("fsdp2", "dp2", "tp2", "fsdp2 zero2") * 2, 8, "interleaved-1f1b", 2),
}
"""Plans for eight layers on eight devices."""


def pricing_questions() -> Iterator[tuple[str, Question]]:
    """What plans written by hand take, in time and in memory, here and by other frameworks."""
    jobs = {
        "bf16": partial(job_of, "llama", "1x8xa100-80gb", 32, 2048),
        "fp32 on two nodes": partial(job_of, "gemma", "2x4xv100-32gb", 32, 1024, "fp32"),
        "experts": partial(job_of, "mixtral", "1x8xh100-80gb", 32, 1024),
    }
    for name, written in HANDWRITTEN.items():
        for kind, job in jobs.items():
            yield f"price {name}, {kind}", partial(answers.priced, job, written)
        for kind, execution in EXECUTIONS.items():
            yield f"price {name}, {kind}", partial(answers.priced, jobs["bf16"], written, execution=execution)
    for text in ("dp8", "fsdp8 remat=full", "fsdp2-tp4+sp", "tp8"):
        yield f"uniform {text}", partial(answers.uniform, jobs["bf16"], text)


def measured_questions() -> Iterator[tuple[str, Question]]:
    """Plans on CPU processes that share cores, by a profile with made-up seconds."""
    for model, batch, seq_len, memory in (("llama-demo", 16, 256, "2GiB"), ("llama-demo", 16, 256, "80MiB")):
        job = partial(measured, model, batch, seq_len, memory)
        yield f"plan {model} as measured, {memory}", partial(answers.planned, job)
    job = partial(measured, "gpt2", 16, 1024, "3GiB")
    yield "plan small gpt2 as measured", partial(answers.planned_with_fallbacks, job)
    yield "explain small gpt2 as measured", partial(answers.explained, job)
    yield "scaled times of small gpt2 as measured", partial(answers.scaled, job)


def solving_questions() -> Iterator[tuple[str, Question]]:
    """Problem files: the one of the documentation, published tables, the sizes of real decoders, random ones."""
    for budget in (None, 7 * GB, 6 * GB, 4 * GB):
        yield f"solve the documented example, {budget}", partial(answers.solved, answers.documented_problem, budget)
    for cell in (("bert", 8, 8, "full"), ("vit", 8, 16, "full"), ("t5", 8, 8, "dp+pp"), ("swin", 8, 12, "full")):
        yield f"solve published tables {cell}", partial(answers.solved, partial(answers.published_problem, *cell))
    for budget in (24, 36, 80):
        yield (
            f"solve 34 layers on 8 devices, {budget} GB",
            partial(answers.solved, answers.decoder_problem, budget * GB),
        )
    yield "frontier of 34 layers on 8 devices", answers.decoder_frontier
    yield "solve 125 layers of four types, 24 GB", partial(answers.solved, answers.deep_problem, 24 * GB)
    for seed in range(10):
        yield f"solve random tables {seed}", partial(answers.solved_random, seed)


def part_questions() -> Iterator[tuple[str, Question]]:
    """The parts by themselves: timelines, switches between layouts, and the size of the strategy space."""
    schedules = (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2))
    ways: tuple[Mapping[str, Any], ...] = (
        {},
        {"overlap_sends": False},
        {"speeds": ((0, (1.8, 1.5, 1.2, 1.0)),) * 4},
    )
    for schedule, chunks in schedules:
        for way in ways:
            said = ", ".join(way) or "as usual"
            yield f"timeline {schedule}, {said}", partial(answers.played, schedule, chunks, way)
    for cluster in ("1x4xa100-80gb", "1x8xh100-80gb", "2x8xa100-40gb", "1x4xcpu"):
        yield f"switches on {cluster}", partial(answers.switches, cluster)
    for count in range(1, 65):
        yield f"strategies of {count} devices", partial(answers.counted, count)


BANK: tuple[Callable[[], Iterator[tuple[str, Question]]], ...] = (
    planning_questions,
    around_questions,
    pricing_questions,
    measured_questions,
    solving_questions,
    part_questions,
)
