"""``steelyard mcp``: plan, advise, explain, price and check as tools of the Model Context Protocol.

A tool takes the arguments and options of its command, in a schema made from the command's signature, runs the command
in a process of its own, and returns the object that the command prints with ``--json``. Paths that lead out of the
server's folder are refused, and so is Python code of the user's own, which commands would run.
"""

import asyncio
import inspect
import json
import re
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from typer.models import ArgumentInfo

from steelyard import __version__
from steelyard.cli.app import COMMANDS
from steelyard.cli.schema import printed_schema
from steelyard.errors import UserError
from steelyard.files import first_error
from steelyard.model.own import BUILDER

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

TOOLS = ("plan", "advise", "explain", "price", "check")
_WITHHELD = ("json", "builder")
_IN_A_LIST = re.compile(r"[,=+:]")
"""Signs between which options hold paths: ``old=a.json,new=b.json``."""
_RUN = "from steelyard.cli import main; main()"


def mcp(
    folder: Annotated[
        Path, typer.Option("--folder", help="Folder that tools read and write; no path may lead out of it.")
    ] = Path(),
) -> None:
    """Serve plan, advise, explain, price and check to an agent, over standard input and output (MCP)."""
    if not folder.is_dir():
        raise UserError(field="--folder", found=str(folder), expected="a folder", hint=f"mkdir {folder}")
    try:
        from mcp.server.stdio import stdio_server
    except ModuleNotFoundError:
        raise UserError(
            field="mcp",
            found="not installed in this environment",
            expected="the protocol's own library",
            hint='pip install "steelyard[mcp]"',
        ) from None

    async def serve() -> None:
        server = make_server(folder)
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    asyncio.run(serve())


def make_server(folder: Path) -> "Server[Any]":
    """Return a server whose tools read and write in ``folder``."""
    from mcp import types
    from mcp.server.lowlevel import Server

    home = folder.resolve()
    tools = [
        types.Tool(
            name=name,
            description=inspect.getdoc(_function(name)),
            input_schema=Arguments(name).model.model_json_schema(),
            output_schema={"type": "object"} | printed_schema(name),
        )
        for name in TOOLS
    ]

    async def list_tools(_context: Any, _request: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def call_tool(_context: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        if request.name not in TOOLS:
            return types.CallToolResult(content=[_text(f"no tool {request.name!r}: {', '.join(TOOLS)}")], is_error=True)
        try:
            words = Arguments(request.name).words(request.arguments or {}, home)
        except UserError as error:
            return types.CallToolResult(content=[_text(f"error: {error}")], is_error=True)
        printed, messages = await _run(request.name, words, home)
        try:
            found = json.loads(printed)
        except ValueError:
            return types.CallToolResult(content=[_text(messages)], is_error=True)
        return types.CallToolResult(content=[_text(printed)], structured_content=found)

    def _text(text: str) -> types.TextContent:
        return types.TextContent(type="text", text=text)

    return Server("steelyard", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)


class Arguments:
    """Arguments of a tool: those of its command, by the names that they have on the command line."""

    def __init__(self, command: str) -> None:
        self._words: dict[str, str | None] = {}
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(_function(command)).parameters.values():
            if not (declared := getattr(parameter.annotation, "__metadata__", ())):
                continue  # the context
            kind, info = parameter.annotation.__origin__, declared[0]
            words = [each for each in (info.default, *(info.param_decls or ())) if str(each).startswith("--")]
            name = words[0].partition("/")[0][2:].replace("-", "_") if words else parameter.name
            if name in _WITHHELD:
                continue
            self._words[name] = None if isinstance(info, ArgumentInfo) else [*words, f"--{name}"][0]
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            kind = kind | str if info.parser else kind  # which reads 4k and 15T
            fields[name] = (kind, Field(default, description=info.help, ge=info.min, le=info.max))
        config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        self.model: type[BaseModel] = create_model(command, __config__=config, **fields)

    def words(self, given: dict[str, Any], home: Path) -> list[str]:
        """Return the words of a command line; raises `UserError` for wrong ones, paths out of ``home``, code."""
        try:
            checked = self.model.model_validate(given)
        except ValidationError as error:
            raise first_error(error, self.model, UserError) from error
        options, positional = ["--json"], list[str]()
        for name, value in ((each, getattr(checked, each)) for each in given):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, str | Path):
                    _refuse(name, str(each), home)
                yes, _, no = (self._words[name] or "").partition("/")
                if not yes:
                    positional.append(str(each))
                elif isinstance(each, bool):
                    if self.model.model_fields[name].annotation not in (bool, bool | None):
                        raise UserError(
                            field=name, found=str(each).lower(), expected="a value", hint="give one, or leave it out"
                        )
                    options += [yes] if each else [no] if no else []
                elif each is not None:
                    options.append(f"{yes}={each}")
        return [*options, "--", *positional]


def _refuse(name: str, text: str, home: Path) -> None:
    """Raise `UserError` for a text that names a path out of ``home`` or Python code that would be run."""
    if BUILDER.fullmatch(text):
        raise UserError(
            field=name, found=repr(text), expected="no code to run", hint="ask the user to run steelyard in a shell"
        )
    for part in (text, *_IN_A_LIST.split(text)):
        with suppress(OSError, ValueError):
            if (home / part.strip()).resolve().is_relative_to(home):
                continue
        raise UserError(
            field=name, found=repr(text), expected=f"a path in {home}", hint="copy the file there, or write there"
        )


async def _run(command: str, words: list[str], home: Path) -> tuple[str, str]:
    """Return the output and the messages of a command that runs in a process; ends it where nobody waits any more."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _RUN, command, *words),
        cwd=home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, messages = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
    return printed.decode(), messages.decode()


def _function(command: str) -> Any:
    return getattr(import_module(f"steelyard.cli.{COMMANDS[command]}"), command)
