"""Count the files and named functions of the package that one `steelyard plan` enters.

What importing executes does not count, nor do bodies of classes, lambdas, comprehensions and generated methods.

Run: python benchmarks/entered.py [MODEL [OPTION ...]]   (default: llama3-8b on 8 A100)
     python benchmarks/entered.py --list                 (also prints the files with the functions of each)
"""

import contextlib
import inspect
import io
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType

import steelyard
from steelyard.cli.app import main

PACKAGE = Path(steelyard.__file__).parent
DEFAULT = ["llama3-8b", "--cluster", "1x8xa100-80gb", "--global-batch", "64", "--seq-len", "4096"]


def entered(arguments: list[str]) -> dict[str, set[str]]:
    """Return the named functions that ``steelyard plan`` with these arguments calls, by file of the package."""
    found: dict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        is_function = event == "call" and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if is_function and code.co_filename.startswith(str(PACKAGE)):
            found[code.co_filename.removeprefix(f"{PACKAGE}/")].add(code.co_qualname)

    sys.argv = ["steelyard", "plan", *arguments]
    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    return {path: names for path, names in found.items() if not all("<locals>" in name for name in names)}


if __name__ == "__main__":
    shows = "--list" in sys.argv
    given = [each for each in sys.argv[1:] if each != "--list"] or DEFAULT
    files = entered(given)
    num_functions = sum(len(names) for names in files.values())
    if shows:
        for path in sorted(files):
            print(f"{path}: {', '.join(sorted(files[path]))}")
    print(f"steelyard plan {' '.join(given)}: {len(files)} files, {num_functions} named functions")
