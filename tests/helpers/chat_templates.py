"""Chat templates of known models from the pinned sources of llama.cpp, with answers."""

from __future__ import annotations

import tarfile
from functools import lru_cache
from typing import Any

from llama_pin import cached_sdist, read_pin
from pyh2o.core.native_chat import ChatPrompt, NativeTemplate

QWEN3 = "Qwen-Qwen3-0.6B"
QWEN25 = "Qwen-Qwen2.5-7B-Instruct"
R1 = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
GPT_OSS = "openai-gpt-oss-120b"
GEMMA4 = "google-gemma-4-31B-it"
LLAMA31 = "meta-llama-Llama-3.1-8B-Instruct"

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
# One name starts with the other.
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": WEATHER}}
    for name in ("weather", "weather_week")
]
HELLO = [{"role": "user", "content": "Hi"}]


@lru_cache
def all_templates() -> dict[str, str]:
    """Return the sources of all templates by their file names."""
    found = {}
    with tarfile.open(cached_sdist(read_pin())) as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            if folder.endswith("models/templates") and name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                found[name.removesuffix(".jinja")] = file.read().decode()
    return found


def template(name: str) -> str:
    """Return the source of a template by its file name."""
    return all_templates()[name]


def prompt_of(name: str, tools: list[Any] | None = TOOLS, **request: Any) -> ChatPrompt:
    """Return the prompt of "Hi"."""
    return NativeTemplate(template(name), "<s>", "</s>").apply(HELLO, tools=tools, **request)
