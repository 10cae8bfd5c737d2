"""The native routes of llama.cpp's server, which SillyTavern and others use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from ..core.model import Model
from ..library import __version__
from ..writing.chat_parser import Part
from ..writing.events import Content
from ..writing.logprobs import chat_logprobs
from ..writing.prompt import infill_prompt, prompt_text
from .answers import JsonAnswer, models_of
from .bodies import SAMPLERS, CompletionBody, Limit, Strict, Texts, TopCount, named
from .dialect import Dialect
from .requests import routes_of
from .served_model import ServedModel
from .written import Written, written

llama_server_routes = routes_of(Dialect())

# llama.cpp's names of finish reasons.
STOP_TYPES = {"stop": "eos", "length": "limit"}


class NativeBody(CompletionBody):
    """The body of /completion."""

    prompt: Annotated[Texts, Field(max_length=1)]
    max_tokens: Annotated[Limit, named("n_predict", "max_tokens")] = None
    logprobs: Annotated[
        TopCount | None, BeforeValidator(lambda n: n or None), named("n_probs", "logprobs")
    ] = None
    n: Literal[1] = 1


class _File(Strict):
    filename: str = "file"
    text: str


class InfillBody(NativeBody):
    """The body of /infill; `prompt` is text that follows the prefix."""

    prompt: Annotated[Texts, Field(max_length=1)] = Field([""])
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[_File] = Field([])

    def prompts(self, model: Model) -> list[str | list[int]]:
        start = prompt_text(model, self.prompt[0])
        files = [(file.filename, file.text) for file in self.input_extra]
        return [infill_prompt(model, self.input_prefix + start, self.input_suffix, files)]


@llama_server_routes.post("/infill")
async def _infill(request: Request, body: InfillBody) -> Response:
    return _completed(request, body)


@llama_server_routes.post("/completion")
@llama_server_routes.post("/completions")
async def _complete(request: Request, body: NativeBody) -> Response:
    return _completed(request, body)


def _completed(request: Request, body: NativeBody) -> Response:
    def events(text: Written) -> Iterator[Any]:
        for part in text:
            yield _part(text, _text_of(part), _probabilities(text))
        yield {**_part(text, "", []), **_end(text)}

    def whole(text: Written) -> Any:
        content = "".join(map(_text_of, text))
        return {**_part(text, content, _probabilities(text)), **_end(text)}

    return written(request, body, body.model, whole, events)


def _text_of(part: Part) -> str:
    return part.text if isinstance(part, Content) else ""


def _part(text: Written, content: str, probabilities: list[Any]) -> dict[str, Any]:
    return {
        "index": 0,
        "content": content,
        "tokens": [],
        "stop": False,
        "tokens_predicted": text.usage.sampled,
        "tokens_evaluated": text.usage.prompt,
        **({"completion_probabilities": probabilities} if probabilities else {}),
    }


def _end(text: Written) -> dict[str, Any]:
    usage, body = text.usage, text.body
    stop_type = "word" if text.stop else STOP_TYPES.get(text.finish, "none")
    n_read = usage.prompt - usage.cached
    return {
        "stop": True,
        "model": text.model.name,
        "stop_type": stop_type,
        "stopping_word": text.stop or "",
        "stopped_eos": stop_type == "eos",
        "stopped_limit": stop_type == "limit",
        "stopped_word": stop_type == "word",
        "truncated": False,
        "tokens_cached": usage.cached,
        "generation_settings": _settings(text.model, body),
        "timings": {
            "cache_n": usage.cached,
            **_timing("prompt", n_read, text.read_seconds),
            **_timing("predicted", usage.sampled, text.write_seconds),
        },
    }


def _timing(name: str, n: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / max(n, 1),
        f"{name}_per_second": n / max(seconds, 1e-9),
    }


def _probabilities(text: Written) -> list[dict[str, Any]]:
    records = text.take_logprobs()
    found: list[dict[str, Any]] = chat_logprobs(records, text.body.logprobs or 0)["content"]
    return found


def _settings(model: ServedModel, body: CompletionBody | Any) -> dict[str, Any]:
    about = body.model_dump(include={*SAMPLERS, "seed", "stop", "max_tokens", "grammar"})
    limit = -1 if body.max_tokens is None else body.max_tokens
    return {**about, "n_predict": limit, "n_ctx": model.longest_prompt}


# ---------------------------------------------------------------------------------------------
# Model and tokens
# ---------------------------------------------------------------------------------------------


class _TextBody(Strict):
    model: str | None = None
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class _TokensBody(Strict):
    model: str | None = None
    tokens: list[int]


@llama_server_routes.post("/tokenize")
async def _tokenize(request: Request, body: _TextBody) -> Response:
    def work(served: ServedModel) -> dict[str, Any]:
        model = served.engine.model
        tokens: list[Any] = model.tokenize(
            body.content.encode(), add_bos=body.add_special, special=body.parse_special
        )
        if body.with_pieces:
            pieces = [(token, model.detokenize([token], special=True)) for token in tokens]
            tokens = [{"id": token, "piece": _text_or_bytes(piece)} for token, piece in pieces]
        return {"tokens": tokens}

    return JsonAnswer(request, models_of(request).find(body.model, embeds=False), work)


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@llama_server_routes.post("/detokenize")
async def _detokenize(request: Request, body: _TokensBody) -> Response:
    def work(served: ServedModel) -> dict[str, Any]:
        served.check_tokens(body.tokens, "tokens")
        text = served.engine.model.detokenize(body.tokens, special=True)
        return {"content": text.decode(errors="replace")}

    return JsonAnswer(request, models_of(request).find(body.model, embeds=False), work)


@llama_server_routes.get("/props")
async def _props(request: Request, model: str | None = None) -> Response:
    def work(served: ServedModel) -> dict[str, Any]:
        model = served.engine.model
        settings = _settings(served, NativeBody(prompt=[""]))
        return {
            "default_generation_settings": {**settings, "params": settings},
            "total_slots": served.engine.n_slots,
            "model_alias": served.name,
            "model_path": served.name,
            "chat_template": model.metadata.get("tokenizer.chat_template", ""),
            "bos_token": _special_text(model, model.token_bos()),
            "eos_token": _special_text(model, model.native.token_eos()),
            "modalities": {"vision": served.senses["sees"], "audio": served.senses["hears"]},
            "build_info": f"pyh2o {__version__}",
        }

    return JsonAnswer(request, models_of(request).find(model, embeds=False), work)


def _special_text(model: Any, token: int) -> str:
    text: str = "" if token == -1 else model.native.token_get_text(token)
    return text


@llama_server_routes.get("/slots")
async def _slots(request: Request, model: str | None = None) -> Response:
    def work(served: ServedModel) -> list[dict[str, Any]]:
        return [
            {
                "id": number,
                "is_processing": slot.running,
                "n_ctx": served.longest_prompt,
                "n_past": slot.kv.position,
            }
            for number, slot in enumerate(served.engine.report())
        ]

    return JsonAnswer(request, models_of(request).find(model, embeds=False), work)
