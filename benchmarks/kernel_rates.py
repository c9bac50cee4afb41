r"""How the seconds of single kernels depend on their shapes: forms in the place of tables, judged on withheld shapes.

    python benchmarks/kernel_rates.py [matmuls] [attention] [experts] [--shapes]

The rows of `data/kernel_rates` are of one device each. One shape in three, by a stable hash, is withheld; each form is
fitted to the others, per device, source and pass, by the least log(1 + (r / 0.1)^2) with r the log of predicted over
measured. Printed are the median and the 90th percentile of |predicted / measured − 1| on what was withheld.

With FLOP $F$ at the peak $P$, operands $r$ that are read and results $w$ that are written at the bandwidth $W$:

| kernels   | form                 | seconds |
|-----------|----------------------|---------|
| matmuls   | one fraction         | $F/(eP)$ |
|           | as priced            | $F/(eP) + c\,(r + w)/W + \rho$ |
|           | reads, writes apart  | $F/(eP) + c_r r/W + c_w w/W + \rho$ |
|           | whole tiles          | as priced, m and n rounded up to 128, tiles to whole rounds over the units |
|           | p-norm               | $((F/eP)^q + (c\,(r + w)/W)^q)^{1/q} + \rho$ |
| attention | one fraction         | $F/(eP) + \rho$ |
|           | as priced            | `AttentionShape` of the generation, with $e$ and $\rho$ alone fitted |
|           | own shape            | `AttentionShape` with all of its parameters fitted, and $\rho$ |
| experts   | one fraction         | $F/(eP)$ |
|           | as matmuls           | $F/(eP) + c\,b/W + \rho$ with $b$ all operands, each weight of an expert once |
|           | whole tiles          | the same, with an expert's rows rounded up to 128 |

``--shapes`` fits `AttentionShape` to all devices of a generation together, each with an $e$ and a $\rho$ of its own:
what a call of these libraries takes whatever its shape, as they write a cache of pages along, is not training's.
"""

import argparse
import csv
import gzip
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from least_squares import least
from numpy.typing import NDArray

from steelyard.cost.efficiency import (
    QUERIES_OF_A_BLOCK,
    REFERENCE_HEAD_DIM,
    REFERENCE_KEYS,
    catalogue_rates,
    efficiency_of,
)
from steelyard.hardware.files import find_device

FOLDER = Path(__file__).parent / "data" / "kernel_rates"
UNITS = {"a100": 108, "h100": 132, "h200": 132, "gh200": 132, "b200": 148, "b300": 148, "gb200": 148, "gb300": 148}
"""Streaming multiprocessors, by what stands before the first hyphen; of the others there is no form of whole tiles."""
TILE = 128
BYTES = 2
FEWEST = 12
"""Rows of a group to fit a form to."""
FAR = 12.0
Array = NDArray[np.float64]
Form = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one device, source and pass."""

    device: str
    source: str
    direction: str
    columns: dict[str, Array]
    withheld: NDArray[np.bool_]

    def __getattr__(self, name: str) -> Array:
        return self.columns[name]

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the device's memory, by its data sheet."""
        return find_device(self.device).known_memory_bytes_per_s()

    @property
    def peak(self) -> Array:
        """[N] FLOP a second."""
        return self.columns["peak_tflops"] * 1e12

    def errors(self, seconds: Array) -> Array:
        """[withheld] of |predicted / measured − 1|."""
        return np.abs(seconds / self.seconds - 1)[self.withheld]


def read_rows(name: str) -> list[Rows]:
    """The rows of a table by device, source and pass, where there are enough."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    with gzip.open(FOLDER / f"{name}.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[row.pop("device"), row.pop("source"), row.pop("pass", "fwd")].append(row)
    return [
        Rows(
            *key,
            {column: np.array([float(row[column]) for row in rows]) for column in rows[0]},
            np.array([_is_withheld(row) for row in rows]),
        )
        for key, rows in sorted(groups.items())
        if len(rows) >= FEWEST
    ]


def _is_withheld(row: dict[str, str]) -> bool:
    shape = "x".join(f"{float(row[name]):g}" for name in sorted(row) if name not in ("seconds", "peak_tflops"))
    return zlib.crc32(shape.encode()) % 3 == 0


def fitted(rows: Rows, form: Form, start: Sequence[float]) -> Array:
    """[N] seconds by a form of positive parameters, fitted to what is not withheld."""
    return form(np.exp(fit(rows.seconds, form, start, ~rows.withheld)))


def fit(seconds: Array, form: Form, start: Sequence[float], keep: NDArray[np.bool_]) -> Array:
    """Logarithms of a form's parameters."""
    x = np.log(np.array(start))

    def residuals(x: Array) -> Array:
        with np.errstate(over="ignore"):  # of a power that the fit tries and drops
            return np.nan_to_num(np.log(form(np.exp(x)) / seconds)[keep], posinf=FAR)

    return least(residuals, x, x - FAR, x + FAR)


