"""Tool calls in a chat: ask the user, run the call, and show its result."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InputError
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count, shortened
from .input import Dropped, Source

if TYPE_CHECKING:
    from pyh2o.sessions.mcp_servers import McpServers
    from pyh2o.writing.tools import Call, Tool

QUESTION = "run it? yes, no, or always for this tool> "


class ChatTools:
    """The tools of MCP servers, and those that run without a question.

    Args:
        servers: the servers; None if the chat has none, although its session may have had some.
        allowed: names of tools that run without a question.
        source: asks the user.
        bars: show calls in progress.
    """

    def __init__(
        self, servers: McpServers | None, allowed: Collection[str], source: Source, bars: Bars
    ) -> None:
        self.servers = servers
        self.allowed = set(allowed)
        self._source = source
        self._bars = bars

    def known(self) -> list[Tool]:
        """Return all tools with their names for the model, and print errors of servers.

        Raises:
            InputError: an allowed tool does not exist.
        """
        found = {}
        if self.servers is not None:
            self._bars.show("starting MCP servers")
            found = self.servers.tools()
            self._bars.clear()
            for server in filter(lambda each: each.trouble, self.servers.servers):
                terminal.say(f"the MCP server {server.name} {server.trouble}", style="yellow")
        if unknown := sorted(self.allowed - found.keys()):
            available = ", ".join(found) or "none (--mcp)"
            raise InputError(f"--allow-tool: unknown tool {unknown[0]}: available are {available}")
        return [replace(tool, name=name) for name, (_, tool) in found.items()]

    def run(self, call: Call) -> Call:
        """Return the call with its result, which may be that the user refused or canceled it."""
        terminal.say(f"calls {call.name} {call.arguments}", style="cyan")
        if why := self._why_not(call):
            done = replace(call, result=why, failed=True)
        else:
            done = self._call(call)
        result = done.result or ""
        size = f" ({count(len(result), 'character')})" if result != shortened(result) else ""
        failed = "failed: " if done.failed else ""
        terminal.say(f"-> {failed}{shortened(result)}{size}", style="yellow" if failed else "dim")
        return done

    def _why_not(self, call: Call) -> str:
        """Return why a call is not run, for the model; "" if it is."""
        if self.servers is None:
            return "no tools are connected (pyh2o chat --mcp FILE)"
        if call.name in self.allowed:
            return ""
        if not self._source.interactive:
            return f"the call is not allowed (--allow-tool {call.name})"
        answer = ""
        while answer not in ("y", "n", "a"):
            try:
                answer = self._source.ask(QUESTION).strip().lower()[:1]
            except (EOFError, Dropped):
                answer = "n"
        if answer == "a":
            self.allowed.add(call.name)
        return "the user refused this call" if answer == "n" else ""

    def _call(self, call: Call) -> Call:
        assert self.servers is not None
        self._bars.show(call.name)
        try:
            return self.servers.run(call)
        except KeyboardInterrupt:
            return replace(call, result="the user canceled this call", failed=True)
        finally:
            self._bars.clear()
