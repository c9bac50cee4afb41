"""Hooks of mkdocs: pages that are made from the code, pages of benchmarks, and links that leave the site."""

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from typer.main import get_command

import steelyard
from steelyard.cli.app import app
from steelyard.cli.schema import FILES, printed_types
from steelyard.hardware import devices, links
from steelyard.units import GB, TERA, format_bytes, format_seconds

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def generated() -> dict[str, str]:
    """Pages that are made from the code, by their places in the site."""
    return {
        "reference/command-line.md": "\n".join(_command_line()),
        "reference/schemas.md": "\n".join(_schemas()),
        "reference/python.md": "\n".join(_python()),
        "reference/devices.md": "\n".join(_devices()),
    }


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and those of benchmarks."""
    for place, text in generated().items():
        files.append(File.generated(config, place, content=text))
    for page in sorted((ROOT / "benchmarks").glob("*.md")):
        files.append(File.generated(config, f"benchmarks/{page.name}", abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at pages of the site; a link to another file of the repository becomes its path."""
    place = page.file.src_uri
    source = Path(place) if place.startswith("benchmarks/") else Path("docs") / place

    def one(link: re.Match[str]) -> str:
        text, target, anchor = link.group(1), link.group(2), link.group(3) or ""
        goal = os.path.normpath(source.parent / target)
        inside = goal.removeprefix("docs/")
        if files.get_file_from_path(inside) is not None:
            return f"[{text}]({os.path.relpath(inside, Path(place).parent)}{anchor})"
        if not (ROOT / goal).exists():
            return link.group(0)  # which mkdocs reports
        return f"{text} (`{goal}`)" if text.strip("`") != goal else f"`{goal}`"

    return _LINK.sub(one, markdown)


def _command_line() -> Iterator[str]:
    yield "# Command line\n"
    yield "Made from the code. [Commands](../get-started/commands.md) shows which one answers which question.\n"
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        yield f"## {name}\n"
        yield f"{_one_line(command.help)}\n"
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        words = " ".join(each.metavar or each.name.upper() for each in arguments)
        yield f"```text\nsteelyard {name} {words} [OPTIONS]\n```\n".replace("  ", " ")
        yield "| option | meaning | default |\n| --- | --- | --- |"
        for each in command.params:
            if each.name in ("help",):
                continue
            label = each.metavar or each.name.upper() if each in arguments else ", ".join(each.opts)
            default = each.default if isinstance(each.default, str | int | float) else None
            shown = "" if default is None or default is False else str(default)
            yield f"| `{_cell(label)}` | {_cell(getattr(each, 'help', None) or '')} | {_cell(shown)} |"
        yield ""


def _schemas() -> Iterator[str]:
    yield "# File schemas\n"
    yield "Made from the code: keys of the files that steelyard reads and writes. An unknown key is an error.\n"
    yield "`steelyard schema NAME` prints the JSON schema of a file, and `steelyard schema COMMAND --json` that of the"
    yield f"value which a command prints with `--json`: {', '.join(f'`{name}`' for name in printed_types())}.\n"
    for name, kind in FILES.items():
        schema = kind.model_json_schema()
        yield f"## {name}\n"
        parts: Mapping[str, Any] = {kind.__name__: schema} | schema.get("$defs", {})
        for title, part in parts.items():
            if "properties" not in part:
                continue
            yield f"### {name}: {title}\n" if part is not schema else ""
            yield f"{_one_line(part.get('description'))}\n"
            yield "| key | type | required |\n| --- | --- | --- |"
            for key, value in part["properties"].items():
                yield f"| `{key}` | {_cell(_type(value))} | {'yes' if key in part.get('required', ()) else ''} |"
            yield ""


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for key, word in (("anyOf", " or "), ("oneOf", " or "), ("allOf", " and ")):
        if key in schema:
            return word.join(dict.fromkeys(_type(each) for each in schema[key]))
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = schema.get("items") or {"type": "values"}
        return f"list of {_type(items)}" if "prefixItems" not in schema else "pair"
    return str(schema.get("type", "any"))


def _python() -> Iterator[str]:
    yield "# Python\n"
    yield "Made from docstrings: everything that `import steelyard` offers.\n"
    for name in steelyard.__all__:
        if not name.startswith("_"):
            value = inspect.getmodule(getattr(steelyard, name))
            yield f"::: {value.__name__ if value else 'steelyard'}.{name}\n"


def _devices() -> Iterator[str]:
    yield "# Devices and links\n"
    yield "Made from the catalogue. `--cluster` and `--network` take these names; each number has its source.\n"
    yield "## Devices\n\n| device | memory | bf16 or fp16 TFLOP/s | source |\n| --- | --- | --- | --- |"
    for device in devices():
        memory = "" if device.memory_bytes is None else format_bytes(device.memory_bytes)
        peak = device.peak_flop_per_s.get("bf16", device.peak_flop_per_s.get("fp16"))
        shown = "" if peak is None else f"{peak / TERA:.0f}"
        yield f"| `{device.name}` | {memory} | {shown} | {_cell(device.source)} |"
    yield "\n## Links\n\n| link | GB/s, one direction | latency | source |\n| --- | --- | --- | --- |"
    for link in links():
        rate, latency = f"{link.bytes_per_s / GB:.4g}", format_seconds(link.latency_s)
        yield f"| `{link.name}` | {rate} | {latency} | {_cell(link.source)} |"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("[", "\\[")


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|").replace("<", "&lt;")
