"""Run servers of the Model Context Protocol from a configuration file, and call their tools."""

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

SECONDS_TO_START = 180.0  # some are downloaded first
SECONDS_TO_ANSWER = 120.0
SECONDS_TO_END = 10.0
NOT_YET = f"has not started within {SECONDS_TO_START:g} s"
# End of a server's stderr in which an error message is searched.
TAIL_BYTES = 2000
MAX_REASON = 200


class McpServers:
    """All servers of a file, which run until `close`.

    Attributes:
        servers: the servers, in the order of the file.

    Args:
        path: JSON in the usual form, {"mcpServers": {NAME: {"command": ..., "args": [...],
            "env": {...}, "cwd": ...} or {"url": ..., "headers": {...}}}}.
        seconds: timeout of a call.

    Raises:
        SettingsError: the file does not exist or has another form.
        MissingPackageError: the package mcp is not installed.
    """

    def __init__(self, path: Path, *, seconds: float = SECONDS_TO_ANSWER) -> None:
        found = _read(path)
        try:
            import mcp  # noqa: F401  # takes half a second
            from anyio.from_thread import start_blocking_portal
        except ImportError as error:
            raise MissingPackageError("an MCP server", error.name, "mcp") from error
        logging.getLogger("mcp").addHandler(logging.NullHandler())  # it would print to the chat
        self._stack = ExitStack()
        portal = self._stack.enter_context(start_blocking_portal())
        self.servers = [McpServer(name, about, portal, seconds) for name, about in found.items()]
        for server in self.servers:
            self._stack.callback(server.close)

    def close(self) -> None:
        """Stop all servers."""
        self._stack.close()

    def tools(self) -> dict[str, tuple[McpServer, Tool]]:
        """Return all tools by their names for the model; waits until the servers have started.

        If two servers have a tool of the same name, each gets its server's name as a prefix.
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
        """Return the call with its result, which may be an error message.

        KeyboardInterrupt cancels the call.
        """
        tools = self.tools()
        if call.name not in tools:
            result = f"unknown tool {call.name}: available are {', '.join(tools) or 'none'}"
            return replace(call, result=result, failed=True)
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return replace(call, result=f"the arguments are not JSON: {error}", failed=True)
        if not isinstance(arguments, dict):
            return replace(call, result="the arguments are not a JSON object", failed=True)
        server, tool = tools[call.name]
        text, failed = server.call(tool.name, arguments)
        return replace(call, result=text, failed=failed)


class McpServer:
    """A server and the connection to it, in the thread of the portal.

    Attributes:
        name: name in the file.
        trouble: why its tools cannot be called; "" if they can.
    """

    def __init__(
        self, name: str, about: dict[str, Any], portal: BlockingPortal, seconds: float
    ) -> None:
        """Start the server; `seconds` is the timeout of a call."""
        self.name = name
        self._about = about
        self._portal = portal
        self._seconds = seconds
        self._tools: tuple[Tool, ...] = ()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in `close`
        self._start()

    def _start(self) -> None:
        self.trouble = ""
        self._started: Future[tuple[Client, tuple[Tool, ...]]] = Future()
        self._task = self._portal.start_task_soon(self._run, self._started)

    def _stop(self) -> None:
        self._task.cancel()
        with suppress(Exception, CancelledError):
            self._task.result(SECONDS_TO_END)

    def close(self) -> None:
        """Stop the server."""
        self._stop()
        self._log.close()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The server's tools; waits until it has started."""
        with suppress(Exception):
            self._connected()
        return self._tools

    def _connected(self) -> Client:
        """Wait for the connection, and return it."""
        try:
            client, self._tools = self._started.result(SECONDS_TO_START)
        except FutureTimeoutError:
            self.trouble = NOT_YET
            raise
        except Exception as error:
            self.trouble = f"cannot be started: {self._reason(error)}"
            raise
        if self.trouble == NOT_YET:
            self.trouble = ""
        return client

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return the result of a tool as text, and whether it failed.

        A server that has exited is restarted. KeyboardInterrupt cancels the call.
        """
        if self.trouble not in ("", NOT_YET):
            self._start()
        try:
            client = self._connected()
        except Exception:
            return f"the server {self.name} {self.trouble}", True
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        answer = self._portal.start_task_soon(self._send, client, name, arguments)
        try:
            found: tuple[str, bool] = answer.result()
            return found
        except TimeoutError:
            return f"no answer within {self._seconds:g} s: the call was canceled", True
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                return error.message, True
            self._stop()
            self.trouble = f"has exited: {self._reason(error)}"
            return f"the server {self.name} {self.trouble}", True
        except Exception as error:  # servers may answer anything
            return self._reason(error), True
        except BaseException:
            answer.cancel()
            raise

    # ---------------------------------------------------------------------------------------------
    # In the thread of the portal
    # ---------------------------------------------------------------------------------------------

    async def _run(self, started: Future[tuple[Client, tuple[Tool, ...]]]) -> None:
        import anyio
        from mcp import Client

        try:
            async with self._transport() as transport, Client(transport) as client:
                started.set_result((client, await _listed(client)))
                await anyio.sleep_forever()
        except Exception as error:
            if not started.done():
                started.set_exception(error)

    async def _send(self, client: Client, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        import anyio

        with anyio.fail_after(self._seconds):
            result = await client.call_tool(name, arguments)
        texts = [_text_of(block) for block in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        return "\n".join(texts), result.is_error

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        """Open the client's transport: the pipes of a process, or HTTP."""
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

    def _reason(self, error: BaseException) -> str:
        """Return the innermost error and the server's last output in one line."""
        while inner := getattr(error, "exceptions", ()):
            error = inner[0]
        # pread, as the server writes at the position of the shared file
        start = max(0, os.fstat(self._log.fileno()).st_size - TAIL_BYTES)
        tail = os.pread(self._log.fileno(), TAIL_BYTES, start).decode(errors="replace").split("\n")
        last = next((line for line in reversed(tail) if line.strip()), "")
        reason = str(error) or type(error).__name__
        return textwrap.shorten(f"{reason} ({last.strip()})" if last else reason, MAX_REASON)


async def _listed(client: Client) -> tuple[Tool, ...]:
    """Return the tools from all pages of the server's list."""
    tools, cursor = list[Tool](), None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            tools.append(Tool(tool.name, tool.description or "", tool.input_schema))
        if not (cursor := page.next_cursor):
            return tuple(tools)


def _text_of(block: Any) -> str:
    """Return a part of a result as text."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return str(block.uri)
    text = getattr(getattr(block, "resource", None), "text", None)
    return f"({block.type}, which is not text)" if text is None else str(text)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the servers of the file by name, each with the supported fields."""
    try:
        servers = json.loads(path.read_bytes())["mcpServers"]
        found = {name: _server(name, about) for name, about in servers.items()}
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise SettingsError(
            f'{path} is not a file of MCP servers ({error}): its form is {{"mcpServers": {{NAME: '
            '{"command": ..., "args": [...]} or {"url": ...}}}'
        ) from None
    return found


def _server(name: str, about: Any) -> dict[str, Any]:
    """Return the supported fields of a server; other clients have more."""
    known = ("command", "args", "env", "cwd") if "command" in about else ("url", "headers")
    found = {key: about[key] for key in known if key in about}
    if not all(isinstance(found.get(key, ""), str) for key in ("command", "cwd", "url")):
        raise ValueError(f"the command or url of {name} is not a string")
    if not found:
        raise ValueError(f"{name} has neither command nor url")
    return found
