"""The bodies of requests: every field checked, before the model sees any of it.

Types are strict, as OpenAI's are: "5" is no number. A field that is null is one that was not given.
Fields that this server does not know are left alone: clients send new ones every year.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

LARGEST_INT32 = 2**31 - 1
# Of llama.cpp; the highest one stands for a new seed each time.
N_SEEDS = 2**32 - 1
NOT_EMPTY = ("system", "user", "tool")
# Fields of bodies that are arguments of both completions of `llama_cpp.Llama`.
DRAWING = {
    "stream", "temperature", "top_p", "min_p", "top_k", "repeat_penalty", "presence_penalty",
    "frequency_penalty", "mirostat_mode", "mirostat_tau", "mirostat_eta", "stop",
}  # fmt: skip

Count = Annotated[int, Field(ge=1, le=LARGEST_INT32)]
WholeNumber = Annotated[int, Field(ge=0, le=LARGEST_INT32)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
# Beyond these, logits leave the range of their type.
RepeatPenalty = Annotated[float, Field(ge=0.01, le=100)]
# OpenAI's ranges.
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    """A record of a body."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


# ---------------------------------------------------------------------------------------------
# Texts that come in several forms
# ---------------------------------------------------------------------------------------------


def _one_prompt(prompt: object) -> object:
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], str):
            return prompt[0]
        raise ValueError("give one text: this server takes neither several prompts nor tokens")
    return prompt


def _stop_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _joined_parts(content: object) -> object:
    """The text of a content that comes in parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError('give parts of the type "text", with a text: no others are read')
    return "".join(texts)


Name = Annotated[str, Field(min_length=1, max_length=256)]
Prompt = Annotated[str, BeforeValidator(_one_prompt)]
OneStop = Annotated[str, Field(max_length=1000)]
Stop = Annotated[list[OneStop], Field(max_length=64), BeforeValidator(_stop_list)]
Content = Annotated[str, BeforeValidator(_joined_parts)]


# ---------------------------------------------------------------------------------------------
# What both kinds of completion take
# ---------------------------------------------------------------------------------------------


def _no_probabilities(wanted: object) -> object:
    if wanted is not False:
        raise ValueError("no probabilities of tokens are kept here: leave it out")
    return wanted


class StreamOptions(Strict):
    """What comes with a stream."""

    include_usage: bool = False


class Body(Strict):
    """How tokens are drawn, and when they end."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    max_tokens: Count | None = None
    min_tokens: WholeNumber = 0
    temperature: Temperature = 0.8
    top_p: Share = 0.95
    min_p: Share = 0.05
    top_k: WholeNumber = 40
    repeat_penalty: RepeatPenalty = 1.1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    mirostat_mode: Literal[0, 1, 2] = 0
    mirostat_tau: Annotated[float, Field(ge=0, le=10)] = 5.0
    mirostat_eta: Annotated[float, Field(ge=0.001, le=1)] = 0.1
    stop: Stop = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logprobs: Annotated[Literal[False], BeforeValidator(_no_probabilities)] = False
    logit_bias: dict[str, Bias] | None = None
    logit_bias_type: Literal["input_ids", "tokens"] = "input_ids"
    grammar: str | None = None

    def drawing(self) -> dict[str, Any]:
        """The arguments of both completions of `llama_cpp.Llama` that say how to draw tokens."""
        seed = None if self.seed is None else self.seed % N_SEEDS
        return {**self.model_dump(include=DRAWING), "seed": seed}


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    max_tokens: Count = 16
    echo: bool = False
    best_of: Literal[1] = 1


# ---------------------------------------------------------------------------------------------
# Chat
# ---------------------------------------------------------------------------------------------


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, data: Any) -> Any:
        # An assistant's may be empty: it called a tool, or said nothing.
        needs_content = isinstance(data, dict) and data.get("role") in NOT_EMPTY
        if needs_content and data.get("content") is None:
            raise ValueError("it has no content")
        return data

    def for_template(self) -> dict[str, Any]:
        """What a chat template sees: what was given, and a text in any case."""
        return {**self.model_dump(exclude_unset=True), "content": self.content}


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] = {}


class Tool(Strict):
    """A function that the model may call, as OpenAI wraps it."""

    type: Literal["function"]
    function: Function


def _wanted_tool(choice: object) -> object:
    """Which function has to be called: its name, "" for the only one, or None."""
    match choice:
        case "none" | "auto":
            return None
        case "required":
            return ""
        case {"type": "function", "function": {"name": str(name)}} if name:
            return name
    raise ValueError('give "none", "auto", "required", or a function by its name')


def _wanted_schema(given: object) -> object:
    """The schema of the answer; an empty one is any JSON, and None any text."""
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object", **others}:
            return others.get("schema") or {}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise ValueError(
        'give the type "text", "json_object" or, with {"schema": ...} in "json_schema", '
        '"json_schema"'
    )


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(_wanted_schema)] = None
    tools: Annotated[list[Tool], Field(max_length=128)] = []
    tool_choice: Annotated[str | None, BeforeValidator(_wanted_tool)] = None
    # The older names of the two, which are refused.
    functions: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatBody:
        if self.grammar is not None and self.response_format is not None:
            raise ValueError("grammar and response_format exclude each other: leave one out")
        self.forced_tool()
        return self

    def forced_tool(self) -> Function | None:
        """The function that the model has to call.

        Raises:
            ValueError: there is no such function, or several.
        """
        if self.tool_choice is None:
            return None
        all_tools = [tool.function for tool in self.tools]
        found = [each for each in all_tools if self.tool_choice in ("", each.name)]
        if len(found) != 1:
            raise ValueError("tool_choice: name one of the functions in tools")
        return found[0]


# ---------------------------------------------------------------------------------------------
# Others
# ---------------------------------------------------------------------------------------------


def _texts(given: object) -> object:
    """A list of texts, of each its characters or its tokens."""
    is_list = isinstance(given, list) and not (given and _is_token(given[0]))
    texts: list[Any] = given if is_list else [given]  # type: ignore[assignment]
    for each in texts or [None]:
        is_tokens = isinstance(each, list) and all(map(_is_token, each))
        if not (isinstance(each, str) or is_tokens):
            raise ValueError("give a text, its tokens, or a list of such")
        if not each:
            raise ValueError("an empty text has no embedding")
    return texts


def _is_token(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


class EmbeddingBody(Strict):
    """The body of /v1/embeddings."""

    model: str | None = None
    # the most that OpenAI takes
    input: Annotated[list[str | list[int]], Field(max_length=2048), BeforeValidator(_texts)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
