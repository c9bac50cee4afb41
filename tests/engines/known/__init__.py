"""Names that framework versions know, one file each, as read from docstrings or files."""

from pathlib import Path


def known_names(file: str) -> set[str]:
    """The names of a file here, without its comments."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("# ")}
