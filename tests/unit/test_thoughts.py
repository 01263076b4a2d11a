"""Thoughts before answers that follow a grammar: where they are open, and what may come in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from serving.grammars import GrammarMatcher
from serving.thoughts import Thought, ThoughtFormat
from serving.tokenizer import Tokenizer

VOCAB_SIZE = 280
OPEN, CLOSE, SEP, END, OTHER = range(257, 262)
NAMES = {
    "<|open|>": OPEN, "<|close|>": CLOSE, "<|sep|>": SEP, "<|end_of_msg|>": END, "[other]": OTHER,
}  # fmt: skip
OPENING = (OPEN, *b"think", SEP)
CLOSING = (CLOSE, *b"think", SEP, OPEN, *b"response", SEP)


def tokenizer(**control: int) -> Tokenizer:
    """A token for each byte, one without text, and control tokens."""
    return Tokenizer(
        vocab=(*(bytes([byte]) for byte in range(256)), b"", *map(str.encode, control)),
        control_tokens=control, eos_token_id=END, encode=lambda text: list(text.encode()),
        max_token_chars=1,
    )  # fmt: skip


def thought_after(prompt: Sequence[int], end_ids: Sequence[int] = (END,)) -> Thought | None:
    known = ThoughtFormat.read(tokenizer(**NAMES), VOCAB_SIZE)
    assert known is not None
    return known.thought_after(prompt, end_ids)


def opened(*end_ids: int) -> Thought:
    thought = thought_after(OPENING, end_ids)
    assert thought is not None
    return thought


def tokens_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        (OPENING, True),
        ((*b"Hi", *OPENING, *b"so far"), True),
        ((*OPENING, *b"old", *CLOSING, *b"Yes", END, *OPENING), True),
        ((*OPENING, *b"old", *CLOSING), False),
        ((*OPENING, *b"cut", END), False),
        ((*OPENING, *b"now", CLOSE), False),
        ((OPEN, *b"response", SEP), False),
        ((OPEN, *b"rethink", SEP), False),
        (b"<|open|>think<|sep|>", False),
        ((*b"think", SEP), False),
        ((), False),
    ],
)
def test_a_prompt_ends_in_a_thought_if_its_last_tag_opens_one(
    prompt: tuple[int, ...], is_open: bool
) -> None:
    assert (thought_after(prompt) is not None) == is_open


@pytest.mark.parametrize("name", ["<|open|>", "<|close|>", "<|sep|>"])
def test_a_tokenizer_without_the_tags_knows_no_thoughts(name: str) -> None:
    others = {known: token for known, token in NAMES.items() if known != name}
    assert ThoughtFormat.read(tokenizer(**others), VOCAB_SIZE) is None


def test_a_thought_is_any_text_and_what_closes_it_is_prescribed() -> None:
    thought = opened()
    for token in b"no {json}":
        assert tokens_of(thought.mask()) == {*range(256), CLOSE}
        assert not thought.accept([token])
    for token in CLOSING:
        assert not thought.has_ended
        assert token in tokens_of(thought.mask())
        assert not thought.accept([token])
        assert thought.has_ended or len(tokens_of(thought.mask())) == 1
    assert thought.has_ended
    assert thought.accept(b"{}") == b"{}"


def test_no_token_that_ends_the_request_comes_in_a_thought() -> None:
    assert tokens_of(opened(END, ord("."), OTHER).mask()) == {*range(256), CLOSE} - {ord(".")}


class Follower:
    """Does what a matcher asks of the library's."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def is_stopped(self) -> bool:
        return False

    def consume_tokens(self, token_ids: Sequence[int]) -> None:
        self.seen += token_ids


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_grammar_begins_with_the_answer_however_the_tokens_come(size: int) -> None:
    follower: Any = Follower()
    matcher = GrammarMatcher("regex", follower, [END], VOCAB_SIZE, opened())
    assert tokens_of(matcher.mask()) == {*range(256), CLOSE}
    answer = (*b"[0-9]? ", *CLOSING, *b"12", END)
    for start in range(0, len(answer), size):
        matcher.accept(answer[start : start + size])
    assert follower.seen == [*b"12"]
