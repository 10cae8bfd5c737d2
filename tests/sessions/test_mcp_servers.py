"""MCP servers: started from a file, listed and called, whatever they do; they are real ones."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_fakes import press_ctrl_c
from mcp_server import config, this_server
from pyh2o.errors import MissingPackageError, SettingsError
from pyh2o.sessions.mcp_servers import McpServers
from pyh2o.writing.tools import Call

SECONDS = 5.0
"""That a call may take."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[McpServers]:
    broken = {"command": sys.executable, "args": ["-c", "raise SystemExit('no such luck')"]}
    path = config(
        tmp_path_factory.mktemp("mcp"),
        one=this_server(env={"COLOUR": "green"}, disabled=False),
        missing={"command": "no-such-program-7h3q"},
        broken=broken,
        web={"url": "http://127.0.0.1:9/mcp"},
    )
    found = McpServers(path, seconds=SECONDS)
    yield found
    found.close()


def result(servers: McpServers, name: str, /, **arguments: Any) -> Call:
    return servers.run(Call(name, json.dumps(arguments)))


def test_tools_are_listed_and_called(servers: McpServers) -> None:
    found = servers.tools()
    server, add = found["add"]
    assert server.name == "one"
    assert add.description == "Adds two numbers."
    assert add.parameters["properties"].keys() == {"a", "b"}
    assert result(servers, "add", a=20, b=22) == Call("add", '{"a": 20, "b": 22}', "42")
    assert result(servers, "setting", name="COLOUR").result == "green"
    assert result(servers, "lines", n=3).result == "\n".join(
        f"line {number} of the long text" for number in range(3)
    )


def test_server_that_cannot_be_started_says_why(servers: McpServers) -> None:
    servers.tools()
    one, missing, broken, web = servers.servers
    assert one.trouble == ""
    assert "no-such-program-7h3q" in missing.trouble
    assert "no such luck" in broken.trouble
    assert web.trouble.startswith("cannot be started: ")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fail", "{}", "fail"),
        ("add", '{"a": 1, "b": "x"}', "valid integer"),
        ("add", '{"a": 1', "the arguments are not JSON: "),
        ("add", "[1, 2]", "the arguments are not a JSON object"),
        ("subtract", "{}", "unknown tool subtract: available are add, "),
    ],
)
def test_what_goes_wrong_is_a_result(
    servers: McpServers, name: str, arguments: str, said: str
) -> None:
    call = servers.run(Call(name, arguments))
    assert call.failed
    assert call.result is not None
    assert said in call.result


def test_server_that_ended_is_begun_again(servers: McpServers) -> None:
    ended = result(servers, "die")
    assert ended.failed
    assert ended.result == "the server one has exited: Connection closed (out of luck)"
    assert servers.servers[0].trouble == "has exited: Connection closed (out of luck)"
    assert result(servers, "add", a=1, b=1).result == "2"
    assert servers.servers[0].trouble == ""


def test_slow_call_ends(tmp_path: Path) -> None:
    servers = McpServers(config(tmp_path, one=this_server()), seconds=0.5)
    try:
        slow = result(servers, "sleep", seconds=60)
    finally:
        servers.close()
    assert slow == Call("sleep", '{"seconds": 60}', slow.result, failed=True)
    assert slow.result == "no answer within 0.5 s: the call was canceled"


def test_ctrl_c_ends_the_call_alone(servers: McpServers) -> None:
    servers.tools()
    threading.Timer(0.5, press_ctrl_c).start()
    with pytest.raises(KeyboardInterrupt):
        result(servers, "sleep", seconds=60)
    assert result(servers, "add", a=1, b=2).result == "3"


def test_tools_of_one_name_have_the_names_of_their_servers(tmp_path: Path) -> None:
    servers = McpServers(config(tmp_path, one=this_server(), two=this_server()))
    try:
        found = servers.tools()
        assert {"one_add", "two_add"} <= found.keys()
        assert result(servers, "two_add", a=1, b=2).result == "3"
    finally:
        servers.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a file of MCP servers"),
        ("{}", "'mcpServers'"),
        ('{"mcpServers": {"one": {"args": []}}}', "one has neither command nor url"),
        ('{"mcpServers": {"one": {"command": ["ls"]}}}', "command or url of one is not a string"),
        ('{"mcpServers": [1]}', "is not a file of MCP servers"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(SettingsError) as error:
        McpServers(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*none\.json"):
        McpServers(tmp_path / "none.json")


def test_missing_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingPackageError, match=r"mcp: .* -m pip install 'pyh2o-llm\[mcp\]'"):
        McpServers(config(tmp_path, one=this_server()))
