"""Every random request is answered or refused with a one-line error; the server never fails."""

from __future__ import annotations

import copy
import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import strategies as st

from good_bodies import CHAT, COMPLETIONS, EMBEDDINGS, GOOD, TOOL
from many_texts import tiny_engine
from mutations import Edit, Oddity, edited, edits, json_bytes, made_odd, oddities
from needed import needed
from pdf_file import pdf_of
from pyh2o.limits import Limits
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tries import Tries

loopback = needed("loopback", name="the server's packages")

SESSIONS = "/v1/sessions"
SHORT = {"max_tokens": 2}
# Each with valid bodies; {id} is a conversation, a story, or neither.
ROUTES: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("POST", COMPLETIONS, [{**GOOD[COMPLETIONS], "stop": ["zz"], "logit_bias": {"5": 1}}]),
    ("POST", CHAT, [{**GOOD[CHAT], "tools": [TOOL], "response_format": {"type": "json_object"}}]),
    ("POST", EMBEDDINGS, [GOOD[EMBEDDINGS]]),
    ("POST", "/v1/responses", [
        {"input": "a", "max_output_tokens": 2, "text": {"format": {"type": "text"}}},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                   {"type": "function_call_output", "call_id": "a", "output": "b"}],
         "tools": [{"type": "function", **TOOL["function"]}], "max_output_tokens": 2},
    ]),
    ("POST", "/v1/messages", [
        {"messages": GOOD[CHAT]["messages"], **SHORT, "tools": [{"name": "f", "input_schema": {}}],
         "tool_choice": {"type": "auto"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], **SHORT,
         "system": "a", "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "b"}]}], **SHORT},
    ]),
    ("POST", "/v1/messages/count_tokens", [{"messages": GOOD[CHAT]["messages"], "system": "a"}]),
    ("POST", "/completion", [{"prompt": "a", "n_predict": 2, "n_probs": 2, "json_schema": {}}]),
    ("POST", "/tokenize", [{"content": "a", "with_pieces": True}]),
    ("POST", "/detokenize", [{"tokens": [5, 6]}]),
    ("POST", "/api/chat", [
        {"model": "a", "messages": GOOD[CHAT]["messages"], "options": {"num_predict": 2},
         "tools": [TOOL], "format": "json", "logprobs": True},
        {"model": "a", "options": {"num_predict": 2}, "stream": False,
         "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
    ]),
    ("POST", "/api/generate", [
        {"model": "a", "prompt": "a", "options": {"num_predict": 2, "stop": ["a"]}, "system": "b"},
        {"model": "a", "prompt": "a", "options": {"num_predict": 2}, "raw": True, "format": {}},
    ]),
    ("POST", "/api/embed", [{"model": "a", "input": ["a", "b"]}]),
    ("POST", "/api/show", [{"model": "a"}]),
    ("POST", SESSIONS, [
        {"name": "new", "system": "Be brief."}, {"kind": "story", "text": "a"},
        {"name": "in", "turns": [{"user": "a", "answer": "b"}]},
    ]),
    ("POST", SESSIONS + "/import", [
        {"text": '{"mes": "a", "is_user": true}\n{"mes": "b", "is_user": false}'},
    ]),
    ("POST", "/v1/files/text", [{"name": "a.pdf", "data": b64encode(pdf_of("a")).decode()}]),
    ("PATCH", SESSIONS + "/{id}", [{"name": "talk"}, {"system": "a"}, {"sampling": {"seed": 1}}]),
    ("DELETE", SESSIONS + "/{id}", [{}]),
    ("POST", SESSIONS + "/{id}/answers", [
        {"message": "why", **SHORT}, {"edit": "so", **SHORT}, {"regenerate": True, **SHORT},
        {"continue": True, **SHORT},
    ]),
    ("POST", SESSIONS + "/{id}/passages", [{**SHORT, "at": 3}, SHORT]),
    ("POST", SESSIONS + "/{id}/replace", [{"start": 0, "end": 4, "text": "so"}]),
    ("POST", SESSIONS + "/{id}/stop", [{}]),
    ("POST", SESSIONS + "/{id}/undo", [{}]),
    ("POST", SESSIONS + "/{id}/pins", [{"start": 0, "end": 3}]),
    ("DELETE", SESSIONS + "/{id}/pins", [{"start": 0, "end": 3}]),
]  # fmt: skip
READ = [
    SESSIONS, SESSIONS + "/{id}", SESSIONS + "/{id}/map", SESSIONS + "/{id}/tokens",
    SESSIONS + "/{id}/recalled", SESSIONS + "/{id}/export",
    "/v1/models/{id}", "/v1/kv", "/v1/machine", "/metrics", "/props", "/slots", "/api/tags",
    "/api/version",
]  # fmt: skip
KEYS = (
    "model", "name", "kind", "system", "sampling", "text", "turns", "message", "at", "start", "end",
    "passages", "seed", "temperature", "min_p", "n", "stream", "stop", "echo", "grammar", "tools",
    "tool_choice", "logprobs", "top_logprobs", "max_tokens", "suffix", "response_format", "x",
    "type", "content", "role", "input", "text", "format", "options", "system", "name", "schema",
    "dry_multiplier", "dry_sequence_breakers", "xtc_probability",
)  # fmt: skip
Names = st.sampled_from(["talk", "talk", "story", "story", "0", "none", "..", "a/b", "é☺", "\0"])
Queries = st.dictionaries(
    st.sampled_from(["q", "layer", "head", "start", "end", "format", "x"]),
    st.sampled_from(["", "0", "1", "-1", "5", "99999999999999999999", "a", "json", "1.5", "\n"]),
    max_size=2,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("secret_folder")
    model = write_tiny_gguf(
        folder / "tiny.gguf", seed=5, n_ctx_train=1024, chat_template=CHAT_TEMPLATE
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYH2O_CHATS", str(folder / "chats"))
        with (
            tiny_engine(model, texts=2, n_ctx=256, hh=32, recent=32, slack=16) as engine,
            loopback.LoopbackServer(engine, limits=Limits(body_mib=1)) as running,
        ):
            yield running


def ask(server: Any, method: str, route: str, data: bytes | None) -> Any:
    return loopback.ask(server.port, method, route, data)


def check(reply: Any, route: str) -> None:
    """Check that it is an answer or an error without details of the machine."""
    assert reply.status in (200, 204, 400, 404, 405, 409, 413), (
        reply.status,
        reply.body[:500],
    )
    if reply.status >= 400 and route.startswith("/api/"):
        assert isinstance(reply.json["error"], str)
    elif reply.status >= 400 and route.startswith("/v1/messages"):
        kinds = ("invalid_request_error", "not_found_error", "request_too_large")
        assert reply.json["error"]["type"] in kinds
    elif reply.status >= 400:
        error = reply.error
        assert error["type"] == "invalid_request_error"
        assert error["param"] is None or error["param"] in error["message"]
    assert b"Traceback" not in reply.body
    assert b"secret_folder" not in reply.body
    for line in reply.body.splitlines():
        if line.startswith(b"data: {"):
            assert "error" not in json.loads(line[6:]) or b"internal" not in line


@pytest.fixture
def ids(server: Any) -> dict[str, int]:
    """Return the ids of a conversation and a story that requests can change."""
    bodies = [{"name": "talk"}, {"kind": "story", "name": "story", "text": "once upon"}]
    created = [ask(server, "POST", SESSIONS, json_bytes(body)) for body in bodies]
    return {kind: reply.json["id"] for kind, reply in zip(("talk", "story"), created, strict=True)}


def route_with(route: str, name: str | int, query: dict[str, str]) -> str:
    path = route.replace("{id}", quote(str(name), safe=""))
    return f"{path}?{urlencode(query)}" if query else path


def test_any_body_is_answered_or_refused(server: Any, ids: dict[str, int], tries: Tries) -> None:
    asked = st.tuples(
        st.sampled_from(ROUTES).flatmap(
            lambda route: st.tuples(st.just(route[:2]), st.sampled_from(route[2]))
        ),
        Names,
        st.just([]) | oddities(keys=KEYS),
        st.just([]) | st.just([]) | edits(60),
    )

    def answered(request: tuple[Any, str, list[Oddity], list[Edit]]) -> None:
        ((method, route), good), name, odd, changes = request
        body = made_odd(copy.deepcopy(good), odd)
        # an endless answer is not awaited
        if isinstance(body, dict) and ("n" in body or "max_tokens" not in body):
            body.update({"max_tokens": 2} if "max_tokens" in good else {})
        data = edited(json_bytes(body), changes, b'{"a": [1, "\\ud800", NaN]}')
        check(ask(server, method, route_with(route, ids.get(name, name), {}), data), route)

    tries.every(asked, answered, examples=200)
    server.answers_well()


def test_any_path_and_query_are_answered_or_refused(
    server: Any, ids: dict[str, int], tries: Tries
) -> None:
    asked = st.tuples(st.sampled_from(READ), Names, Queries)
    for message in ("why is it so", "and then"):
        said = {"message": message, "max_tokens": 9}
        assert (
            ask(server, "POST", f"{SESSIONS}/{ids['talk']}/answers", json_bytes(said)).status == 200
        )
    assert (
        ask(server, "POST", f"{SESSIONS}/{ids['story']}/passages", json_bytes(SHORT)).status == 200
    )

    def answered(request: tuple[str, str, dict[str, str]]) -> None:
        route, name, query = request
        check(ask(server, "GET", route_with(route, ids.get(name, name), query), None), route)

    tries.every(asked, answered, examples=80)
    server.answers_well()
