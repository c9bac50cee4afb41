"""Fuzzing cases: a command with files and arguments, one or two of them damaged; deterministic for a seed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import yaml

from steelyard.errors import UserError
from steelyard.model.read import config_hash
from tests.damage.mutations import damaged_arguments, damaged_text, damaged_value

ON = "--cluster @cluster.yaml --profile @profile.json"
JOB = f"@config.json --seq-len 32 --global-batch 4 {ON}"
ONE = "--stages 2 --microbatches 2 --max-tp 1 --schedule 1f1b --remat none"
COMMANDS: tuple[tuple[int, str, str], ...] = (
    (30, "diff @plan.json @other.json", "plan other"),
    (30, f"timeline @plan.json -o @out.json --microbatches 2 {ON}", "plan cluster profile"),
    (20, f"report @plan.json -o @out.html --run @record.json --time-limit 0 {ON}", "plan record cluster profile"),
    (20, "report @plan.json -o @out.html --run @record.json", "plan record"),
    (10, "report @other.json -o @out.html", "other"),
    (1, f"report @plan.json -o @out.html --time-limit 0.05 {ON}", "plan cluster profile"),
    (1, f"explain @plan.json {ON}", "plan cluster profile"),
    (1, f"explain @plan.json {ON} --all --memory 1GiB -o @out.json", "plan cluster profile"),
    (1, f"explain @plan.json {ON} --why-not tp=2", "plan cluster profile"),
    (60, "solve @problem.json", "problem"),
    (15, "solve @problem.json --frontier --points 4 --all --memory 1GiB --time-limit 1", "problem"),
    (30, f"plan {JOB} {ONE}", "config config cluster profile"),
    (10, f"plan {JOB} {ONE} --calibrate @record.json --top 1", "record"),
    (10, f"plan {JOB} {ONE} --calibrate @run.yaml --zero 2", "run plan"),
    (2, f"plan {JOB} --pin tp=2 --schedule 1f1b --space paper --memory 1GiB --fallbacks 1 -o @out.json", "config"),
    (1, f"plan {JOB} --microbatches 2 --partition bmw --imbalance 1.2 --time-limit 1", "cluster profile"),
    (1, f"plan {JOB} --objective devices --stages 1 --microbatches 1", "cluster profile"),
    (2, f"plan {JOB} {ONE} --save-problem @out.json", "cluster profile"),
    (1, f"frontier {JOB} --points 3 --devices 2 --price 1.5 --max-tp 1", "config cluster profile"),
    (10, f"export @plan.json --to TARGET -o @out {ON}", "plan plan cluster profile"),
    (10, "export @plan.json --to TARGET", "plan"),
    (10, "export @other.json --to TARGET", "other"),
    (4, "export @split.json --to TARGET", "split"),
    (2, "explain @split.json", "split"),
    (4, "report @split.json -o @out.html --time-limit 0", "split"),
    (2, "diff @split.json @split.json", "split"),
    (2, "timeline @split.json -o @out.json --microbatches 2", "split"),
    (2, "check @split.json --processes 1", "split"),
    (4, "export @own.json --to TARGET", "own"),
    (2, "explain @own.json", "own"),
    (4, "report @own.json -o @out.html --time-limit 0", "own"),
    (2, "diff @own.json @own.json", "own"),
    (2, "parity @own.json --steps 2 --max-processes 8", "own"),
    (10, "train @plan.json --data @absent --steps 5 --lr 1e-3 --weight-decay 0.1 --seed 1 --max-grad-norm 1", "plan"),
    (10, "train @plan.json --data @absent --warmup-steps 2 --checkpoint-every 5 --keep-last 1 --restarts 1", "plan"),
    (5, "check @plan.json --processes 1 --memory 1GiB --cluster @cluster.yaml", "plan"),
    (5, "parity @plan.json --steps 2 --max-processes 8", "plan"),
    (5, "profile @config.json --seq-len 32 -o @out.json -n 2 --samples 1,2 --budget 1 --merge @profile.json", "config"),
    (1, "schema plan", ""),
)
"""Frequency, command, and files of the command that may be damaged; ``@`` marks a file of the case."""
YAML = ("cluster", "run")
TARGETS = (
    *("torchtitan", "megatron", "megatron-bridge", "automodel", "transformers", "accelerate", "deepspeed"),
    *("axolotl", "llama-factory", "ms-swift", "pytorch", "slurm", "kubeflow"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line and those of its files that are not whole; an argument ``@name`` is the path of a file."""

    seed: int
    arguments: list[str]
    files: dict[str, bytes]


def make_case(seed: int, whole: Mapping[str, Any]) -> Case:
    """The case of a seed, of whole files by their sort."""
    random = Random(seed)
    _, command, breakable = random.choices(COMMANDS, weights=[weight for weight, *_ in COMMANDS])[0]
    arguments = command.replace("TARGET", random.choice(TARGETS)).split(" ")
    files: dict[str, bytes] = {}
    what = random.choice([*breakable.split(), "arguments"])
    if what == "arguments":
        arguments = damaged_arguments(arguments, random)
    elif random.random() < 0.2:
        files[file_name(what)] = damaged_text(file_text(what, whole[what]).decode(), random)
    else:
        content = damaged_value(whole[what], random)
        files[file_name(what)] = file_text(what, content)
        if what == "config" and random.random() < 0.7:
            files[file_name("profile")] = file_text("profile", _of_config(whole["profile"], content))
    if random.random() < 0.1:
        arguments.append("--json")
    return Case(seed=seed, arguments=arguments, files=files)


def whole_files(whole: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a case that nothing has damaged."""
    return {file_name(sort): file_text(sort, content) for sort, content in whole.items()}


def file_name(sort: str) -> str:
    """Name of the file of a sort in a case."""
    return sort + (".yaml" if sort in YAML else ".json")


def file_text(sort: str, content: Any) -> bytes:
    """The file of a sort with this content."""
    return (yaml.safe_dump(content) if sort in YAML else json.dumps(content)).encode()


def _of_config(profile: dict[str, Any], config: Any) -> dict[str, Any]:
    """The profile as if it had been traced for this config, so that what reads the profile goes on."""
    try:
        found = config_hash(config)
    except (UserError, TypeError, ValueError):
        return profile
    return {**profile, "identity": {**profile["identity"], "config_hash": found}}
