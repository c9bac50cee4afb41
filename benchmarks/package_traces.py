"""Makes what the package brings for planning without torch: ``python benchmarks/package_traces.py`` (``make traces``).

For every packaged model how it splits, and its trace, as on GPUs. A trace is taken at three lengths of each
span and compared at further ones, its ends among them; where the parabola through the three misses, the usual lengths
are packaged alone. What is there and holds for the tracer and the packages of now is left as it is.
"""

import argparse
import gzip
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steelyard.installed import TRAINING, installed_version
from steelyard.limits import MOST_TOKENS
from steelyard.model.chain import ModelChain
from steelyard.model.read import (
    chain_from_config,
    load_config,
    model_names,
    packaged_split,
    packaged_structure,
)
from steelyard.model.split import SPLIT_VERSION, ModelSplit
from steelyard.plan.file import default_folder
from steelyard.precision import Precision
from steelyard.profiles.profile import Profile
from steelyard.tracer.cache import (
    ATTENTION,
    LEFT_OUT,
    TRACER_VERSION,
    counted_at,
    packaged_lengths,
    profile_at,
    trace_file,
)

PRECISIONS: tuple[Precision, ...] = ("bf16",)
"""What GPUs train in."""
DEGREES = (1, 2, 4, 8)
"""Of divisions of a layer: those of nodes of as many devices."""
FEWEST = 128
"""Tokens of the shortest sequence that is packaged; below it peaks of short-lived memory change their cause."""
MOST_USUAL = 131_072
"""Tokens of the longest sequence that is packaged by itself."""
CHECKED_DEGREES = (1, 2)
TOLERANCE = 1e-12
"""Of the comparison: what floating-point numbers of this size leave."""


def main() -> None:
    """Makes what is missing or out of date, of all packaged models or of those that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="packaged models; default: all, and files of no model are removed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    options = parser.parse_args()
    names = options.names or model_names()
    with ProcessPoolExecutor(options.jobs) as pool:
        files = [file for made in pool.map(make_files, names) for file in made]
    if not options.names:
        for file in {each for folder in {file.parent for file in files} for each in folder.iterdir()} - set(files):
            file.unlink()


def make_files(name: str) -> list[Path]:
    """The files of a packaged model, those written that are missing or do not hold."""
    _, config = load_config(name)
    chain = chain_from_config(config, name=name)
    files = _files_of_split(chain)
    for precision in PRECISIONS:
        files.append(Path(str(trace_file(chain.config_hash, precision))))
        if not packaged_lengths(chain, precision):
            content = package(chain, precision)
            write(files[-1], gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
            print(f"{name} {precision}: {files[-1].stat().st_size} bytes", flush=True)
    return files


def _files_of_split(chain: ModelChain) -> list[Path]:
    """How a model splits, and the small model of its structure."""
    from steelyard.modules.split_proof import split_and_structure

    folder = Path(str(resources.files("steelyard.model"))) / "splits"
    structure = packaged_structure(chain.config_hash)
    if any(packaged_split(each) is None for each in (chain.config_hash, structure)):
        split, structure, small = split_and_structure(chain.family.model_type, chain.config, default_folder())
        for name, each in ((chain.config_hash, split), (structure, small)):
            content = packaged_split_text(each, structure, {"transformers": _version("transformers")})
            write(folder / f"{name}.json", content.encode())
    return [folder / f"{name}.json" for name in (chain.config_hash, structure)]


def packaged_split_text(split: ModelSplit, structure: str, made_with: Mapping[str, str]) -> str:
    """The content of a file that `packaged_split` reads."""
    content: dict[str, Any] = {
        "split_version": SPLIT_VERSION,
        "made_with": dict(made_with),
        "structure": structure,
        "split": split.model_dump(mode="json"),
    }
    return json.dumps(content) + "\n"


def write(file: Path, content: bytes) -> None:
    """Writes a file of the package."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)


