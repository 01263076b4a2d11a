"""A promise of pages to a remote writer, as a value (cache-semantics.md section 9)."""

from __future__ import annotations

from typing import Literal, NamedTuple

Stage = Literal["held", "receiving", "expired"]


class Ticket(NamedTuple):
    """Pages that a remote writer fills, and how far that is.

    Attributes:
      stage: `held`: nobody else knows the pages; `receiving`: the writer does, and may write at any
        time; `expired`: as `receiving`, but nobody waits for the result any more.
      attention: page of each `page_tokens` positions from 0.
      state: bundle of the state after `tokens` tokens; empty without recurrent layers.
      tokens: of the prefix that will be written.
      clear_step: the step before which the device zeroes the attention pages. Once it is committed
        a held ticket is receivable.
      expires_at: in the caller's unit of time.
    """

    stage: Stage
    attention: tuple[int, ...]
    state: tuple[int, ...]
    tokens: int
    clear_step: int
    expires_at: int

    @property
    def pages(self) -> tuple[int, ...]:
        return (*self.attention, *self.state)
