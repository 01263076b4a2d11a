"""Drafts without a model: what followed the same tokens earlier in the sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WINDOW_TOKENS = 4096  # how far back to look
LONGEST, SHORTEST = 4, 2  # tokens that must be the same


def propose(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """Up to `num_drafts` tokens that may follow.

    The end of the sequence, the longest of 4 to 2 tokens that occurs before, is looked up; of
    several places the last counts.

    Args:
      tokens: known ones, from `WINDOW_TOKENS` before their end on or from their start.
    """
    if num_drafts < 1:
        return ()
    words = array("i", tokens)
    text, size = words.tobytes(), words.itemsize
    for length in range(min(LONGEST, len(words) - 1), SHORTEST - 1, -1):
        end = text[-length * size :]
        # The last occurrence that begins before the end itself does, on a word's border.
        place = len(text) - size
        while (place := text.rfind(end, 0, place)) > -1:
            if place % size == 0:
                first = place // size + length
                return tuple(words[first : first + num_drafts])
            place += len(end) - 1  # the next candidate begins one byte earlier
    return ()
