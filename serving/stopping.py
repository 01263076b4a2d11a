"""Stop strings: found in the text of the tokens as they come, across token and UTF-8 borders.

The engine ends a request with the token that completes a stop string. The tokens that spell the
string are part of the answer, since clients get ids; whoever makes text of them cuts it off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serving.request import SamplingParams
from serving.tokenizer import Detokenizer, Tokenizer


class Match(NamedTuple):
    """Where an answer ends: after so many of the new tokens, because of a string."""

    num_tokens: int
    stop: str


class StopMatcher:
    """Looks for the stop strings of one request. To be asked about each of its tokens once.

    A string counts when its last character is complete, and only if the token that completes it
    comes after `min_tokens` others. Of several the one that ends first counts, then the longest.

    Args:
      sampling: of the request.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams):
        skipped = tokenizer.control_tokens.values() if sampling.skip_special_tokens else ()
        self._text = Detokenizer(tokenizer, skip=skipped)
        self._stops, self._num_free = sampling.stop, sampling.min_tokens
        self._most = max(map(len, sampling.stop)) - 1
        self._tail = ""

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """The end of the answer, if it is in these tokens."""
        for count, token in enumerate(token_ids, start=1):
            self._num_free -= 1
            text = self._text.push((token,))
            seen = self._tail + text
            if text and self._num_free < 0:
                # What ends in the old text has been seen before.
                found = _first(seen, self._stops, len(self._tail) + 1)
                if found is not None:
                    return Match(count, found[1])
            self._tail = seen[max(0, len(seen) - self._most) :]
        return None


class StopCutter:
    """Text of a growing answer without the stop string that ends it (KF-V13).

    What may be the beginning of one is held back until it is clear.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held: str = ""
        self.has_ended = False

    def push(self, text: str) -> str:
        """Return what can be shown now; nothing more after a stop string."""
        if self.has_ended:
            return ""
        text = self._held + text
        found = _first(text, self._stops, 0)
        if found is not None:
            self.has_ended = True
            self._held = ""
            return text[: found[0]]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _first(text: str, stops: Sequence[str], least_end: int) -> tuple[int, str] | None:
    """The string that ends first, at `least_end` or later, and where it begins."""
    places = ((text.find(stop, max(0, least_end - len(stop))), stop) for stop in stops)
    found = ((place + len(stop), place, stop) for place, stop in places if place >= 0)
    first = min(found, default=None)
    return first and first[1:]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
