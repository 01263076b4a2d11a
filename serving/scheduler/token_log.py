"""A list of token ids as a value to which one more can be appended cheaply."""

from __future__ import annotations

import dataclasses
import itertools

_BLOCK_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLog:
    """Token ids in blocks, so that an append copies one short block and not the whole output (one
    append a row and step).

    Attributes:
      blocks: full blocks of `_BLOCK_TOKENS` ids.
      tail: the last ids, fewer than a block.
    """

    blocks: tuple[tuple[int, ...], ...] = ()
    tail: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks) * _BLOCK_TOKENS + len(self.tail)

    def append(self, token: int) -> TokenLog:
        """The log with one more token."""
        tail = (*self.tail, token)
        if len(tail) < _BLOCK_TOKENS:
            return TokenLog(self.blocks, tail)
        return TokenLog((*self.blocks, tail), ())

    def tokens(self) -> tuple[int, ...]:
        """All ids in order."""
        return (*itertools.chain.from_iterable(self.blocks), *self.tail)


EMPTY_LOG = TokenLog()
