"""The bodies of requests, validated before the model reads them.

Types are strict as in OpenAI's API: "5" is not a number. Null means that a field is not set.
Unknown fields are ignored, because clients keep adding some, but a sampler that is not supported
is an error unless it is off.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..core.model import Model
from ..system.integers import LARGEST_INT32
from ..writing.grammar import Grammar
from ..writing.pictures import PICTURES, picture_of
from ..writing.prompt import infill_tokens
from ..writing.sampler import SamplerSettings
from ..writing.sampling import LARGEST_SEED, RANDOM_SEEDS, Sampling
from .constraints import (
    CONSTRAINTS,
    SCHEMAS,
    checked,
    grammar_of_field,
    read_json,
    wanted_schema,
    without_structured_outputs,
)
from .custom_tools import OTHER, as_function, as_function_call
from .refusals import wrong_field

N_SEEDS = LARGEST_SEED + 1
DEPRECATED = {"functions": "tools", "function_call": "tool_choice"}
NOT_EMPTY = ("system", "developer", "user", "tool")
SAMPLERS = tuple(each.name for each in fields(SamplerSettings) if each.name != "seed")
# Fields of other servers that ban words or tokens.
BANS = (
    "banned_strings", "banned_tokens", "custom_token_bans", "bad_words", "bad_words_ids",
    "allowed_token_ids",
)  # fmt: skip
# Samplers of other servers, with the values that turn them off.
OTHER_SAMPLERS: dict[str, tuple[object, ...]] = {
    "tfs_z": (1,), "tfs": (1,), "top_a": (0,), "top_n_sigma": (-1, 0), "nsigma": (-1, 0),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "dynatemp_range": (0,), "smoothing_factor": (0,),
    "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "length_penalty": (1,),
    "penalty_alpha": (0,), "guidance_scale": (1,), "adaptive_target": (-1, -0.01), "skew": (0,),
    "num_beams": (1,), **dict.fromkeys(BANS, ([], "")),
}  # fmt: skip

Count = Annotated[int, Field(ge=1, le=LARGEST_INT32)]
WholeNumber = Annotated[int, Field(ge=0, le=LARGEST_INT32)]
TopCount = Annotated[int, Field(ge=0, le=20)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
# Outside these bounds logits overflow.
RepeatPenalty = Annotated[float, Field(ge=0.01, le=100)]
# OpenAI's ranges.
Penalty = Annotated[float, Field(ge=-2, le=2)]
DryMultiplier = Annotated[float, Field(ge=0, le=100)]
DryBase = Annotated[float, Field(ge=1, le=100)]
LastTokens = Annotated[int, Field(ge=-1, le=LARGEST_INT32)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


# ---------------------------------------------------------------------------------------------
# Fields with several forms
# ---------------------------------------------------------------------------------------------


def _texts(given: object) -> object:
    is_list = isinstance(given, list) and not (given and _is_token(given[0]))
    texts: list[Any] = given if is_list else [given]  # type: ignore[assignment]
    for each in texts or [None]:
        is_tokens = isinstance(each, list) and all(map(_is_token, each))
        if not (isinstance(each, str) or is_tokens):
            raise ValueError("expected a text, a list of tokens, or a list of these")
    return texts


def _is_token(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _stop_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _joined_parts(content: object) -> object:
    """Return content that is a list of text parts as one string."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError('unsupported part: use parts of type "text" with a text')
    return "".join(texts)


def _with_pictures(content: object) -> object:
    """Return content as one string; with pictures or sound, its checked parts."""
    if isinstance(content, list) and any(_is_picture(part) for part in content):
        for part in content:
            if _is_picture(part):
                picture_of(part)
            else:
                _joined_parts([part])
        return content
    text = _joined_parts(content)
    if not isinstance(text, str):
        raise ValueError("input should be a valid string")
    return text


