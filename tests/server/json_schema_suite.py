"""Ask a server for answers by every schema of a folder, and look whether they are valid.

    python tests/server/json_schema_suite.py FOLDER

The folder holds files of JSON-Schema-Test-Suite (tests/draft2020-12, MIT license). Each schema is
refused by name, or the answer of a random model is what `jsonschema` calls valid; and its grammar
allows no instance that is invalid.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from loopback import LoopbackServer
from many_texts import tiny_engine
from pyh2o.core.model import Model
from pyh2o.core.vocabulary import suffix_tokens
from pyh2o.writing.grammar import Grammar, GrammarMatcher
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

SIGNS = '"{}[]:,0123456789-.etruefalsn\n \t\\abfo'
MOST_TOKENS = 400


def answer_of(server: Any, schema: Any, dice: random.Random, route: int = 0) -> Any:
    """What comes of a schema: "refused", "cut", or the value; routes take it in turn."""
    tokens = server.post("/tokenize", {"content": SIGNS}).json["tokens"]
    bias = {str(token): dice.uniform(-4, 8) for token in tokens}
    bias["2"] = 4.0  # the end, where it may be
    asked: dict[str, Any] = {"max_tokens": MOST_TOKENS, "seed": dice.randrange(2**31)}
    messages = [{"role": "user", "content": "a"}]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    path, body = [
        ("/v1/chat/completions", {"messages": messages, "response_format": wanted}),
        ("/v1/completions", {"prompt": "a", "guided_json": schema}),
        ("/completion", {"prompt": "a", "json_schema": schema}),
    ][route % 3]
    reply = server.post(path, {**asked, **body, "logit_bias": bias})
    assert reply.status in (200, 400), reply.body
    if reply.status == 400:
        assert reply.json["error"]["param"] in (*body, "json_schema"), reply.body
        return "refused"
    result = reply.json
    if "choices" in result:
        [choice] = result["choices"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        is_cut = choice["finish_reason"] == "length"
    else:
        text, is_cut = result["content"], result["stop_type"] == "limit"
    return "cut" if is_cut else [json.loads(text)]


def verdict(value: Any, schema: Any) -> str:
    """What `jsonschema` says of a value."""
    checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        return "valid" if checker(schema).is_valid(value) else "INVALID"
    except re.error:  # such as \p{L}, which Python's expressions do not have
        return "not checked"


def allows(model: Model, schema: Any, value: Any) -> bool:
    """Whether the grammar of a schema allows a value."""
    matcher = GrammarMatcher(model, Grammar.of_schema(schema, "schema"))
    tokens = suffix_tokens(model, json.dumps(value, ensure_ascii=False))
    return matcher.follows(tokens) and matcher._matcher.is_accepting()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.disable()  # of what is refused
    dice, counts = random.Random(asked.seed), Counter[str]()
    cases = [
        (f"{path.stem}: {case['description']}", case)
        for path in sorted(asked.folder.glob("*.json"))
        for case in json.loads(path.read_text())
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_gguf(Path(folder) / "tiny.gguf", seed=5, chat_template=CHAT_TEMPLATE)
        with (
            tiny_engine(path, texts=1, n_ctx=512, hh=64, recent=64, slack=16) as engine,
            LoopbackServer(engine) as server,
        ):
            for number, (name, case) in enumerate(cases):
                answer = answer_of(server, case["schema"], dice, number)
                is_value = isinstance(answer, list)
                kind = verdict(answer[0], case["schema"]) if is_value else answer
                if kind == "INVALID":
                    print(f"{name}: {answer[0]!r}")
                counts[f"answers {kind}"] += 1
                for test in case["tests"] if kind != "refused" else ():
                    allowed = allows(engine.model, case["schema"], test["data"])
                    counts[f"{'' if test['valid'] else 'in'}valid instances"] += 1
                    counts[f"{'' if test['valid'] else 'in'}valid instances allowed"] += allowed
    print(f"{len(cases)} schemas, seed {asked.seed}")
    for what, count in sorted(counts.items()):
        print(f"{count:6} {what}")
    return int(bool(counts["answers INVALID"] or counts["invalid instances allowed"]))


if __name__ == "__main__":
    sys.exit(main())
