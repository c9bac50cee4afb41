"""Constants, parsing and formatting for units: bytes, seconds, counts, days and money.

Binary prefixes (KiB, MiB, GiB) are powers of 1024, for memory. Decimal prefixes (GB) are powers of 1000, for bandwidth
and for memory that a user writes that way.
"""

import re
from collections.abc import Callable, Hashable, Iterable
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from steelyard.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Amount: TypeAlias = "float | NDArray[np.float64]"
"""Number, or array of the numbers of several pipeline configurations."""
Whole: TypeAlias = "int | NDArray[np.int64]"
"""Whole number, or array of the numbers of several strategies."""


def at_each(amount: Amount, of: Callable[[float], float]) -> Amount:
    """Apply a function of one number to every number."""
    if isinstance(amount, float | int):
        return of(amount)
    import numpy as np

    return np.array([of(each) for each in amount.tolist()])


def hashable(amount: Amount) -> Hashable:
    """Return a hashable value that is the same for equal numbers."""
    return amount if isinstance(amount, float | int) else amount.tobytes()


def is_positive(amount: Amount) -> bool:
    """Return whether the number, or one of them, is above 0."""
    return amount > 0 if isinstance(amount, float | int) else bool(amount.max() > 0)


KIB = 1024
MIB = 1024**2
GIB = 1024**3
KB = 10**3
MB = 10**6
GB = 10**9
TERA = 10**12

_SUFFIX_BYTES = {"b": 1, "kb": KB, "mb": MB, "gb": GB, "tb": TERA, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4}
MOST_COUNT = 10**18
"""Maximum number of tokens of a training, more than exist and small enough for 64 bits."""
LEAST_BYTES = 10**6
"""Minimum number of bytes that may be written without a unit."""
_COUNT_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}
_COUNT_NOISE = re.compile(r"[\s,_]|(tokens?|samples?|sequences?)$", flags=re.IGNORECASE)
_FLOAT = re.compile(r"\d{1,18}(?:\.\d{1,18})?e\+?\d{1,2}", flags=re.IGNORECASE)
_QUANTITY = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Return the bytes in a quantity such as ``20GiB``, ``512 MB`` or ``1073741824``. Raises `UserError` for others.

    A number without a unit means bytes if it is at least `LEAST_BYTES`. A smaller one surely lacks its unit.
    """
    match = _QUANTITY.fullmatch(text)
    number, suffix = match.groups() if match else ("", "")
    if match and not suffix and 0 < float(number) < LEAST_BYTES:
        raise UserError(
            field="--memory",
            found=f"{number}, which has no unit",
            expected=f"a number with a unit: is it {number}GiB or {number}GB?",
            hint=f"write --memory {number}GiB, the unit of device memory ({number}B for bytes)",
        )
    if match is None or (suffix.lower() or "b") not in _SUFFIX_BYTES:
        meant = f"{suffix[0].upper()}iB" if suffix and f"{suffix[0].lower()}ib" in _SUFFIX_BYTES else ""
        raise UserError(
            field="--memory",
            found=repr(text),
            expected="a number with a unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB or TiB (powers of 1024)",
            hint=f"write --memory {number}{meant}" if meant else "write for example --memory 80GB or --memory 20GiB",
        )
    return int(Fraction(number) * _SUFFIX_BYTES[suffix.lower() or "b"])


def parse_count(
    text: str, *, field: str, least: int = 1, most: int = MOST_COUNT, kilo: int = 1000, example: str = "15T"
) -> int:
    """Return the count in ``15T``, ``300B`` or ``1000000``. Raises `UserError` for anything else.

    ``kilo`` is the value of K, 1000 or 1024. M, B and T are its powers.
    """
    count = _count(text, kilo)
    if count is None or not least <= count <= most:
        plain = _COUNT_NOISE.sub("", text)
        if (meant := _count(plain, kilo)) is None and _FLOAT.fullmatch(plain) and float(plain).is_integer():
            plain, meant = f"{float(plain):.0f}", int(float(plain))
        is_near = meant is not None and least <= meant <= most
        powers = "K, M, B, T: powers of 1000" if kilo == 1000 else f"4K is 4 × {kilo}"
        raise UserError(
            field=field,
            found=repr(text),
            expected=f"a whole number from {least} to {most:,} ({powers})",
            hint=f"write {field} {plain if is_near else example}",
        )
    return count


def _count(text: str, kilo: int) -> int | None:
    match = _QUANTITY.fullmatch(text)
    power = _COUNT_POWERS.get(match.group(2).lower()) if match else None
    if match is None or power is None:
        return None
    count = Fraction(match.group(1)) * kilo**power
    return int(count) if count.denominator == 1 else None


def format_bytes(num_bytes: float) -> str:
    """Format a byte count with a binary prefix and three significant digits, ``1.46 GiB``."""
    value = float(num_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.5:
            return f"{value:.0f} B" if suffix == "B" else f"{_three_digits(value)} {suffix}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def format_seconds(seconds: float) -> str:
    """Format a duration with a suitable unit and three significant digits, ``12.3 ms``."""
    for factor, suffix in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if abs(seconds) >= 0.9995 * factor:
            return f"{_three_digits(seconds / factor)} {suffix}"
    return "0 s" if seconds == 0 else f"{seconds:.3g} s"


def format_plural(count: int, one: str, many: str | None = None) -> str:
    """Format a count with its noun, ``1 stage`` or ``4 stages``. ``many`` is for plurals not formed by an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def format_count(count: float) -> str:
    """Format a large count with a decimal prefix, ``8.03 B`` for 8 030 000 000."""
    value = float(count)
    for suffix in ("", " K", " M", " B"):
        if abs(value) < 999.5:
            return f"{_three_digits(value)}{suffix}" if suffix else f"{value:.0f}"
        value /= 1000
    return f"{_three_digits(value)} T"


def format_tera(flop_per_s: float) -> str:
    """Format TFLOP/s as a whole number from ten on, ``365``, and with two digits below, ``0.024``."""
    tera = flop_per_s / TERA
    return f"{tera:,.0f}" if tera >= 10 else f"{tera:.2g}"


def format_ranges(values: Iterable[int]) -> str:
    """Format whole numbers with runs joined, ``3, 5–7``."""
    ordered = sorted(values)
    runs = [[value for _, value in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def format_change(share: float) -> str:
    """Format a relative change, ``+2.0%``, ``−0.3%`` or ``same``."""
    return "same" if abs(share) < 0.0005 else f"{share:+.1%}".replace("-", "−")


def format_days(days: float) -> str:
    """Format a long duration in days, or in hours or minutes if it is short: ``61.2 days``, ``14.3 hours``."""
    for factor, unit in ((1, "days"), (24, "hours")):
        if days * factor >= 1.5:
            return f"{_three_digits(days * factor)} {unit}"
    return f"{_three_digits(days * 24 * 60)} minutes"


def format_money(dollars: float) -> str:
    """Format dollars with a decimal prefix, ``$2.94 M``, or with cents below a thousand."""
    return f"${dollars:.2f}" if dollars < 999.5 else f"${format_count(dollars)}"


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"
