"""Cases that once failed, each in a file, with its damaged files."""

import base64
import json
from pathlib import Path

from tests.damage.cases import Case

FOLDER = Path(__file__).parent / "corpus"


def keep(case: Case, folder: Path) -> None:
    """Write a case into a folder, named by its seed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: base64.b64encode(content).decode() for name, content in case.files.items()}
    content = {"seed": case.seed, "arguments": case.arguments, "files": files}
    (folder / f"{case.seed}.json").write_text(json.dumps(content))


def kept(folder: Path = FOLDER) -> list[Case]:
    """The cases of a folder."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [
        Case(
            seed=each["seed"],
            arguments=each["arguments"],
            files={name: base64.b64decode(content) for name, content in each["files"].items()},
        )
        for each in found
    ]
