"""Identities of prefixes: two sequences of tokens have the same one exactly if they are equal."""

from __future__ import annotations

from collections.abc import Iterable

STALE = -1  # of a slot that holds no token
_ROOT = 0


class PrefixIds:
    """Numbers for prefixes, given out in the order in which they are first seen."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._last = _ROOT

    def of(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Identities of the first 0, 1, 2, ... tokens."""
        prefix = _ROOT
        prefixes = [prefix]
        for token in tokens:
            child = self._children.get((prefix, token))
            if child is None:
                child = self._children[prefix, token] = self.other()
            prefix = child
            prefixes.append(prefix)
        return tuple(prefixes)

    def other(self) -> int:
        """An identity that no prefix has."""
        self._last += 1
        return self._last
