"""Stop strings in growing answers: wherever tokens or characters are cut, the end is the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.request import SamplingParams
from serving.stopping import Match, StopCutter, StopMatcher
from serving.tokenizer import Detokenizer, Tokenizer

CONTROL = 5
PIECES = (
    b"a", b"b", b"ab", b"\xf0\x9f", b"\x98\x80", b"<end>", b"", b" zeta", b"\xc3", b"\xa9a",
)  # fmt: skip
TOKENIZER = Tokenizer(
    vocab=PIECES,
    control_tokens={"<end>": CONTROL},
    eos_token_id=None,
    encode=list,
    max_token_chars=9,
)
STOPS = ("ba", "\U0001f600", "aab", "é", " zeta ze", "<end>", "bb")


def matcher(*stops: str, min_tokens: int = 0, skip: bool = False) -> StopMatcher:
    sampling = SamplingParams(
        seed=0, max_tokens=99, stop=stops, min_tokens=min_tokens, skip_special_tokens=skip
    )
    return StopMatcher(TOKENIZER, sampling)


def first_end(tokens: Sequence[int], stops: Sequence[str], min_tokens: int) -> int | None:
    """Tokens up to the first, beyond `min_tokens`, whose text ends a stop string that the text
    before it does not hold so often; from the whole text of each beginning."""
    before = ""
    for count in range(1, len(tokens) + 1):
        text = Detokenizer(TOKENIZER).push(tokens[:count])
        news = any(
            text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in stops
        ) and len(text) > len(before)
        if news and count > min_tokens:
            return count
        before = text
    return None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True),
    st.integers(0, 4),
    st.lists(st.integers(1, 4)),
)
def test_the_end_does_not_depend_on_how_tokens_arrive(
    tokens: list[int], stops: list[str], min_tokens: int, sizes: list[int]
) -> None:
    whole = matcher(*stops, min_tokens=min_tokens).find(tokens)
    assert (whole and whole.num_tokens) == first_end(tokens, stops, min_tokens)
    pieces, done = matcher(*stops, min_tokens=min_tokens), 0
    for size in [*sizes, *([1] * len(tokens))]:
        found = pieces.find(tokens[done : done + size])
        if found is not None:
            assert whole == Match(done + found.num_tokens, found.stop)
            return
        done += size
    assert whole is None


def test_kf_v14_a_character_over_two_tokens_counts_when_it_is_complete() -> None:
    one = matcher("\U0001f600")
    assert one.find([0, 3]) is None
    assert one.find([4, 0]) == Match(1, "\U0001f600")


def test_of_two_strings_that_end_together_the_longer_one_is_told() -> None:
    assert matcher("b", "ab").find([2]) == Match(1, "ab")
    assert matcher("eta", " z").find([7]) == Match(1, " z")  # it ends first


def test_control_tokens_are_text_unless_they_are_skipped() -> None:
    assert matcher("<end>").find([0, CONTROL]) == Match(2, "<end>")
    assert matcher("<end>", skip=True).find([0, CONTROL]) is None
    assert matcher("ab", skip=True).find([0, CONTROL, 1]) == Match(3, "ab")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text("abz ", max_size=14),
    st.lists(st.text("abz ", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4)),
)
def test_kf_v13_no_part_of_a_stop_string_is_shown_however_text_arrives(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    want = text[: min(ends)[1]] if ends else text
    cutter, shown, done = StopCutter(stops), "", 0
    for size in [*sizes, *([1] * len(text))]:
        shown += cutter.push(text[done : done + size])
        done += size
        assert want.startswith(shown)
    assert shown + cutter.finish() == want


@pytest.mark.parametrize("pieces", [[" zeta", " eta", " thet", "a."], [" zeta eta theta."]])
def test_what_only_looked_like_a_stop_string_is_shown(pieces: list[str]) -> None:
    cutter = StopCutter([" zeta eta theta!"])
    shown = [cutter.push(piece) for piece in pieces]
    assert "".join(shown) + cutter.finish() == " zeta eta theta."
