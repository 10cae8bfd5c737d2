"""Requests that are wrong: named in one line, never a fault of the server, which lives on."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from good_bodies import CHAT, COMPLETIONS, GOOD, TOOL, with_field
from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from pyh2o.engine.slots import Slot
from pyh2o.writing.events import Usage
from pyh2o.writing.writer import Writer
from tiny_gguf import write_tiny_gguf

loopback = needed("loopback", name="the server's packages")
NO_END = loopback.NO_END


@pytest.mark.parametrize(("route", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
def test_what_is_missing_is_named(server: Any, route: str, field: str) -> None:
    error = server.refused(route, {"max_tokens": 3})
    assert (error["message"], error["param"]) == (f"{field} is missing", field)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "Hello?"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "a"}]}]}, "messages[0].content"),
        (CHAT, {"n": 129}, "n"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"dry_multiplier": -0.8}, "dry_multiplier"),
        (CHAT, {"dry_sequence_breakers": "[5"}, "dry_sequence_breakers"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"continue_final_message": True}, "messages"),
        (CHAT, {"add_generation_prompt": False}, "messages"),
        (
            CHAT,
            {
                "messages": [{"role": "assistant", "content": "{"}],
                "response_format": {"type": "json_object"},
            },
            "messages",
        ),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            "response_format",
        ),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", [5, 99999]]}, "prompt[1]"),
        (COMPLETIONS, {"max_tokens": -3}, "max_tokens"),
        (COMPLETIONS, {"temperature": float("nan")}, "temperature"),
        (COMPLETIONS, {"presence_penalty": 10**400}, "presence_penalty"),
        (COMPLETIONS, {"stop": ["a"] * 100}, "stop"),
        (COMPLETIONS, {"seed": 2**64}, "seed"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"5": 1e39}}, "logit_bias.5"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1, "echo": True}, "echo"),
        (COMPLETIONS, {"top_n_sigma": 1.5}, "top_n_sigma"),
        (COMPLETIONS, {"banned_strings": ["a"]}, "banned_strings"),
        (COMPLETIONS, {"stop_token_ids": [99999]}, "stop_token_ids"),
        (COMPLETIONS, {"repeat_last_n": -2}, "repeat_last_n"),
        (CHAT, {"custom_token_bans": "5,6"}, "custom_token_bans"),
        (CHAT, {"bad_words": ["a"]}, "bad_words"),
        (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].function"),
        (CHAT, {"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_wrong_field_is_named(server: Any, route: str, fields: Any, param: str) -> None:
    error = server.refused(route, with_field(route, **fields))
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_of_a_stream_has_a_status(server: Any, stream: bool) -> None:
    for fields in ({"logit_bias": {"99999": 1}}, {"grammar": "root ::= ("}):
        server.refused(COMPLETIONS, with_field(COMPLETIONS, stream=stream, **fields))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
    ids=range(10),
)
def test_what_is_not_json(server: Any, body: bytes) -> None:
    for route in GOOD:
        server.refused(route, body)
    server.answers_well()


def test_pages_of_other_sites_cannot_pass_for_plain_forms(server: Any) -> None:
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    for page in ({"Origin": "https://example.com"}, {"Sec-Fetch-Site": "cross-site"}):
        reply = server.post(COMPLETIONS, body, **{"Content-Type": "text/plain"}, **page)
        assert reply.status == 415
        assert "application/json" in reply.error["message"]


def test_what_curl_sends_is_read(server: Any) -> None:
    """Without a content type of JSON: no page sends it."""
    body = json.dumps({"model": "tiny", "prompt": "once", "stream": False}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.post("/api/generate", body, **form).json["done"]
    assert server.post("/api/generate", b"prompt=once", **form).status == 400


HALF = "a\ud83d"


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": HALF}, "prompt"),
        (COMPLETIONS, {"stop": ["a", HALF]}, "stop[1]"),
        (CHAT, {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        (CHAT, {"tools": [{**TOOL, "x": {HALF: 1}}]}, "tools[0].x"),
        ("/v1/responses", {"input": HALF}, "input"),
        ("/v1/messages", {"messages": [], "system": HALF}, "system"),
        ("/completion", {"prompt": [HALF]}, "prompt[0]"),
        ("/tokenize", {"content": HALF}, "content"),
        ("/api/generate", {"model": "tiny", "prompt": HALF}, "prompt"),
        ("/v1/sessions", {"system": HALF}, "system"),
    ],
)
def test_half_a_character_is_named(server: Any, route: str, fields: Any, param: str) -> None:
    for escaped in (True, False):
        body = json.dumps({**GOOD.get(route, {}), **fields}, ensure_ascii=escaped)
        reply = server.post(route, body.encode(errors="surrogatepass"))
        error = reply.json["error"]
        message = error if isinstance(error, str) else error["message"]
        assert reply.status == 400
        assert message.startswith(f"{param}: contains a lone surrogate")
    whole = json.dumps({**GOOD[COMPLETIONS], "prompt": "\U0001f600"}).encode()
    assert server.post(COMPLETIONS, whole).status == 200


def test_odd_values_have_no_words_of_python_s(server: Any) -> None:
    routes: dict[str, Any] = {
        COMPLETIONS: ("prompt", "stream_options", "logit_bias", "stop", "best_of", "max_tokens"),
        CHAT: ("messages", "tools", "tool_choice", "functions", "chat_template_kwargs", "stop"),
        "/v1/responses": ("input", "text", "reasoning", "tools", "tool_choice"),
        "/v1/messages": ("messages", "thinking", "tools", "system", "max_tokens"),
        "/api/chat": ("options", "messages", "keep_alive", "think", "tools"),
        "/v1/sessions": ("card", "sampling", "turns"),
        "/v1/sessions/a/answers": ("message", "regenerate"),
    }
    good = {"model": "tiny", "messages": [{"role": "user", "content": "a", "tool_calls": True}]}
    for route, names in routes.items():
        for name in names:
            for odd in (False, [False], {"a": False}):
                reply = server.post(route, {**good, **GOOD.get(route, {}), name: odd})
                assert reply.status in (200, 400, 404), (route, name, odd, reply.body)
                told = reply.body.decode() if reply.status == 400 else ""
                assert not re.search(r"None|False|True|dict|instance|object has|\.str", told), told


def test_older_names_name_the_newer(server: Any) -> None:
    for older, newer in {"functions": "tools", "function_call": "tool_choice"}.items():
        message = server.refused(CHAT, with_field(CHAT, **{older: [{"name": "f"}]}))["message"]
        assert message == f"{older}: deprecated and not supported: use {newer}"


def test_routes_that_are_not_there(server: Any) -> None:
    for route in ("/docs", "/redoc"):  # their pages load from other hosts
        assert server.get(route).status == 404
    assert server.refused("/v1/images", {}, 404)["message"] == "POST /v1/images: Not Found"
    assert server.refused("/v1/models", {}, 405)["param"] is None


def test_null_is_not_given(server: Any) -> None:
    nulls = dict.fromkeys(("temperature", "stop", "seed", "presence_penalty", "n", "grammar"))
    for route in (COMPLETIONS, CHAT):
        reply = server.post(route, with_field(route, **nulls))
        assert reply.status == 200


def test_a_sampler_that_is_not_here_may_be_off(server: Any) -> None:
    off = {"smoothing_factor": 0.0, "tfs": 1, "top_n_sigma": -1, "banned_strings": [],
           "custom_token_bans": "", "bad_words": []}  # fmt: skip
    for route in (COMPLETIONS, CHAT):
        assert server.post(route, with_field(route, **off)).status == 200
        message = server.refused(route, with_field(route, smoothing_factor=0.8))["message"]
        assert "omit it, or use one of temperature, top_k, top_p" in message


def test_samplers_by_their_other_names(server: Any) -> None:
    for names in ({"repetition_penalty": 2.0}, {"mirostat": 2}, {"typical": 0.2}):
        body = with_field(COMPLETIONS, max_tokens=30, seed=1, logit_bias=NO_END)
        assert answered(server, COMPLETIONS, body) != answered(server, COMPLETIONS, body | names)


def answered(server: Any, route: str, body: dict[str, Any]) -> Any:
    choice = server.post(route, body).json["choices"][0]
    return choice["text"] if route == COMPLETIONS else choice["message"]["content"]


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_dry_and_xtc(server: Any, route: str) -> None:
    body = with_field(route, max_tokens=60, seed=1, top_k=4, logit_bias=NO_END)
    plain = answered(server, route, body)
    dry = {"dry_multiplier": 5, "dry_allowed_length": 0, "dry_sequence_breakers": []}
    for fields in (dry, {"xtc_probability": 1, "xtc_threshold": 0.02}):
        assert answered(server, route, body | fields) != plain
    as_json = {**dry, "dry_sequence_breakers": "[]"}
    assert answered(server, route, body | dry) == answered(server, route, body | as_json)
    assert answered(server, route, body | dry | {"dry_penalty_last_n": 0}) == plain


READ_ONLY: dict[str, Any] = {
    COMPLETIONS: {"max_tokens": 0},
    CHAT: {"max_tokens": 0},
    "/v1/responses": {"input": "once", "max_output_tokens": 0},
    "/v1/messages": {"messages": GOOD[CHAT]["messages"], "max_tokens": 0},
    "/completion": {"prompt": "once", "n_predict": 0},
    "/api/generate": {"model": "tiny", "prompt": "once", "options": {"num_predict": 0}},
    "/api/chat": {"model": "tiny", **GOOD[CHAT], "options": {"num_predict": 0}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", READ_ONLY)
def test_a_limit_of_0_reads_the_prompt(
    server: Any, engine: Engine, route: str, stream: bool
) -> None:
    before = engine.usage
    body = {**GOOD.get(route, {}), **READ_ONLY[route], "stream": stream, "logit_bias": NO_END}
    reply = server.post(route, body)
    assert reply.status == 200
    assert re.search(rb'"(length|max_tokens|incomplete|limit)"', reply.body)
    assert engine.usage.sampled == before.sampled
    assert engine.usage.prompt > before.prompt
    again = server.post(route, {**body, "stream": False})
    n_read = engine.usage.prompt - before.prompt
    assert again.status == 200
    assert engine.usage.cached - before.cached >= n_read // 2 - 1


@pytest.mark.parametrize("limit", [-2, -1])
def test_limits_that_are_none(server: Any, engine: Engine, limit: int) -> None:
    body = {"prompt": "once", "logit_bias": NO_END}
    reply = server.post(COMPLETIONS, {**body, "max_tokens": limit}).json
    assert reply["usage"]["completion_tokens"] == engine.model.window
    reply = server.post("/completion", {**body, "n_predict": limit}).json
    assert reply["tokens_predicted"] == engine.model.window


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echo_comes_first_in_a_stream(server: Any, max_tokens: int) -> None:
    body = with_field(COMPLETIONS, echo=True, seed=1, max_tokens=max_tokens, logit_bias=NO_END)
    plain = server.post(COMPLETIONS, body).json["choices"][0]["text"]
    choices = [
        event["choices"][0] for event in server.post(COMPLETIONS, {**body, "stream": True}).events
    ]
    assert choices[0]["text"] == "once"
    assert "".join(choice["text"] for choice in choices) == plain


def ends_of(server: Any, engine: Engine, route: str, **fields: Any) -> tuple[int, str]:
    """Tokens of an answer whose model would end it at once, and why it ended."""
    ends = {str(token): 100 for token in engine.model.end_tokens}
    body = with_field(route, logit_bias=ends, temperature=0, max_tokens=9, **fields)
    reply = server.post(route, body).json
    return reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_what_ends_a_text(server: Any, engine: Engine, route: str) -> None:
    assert ends_of(server, engine, route) == (0, "stop")
    assert ends_of(server, engine, route, min_tokens=3) == (3, "stop")
    assert ends_of(server, engine, route, ignore_eos=True) == (9, "length")
    body = with_field(route, logit_bias={"50": 100}, temperature=0, max_tokens=9)
    assert answered(server, route, body) != ""
    for fields, n in (({}, 0), ({"min_tokens": 4}, 4), ({"ignore_eos": True}, 0)):
        reply = server.post(route, {**body, "stop_token_ids": [50, 51], **fields}).json
        told = reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]
        assert told == (n, "stop")


def test_end_tokens_of_any_kind(
    server: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models have several, of which one is EOS."""
    monkeypatch.setattr(type(engine.model), "is_end", lambda _model, token: token in (2, 60))
    monkeypatch.setattr(engine.model, "end_tokens", [2, 60])
    for fields in ({"ignore_eos": True}, {"min_tokens": 9}):
        assert ends_of(server, engine, COMPLETIONS, **fields) == (9, "length")


