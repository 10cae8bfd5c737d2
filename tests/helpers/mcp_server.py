"""A real MCP server on stdio for tests: `python mcp_server.py [TOOL ...]`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer

THIS = Path(__file__)


def config(folder: Path, **servers: dict[str, Any]) -> Path:
    """Write a server configuration in which every server is this one."""
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def this_server(*tools: str, **more: Any) -> dict[str, Any]:
    """Return a configuration entry of this server with these tools, or with all."""
    return {"command": sys.executable, "args": [str(THIS), *tools], **more}


def make_server(names: Sequence[str]) -> MCPServer:
    """Make a server with a tool for each outcome, or with the named ones."""
    server = MCPServer("tests")

    def tool(function: Callable[..., Any]) -> None:
        if not names or function.__name__ in names:
            server.add_tool(function)

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @tool
    def lines(n: int) -> str:
        """So many lines of text."""
        return "\n".join(f"line {number} of the long text" for number in range(n))

    @tool
    def setting(name: str) -> str:
        """An environment variable."""
        return os.environ.get(name, "")

    @tool
    def fail() -> str:
        """Always fails."""
        raise ValueError("no such thing")

    @tool
    def sleep(seconds: float) -> str:
        """Sleeps."""
        time.sleep(seconds)
        return "slept"

    @tool
    def die() -> str:
        """Ends the server."""
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)

    return server


if __name__ == "__main__":
    make_server(sys.argv[1:]).run("stdio")
