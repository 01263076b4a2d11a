"""Find the longest prefix that can be reused (cache-semantics.md section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from immutables import Map

from serving.page_table.states import Bundle
from serving.page_table.table import Entry, PageTable


class Hit(NamedTuple):
    """What a request can reuse.

    Attributes:
      tokens: of the prefix; a multiple of the unit, and less than the request has.
      junction: longest hit of one kind of layer alone, if that is longer; else 0. A state is worth
        keeping there.
      attention: pages that hold the prefix; the last one may be used in part.
      state: bundle of the state after `tokens` tokens; empty without recurrent layers.
      is_ready: False if a part is still being computed by a step in flight, or its producer parts
        from it in the step being planned: the request had better wait for it.
      is_junction: whether the state was kept as a junction.
    """

    tokens: int
    junction: int
    attention: tuple[int, ...]
    state: Bundle
    is_ready: bool
    is_junction: bool = False


class Probe(NamedTuple):
    """What a lookup would find, for each kind of layer alone too.

    Attributes:
      group_hits: of attention, then of each recurrent group.
    """

    hit: int
    junction: int
    group_hits: tuple[int, ...]


MISS = Hit(0, 0, (), (), True)


def lookup(table: PageTable, keys: Sequence[bytes], limit: int) -> Hit:
    """The longest prefix for which attention entries and a state are there.

    Args:
      keys: of the request's complete units.
      limit: tokens at most; the request's tokens less one, so that logits are computed.
    """
    if not table.policy.enabled or not keys:
        return MISS
    attention_hit, pages, pending = _attention(table, keys, limit)
    if not table.geometry.num_state_pages:
        return Hit(attention_hit, 0, pages, (), not pending)
    found = _state(table, keys, attention_hit)
    if found is None:
        return Hit(0, attention_hit, (), (), True)
    pages = pages[: -(-found.tokens // table.geometry.page_tokens)]
    return Hit(
        tokens=found.tokens,
        junction=attention_hit if attention_hit > found.tokens else 0,
        attention=pages,
        state=found.pages,
        is_ready=found.step <= table.committed
        and found.pages not in table.parted
        and not pending.intersection(pages),
        is_junction=found.is_junction,
    )


def probe(table: PageTable, keys: Sequence[bytes], limit: int) -> Probe:
    """As `lookup`, with the hits of each group alone."""
    hit = lookup(table, keys, limit)
    if not table.policy.enabled:
        return Probe(0, 0, (0,) * (1 + table.geometry.num_state_pages))
    attention_hit, _, _ = _attention(table, keys, limit)
    state = _state(table, keys, limit)
    states = (state.tokens if state is not None else 0,) * table.geometry.num_state_pages
    return Probe(hit.tokens, hit.junction, (attention_hit, *states))


def _attention(
    table: PageTable, keys: Sequence[bytes], limit: int
) -> tuple[int, tuple[int, ...], set[int]]:
    """Tokens that the attention entries cover, their pages, and which pages are not written yet.

    Whole pages from the left while they hit, then the longest part of the next one.
    """
    unit, page_tokens = table.policy.unit_tokens, table.geometry.page_tokens
    drop = unit if table.policy.tail_drop else 0
    limit = min(limit + drop, len(keys) * unit)
    pages: list[int] = []
    pending: set[int] = set()
    index, scale = table.attention, page_tokens // unit
    for last_unit in range(scale - 1, limit // unit, scale):
        entry = _oldest(index, keys[last_unit], table.committed)
        if entry is None:
            break
        pages.append(entry.pages[0])
        if entry.step > table.committed:
            pending.add(entry.pages[0])
    tokens = len(pages) * page_tokens
    first = len(pages) * scale
    for last_unit in range(min(first + scale - 1, limit // unit) - 1, first - 1, -1):
        entry = _oldest(index, keys[last_unit], table.committed)
        if entry is not None:
            pages.append(entry.pages[0])
            if entry.step > table.committed:
                pending.add(entry.pages[0])
            tokens = (last_unit + 1) * unit
            break
    tokens = max(0, tokens - drop)
    return tokens, tuple(pages[: -(-tokens // page_tokens)]), pending


def _state(table: PageTable, keys: Sequence[bytes], limit: int) -> Entry | None:
    """The longest state of at most `limit` tokens. A state serves exactly its own length."""
    unit, index = table.policy.unit_tokens, table.states
    for last_unit in range(min(limit // unit, len(keys)) - 1, -1, -1):
        entry = _oldest(index, keys[last_unit], table.committed)
        if entry is not None:
            return entry
    return None


def _oldest(index: Map[bytes, tuple[Entry, ...]], key: bytes, committed: int) -> Entry | None:
    """The first entry that is visible, else the first of all."""
    found = index.get(key)
    if found is None:
        return None
    return next((entry for entry in found if entry.step <= committed), found[0])