def _is_picture(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in PICTURES


def _breakers(given: object) -> object:
    """Parse a list of strings, which some clients send as JSON."""
    if isinstance(given, str):
        with suppress(ValueError):
            return json.loads(given)
    return given


Breaker = Annotated[str, Field(max_length=40)]
Breakers = Annotated[list[Breaker], Field(max_length=64), BeforeValidator(_breakers)]
Schema = dict[str, Any] | bool
Name = Annotated[str, Field(min_length=1, max_length=256)]
# OpenAI's limit
Texts = Annotated[list[str | list[int]], Field(max_length=2048), BeforeValidator(_texts)]
OneStop = Annotated[str, Field(max_length=1000)]
Stop = Annotated[list[OneStop], Field(max_length=64), BeforeValidator(_stop_list)]
JoinedText = Annotated[str, BeforeValidator(_joined_parts)]
Content = Annotated[Any, BeforeValidator(_with_pictures)]


# ---------------------------------------------------------------------------------------------
# Completions and chats
# ---------------------------------------------------------------------------------------------


def _not_false(given: object) -> object:
    return None if given is False else given


def _biases(given: object) -> object:
    """Return biases by token; clients of llama.cpp's server send pairs, with false for "never"."""
    if not isinstance(given, list):
        return given
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        raise ValueError("expected {token: bias}, or a list of [token, bias]")
    return {str(token): -100 if bias is False else bias for token, bias in given} or None


def named(*names: str) -> Any:
    return Field(validation_alias=AliasChoices(*names))


# -1 and -2 (Ollama's) mean the window; 0 only reads the prompt.
Limit = Annotated[
    WholeNumber | None, BeforeValidator(lambda given: None if given in (-1, -2) else given)
]
# 64 bits as in OpenAI's API; None for a new seed per request.
Seed = Annotated[
    Annotated[int, Field(ge=-(2**63), lt=2**63)] | None,
    AfterValidator(lambda seed: None if seed in RANDOM_SEEDS else seed),
]


class StreamOptions(Strict):
    include_usage: bool = False


class Body(Strict):
    """Sampling, limits and constraints."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Limit = None
    min_tokens: WholeNumber = 0
    temperature: Temperature = 0.8
    top_p: Share = 0.95
    min_p: Share = 0.05
    typical_p: Annotated[Share, named("typical_p", "typical")] = 1.0
    top_k: Annotated[WholeNumber, BeforeValidator(lambda k: 0 if k == -1 else k)] = 40
    repeat_penalty: Annotated[RepeatPenalty, named("repeat_penalty", "repetition_penalty")] = 1.0
    repeat_last_n: LastTokens = 64
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    mirostat_mode: Annotated[Literal[0, 1, 2], named("mirostat_mode", "mirostat")] = 0
    mirostat_tau: Annotated[float, Field(ge=0, le=10)] = 5.0
    mirostat_eta: Annotated[float, Field(ge=0.001, le=1)] = 0.1
    dry_multiplier: DryMultiplier = 0.0
    dry_base: DryBase = 1.75
    dry_allowed_length: WholeNumber = 2
    dry_penalty_last_n: LastTokens = -1
    dry_sequence_breakers: Breakers = list(Sampling.dry_sequence_breakers)
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    stop: Stop = []
    stop_token_ids: Annotated[list[int], Field(max_length=128)] = []
    ignore_eos: bool = False
    seed: Seed = None
    logit_bias: Annotated[dict[str, Bias] | None, BeforeValidator(_biases)] = None
    logit_bias_type: Literal["input_ids", "tokens"] = "input_ids"
    grammar: str | None = None
    response_format: Annotated[Schema | None, BeforeValidator(wanted_schema)] = None
    json_schema: Schema | None = None
    guided_json: Annotated[Schema | None, BeforeValidator(read_json)] = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    keep_dropped: bool | None = None
    keep_thoughts: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_samplers(cls, data: Any) -> Any:
        for name, off in OTHER_SAMPLERS.items() if isinstance(data, dict) else ():
            if data.get(name) in (None, *off):
                continue
            if name in BANS:
                raise wrong_field(name, "not supported: omit it, or use logit_bias")
            supported = ", ".join(SAMPLERS)
            raise wrong_field(name, f"unsupported sampler: omit it, or use one of {supported}")
        return data

    @model_validator(mode="before")
    @classmethod
    def _rename_structured_outputs(cls, data: Any) -> Any:
        return without_structured_outputs(data) if isinstance(data, dict) else data

    @field_validator(*CONSTRAINTS)
    @classmethod
    def _check_constraint(cls, value: Any, about: ValidationInfo) -> Any:
        return checked(about.field_name or "", value)

    @model_validator(mode="after")
    def _check_exclusive(self) -> Body:
        if len(self._constraints) > 1:
            first, second, *_ = self._constraints
            raise ValueError(f"{first} and {second} exclude each other: omit one")
        return self

    @property
    def _constraints(self) -> list[str]:
        """Names of the fields that are set and constrain the answer."""
        return [name for name in CONSTRAINTS if getattr(self, name) not in (None, "")]

    @property
    def constraint(self) -> Grammar | None:
        """Grammar of the answer; None for any text."""
        return next((grammar_of_field(n, getattr(self, n)) for n in self._constraints), None)

    @property
    def schema_field(self) -> str | None:
        """Name of the field with a JSON schema of the answer."""
        return next((name for name in self._constraints if name in SCHEMAS), None)


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: Texts
    suffix: str | None = None
    max_tokens: Limit = 16
    echo: bool = False
    logprobs: Annotated[TopCount | None, BeforeValidator(_not_false)] = None
    best_of: Literal[1] = 1

    def prompts(self, model: Model) -> list[str | list[int]]:
        if self.suffix is not None and infill_tokens(model) is None:
            raise wrong_field("suffix", "the model cannot fill gaps: omit it")
        return self.prompt


# ---------------------------------------------------------------------------------------------
# Chat
# ---------------------------------------------------------------------------------------------


def _function_calls(calls: object) -> object:
    return [as_function_call(call) for call in calls] if isinstance(calls, list) else calls


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    reasoning_content: Annotated[str | None, named("reasoning_content", "reasoning")] = None
    tool_calls: Annotated[list[dict[str, Any]] | None, BeforeValidator(_function_calls)] = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, data: Any) -> Any:
        # An assistant message may be empty: it may only call a tool.
        needs_content = isinstance(data, dict) and data.get("role") in NOT_EMPTY
        if needs_content and data.get("content") is None:
            raise ValueError("content is missing")
        return data

    def for_template(self) -> dict[str, Any]:
        """Return the fields that are set; "developer" becomes "system", which templates know."""
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(exclude_unset=True), "role": role, "content": self.content}


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class ToolBody(Strict):
    """A tool as OpenAI's API has it.

    A custom tool becomes a function with one text argument. Tools that a provider runs itself, such
    as web_search, have the type "other" and are dropped.
    """

    type: Literal["function", "custom", "other"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _with_function(cls, data: Any) -> Any:
        return as_function(data)

    def for_template(self) -> dict[str, Any]:
        return {**self.model_dump(exclude_none=True), "type": "function"}


Tools = Annotated[
    list[ToolBody],
    Field(max_length=128),
    AfterValidator(lambda tools: [tool for tool in tools if tool.type != OTHER]),
]


def _wanted_tool(choice: object) -> object:
    match choice:
        case "none" | "auto" | "required":
            return choice
        case {"type": "function", "function": {"name": str(name)}} if name:
            return {"type": "function", "function": {"name": name}}
        case {"type": "custom", "custom": {"name": str(name)}} if name:
            return {"type": "function", "function": {"name": name}}
    raise ValueError(
        'expected "none", "auto", "required", or the name of a function or custom tool'
    )


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Limit = None
    logprobs: bool = False
    top_logprobs: TopCount = 0
    tools: Tools = []
    tool_choice: Annotated[str | dict[str, Any] | None, BeforeValidator(_wanted_tool)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    reasoning_budget: Annotated[
        Annotated[int, Field(ge=-1, le=LARGEST_INT32)] | None,
        named("reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens"),
    ] = None
    chat_template_kwargs: dict[str, Any] = {}
    # vLLM's; without them, the last message is continued if it is from the assistant.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_deprecated(cls, data: Any) -> Any:
        for name, newer in DEPRECATED.items() if isinstance(data, dict) else ():
            if data.get(name) not in (None, []):
                raise wrong_field(name, f"deprecated and not supported: use {newer}")
        return data

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_thinking(cls, given: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(given.get("enable_thinking", True), bool):
            raise ValueError("enable_thinking must be true or false")
        return given

    @model_validator(mode="after")
    def _check_combination(self) -> ChatBody:
        has_to_call = isinstance(self.tool_choice, dict) or self.tool_choice == "required"
        if self.continues and (has_to_call or self.schema_field):
            raise wrong_field(
                "messages",
                "an answer that continues the last message cannot follow a schema: end with a "
                f"user message, or omit {self.schema_field or 'response_format'} and tool_choice",
            )
        if not self.continues and (
            self.continue_final_message or self.add_generation_prompt is False
        ):
            raise wrong_field("messages", "only a last assistant message with text is continued")
        self._check_tools()
        return self

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the answer; None for the window."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def custom_tools(self) -> set[str]:
        return {tool.function.name for tool in self.tools if tool.type == "custom"}

    @property
    def continues(self) -> bool:
        """Whether the last message is the start of the answer."""
        last, wanted = self.messages[-1], self.continue_final_message
        text = last.content or last.reasoning_content
        is_partial = last.role == "assistant" and bool(text) and not last.tool_calls
        return is_partial and (not self.add_generation_prompt if wanted is None else wanted)

    def _check_tools(self) -> None:
        """Raise a RefusedError if `tool_choice` does not name one of the tools."""
        names = [tool.function.name for tool in self.tools]
        if isinstance(self.tool_choice, dict):
            is_valid = names.count(self.tool_choice["function"]["name"]) == 1
        else:
            is_valid = self.tool_choice != "required" or bool(names)
        if not is_valid:
            raise wrong_field("tool_choice", "must name one of the functions in tools")

    def reasoning(self) -> tuple[bool | None, int | None, dict[str, Any]]:
        """Return whether the model reasons, its budget, and other variables of the template."""
        arguments = dict(self.chat_template_kwargs)
        enabled = arguments.pop("enable_thinking", None)
        if self.reasoning_effort == "none":
            enabled = False
        elif self.reasoning_effort:
            arguments["reasoning_effort"] = self.reasoning_effort
        return enabled, self.reasoning_budget, arguments


# ---------------------------------------------------------------------------------------------
# Embeddings
# ---------------------------------------------------------------------------------------------


def _not_empty(texts: list[str | list[int]]) -> list[str | list[int]]:
    if not all(texts):
        raise ValueError("an empty text has no embedding: omit it")
    return texts


class EmbeddingBody(Strict):
    """The body of /v1/embeddings."""

    model: str | None = None
    input: Annotated[Texts, AfterValidator(_not_empty)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
