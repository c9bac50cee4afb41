"""Paths of modules: which lie below which."""

from collections.abc import Iterable


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Of paths, each once, those that lie in no other of them."""
    distinct = list(dict.fromkeys(paths))
    return tuple(path for path in distinct if not any(is_below(path, other) for other in distinct if other != path))


def is_below_any(path: str, outers: Iterable[str]) -> bool:
    """Whether a path is one of others or lies in one of them."""
    return any(is_below(path, outer) for outer in outers)


def is_below(path: str, outer: str) -> bool:
    """Whether a path of a module is another one or lies in it."""
    return path.startswith(f"{outer}.") or path == outer