def matmul_forms(rows: Rows) -> dict[str, tuple[Form, tuple[float, ...]]]:
    """Forms of the seconds of matmuls, with where to start."""
    m, n, k = rows.m, rows.n, rows.k
    busy = 2 * m * n * k / rows.peak
    read, written = BYTES * (m * k + k * n) / rows.bandwidth, BYTES * m * n / rows.bandwidth
    forms: dict[str, tuple[Form, tuple[float, ...]]] = {
        "one fraction": (lambda p: busy / p[0], (0.7,)),
        "as priced": (lambda p: busy / p[0] + p[1] * (read + written) + p[2] * 1e-6, (0.75, 0.5, 3.0)),
        "reads, writes apart": (
            lambda p: busy / p[0] + p[1] * read + p[2] * written + p[3] * 1e-6,
            (0.75, 0.5, 0.5, 3.0),
        ),
        "p-norm": (
            lambda p: ((busy / p[0]) ** p[3] + (p[1] * (read + written)) ** p[3]) ** (1 / p[3]) + p[2] * 1e-6,
            (0.75, 1.2, 3.0, 2.0),
        ),
    }
    units = UNITS.get(rows.device.partition("-")[0])
    if units is not None:
        tiles = np.ceil(m / TILE) * np.ceil(n / TILE)
        rounded = busy * TILE**2 / (m * n) * np.ceil(tiles / units) * units
        forms["whole tiles"] = (
            lambda p: rounded / p[0] + p[1] * (read + written) + p[2] * 1e-6,
            (0.75, 0.5, 3.0),
        )
    return forms


def attention_flop(rows: Rows) -> Array:
    """[N] FLOP as the planner counts them."""
    square = 2 * rows.batch * rows.heads * rows.seq**2 * (rows.head_dim + rows.v_head_dim)
    return square * np.where(rows.causal > 0, 0.5, 1.0) * (2.5 if rows.direction == "bwd" else 1.0)


def shaped(rows: Rows, head_dim: float, keys: float, blocks: float) -> Array:
    """[N] how many times as long attention takes as at the reference, for its FLOP."""
    dims = (rows.head_dim + rows.v_head_dim) / 2
    filled = rows.batch * rows.heads * rows.seq / QUERIES_OF_A_BLOCK
    slower = (1 + head_dim / dims) * (1 + keys / rows.seq) * (1 + blocks / filled)
    return slower / ((1 + head_dim / REFERENCE_HEAD_DIM) * (1 + keys / REFERENCE_KEYS))


def attention_forms(rows: Rows) -> dict[str, tuple[Form, tuple[float, ...]]]:
    """Forms of the seconds of attention, with where to start."""
    busy, shape = attention_flop(rows) / rows.peak, efficiency_of(rows.device, "").attention_shape
    priced = busy * shaped(rows, shape.head_dim, shape.keys, shape.blocks)
    forms: dict[str, tuple[Form, tuple[float, ...]]] = {
        "one fraction": (lambda p: busy / p[0] + p[1] * 1e-6, (0.5, 10.0)),
        "as priced": (lambda p: priced / p[0] + p[1] * 1e-6, (0.5, 10.0)),
    }
    if len(rows.seconds) > 3 * FEWEST:
        forms["own shape"] = (
            lambda p: busy * shaped(rows, *p[2:]) / p[0] + p[1] * 1e-6,
            (0.6, 10.0, 50.0, 500.0, 50.0),
        )
    return forms


