"""Tests of units: the constants, printed quantities, and texts that are quantities of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import units
from steelyard.errors import UserError
from steelyard.units import (
    format_bytes,
    format_change,
    format_count,
    format_days,
    format_money,
    format_seconds,
    parse_bytes,
    parse_count,
)

BYTE_SUFFIXES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
SECOND_SUFFIXES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
COUNT_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        (units.KIB, 1024),
        (units.MIB, 1024**2),
        (units.GIB, 1024**3),
        (units.KB, 10**3),
        (units.MB, 10**6),
        (units.GB, 10**9),
        (units.TERA, 10**12),
    ],
)
def test_binary_prefixes_are_powers_of_1024_and_decimal_ones_of_1000(constant, value):
    assert constant == value


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GiB", 20 * 1024**3),
        ("20 GiB", 20 * 1024**3),
        (" 512 MB ", 512 * 10**6),
        ("1073741824", 1024**3),
        ("7B", 7),
        ("1.5KiB", 1536),
        ("2kb", 2000),
        ("3TB", 3 * 10**12),
        ("3TiB", 3 * 1024**4),
        ("4.35GB", 4_350_000_000),
        ("0", 0),
    ],
)
def test_a_quantity_is_read_with_its_unit(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["20gib", "20GIB", "20GiB", "20giB"])
def test_the_case_of_a_unit_does_not_matter(text):
    assert parse_bytes(text) == 20 * units.GIB


@given(st.integers(units.LEAST_BYTES, 10**18 - 1))
def test_a_number_without_unit_is_read_to_the_byte(num_bytes):
    assert parse_bytes(str(num_bytes)) == parse_bytes(f"{num_bytes} B") == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "20 gigabytes",
        "-5GiB",
        "1e9",
        "nan",
        "inf",
        "1,5GB",
        "20 Gi B",
        "1.GiB",
        ".5GiB",
        "2 0GiB",
        "9" * 5000,
    ],
)
def test_a_text_that_is_no_quantity_shows_how_to_write_one(text):
    with pytest.raises(UserError, match="--memory 20GiB") as caught:
        parse_bytes(text)
    assert (caught.value.field, caught.value.found) == ("--memory", repr(text))


@pytest.mark.parametrize("text", ["80", "80.5", "999999"])
def test_a_number_without_a_unit_that_is_too_small_for_bytes_is_asked_for_its_unit(text):
    with pytest.raises(UserError, match="no unit") as caught:
        parse_bytes(text)
    assert caught.value.expected == f"a number with a unit: is it {text}GiB or {text}GB?"
    assert f"--memory {text}GiB" in caught.value.hint


@given(st.integers(0, 10**15))
def test_bytes_printed_and_read_again_are_the_same_to_three_digits(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006, abs=0)


@given(st.integers(0, 10**15))
def test_more_bytes_never_print_as_fewer(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) <= parse_bytes(format_bytes(num_bytes + num_bytes // 100 + 1))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1.46 * 1024**3, "1.46 GiB"),
        (79.3 * 1024**3, "79.3 GiB"),
        (9.999 * 1024**3, "10.0 GiB"),
        (5 * 1024**4, "5.00 TiB"),
        (-3 * 1024**2, "-3.00 MiB"),
    ],
)
def test_bytes_print_with_a_binary_prefix_and_three_digits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12.34, "12.3 s"),
        (0.0123, "12.3 ms"),
        (4.5e-6, "4.50 µs"),
        (0.99999, "1.00 s"),
        (321, "321 s"),
        (2e-9, "2.00 ns"),
        (2e-10, "2e-10 s"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds_print_with_a_fitting_unit(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(1e-9, 999))
def test_seconds_printed_and_read_again_are_the_same_to_three_digits(seconds):
    number, suffix = format_seconds(seconds).split()
    assert float(number) * SECOND_SUFFIXES[suffix] == pytest.approx(seconds, rel=0.0051)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (999_999, "1.00 M"), (1000, "1.00 K"), (8_030_261_248, "8.03 B"), (1.5e13, "15.0 T")],
)
def test_counts_print_with_a_decimal_prefix(count, text):
    assert format_count(count) == text


@given(st.integers(0, 10**14))
def test_counts_printed_and_read_again_are_the_same_to_three_digits(count):
    number, _, suffix = format_count(count).partition(" ")
    assert float(number) * COUNT_SUFFIXES[suffix] == pytest.approx(count, rel=0.0051)


@pytest.mark.parametrize(
    ("text", "count"),
    [("15T", 15 * 10**12), ("300 b", 300 * 10**9), ("1.4m", 1_400_000), ("2K", 2000), ("7", 7)],
)
def test_a_count_may_have_a_decimal_prefix(text, count):
    assert parse_count(text, field="--tokens") == count


@pytest.mark.parametrize("text", ["", "T", "-1B", "0", "0.1", "15GB", "15 T tokens", "1e12", "inf"])
def test_other_texts_are_no_count(text):
    with pytest.raises(UserError, match="--tokens"):
        parse_count(text, field="--tokens")


@pytest.mark.parametrize(
    ("days", "text"), [(61.24, "61.2 days"), (1.4, "33.6 hours"), (0.05, "72.0 minutes"), (1500, "1500 days")]
)
def test_long_durations_are_in_days_hours_or_minutes(days, text):
    assert format_days(days) == text


@pytest.mark.parametrize(("share", "text"), [(0.0204, "+2.0%"), (-0.0016, "−0.2%"), (-0.0004, "same"), (0.0, "same")])
def test_a_change_has_its_sign_unless_it_is_none(share, text):
    assert format_change(share) == text


@pytest.mark.parametrize(
    ("dollars", "text"), [(2.94e6, "$2.94 M"), (0.125, "$0.12"), (999, "$999.00"), (1e9, "$1.00 B")]
)
def test_money_has_cents_or_a_prefix(dollars, text):
    assert format_money(dollars) == text
