"""Servers of the Model Context Protocol: those that a file names, started, and asked for tools."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import textwrap
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingPackageError, SettingsError
from ..writing.tools import Call, Tool

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client

SECONDS_TO_START = 180.0  # some are fetched first
SECONDS_TO_ANSWER = 120.0
SECONDS_TO_END = 10.0
NOT_YET = f"has not begun within {SECONDS_TO_START:g} s"
# What is looked at of what a server has said last.
TAIL_BYTES = 2000
LONGEST_REASON = 200


class McpServers:
    """All servers of a file; they run until `close`.

    Attributes:
        servers: in the order of the file.

    Args:
        path: JSON in the usual form, {"mcpServers": {NAME: {"command": ..., "args": [...],
            "env": {...}, "cwd": ...} or {"url": ..., "headers": {...}}}}.
        seconds: that a call may take.

    Raises:
        SettingsError: no such file, or it has something else in it.
        MissingPackageError: the package mcp is not installed.
    """

    def __init__(self, path: Path, *, seconds: float = SECONDS_TO_ANSWER) -> None:
        found = _read(path)
        try:
            import mcp  # noqa: F401  # takes half a second
            from anyio.from_thread import start_blocking_portal
        except ImportError as error:
            raise MissingPackageError("an MCP server", error.name, "mcp") from error
        logging.getLogger("mcp").addHandler(logging.NullHandler())  # or it writes into the chat
        self._stack = ExitStack()
        portal = self._stack.enter_context(start_blocking_portal())
        self.servers = [McpServer(name, about, portal, seconds) for name, about in found.items()]
        for server in self.servers:
            self._stack.callback(server.close)

    def close(self) -> None:
        """End all servers."""
        self._stack.close()

    def tools(self) -> dict[str, tuple[McpServer, Tool]]:
        """All tools, by the names that a model knows them by; waits until the servers have begun.

        Where two servers have a tool of the same name, the names of the servers are put before it.
        """
        every = [(server, tool) for server in self.servers for tool in server.tools]
        names = [tool.name for _, tool in every]
        return {
            tool.name if names.count(tool.name) == 1 else f"{server.name}_{tool.name}": (
                server,
                tool,
            )
            for server, tool in every
        }

    def run(self, call: Call) -> Call:
        """The call with its result; what goes wrong is a result as well.

        KeyboardInterrupt ends the call.
        """
        tools = self.tools()
        if call.name not in tools:
            there = ", ".join(tools) or "none"
            return replace(call, result=f"no tool {call.name}: there are {there}", failed=True)
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return replace(call, result=f"the arguments are no JSON: {error}", failed=True)
        if not isinstance(arguments, dict):
            return replace(call, result="the arguments are no JSON object", failed=True)
        server, tool = tools[call.name]
        text, failed = server.call(tool.name, arguments)
        return replace(call, result=text, failed=failed)


class McpServer:
    """A server and the connection to it, in the thread of the portal.

    Attributes:
        name: in the file.
        trouble: why it cannot be asked; "" if it can.
    """

    def __init__(
        self, name: str, about: dict[str, Any], portal: BlockingPortal, seconds: float
    ) -> None:
        """Begin it; `seconds` is what a call may take."""
        self.name = name
        self._about = about
        self._portal = portal
        self._seconds = seconds
        self._tools: tuple[Tool, ...] = ()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in `close`
        self._begin()

    def _begin(self) -> None:
        self.trouble = ""
        self._begun: Future[tuple[Client, tuple[Tool, ...]]] = Future()
        self._alive = self._portal.start_task_soon(self._live, self._begun)

    def _end(self) -> None:
        self._alive.cancel()
        with suppress(Exception, CancelledError):
            self._alive.result(SECONDS_TO_END)

    def close(self) -> None:
        """End it."""
        self._end()
        self._log.close()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Its tools; waits until it has begun."""
        with suppress(Exception):
            self._connected()
        return self._tools

    def _connected(self) -> Client:
        """The connection, when it is there."""
        try:
            client, self._tools = self._begun.result(SECONDS_TO_START)
        except FutureTimeoutError:
            self.trouble = NOT_YET
            raise
        except Exception as error:
            self.trouble = f"cannot be started: {self._why(error)}"
            raise
        if self.trouble == NOT_YET:
            self.trouble = ""
        return client

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """What a tool gives, as text, and whether it failed.

        A server that has ended is begun again. KeyboardInterrupt ends the call.
        """
        if self.trouble not in ("", NOT_YET):
            self._begin()
        try:
            client = self._connected()
        except Exception:
            return f"the server {self.name} {self.trouble}", True
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        answer = self._portal.start_task_soon(self._ask, client, name, arguments)
        try:
            found: tuple[str, bool] = answer.result()
            return found
        except TimeoutError:
            return f"no answer within {self._seconds:g} s: the call was ended", True
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                return error.message, True
            self._end()
            self.trouble = f"has ended: {self._why(error)}"
            return f"the server {self.name} {self.trouble}", True
        except Exception as error:  # servers may answer anything
            return self._why(error), True
        except BaseException:
            answer.cancel()
            raise

    # ---------------------------------------------------------------------------------------------
    # In the thread of the portal
    # ---------------------------------------------------------------------------------------------

    async def _live(self, begun: Future[tuple[Client, tuple[Tool, ...]]]) -> None:
        import anyio
        from mcp import Client

        try:
            async with self._transport() as transport, Client(transport) as client:
                begun.set_result((client, await _listed(client)))
                await anyio.sleep_forever()
        except Exception as error:
            if not begun.done():
                begun.set_exception(error)

    async def _ask(self, client: Client, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        import anyio

        with anyio.fail_after(self._seconds):
            result = await client.call_tool(name, arguments)
        texts = [_text_of(block) for block in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        return "\n".join(texts), result.is_error

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        """What the client talks through: the pipes of a process, or HTTP."""
        from mcp import StdioServerParameters, stdio_client

        about = self._about
        if "command" in about:
            yield stdio_client(StdioServerParameters(**about), errlog=self._log)
            return
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(self._seconds)
        async with httpx2.AsyncClient(headers=about.get("headers"), timeout=timeout) as http:
            yield streamable_http_client(about["url"], http_client=http)

    def _why(self, error: BaseException) -> str:
        """An error in one line: the innermost one, and what the server has said last."""
        while inner := getattr(error, "exceptions", ()):
            error = inner[0]
        # not moved: the server writes where the file is
        start = max(0, os.fstat(self._log.fileno()).st_size - TAIL_BYTES)
        said = os.pread(self._log.fileno(), TAIL_BYTES, start).decode(errors="replace").split("\n")
        last = next((line for line in reversed(said) if line.strip()), "")
        why = str(error) or type(error).__name__
        return textwrap.shorten(f"{why} ({last.strip()})" if last else why, LONGEST_REASON)


async def _listed(client: Client) -> tuple[Tool, ...]:
    """All pages of its list."""
    tools, cursor = list[Tool](), None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            tools.append(Tool(tool.name, tool.description or "", tool.input_schema))
        if not (cursor := page.next_cursor):
            return tuple(tools)


def _text_of(block: Any) -> str:
    """A part of a result as text."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return str(block.uri)
    text = getattr(getattr(block, "resource", None), "text", None)
    return f"({block.type}, which is no text)" if text is None else str(text)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The servers of the file by their names, with what is known here of each."""
    try:
        servers = json.loads(path.read_bytes())["mcpServers"]
        found = {name: _server(name, about) for name, about in servers.items()}
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise SettingsError(
            f'{path} is no file of MCP servers ({error}): it has {{"mcpServers": {{NAME: '
            '{"command": ..., "args": [...]} or {"url": ...}}}'
        ) from None
    return found


def _server(name: str, about: Any) -> dict[str, Any]:
    """What is known here of a server: other clients' files have more."""
    known = ("command", "args", "env", "cwd") if "command" in about else ("url", "headers")
    found = {key: about[key] for key in known if key in about}
    if not all(isinstance(found.get(key, ""), str) for key in ("command", "cwd", "url")):
        raise ValueError(f"the command or url of {name} is no text")
    if not found:
        raise ValueError(f"{name} has neither command nor url")
    return found