def expert_forms(rows: Rows) -> dict[str, tuple[Form, tuple[float, ...]]]:
    """Forms of the seconds of grouped matmuls, with where to start."""
    pairs, local = rows.tokens * rows.topk / rows.ep, rows.experts / rows.ep
    busy = 2 * pairs * rows.hidden * rows.ffn * rows.matmuls / rows.peak
    weights = np.minimum(local, pairs) * rows.hidden * rows.ffn
    moved = BYTES * rows.matmuls * (weights + pairs * (rows.hidden + rows.ffn)) / rows.bandwidth
    each = np.maximum(pairs / local, 1.0)
    rounded = busy * np.ceil(each / TILE) * TILE / each
    return {
        "one fraction": (lambda p: busy / p[0], (0.5,)),
        "as matmuls": (lambda p: busy / p[0] + p[1] * moved + p[2] * 1e-6, (0.7, 0.8, 20.0)),
        "whole tiles": (lambda p: rounded / p[0] + p[1] * moved + p[2] * 1e-6, (0.7, 0.8, 20.0)),
    }


FORMS = {"matmuls": matmul_forms, "attention": attention_forms, "experts": expert_forms}


def show(name: str) -> None:
    """Prints a line for each device, source and pass of a table."""
    print(f"{name}: withheld shapes, median and 90th percentile of |error|")
    for rows in read_rows(name):
        cells = []
        for form_name, (form, start) in FORMS[name](rows).items():
            errors = rows.errors(fitted(rows, form, start))
            if errors.size:
                cells.append(f"{form_name} {np.median(errors):.1%} {np.quantile(errors, 0.9):.0%}")
        label = f"{rows.device} {rows.source} {rows.direction}"
        print(f"  {label:30s} {rows.withheld.sum():4d} of {len(rows.seconds):4d}   " + " · ".join(cells))


def fit_shape(generation: str) -> tuple[float, float, float]:
    """Head dim, keys and blocks of `AttentionShape` that fit the forward rows of short runs of a generation.

    Where all rows have one head dim, what it costs stays as priced.
    """
    devices = [
        rows
        for rows in read_rows("attention")
        if rows.source == "aic" and catalogue_rates(rows.device).generation == generation
    ]
    seconds = np.concatenate([rows.seconds for rows in devices])
    keep = np.concatenate([~rows.withheld for rows in devices])
    has_one_dim = len({float(dim) for rows in devices for dim in rows.head_dim}) == 1

    known_dim = efficiency_of(devices[0].device, "").attention_shape.head_dim

    def form(p: Array) -> Array:
        head_dim = known_dim if has_one_dim else p[0]
        parts = [
            attention_flop(rows) / rows.peak * shaped(rows, head_dim, p[1], p[2]) / rate + start_us * 1e-6
            for rows, rate, start_us in zip(devices, p[3::2], p[4::2], strict=True)
        ]
        return np.concatenate(parts)

    found = np.exp(fit(seconds, form, (50.0, 500.0, 50.0, *[0.5, 10.0] * len(devices)), keep))
    return known_dim if has_one_dim else float(found[0]), float(found[1]), float(found[2])


def backward_over_forward(device: str) -> float:
    """Median over shapes of the seconds of a backward pass over those forward, for their FLOP, of SimuMax's rows."""
    there, back = (
        dict(zip(_shapes(rows), rows.seconds / attention_flop(rows), strict=True))
        for direction in ("fwd", "bwd")
        for rows in read_rows("attention")
        if rows.device == device and rows.source == "simumax" and rows.direction == direction
    )
    return float(np.median([back[shape] / there[shape] for shape in there.keys() & back.keys()]))


def _shapes(rows: Rows) -> list[tuple[float, ...]]:
    return list(zip(*(rows.columns[name] for name in ("batch", "heads", "head_dim", "seq")), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", choices=[[], *FORMS], metavar="KERNELS", help=", ".join(FORMS))
    parser.add_argument("--shapes", action="store_true", help="fit attention's shape of each generation")
    options = parser.parse_args()
    for name in options.kernels or FORMS:
        show(name)
    if options.shapes:
        for generation in ("ampere", "hopper", "ada", "blackwell"):
            head_dim, keys, blocks = fit_shape(generation)
            print(f"{generation}: head_dim {head_dim:.0f}, keys {keys:.0f}, blocks {blocks:.0f}")
        for device in ("a100-pcie-80gb", "b200-180gb"):
            print(f"{device}: attention backward over forward {backward_over_forward(device):.2f}")


if __name__ == "__main__":
    main()
