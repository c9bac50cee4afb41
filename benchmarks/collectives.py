r"""Seconds of collectives by `steelyard.cost.communication` against those that others measured, and fits of its links.

    python benchmarks/collectives.py [--fit]

The rows of `data/collectives` are of one node and of 2 to 8 ranks, of links that the catalogue has. One in three, by a
stable hash of device, collective, ranks and bytes, is withheld: links were fitted to the others alone. Printed per link
are the median and the 90th percentile of |predicted / measured − 1| with the rates that the catalogue's efficiency
gives, of the rows withheld, of those from 1 MiB on, and by the plain ring that knows rate and latency only. Across
nodes there are no measurements of single collectives: printed is what NCCL 2.27 assumes of itself on H100 (tuning log),
and of all-to-alls constants that others fitted to nccl-tests, beside ours.

``--fit`` prints new values for ``measured`` of `steelyard/hardware/links.yaml` and the part of the rate reached:
least log(1 + (r / 0.1)^2), r the log of predicted over measured.
"""

import argparse
import csv
import gzip
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from least_squares import least
from numpy.typing import NDArray

from steelyard.cost.communication import Group, collective_time
from steelyard.cost.efficiency import LinkEfficiency, efficiency_of
from steelyard.hardware import Cluster, Link
from steelyard.hardware.files import find_device, find_link
from steelyard.hardware.values import UNMEASURED, NodeGroup
from steelyard.profiles.profile import Collective, LayerProfile, Profile, ProfileIdentity, Work
from steelyard.units import GB

