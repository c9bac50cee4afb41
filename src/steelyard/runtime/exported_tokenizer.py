"""The tokenizer that goes with exported weights, read before a run that takes days. Imports no torch."""

from pathlib import Path

from steelyard.errors import InvalidDataError

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What transformers reads beside a ``tokenizer.json``, where it is there."""


def tokenizer_files(path: Path | None) -> dict[str, bytes]:
    """The files of the tokenizer at ``path`` by the names that transformers knows them by; none for text as bytes.

    ``path`` is a ``tokenizer.json``, whatever its name, or the folder of one. Raises `InvalidDataError` where it cannot
    be read.
    """
    if path is None:
        return {}
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        beside = {name: file.with_name(name) for name in _BESIDE}
        found = {name: each.read_bytes() for name, each in beside.items() if each.is_file()}
        return {"tokenizer.json": file.read_bytes()} | found
    except OSError as error:
        raise InvalidDataError(
            field="tokenizer",
            found=f"{file}: {error.strerror}",
            expected="a tokenizer.json, or a folder that holds one",
            hint="check the path",
        ) from error