def test_the_window_of_penalties(server: Any, engine: Engine) -> None:
    body = with_field(
        COMPLETIONS, temperature=0, max_tokens=90, logit_bias={**NO_END, "50": 4, "51": 3}
    )

    def text(n: int, penalty: float = 3.0) -> Any:
        fields = {"repeat_penalty": penalty, "repeat_last_n": n}
        return answered(server, COMPLETIONS, {**body, **fields})

    assert text(0) == text(64, 1.0) == answered(server, COMPLETIONS, body)
    assert text(-1) == text(engine.model.window) == text(2**31 - 1)
    assert len({text(0), text(1), text(4), text(64), text(-1)}) == 5
    assert text(64) == answered(server, COMPLETIONS, {**body, "repeat_penalty": 3.0})


def test_a_prompt_of_tokens_is_taken_as_it_is(server: Any, engine: Engine) -> None:
    tokens = engine.model.tokenize(b"once", add_bos=True, special=True)
    body = with_field(COMPLETIONS, temperature=0, max_tokens=10)
    plain, as_tokens, several = (
        server.post(COMPLETIONS, {**body, "prompt": prompt}).json
        for prompt in ("once", tokens, [tokens, "once"])
    )
    assert as_tokens["usage"]["prompt_tokens"] == len(tokens)
    assert {choice["text"] for choice in several["choices"]} == {
        each["choices"][0]["text"] for each in (plain, as_tokens)
    }


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of the prompts."""
    read: list[list[int]] = []
    start = Slot.start

    def watched(slot: Slot) -> Usage:
        read.append(list(slot.prompt))
        return start(slot)

    monkeypatch.setattr(Slot, "start", watched)
    return read


def test_an_answer_that_is_begun_goes_on(
    server: Any, engine: Engine, read: list[list[int]]
) -> None:
    """As llama.cpp's server and vLLM have it; unless a new one is asked for."""
    messages = [*GOOD[CHAT]["messages"], {"role": "assistant", "content": "once upon"}]
    texts = []
    for fields in ({}, {"continue_final_message": True, "add_generation_prompt": False},
                   {"add_generation_prompt": True}, {"continue_final_message": False}):  # fmt: skip
        assert server.post(CHAT, with_field(CHAT, messages=messages, **fields)).status == 200
        texts.append(engine.model.detokenize(read[-1]).decode())
    assert texts[0] == texts[1]
    assert texts[0].endswith("assistant: once upon")
    assert texts[2] == texts[3] == texts[0] + "\nassistant: "