FOLDER = Path(__file__).parent / "data" / "collectives"
COLLECTIVES: dict[str, Collective] = {
    name: name for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
}
LARGE = 2**20
FITTED = ("start_s", "step_s", "climb_s", "few_ranks", "crowding", "all_reduce_gain")
USUAL = (5e-6, 1e-6, 1e-5, 0.7, 0.3, 1.1, 0.75)
LEAST = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.02)
MOST = (5e-5, 2e-5, 6e-5, 1.0, 3.0, 1.6, 1.2)
PCIE = "pcie"
NAMES = {"pcie-4": "pcie-4-host"}
"""The catalogue's names of links of the table: its devices on PCIe 4 are L40S, without peer access."""
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective over the ranks of a node."""

    device: str
    link: str
    collective: Collective
    ranks: int
    num_bytes: int
    seconds: float

    @property
    def is_withheld(self) -> bool:
        """Whether it is kept from the fit."""
        key = f"{self.device} {self.collective} {self.ranks} {self.num_bytes}"
        return hashlib.sha256(key.encode()).digest()[0] % 3 == 0


def measurements() -> Iterator[Measurement]:
    """The rows of one node over links of the catalogue; Sailor's of lists of tensors hold copies and are left out."""
    with gzip.open(FOLDER / "collectives.csv.gz", "rt", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            is_named = not row["device"].startswith("unnamed") and row["link"] not in ("", "pcie", "nvlink-2")
            has_copies = row["source"].startswith("sailor") and row["kind"] != "all_reduce"
            is_late = row["source"].startswith("sailor") and float(row["seconds"]) < 3e-4
            if row["nodes"] != "1" or row["kind"] not in COLLECTIVES or not is_named or has_copies or is_late:
                continue
            yield Measurement(
                device=row["device"],
                link=NAMES.get(row["link"], row["link"]),
                collective=COLLECTIVES[row["kind"]],
                ranks=int(row["ranks"]),
                num_bytes=int(row["bytes"]),
                seconds=float(row["seconds"]),
            )


def unprofiled() -> Profile:
    """A profile that measured nothing."""
    nothing = Work(matmul_flop={}, attention_flop={}, matmul_bytes={}, memory_bytes={}, num_kernels=0)  # type: ignore[arg-type]
    layer = LayerProfile(
        kind="none",
        num_params=0,
        forward=nothing,
        backward=nothing,
        saved_bytes={},  # type: ignore[arg-type]
        input_bytes={},  # type: ignore[arg-type]
        forward_transient_bytes={},  # type: ignore[arg-type]
        backward_transient_bytes={},  # type: ignore[arg-type]
        recomputations=(),
    )
    identity = ProfileIdentity(
        method="traced",
        model_name="none",
        config_hash="",
        seq_len=1,
        precision="bf16",
        device="any",
        num_devices=1,
        torch="none",
        transformers="none",
        created="",
    )
    return Profile(identity=identity, layers=(layer,))


PROFILE = unprofiled()


def node_of(link: Link, *, num_nodes: int = 1, num_devices: int = 8) -> Cluster:
    """Nodes of devices on a link, with a 400 Gb/s port for each."""
    return Cluster(
        groups=(
            NodeGroup(
                name="node",
                num_nodes=num_nodes,
                devices_per_node=num_devices,
                device=find_device("h100-80gb"),
                intra_link=link,
                inter_link=find_link("infiniband-ndr") if num_nodes > 1 else None,
            ),
        )
    )


def predicted_s(rows: list[Measurement], link: Link, reached: LinkEfficiency) -> Array:
    """[N] seconds of collectives inside a node on this link, without other devices."""
    known: dict[tuple[Collective, int], Callable[[float], float]] = {}
    seconds = []
    for row in rows:
        key = row.collective, row.ranks
        if key not in known:
            known[key] = collective_time(
                row.collective,
                Group(size=row.ranks, stride=1, span=row.ranks),
                node_of(link, num_devices=row.ranks),
                PROFILE,
                reached,
            )
        seconds.append(known[key](row.num_bytes))
    return np.array(seconds)


def errors(rows: list[Measurement], link: Link, reached: LinkEfficiency) -> str:
    """Median and 90th percentile."""
    if not rows:
        return "      –       –"
    off = np.abs(predicted_s(rows, link, reached) / np.array([row.seconds for row in rows]) - 1)
    return f"{np.median(off):7.1%} {np.quantile(off, 0.9):7.1%}"


def fitted(rows: list[Measurement], link: Link) -> tuple[Link, float]:
    """The link with what fits these rows, and the part of its rate that is reached."""
    seconds = np.array([row.seconds for row in rows])
    most = [
        value if name != "crowding" or PCIE in link.name else 0.0
        for name, value in zip((*FITTED, ""), MOST, strict=True)
    ]

    def with_values(x: Array) -> tuple[Link, LinkEfficiency]:
        measured = replace(link.measured, **dict(zip(FITTED, map(float, x), strict=False)))
        rate = LinkEfficiency(intra=float(x[-1]), inter=1.0, intra_latency=1.0, inter_latency=1.0)
        return replace(link, measured=measured), rate

    found = least(
        lambda x: np.log(predicted_s(rows, *with_values(x)) / seconds), np.array(USUAL), np.array(LEAST), np.array(most)
    )
    return with_values(found)[0], float(found[-1])


def compare_with_nccl() -> None:
    """Ours beside what NCCL assumes on 2, 8 and 32 nodes of H100: microseconds of a small message and of 1 GB."""
    best: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    with (FOLDER / "collective_models.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            is_asked = row["basis"] == "nccl_tuning_log" or row["algorithm"] == "per port"
            if is_asked and row["ranks_per_node"] == "8" and row["device"] == "h100-80gb":
                for collective in row["kind"].split("|"):
                    best[int(row["nodes"]), collective].append((float(row["latency_us"]), float(row["algbw_GBps"])))
    link, reached = find_link("nvlink-4"), efficiency_of("h100-80gb", "infiniband")
    print("\nnodes of 8 H100    small message: NCCL, ours      100 MB: NCCL, ours      1 GB: NCCL, ours (µs)")
    for (nodes, collective), lines in sorted(best.items()):
        if nodes == 1:
            continue
        run = collective_time(
            COLLECTIVES[collective],
            Group(size=8 * nodes, stride=1, span=8 * nodes),
            node_of(link, num_nodes=nodes),
            PROFILE,
            reached.links,
        )
        sizes = (1.0, 1e8, 1e9)
        theirs = [min(latency + size / (rate * GB) * 1e6 for latency, rate in lines) for size in sizes]
        print(
            f"{nodes:3d} {collective:16s}"
            + "".join(f"{a:14.0f} {1e6 * run(b):10.0f}" for a, b in zip(theirs, sizes, strict=True))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print what fits the rows that are not withheld")
    options = parser.parse_args()
    by_link: dict[str, list[Measurement]] = defaultdict(list)
    for row in measurements():
        by_link[row.link].append(row)
    print("link, rows, withheld: median, 90 %; from 1 MiB on; by a plain ring; of it from 1 MiB on")
    for name, rows in sorted(by_link.items()):
        link, reached = find_link(name), efficiency_of(rows[0].device, "").links
        held = [row for row in rows if row.is_withheld]
        large = [row for row in held if row.num_bytes >= LARGE]
        plain = replace(link, measured=UNMEASURED)
        figures = [errors(part, each, reached) for each in (link, plain) for part in (held, large)]
        print(f"  {name:10s} {len(rows):5d} {len(held):5d}  " + "   ".join(figures), flush=True)
        if options.fit:
            found, rate = fitted([row for row in rows if not row.is_withheld], link)
            print(f"    {rate:.3f} of the rate; {found.measured}")
            alone = LinkEfficiency(intra=rate, inter=1.0, intra_latency=1.0, inter_latency=1.0)
            print(f"    withheld with these: {errors(held, found, alone)}   {errors(large, found, alone)}")
    compare_with_nccl()


if __name__ == "__main__":
    main()
