"""A list of token ids as a value to which one more can be appended cheaply."""

from __future__ import annotations

import itertools
from typing import NamedTuple

_BLOCK_TOKENS = 32


class TokenLog(NamedTuple):
    """Token ids in blocks: an append copies one short block, not the whole list.

    Attributes:
      blocks: full blocks of `_BLOCK_TOKENS` ids.
      tail: the last ids, fewer than a block.
    """

    blocks: tuple[tuple[int, ...], ...] = ()
    tail: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * _BLOCK_TOKENS + len(self.tail)

    def append(self, token: int) -> TokenLog:
        """The log with one more token."""
        tail = (*self.tail, token)
        if len(tail) < _BLOCK_TOKENS:
            return TokenLog._make((self.blocks, tail))
        return TokenLog((*self.blocks, tail), ())

    def tokens(self) -> tuple[int, ...]:
        """All ids in order."""
        return (*itertools.chain.from_iterable(self.blocks), *self.tail)


EMPTY_LOG = TokenLog()
