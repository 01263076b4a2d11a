"""Which reusable entries there are, and what they are called: by content, not by page.

An entry comes into being in the step that writes its bytes and is registered once that step
completes. It stays registered while a later step keeps it from being used for a moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from serving.page_table import CachePolicy, KeyChain, PageTable, chain_of, extend_chain, unit_keys
from serving.page_table.table import Entry
from serving.replay.answers import EntryName
from serving.replay.trace import TraceConfig


class Prefix(NamedTuple):
    """The first `tokens` tokens of a request."""

    request_id: str
    tokens: int


class EntryPage(NamedTuple):
    """What an entry promises: page `page` serves group `group` (0 is attention, then each recurrent
    group) for the first `tokens` tokens of a sequence."""

    group: int
    key: bytes
    page: int
    tokens: int


class PrefixNames:
    """What prefixes are called, by key: after the earliest request that begins with it as far as
    is known when the name is asked for first."""

    def __init__(self, policy: CachePolicy):
        self._policy = policy
        self._chains: dict[str, KeyChain] = {}
        self._keys: dict[str, dict[bytes, int]] = {}
        self._names: dict[bytes, Prefix] = {}

    def add(self, request_id: str, salt: str) -> None:
        """Make a request known, without its tokens."""
        policy = self._policy
        self._chains[request_id] = chain_of(salt, policy.unit_tokens, policy.hash_lookahead_tokens)
        self._keys[request_id] = {}

    def extend(self, request_id: str, tokens: tuple[int, ...]) -> None:
        """Make the tokens of a request known, all that there are so far."""
        old = self._chains[request_id]
        chain = extend_chain(old, tokens[old.num_tokens :])
        self._chains[request_id] = chain
        unit = self._policy.unit_tokens
        self._keys[request_id] |= {
            key: index * unit for index, key in enumerate(chain.keys, start=1)
        }

    def find(self, key: bytes) -> Prefix | None:
        """The name of a key; None if no request has it."""
        if key not in self._names:
            found = ((name, keys[key]) for name, keys in self._keys.items() if key in keys)
            first = next(found, None)
            if first is None:
                return None
            self._names[key] = Prefix(*first)
        return self._names[key]


def prefix_keys(policy: CachePolicy, tokens: tuple[int, ...], salt: str) -> tuple[bytes, ...]:
    """Keys of all complete units."""
    return unit_keys(tokens, policy.unit_tokens, salt=salt, lookahead=policy.hash_lookahead_tokens)


class EntryLog:
    """The entries of a page table from step to step."""

    def __init__(self) -> None:
        self._steps: dict[EntryPage, int] = {}  # after which an entry's bytes are there
        self._completed = -1

    def registered(self) -> frozenset[EntryPage]:
        """Entries whose step has completed."""
        return frozenset(one for one, step in self._steps.items() if step <= self._completed)

    def state_pages(self) -> frozenset[int]:
        """Pages of all recurrent states, those of steps in flight included."""
        return frozenset(one.page for one in self._steps if one.group)

    def planned(self, table: PageTable, step_id: int, written: Set[int]) -> None:
        """A step was planned; it replaces the pages `written`."""
        self._update(table, step_id, written)

    def completed(self, table: PageTable, step_id: int) -> None:
        """A step was completed."""
        self._completed = step_id
        self._update(table, step_id, frozenset())

    def changed(self, table: PageTable) -> None:
        """Something else may have taken entries away, or made some reusable."""
        self._update(table, self._completed, frozenset())

    def _update(self, table: PageTable, new_step: int, written: Set[int]) -> None:
        old = self._steps
        self._steps = {
            one: old[one] if one in old and one.page not in written else new_step
            for one in _all_pages(table)
        }


def entry_names(
    pages: Set[EntryPage], names: PrefixNames, config: TraceConfig
) -> frozenset[EntryName]:
    """What the entries are called in answers. Those of an unknown key have no name."""
    groups = (config.attention_group, *config.recurrent_groups)
    found = ((groups[page.group], names.find(page.key)) for page in pages)
    return frozenset(
        EntryName(group, prefix.request_id, prefix.tokens)
        for group, prefix in found
        if prefix is not None
    )


def frozen_slots(pages: Set[EntryPage], page_tokens: int) -> dict[int, int]:
    """Published pages, and how many slots of each must not change; a state page is all slots."""
    frozen: dict[int, int] = {}
    for page in pages:
        slots = page_tokens if page.group else (page.tokens - 1) % page_tokens + 1
        frozen[page.page] = max(slots, frozen.get(page.page, 0))
    return frozen


def _all_pages(table: PageTable) -> list[EntryPage]:
    """All entries with their pages, also those that can not be used yet."""
    indexes: tuple[tuple[Mapping[bytes, tuple[Entry, ...]], int], ...] = (
        (table.attention, 0),
        (table.states, 1),
    )
    return [
        EntryPage(group, key, page, entry.tokens)
        for index, first_group in indexes
        for key, found in index.items()
        for entry in found
        for group, page in enumerate(entry.pages, start=first_group)
    ]
