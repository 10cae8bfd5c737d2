"""Grammars and schemas: what cannot be followed is refused, and all else is followed."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList, MinTokensLogitsProcessor, llama_grammar

from pyh2o import Llama
from pyh2o.core.vocabulary import suffix_tokens
from pyh2o.errors import GrammarError
from pyh2o.writing.grammar import MAX_BYTES, Grammar, GrammarMatcher
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, seed=3, chat_template=CHAT_TEMPLATE)
    return tiny_llama(path, n_ctx=200, hh=20, recent=20)


def grammar(text: str) -> LlamaGrammar:
    return LlamaGrammar.from_string(text, verbose=False)


def follows(llm: Llama, grammar: Grammar, text: str) -> bool:
    """Whether a text, and not only its beginning, follows a grammar."""
    matcher = GrammarMatcher(llm.text.model, grammar)
    tokens = suffix_tokens(llm.text.model, text)
    return matcher.follows(tokens) and matcher._matcher.is_accepting()


def rejected(llm: Llama, **made: Any) -> str:
    """What a completion says of a grammar that it refuses; in one line."""
    with pytest.raises(GrammarError) as error:
        list(llm.create_completion("a", max_tokens=3, stream=True, **made))
    assert "\n" not in str(error.value)
    assert llm.create_completion("a", max_tokens=1)["choices"]
    return str(error.value)


WRONG = [
    "root ::= (",
    "root",
    'other ::= "a"',
    "root ::= missing",
    'root ::= "a"\0(',
    'root ::= "\ud800"',
    'root ::= "\\ud800"',
    'root ::= "\\UFFFFFFFF"',
    'root ::= "\\q"',
    "root ::= [z-a]",
    'root ::= "a" )',
    'root ::= "a" ( b ::= "c"',
    'root ::= * "a"',
    'root ::= "a"{5,3}',
    'root ::= "a" { 3 , 0 }',
    "root ::= <[999999]>",
    "root ::= <none of the tokens>",
    "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(300_000)) + 'r300000 ::= "a"',
    "%llguidance {}\nstart: missing",
]


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_grammar_that_cannot_be_read_is_refused(llm: Llama, text: str) -> None:
    assert rejected(llm, grammar=grammar(text)).startswith("grammar: ")
    with pytest.raises(GrammarError):
        next(iter(llm.generate([1, 2], grammar=grammar(text))))
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(GrammarError):
        llm.create_chat_completion(messages, max_tokens=3, grammar=grammar(text))


CHAINS = [
    ("r{n} ::= r{m}\n", 'r{n} ::= "ab"'),
    ("r{n} ::= r{m} | r{m} root\n", 'r{n} ::= "ab"'),
    ("r{n} ::= [a-z] r{m}\n", 'r{n} ::= "b" r0 | "c"'),
]


@pytest.mark.parametrize(("link", "last"), CHAINS)
def test_a_grammar_as_large_as_it_may_be_does_not_end_the_process(
    llm: Llama, link: str, last: str
) -> None:
    text, n = "root ::= r0\n", 0
    while len(text) < MAX_BYTES - 100:
        text += link.format(n=n, m=n + 1)
        n += 1
    with contextlib.suppress(GrammarError):
        llm.create_completion("a", max_tokens=3, grammar=grammar(text + last.format(n=n)))


HOSTILE = [
    'root ::= ("a"?){500} "b"',
    "root ::= x{2000}\nx ::= [a-z]*",
    "root ::= " + "(x " * 40 + ")?" * 40 + "\nx ::= y\ny ::= [a-z]*",
    "root ::= (((x?)))*{30}\nx ::= [a-z]",
    'root ::= ws root ws | "a"\nws ::= [ ]*',
    'root ::= "(" (e root ")")? "a" | e root "b"\ne ::= f\nf ::= "c"? #(',
    "root ::= e0\n"
    + "\n".join(f'e{n} ::= e{n + 1} "{"+-*/%&|^"[n % 8]}" e{n} | e{n + 1}' for n in range(20))
    + "\ne20 ::= [a-z]+",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_grammar_that_llama_cpp_computes_for_ever(llm: Llama, text: str) -> None:
    start = time.monotonic()
    with contextlib.suppress(GrammarError):
        assert llm.create_completion("a", max_tokens=3, grammar=grammar(text))["choices"]
    assert time.monotonic() - start < 60


FOLLOWED = [
    ('root ::= ("yes" | "no" | "é" [a-z]+ " ")+', ["yesno", "éab yes"], ["", "maybe", "é yes"]),
    ('root ::= [\\]"(]* "\\"(" | #{ (\n "b" {2,3} [^] "" .?\r\nws ::= # none\n\t"a"',
     ['(("(', "bb", "bbb😀"], ["b", "bbbbb", '"']),
    ('root ::= "(" root ")" | word\nword ::= [a-z]+', ["((ab))", "a"], ["(a", "()"]),
    ('root ::= "\\x41\\u00e9\\U0001F600\\n" [a\\-z-]', ["Aé😀\n-", "Aé😀\na"], ["Aé😀\nb"]),
    ('A ::= "x"\na ::= "y"\nroot ::= A a "ab"*', ["xy", "xyabab"], ["yx", "xya"]),
    ("root ::= [^a]{2} .", ["\n\nx"], ["abc"]),
    ('root ::= "a"{2,}', ["aa", "a" * 70], ["a"]),
    # a text that may not contain what comes after it
    ('root ::= u "</p>"\nu ::= | [^<] u | "<" v\nv ::= | "<" v | [^</] u | "/" w\n'
     'w ::= | "<" v | [^<p] u | "p" x\nx ::= | "<" v | [^<>] u',
     ["</p>", "a</pq</p</p>", "b" * 5000 + "</p>"], ["</p></p>", "a<"]),
    ('root ::= item "," root | item\nitem ::= [0-9]+', [",".join(["12"] * 3000)], ["1,"]),
     ('root ::= "a" %json {"type": "integer", "maximum": 12}\n', ["a12", "a-3", "a1 \n"], ["a13"]),
    ('%llguidance {}\nstart: /[0-9]+/ "."', ["12."], ["."]),
    ('start: "a" | "b"', ["a"], ["c"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "right", "wrong"), FOLLOWED, ids=range(len(FOLLOWED)))
def test_texts_follow_a_grammar(llm: Llama, text: str, right: list[str], wrong: list[str]) -> None:
    made = Grammar.of(text)
    assert [each for each in right if not follows(llm, made, each)] == []
    assert [each for each in wrong if follows(llm, made, each)] == []


def test_special_tokens_stand_for_their_texts_and_never_for_others(llm: Llama) -> None:
    special, model = llm.token_bos(), llm.text.model
    text = model.native.token_get_text(special)
    written = suffix_tokens(model, text)
    assert written != [special]
    for made in (f'root ::= "a{text}" "b"', f"root ::= [a] <[{special}]> [b]"):
        matcher = GrammarMatcher(model, Grammar.of(made))
        a, b = (suffix_tokens(model, each) for each in "ab")
        assert matcher.follows([*a, special, *b])
    assert GrammarMatcher(model, Grammar.of(f'root ::= "{text}"')).follows(written)
    assert not GrammarMatcher(model, Grammar.of(r"root ::= [^\x00] .")).follows([special])


@pytest.mark.parametrize("name", [n for n in dir(llama_grammar) if n.endswith("_GBNF")])
def test_grammars_of_llama_cpp_are_read(llm: Llama, name: str) -> None:
    text = getattr(llama_grammar, name)
    assert llm.create_completion("a", max_tokens=3, grammar=grammar(text))["choices"]


def test_a_grammar_that_allows_no_token_is_an_error(llm: Llama) -> None:
    """llama.cpp throws where nothing can catch it: the process ends."""
    forbid_end = LogitsProcessorList([MinTokensLogitsProcessor(10, llm.token_eos())])
    for options in ({}, {"temperature": 0.0}, {"mirostat_mode": 2}):
        with pytest.raises(GrammarError, match="allows none of the tokens"):
            llm.create_completion(
                "a", grammar=grammar('root ::= "ab"'), logits_processor=forbid_end, **options
            )
    assert llm.create_completion("a", max_tokens=3)["choices"]


def test_a_grammar_that_cannot_be_read_is_not_printed(
    llm: Llama, capfd: pytest.CaptureFixture[str]
) -> None:
    rejected(llm, grammar=grammar("root ::= (\x1b[31m"))
    assert capfd.readouterr() == ("", "")


ANY = [1, "a", None, {"b": [1]}]
VALUES: list[tuple[Any, list[Any], list[Any]]] = [
    (True, ANY, []),
    ({"title": "A"}, ANY, []),
    *(({"enum": [x]}, [x], ["", "x"]) for x in ("a\nb", "C:\\x", 'say "x"', "😀")),
    *(
        (
            {"type": "object", "properties": {k: {"type": "integer"}}, "required": [k]},
            [{k: 1}],
            [{k: "1"}, {}, {k + "x": 1}],
        )
        for k in ("😀", 'a"b', "", "a\nb")
    ),
    *(
        ({"type": "string", "pattern": pattern}, right, wrong)
        for pattern, right, wrong in [
            ('^"a"$', ['"a"'], ["a", '""a""']),
            ("^.{3,5}$", ['a"b', "abcde"], ["ab", "abcdef"]),
            ("^a|b$", ["axx", "xxb"], ["x", ""]),
            ("^a\nb$", ["a\nb"], ["anb"]),
            (r"^a\\b$", ["a\\b"], ["ab"]),
            ("^[^a]{3,5}$", ["bbb"], ["bab"]),
            (r"^\d{5}$", ["12345"], ["1234", "a"]),
            (r"\w", ["-a-"], ["--"]),
            (r"^\s$", [" ", "\n"], ["a"]),
            (r"^\.$", ["."], ["a"]),
            ('^"+$', ['"', '""'], ["a"]),
            (r"^hello there indeed\!$", ["hello there indeed!"], ["hello there indeed"]),
        ]
    ),
    ({"type": "integer", "minimum": 10, "maximum": 20}, [10, 15, 20], [9, 1024, 10.5]),
    ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1], [1.2089, -0.1]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, [4], [3, 5]),
    ({"type": "integer", "multipleOf": 3}, [9], [10]),
    ({"type": ["string", "null"], "maxLength": 3}, ["abc", None], ["abcd", 1]),
    ({"type": "object", "required": ["z"]}, [{"z": 1}], [{}, {"a": 1}]),
    ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "string", "maxLength": 2000}, ["a" * 2000], ["a" * 2001]),
    ({"type": "string", "maxLength": 3.0}, ["abc"], ["abcd"]),
    ({"type": "string", "format": "int32"}, ["a"], [1]),
    (
        {"properties": {"a": {"$ref": "#"}}, "type": "object", "additionalProperties": False},
        [{"a": {"a": {}}}],
        [{"a": 1}],
    ),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}}, [1], ["1"]),
    # by other keywords
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1},
        [["a"], ["b", "a"]],
        [[], ["a", "a"], ["c"]],
    ),
    ({"not": {"type": ["object", "array"]}}, [1, "a"], [{}, []]),
    ({"type": ["string", "null"], "not": {"type": "null"}}, ["a"], [None]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}, {}], [{"b": 1}]),
    (
        {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}},
        [{"a": None}],
        [{"b": None}, {"a": 1}],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    (
        {"properties": {"a": {}}, "unevaluatedProperties": False, "type": "object"},
        [{"a": 1}],
        [{"b": 1}],
    ),
    ({"if": {"type": "string"}, "minContains": 2}, ANY, []),
]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"), VALUES, ids=[str(schema)[:60] for schema, *_ in VALUES]
)
def test_values_follow_a_schema(
    llm: Llama, schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    before = json.dumps(schema)
    made = Grammar.of_schema(schema, "response_format")
    for value in right:
        for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1)):
            assert follows(llm, made, text) or "\\u" in text or "[" in before, text
    assert [value for value in wrong if follows(llm, made, json.dumps(value))] == []
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (False, "false allows no value"),
        ([], "must be an object"),
        ({"type": "string", "pattern": "^(abc$"}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, '"if", "then"'),
        ({"minimum": 5, "maximum": 1, "type": "integer"}, r"minimum \(5\) is greater"),
        ({"type": "string", "format": "regex"}, "Unknown format: regex"),
        ({"not": {"required": ["a"]}}, "not"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"$ref": "https://example.com/a"}, "example.com"),
        ({"x-guidance": {"lenient": True}, "contains": {}}, "contains"),
        ({"enum": [float("nan")]}, "not valid JSON"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"description": "a" * MAX_BYTES}, "bytes, the limit is"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_the_keyword(schema: Any, said: str) -> None:
    with pytest.raises(GrammarError, match=said) as error:
        Grammar.of_schema(schema, "format")
    assert str(error.value).startswith("format: ")
    assert "\n" not in str(error.value)


def test_a_schema_that_is_nested_deeply_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(3000):
        nested = {"items": nested}
    chain = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(5000)}
    for schema in (nested, {"$ref": "#/$defs/a0", "$defs": {**chain, "a5000": {}}}):
        with contextlib.suppress(GrammarError):
            Grammar.of_schema(schema, "format")


def test_a_tool_s_schema_may_have_keywords_that_are_not_known(llm: Llama) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    made = Grammar.of_schema(schema, "tools", is_strict=False)
    assert follows(llm, made, "[1, 1]")
    assert not follows(llm, made, '["1"]')


def test_expressions_and_choices(llm: Llama) -> None:
    expression = Grammar.of_regex(r"\d{3}/[a-z]", "guided_regex")
    assert follows(llm, expression, "123/a")
    assert not follows(llm, expression, "x123/a")
    choice = Grammar.of_choice(['a"', "b\nc"], "guided_choice")
    assert follows(llm, choice, "b\nc")
    assert not follows(llm, choice, "b")
    with pytest.raises(GrammarError, match=r"guided_regex: .*unclosed group"):
        Grammar.of_regex("(", "guided_regex")


def test_strings_have_no_control_characters(llm: Llama, rng: np.random.Generator) -> None:
    """Whatever a model likes to write."""
    newline = llm.tokenize(b"\n", add_bos=False)[-1]
    schema = {"type": "object", "properties": {"t": {"type": "string", "maxLength": 9}}}
    for seed in rng.integers(2**31, size=4).tolist():
        llm.reset()
        answer = llm.create_chat_completion(
            [{"role": "user", "content": "a"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            logit_bias={str(newline): 8.0},
            seed=seed,
            max_tokens=150,
        )["choices"][0]
        if answer["finish_reason"] == "stop":
            json.loads(answer["message"]["content"])
        else:
            assert "\n" not in answer["message"]["content"].partition(":")[2].partition('"')[2]