def test_a_developer_is_the_system(server: Any, read: list[list[int]]) -> None:
    for role in ("developer", "system", "user"):
        messages = [{"role": role, "content": "Be brief."}, *GOOD[CHAT]["messages"]]
        assert server.post(CHAT, with_field(CHAT, messages=messages)).status == 200
    developer, system, user = read
    assert developer == system != user


def test_content_in_parts_is_read(server: Any, read: list[list[int]]) -> None:
    for content in (
        "Hello, you",
        [{"type": "text", "text": "Hello,"}, {"type": "text", "text": " you"}],
        "Hello, me",
    ):
        server.post(CHAT, with_field(CHAT, messages=[{"role": "user", "content": content}]))
    plain, parts, other = read
    assert parts == plain != other


def test_seeds_of_64_bits_repeat_their_text(server: Any) -> None:
    for seed in (-2, 2**32 + 5, -(2**63), 2**63 - 1):
        body = with_field(COMPLETIONS, seed=seed, max_tokens=10)
        first, second = (server.post(COMPLETIONS, body).json["choices"][0] for _ in range(2))
        assert first["text"] == second["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_s_path_is_not_told(server: Any, stream: bool) -> None:
    for route in (COMPLETIONS, CHAT):
        body = server.post(route, with_field(route, stream=stream, model="/etc/passwd")).body
        assert b"secret_folder" not in body
        assert set(re.findall(rb'"model": ?"(.*?)"', body)) == {b"tiny"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_tells_no_path_and_no_traceback(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, stream: bool
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("cannot read\n/srv/secret/tiny.gguf: code -3")

    monkeypatch.setattr(Writer, "write", fail)
    caplog.set_level(logging.WARNING)
    reply = server.post(COMPLETIONS, with_field(COMPLETIONS, stream=stream))
    assert reply.status == 500
    assert reply.error["message"] == "cannot read tiny.gguf: code -3"
    assert reply.error["type"] == "internal_server_error"
    assert caplog.messages == ["500 POST /v1/completions: cannot read tiny.gguf: code -3"]
    assert caplog.records[0].exc_info is None


def test_a_failed_request_is_one_line_in_the_terminal(server: Any, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    server.refused(CHAT, with_field(CHAT, temperature="\x1b[31m\nred"))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("400 POST /v1/chat/completions: temperature: ")
    assert caplog.messages[0].isprintable()


def test_a_template_that_refuses(folder: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    path = write_tiny_gguf(folder / "strict.gguf", seed=5, n_ctx_train=512, chat_template=template)
    with (
        tiny_engine(path, texts=1, n_ctx=256, hh=32, recent=32) as engine,
        loopback.LoopbackServer(engine) as server,
    ):
        error = server.refused(CHAT, GOOD[CHAT])
    assert error["param"] == "messages"
    assert error["message"].endswith("roles must alternate")


def test_a_body_that_is_too_long(server: Any) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "a" * (20 * 2**20)}, 413)
    assert error["message"] == (
        "the body exceeds 1 MiB: send less, or start the server with a higher --max-body-mib"
    )
    server.answers_well()


def test_a_prompt_that_is_too_long(server: Any, engine: Engine) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "é" * 8 * engine.model.window})
    assert error["param"] == "prompt"
    assert error["code"] == "context_length_exceeded"
    assert f"the limit is {8 * engine.model.window:,}" in error["message"]
    assert "--max-prompt-tokens" in error["message"]
    long = [{"role": "user", "content": "é" * 8 * engine.model.window}]
    assert server.refused(CHAT, {"messages": long})["param"] == "messages"


@pytest.mark.parametrize("by", ["request", "server", "nobody"])
def test_a_text_goes_on_whose_beginning_its_client_drops(
    server: Any, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """If the request asks for that, or the server was started so."""
    monkeypatch.setattr(server.models.sources[0].load(print), "keep_dropped", by == "server")
    messages = [{"role": "system", "content": f"Be a scribe, wanted by the {by}."}]
    body: dict[str, Any] = {"max_tokens": 12, "grammar": "root ::= [ab]+", "logit_bias": NO_END}
    body |= {"keep_dropped": True} if by == "request" else {}
    for turn in range(6):
        messages.append({"role": "user", "content": f"this is what was said in turn {turn} of six"})
        sent = [messages[0], *messages[1:][-5:]]
        answer = server.post(CHAT, with_field(CHAT, messages=sent, **body)).json
        messages.append(answer["choices"][0]["message"])
        details = answer["usage"]["prompt_tokens_details"]
        assert ("dropped_tokens" in details) == (turn > 2 and by != "nobody")
