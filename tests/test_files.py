"""Tests of file reading: complete files are read, and impossible files are refused early."""

import json
import subprocess
import sys

import pytest

from steelyard.files import (
    MOST_BYTES,
    MOST_CONTAINERS,
    MOST_DEPTH,
    MOST_KEYS,
    MOST_YAML_BYTES,
    parse_json,
    parse_yaml,
    read_json,
    read_text,
)

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "x"]}, [], "größe", {}, 10**30])
def test_what_json_holds_is_read(value, tmp_path):
    (tmp_path / "file.json").write_text(json.dumps(value), encoding="utf-8")
    assert read_json(tmp_path / "file.json") == value


def test_what_yaml_holds_is_read():
    part = {"b": [1, 2.5, None, True, "text"]}
    assert parse_yaml("a: &x {b: [1, 2.5, null, true, text]}\nc: *x\n") == {"a": part, "c": part}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested too deep"),
        ("[" * 900 + "]" * 900, "nested too deep"),
        ("[" * 100_000, "nested too deep"),
        ("[" + "[]," * MOST_CONTAINERS + "1]", "more than the limit for such files"),
        ("{" + ",".join(f'"{number}":1' for number in range(MOST_KEYS + 1)) + "}", "keys"),
        ('[{"a": 1, "b": 2, "a": 3}]', "the key 'a' twice"),
        (r'{"a": "\ud800"}', "surrogates"),
        ("{", "Expecting"),
        ("9" * 5000, "digits"),
    ],
    ids=["deep", "900 deep", "100,000 deep", "lists", "keys", "twice", "half a character", "brace", "digits"],
)
def test_json_beyond_the_bounds_is_refused_with_a_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_a_key_of_many_that_is_there_twice_is_named():
    text = "{" + ",".join(f'"{number}":1' for number in range(50_000)) + ',"7":2}'
    with pytest.raises(ValueError, match="the key '7' twice"):
        parse_json(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LAUGHS, "values, counted as often as they occur"),
        ("a: &a [*a]", "nested too deep"),
        ("a: &a [*a, *a]", "values, counted as often as they occur"),
        ("[" * 5000, "nested too deep"),
        ("x" * (MOST_YAML_BYTES + 1), "the limit for such files"),
        ("a: 2001-01-01", "a date, which JSON does not support"),
        ("a: 2001-99-99", "month must be"),
        ("a: !!set {b}", "a set, which JSON does not support"),
        ("1: 2", "the key 1, which is not a string"),
        ("!!timestamp x", "not valid YAML"),
        ("!!int ''", "not valid YAML"),
        ("!!bool x", "not valid YAML"),
        ("!!python/object:os.system {}", "not valid YAML"),
        ("? [1]\n: 2", "not valid YAML"),
        (r'a: "\ud800"', "surrogates"),
    ],
)
def test_yaml_beyond_the_bounds_is_refused_with_a_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_yaml(text)


def test_a_file_longer_than_the_bound_is_refused(tmp_path):
    (tmp_path / "file").write_text("x" * 11)
    assert len(read_text(tmp_path / "file", most_bytes=11)) == 11
    with pytest.raises(ValueError, match="more than 10 B"):
        read_text(tmp_path / "file", most_bytes=10)


def test_a_device_without_an_end_is_refused():
    with pytest.raises(ValueError, match="the limit for such files"):
        read_text("/dev/zero")


TOO_MUCH = {
    "brackets": f"'[' * {MOST_BYTES}",
    "lists": f"'[' + '[],' * ({MOST_BYTES} // 3) + '1]'",
    "numbers": f"'[' + '1,' * ({MOST_BYTES} // 2) + '1]'",
    "a million keys": "'{' + ','.join(f'\"{n}\":1' for n in range(10**6)) + '}'",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_is_refused_takes_less_than_500_mib(text):
    script = (
        f"from steelyard.files import parse_json\ntext = {text}\n"
        "try:\n    parse_json(text)\n"
        "except ValueError:\n    print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(finished.stdout) < 500 * 1024
