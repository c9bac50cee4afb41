"""Tests of ``steelyard mcp``: tools answer as the commands do, follow their schemas, and stay in their folder."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from steelyard.cli.mcp import TOOLS, make_server
from steelyard.cli.schema import printed_schema
from tests.cli.conftest import Run, check_printed, user_error

JOB = {"model": "llama3.2-1b", "cluster": "1x2xa100-40gb", "global_batch": 4, "seq_len": 4096}
Call = Callable[..., tuple[bool, Any]]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Call a tool of a server for ``home``: return whether it is an error, and the object or the message."""

    async def ask(tool: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        async with Client(make_server(tmp_path / "home")) as client:
            found = await client.call_tool(tool, arguments)
            return found.is_error, found.content[0].text if found.is_error else found.structured_content

    (tmp_path / "home").mkdir()
    (tmp_path / "outside.json").write_text("{}")
    (tmp_path / "home" / "link.json").symlink_to(tmp_path / "outside.json")
    return lambda tool, **arguments: asyncio.run(ask(tool, arguments))


def test_tools_have_the_options_of_their_commands_and_the_schemas_of_their_json(tmp_path: Path) -> None:
    async def listed() -> Any:
        async with Client(make_server(tmp_path)) as client:
            return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in asyncio.run(listed())}
    assert tuple(tools) == TOOLS == ("plan", "advise", "explain", "price", "check")
    for name, tool in tools.items():
        assert tool.description
        assert tool.input_schema["additionalProperties"] is False
        assert tool.output_schema == {"type": "object"} | printed_schema(name)
    plan = tools["plan"].input_schema
    assert plan["required"] == ["model", "cluster"]
    assert {"global_batch", "max_tp", "optimizer", "calibrate"} <= set(plan["properties"])
    assert all(each["description"] for each in plan["properties"].values())
    assert not {"json", "builder"} & {name for tool in tools.values() for name in tool.input_schema["properties"]}


@pytest.mark.slow
def test_a_server_in_a_process_plans_and_explains_in_its_folder(tmp_path: Path) -> None:
    code = "from steelyard.cli import main; main()"
    server = StdioServerParameters(
        command=sys.executable, args=["-c", code, "mcp", "--folder", str(tmp_path)], env=dict(os.environ)
    )

    async def talk() -> tuple[Any, Any]:
        async with Client(stdio_client(server)) as client:
            planned = await client.call_tool("plan", JOB | {"output": "plan.json"})
            return planned, await client.call_tool("explain", {"path": "plan.json", "why_not": "tp=2"})

    planned, explained = asyncio.run(talk())
    assert not planned.is_error, planned.content
    assert planned.structured_content == json.loads((tmp_path / "plan.json").read_text())
    check_printed("plan", planned.content[0].text)
    check_printed("explain", json.dumps(explained.structured_content))
    assert explained.structured_content["explanation"]["why_not"]


@pytest.mark.slow
def test_settings_are_priced_as_the_command_prices_them(call: Call, run: Run) -> None:
    is_error, found = call("price", **JOB, tp=2, sp=False)
    assert not is_error, found
    words = [word for name, value in JOB.items() if name != "model" for word in (f"--{name.replace('_', '-')}", value)]
    assert found == json.loads(run("price", JOB["model"], *words, "--tp", 2, "--no-sp", "--json").stdout)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("plan", JOB | {"output": "../plan.json"}),
        ("plan", JOB | {"save_problem": "/p.json"}),
        ("plan", JOB | {"profile": "old=a.json,new=../b.json"}),
        ("plan", JOB | {"calibrate": ["record.json", "link.json"]}),
        ("plan", JOB | {"model": "/etc/config.json"}),
        ("plan", JOB | {"cluster": "a/../../lab.yaml"}),
        ("explain", {"path": "link.json"}),
        ("explain", {"path": "plan.json", "why_not": "../other.json"}),
        ("check", {"path": "\0"}),
    ],
)
def test_a_path_out_of_the_folder_is_refused(call: Call, tool: str, arguments: dict[str, Any]) -> None:
    is_error, message = call(tool, **arguments)
    assert is_error
    assert "expected: a path in " in message
    assert "Traceback" not in message


@pytest.mark.parametrize("model", ["own.py:build", "sub/own.py:build"])
def test_code_is_not_run(call: Call, model: str) -> None:
    assert "no code to run" in call("plan", **JOB | {"model": model})[1]


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        ("train", {}, "no tool 'train'"),
        ("plan", {"modle": "x"}, "did you mean model or"),
        ("plan", JOB | {"seq_len": True}, "seq_len: found true"),
        ("plan", {"model": "gpt2"}, "cluster: found nothing"),
        ("plan", JOB | {"max_tp": 0}, "--max-tp: found '0'"),
        ("check", {"path": "plan.json", "builder": "x.py:f"}, "builder"),
    ],
)
def test_another_tool_or_argument_is_an_error(call: Call, tool: str, arguments: dict[str, Any], expected: str) -> None:
    is_error, message = call(tool, **arguments)
    assert is_error
    assert expected in message


@pytest.mark.slow
def test_an_error_of_a_command_is_its_message(call: Call) -> None:
    is_error, message = call("plan", **JOB | {"cluster": "1x8xh1000"})
    assert is_error
    assert message.startswith("error: device: found 'h1000'")


def test_a_missing_library_and_a_missing_folder_are_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_error(run("mcp", "--folder", "missing")).field == "--folder"
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    assert "steelyard[mcp]" in user_error(run("mcp")).hint
