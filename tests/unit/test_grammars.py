"""Masks of grammars: every text that they let through follows the grammar; refusals are clear."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from typing import Any

import numpy as np
import pytest

from serving import grammars
from serving.grammars import GrammarMatcher, Grammars
from serving.request import Grammar, GrammarKind, RequestError
from serving.tokenizer import Tokenizer

VOCAB_SIZE, END = 270, 261
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CALL = {
    "type": "tag", "begin": "<|258|>call<|259|>", "end": "<|260|>",
    "content": {
        "type": "plus",
        "content": {
            "type": "or",
            "elements": [
                {"type": "sequence", "elements": [
                    {"type": "const_string", "value": 'a="<|259|>'},
                    {"type": "regex", "pattern": "[1-9]/"},
                ]},
                {"type": "json_schema", "json_schema": {"enum": [3, 44]}},
            ],
        },
    },
}  # fmt: skip
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags", "triggers": ["<|258|>call"], "tags": [CALL],
        "at_least_one": True,
    },
}  # fmt: skip


def tokenizer() -> Tokenizer:
    """A token for each byte, two longer ones, and control tokens."""
    names = {f"<|{token}|>": token for token in range(258, 262)}
    return Tokenizer(
        vocab=(*(bytes([byte]) for byte in range(256)), b"no", b'"b":', *map(str.encode, names)),
        control_tokens=names, eos_token_id=END, encode=lambda text: list(text.encode()),
        max_token_chars=4,
    )  # fmt: skip


def matcher_of(kind: GrammarKind, text: str) -> GrammarMatcher:
    return Grammars(tokenizer(), VOCAB_SIZE).matcher(Grammar(kind, text), [END])


def allowed_by(matcher: GrammarMatcher) -> set[int]:
    """Tokens in its mask."""
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(kind: GrammarKind, text: str, seed: int, most: int = 60) -> tuple[str, bool]:
    """A random answer, and whether it came to its end."""
    tokens, rng, vocab = [], random.Random(seed), tokenizer().vocab
    matcher = matcher_of(kind, text)
    for _ in range(most):
        allowed = sorted(allowed_by(matcher))
        assert allowed
        assert max(allowed) < VOCAB_SIZE
        token = END if END in allowed and rng.random() < 0.5 else rng.choice(allowed)
        if token == END:
            return b"".join(vocab[token] for token in tokens).decode(), True
        tokens.append(token)
        matcher.accept([token])
    return b"".join(vocab[token] for token in tokens).decode(errors="replace"), False


@pytest.fixture
def _library() -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("seed", range(3))
def test_answers_follow_their_grammar(seed: int) -> None:
    text, ended = walk("choice", json.dumps(["yes", "no", 'may "be"']), seed)
    assert ended
    assert text in ("yes", "no", 'may "be"')
    text, _ = walk("regex", "[a-c]{3}-[0-9]+", seed)
    assert re.fullmatch("[a-c]{3}-[0-9]+", text)
    text, ended = walk("json_schema", json.dumps(SCHEMA), seed, most=500)
    assert ended
    value: Any = json.loads(text)
    assert value["a"] <= 99
    assert value["b"] in "xy"
    text, _ = walk("json_object", "", seed, most=20)
    assert text.startswith("{")
    text, _ = walk("grammar", 'root ::= "a" ("b" | "c")+', seed)
    assert re.fullmatch("a[bc]+", text)
    text, _ = walk("grammar", 'start: "x" /[0-9]/+', seed)  # as Lark writes it
    assert re.fullmatch("x[0-9]+", text)


@pytest.mark.usefixtures("_library")
def test_tagged_parts_follow_their_format_in_free_text() -> None:
    matcher = matcher_of("structural_tag", json.dumps(TAGS))
    assert 258 in allowed_by(matcher)
    assert END not in allowed_by(matcher)  # there has to be a call
    matcher.accept([*b"any text", 258])
    assert allowed_by(matcher) == {ord("c")}
    matcher.accept([*b"call", 259])
    assert allowed_by(matcher) == set(b"a34")
    matcher.accept([*b'44a="', 259, *b"7/"])
    assert allowed_by(matcher) == {*b"a34", 260}
    matcher.accept([260])
    assert {END, 258, *b"more"} <= allowed_by(matcher)


@pytest.mark.usefixtures("_library")
def test_white_space_in_json_comes_to_an_end() -> None:
    matcher = Grammars(tokenizer(), VOCAB_SIZE).matcher(
        Grammar("json_schema", json.dumps(SCHEMA)), [END]
    )
    matcher.accept(b"{" + b" " * 19)
    assert matcher.mask()[1] & 1  # a space, token 32
    matcher.accept(b" ")
    assert not matcher.mask()[1] & 1


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"), ("json_schema", '{"type": "strin"}'), ("regex", "("),
        ("grammar", "!!"), ("grammar", 'a ::= "a"'), ("structural_tag", "{}"),
        ("structural_tag", "["),
        ("structural_tag", '{"format": {"type": "unheard_of"}}'),
        ("regex", "a" * (grammars.MAX_CHARS + 1)),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(kind: GrammarKind, text: str) -> None:
    with pytest.raises(RequestError, match=f"^{kind} is ") as refused:
        Grammars(tokenizer(), VOCAB_SIZE).matcher(Grammar(kind, text), [END])
    assert refused.value.status == "INVALID_ARGUMENT"


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("choice", ["c2999", 'c"\n\0\U0001f600'])
def test_choices_may_be_many_and_of_any_characters(choice: str) -> None:
    choices = [*(f"c{number}" for number in range(3000)), 'c"\n\0\U0001f600']
    matcher = matcher_of("choice", json.dumps(choices))
    for byte in choice.encode():
        assert byte in allowed_by(matcher)
        matcher.accept([byte])
    assert allowed_by(matcher) == {END}


@pytest.mark.usefixtures("_library")
def test_a_grammar_that_becomes_too_complex_is_an_error_and_no_end() -> None:
    rules = " | ".join(f'"a" /{number}/' for number in range(3000))
    matcher = matcher_of("grammar", f"start: {rules}")
    assert allowed_by(matcher) == {ord("a")}
    matcher.accept([ord("a")])
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^grammar cannot be followed: .*max is") as error:
            matcher.mask()
        assert error.value.status == "INVALID_ARGUMENT"


@pytest.mark.usefixtures("_library")
def test_a_model_without_an_end_token_refuses_grammars() -> None:
    with pytest.raises(RequestError, match="the model has no end token") as refused:
        Grammars(tokenizer(), VOCAB_SIZE).matcher(Grammar("regex", "a"), [])
    assert refused.value.status == "UNIMPLEMENTED"


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("kind", ["regex", "structural_tag"])
def test_a_grammar_waits_for_the_end_of_a_thought_and_tags_do_not(kind: GrammarKind) -> None:
    tags = {"<|open|>": 262, "<|close|>": 263, "<|sep|>": 264}
    known = dataclasses.replace(
        tokenizer(), vocab=(*tokenizer().vocab, *map(str.encode, tags)),
        control_tokens=tokenizer().control_tokens | tags,
    )  # fmt: skip
    text = "[0-9]{2}" if kind == "regex" else json.dumps(TAGS)
    every = Grammars(known, VOCAB_SIZE)
    matcher = every.matcher(Grammar(kind, text), [END], (262, *b"think", 264))
    if kind == "structural_tag":
        assert {*b"a", 258} <= allowed_by(matcher)
        return
    assert allowed_by(matcher) == {*range(258), 263}
    closing = (263, *b"think", 264, 262, *b"response", 264)
    matcher.accept([*b"a few words", *closing])
    assert allowed_by(matcher) == {*b"0123456789"}
    matcher.accept(b"42")
    assert allowed_by(matcher) == {END}
    at_once = every.matcher(Grammar(kind, text), [END], (262, *b"think", 264, *closing))
    assert allowed_by(at_once) == {*b"0123456789"}


def test_without_the_library_the_refusal_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "_library", None)
    with pytest.raises(RequestError, match="install the extra `grammar`") as refused:
        Grammars(tokenizer(), VOCAB_SIZE).matcher(Grammar("regex", "a"), [END])
    assert refused.value.status == "UNIMPLEMENTED"