def package(chain: ModelChain, precision: Precision) -> dict[str, Any]:
    """What a packaged trace holds."""
    from steelyard.tracer.trace import SIZES, trace

    traced = partial(trace, chain, precision=precision, gpu_kernels=True)

    def content(spans: list[range]) -> dict[str, Any]:
        return {
            "key": {"tracer": TRACER_VERSION, "attention": ATTENTION},
            "made_with": {name: _version(name) for name in TRAINING},
            "degrees": DEGREES,
            "sizes": SIZES,
            "spans": [held(span) for span in spans],
        }

    @cache
    def held(span: range) -> dict[str, Any]:
        lengths = lengths_of(span)
        profiles = [traced(seq_len=length, degrees=DEGREES) for length in lengths]
        layers = [
            [counted_at(layer.model_dump(mode="json"), SIZES) for layer in profile.layers] for profile in profiles
        ]
        identity = profiles[0].identity.model_dump(mode="json")
        return {"first": span.start, "last": span.stop - 1, "lengths": lengths, "identity": identity, "layers": layers}

    def is_exact(span: range) -> bool:
        try:
            return not any(
                difference(
                    traced(seq_len=length, degrees=CHECKED_DEGREES),
                    profile_at(content([span]), chain, seq_len=length, degrees=CHECKED_DEGREES),
                )
                for length in further_lengths(span)
            )
        except ValidationError:  # a part of a kernel: a recurrence over one chunk runs fewer than over several
            return False

    spans: list[range] = []
    for span in spans_of(chain):
        exact = len(span) == 1 or is_exact(span)
        spans += [span] if exact else [range(length, length + 1) for length in usual_lengths(chain) if length in span]
    return content(spans)


def spans_of(chain: ModelChain) -> list[range]:
    """Spans of lengths in which the layers of a model do the same operations, or single lengths.

    Images have one length. From a window of attention on a layer has a mask, the square of the sequence, which at some
    length is the largest of what it holds for a short time: there the usual lengths are alone.
    """
    if not chain.family.task.reads_text:
        return [range(chain.max_seq_len, chain.max_seq_len + 1)]
    longest = chain.max_seq_len if chain.learned_positions else MOST_TOKENS
    window = min(
        (each for layer_type in chain.layer_types if (each := chain.window(layer_type)) is not None),
        default=longest + 1,
    )
    within = [range(FEWEST, window)] if window > FEWEST else []
    return within + [range(length, length + 1) for length in usual_lengths(chain) if length >= window]


def usual_lengths(chain: ModelChain) -> list[int]:
    """Powers of two, and the longest sequence that the model was made for, as far as `MOST_USUAL` and what it knows."""
    most = min(MOST_USUAL, chain.max_seq_len) if chain.learned_positions else MOST_USUAL
    powers = {2**power for power in range(FEWEST.bit_length() - 1, MOST_USUAL.bit_length())}
    return sorted(length for length in powers | {chain.max_seq_len} if FEWEST <= length <= most)


def lengths_of(span: range) -> list[int]:
    """The lengths at which a span is traced: a few times what every degree divides."""
    if len(span) == 1:
        return [span.start]
    unit = math.lcm(*DEGREES)
    first = math.ceil(span.start / unit) * unit
    return [first, 2 * first, min(4 * first, (span.stop - 1) // unit * unit)]


def further_lengths(span: range) -> list[int]:
    """The lengths at which a packaged trace is compared: an odd one, and the ends of the span."""
    return [min(span.start + 1001, (span.start + span.stop) // 2), span.start, span.stop - 1]


def difference(expected: Profile, found: Profile | None) -> str:
    """The first place at which a profile differs from the one expected, by more than rounding; empty if none."""
    if found is None:
        return "nothing is packaged"
    layers = [[layer.model_dump(mode="json") for layer in each.layers] for each in (expected, found)]
    return next(_differences("layers", *layers), "")


def _differences(place: str, expected: Any, found: Any) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        for key in (each for each in expected if each != LEFT_OUT):
            yield from _differences(f"{place}.{key}", expected[key], found[key])
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from _differences(f"{place}[{index}]", one, other)
    elif isinstance(expected, float) and isinstance(found, float):
        if not math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=1e-3):
            yield f"{place} is {expected!r}, packaged {found!r}"
    elif expected != found:
        yield f"{place} is {expected!r}, packaged {found!r}"


def _version(name: str) -> str:
    found = installed_version(name)
    assert found is not None, f"{name} makes what is packaged"
    return found


if __name__ == "__main__":
    main()
