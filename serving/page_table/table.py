"""The page table as one immutable value. `serving.page_table.edit` makes the next one.

Life of a page: free -> private (cleared first if it will hold attention entries) -> published <->
shared -> free. Published pages that nobody references are *idle*: reusable, and handed out, least
recently released first, once no free page is left. `serving.page_table.transfer` adds the life of
pages that a remote writer fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from immutables import Map

from serving.page_table.alignment import PageGeometry, capacity
from serving.page_table.policy import CachePolicy, check_policy, no_reuse
from serving.page_table.states import Bundle, Columns
from serving.page_table.tickets import Ticket
from serving.request import InvariantError

NULL_PAGE = 0  # padding points here; never handed out
NEVER = -1  # step of an entry whose bytes were there before the first step


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; the table is unchanged."""


class Entry(NamedTuple):
    """A reusable piece of a prefix.

    Attributes:
      pages: the attention page, or the bundle of a state.
      tokens: of the prefix; a state serves exactly this one.
      step: after which the bytes are there; the entry is visible once that step is committed.
      is_junction: a state that is kept only because another request's prefix ended there.
    """

    pages: Bundle
    tokens: int
    step: int
    is_junction: bool = False


class PageKeys(NamedTuple):
    """Under which keys a page can be found, as a state or as an attention page."""

    is_state: bool
    keys: tuple[bytes, ...]


class PublishedKey(NamedTuple):
    """An entry that a request made, or the state that it started from. It goes with its request if
    its step is not committed then, or if the request turns out to be tainted."""

    step: int
    key: bytes
    page: int


class Touch(NamedTuple):
    """An entry that came or went.

    Attributes:
      owner: request that published it; None if it was forgotten.
      tokens, step: of the published entry.
    """

    is_state: bool
    key: bytes
    owner: str | None = None
    tokens: int = 0
    step: int = NEVER


class Allocation(NamedTuple):
    """Pages of one request.

    Attributes:
      attention: page of each `page_tokens` positions from 0.
      states: where its recurrent states are.
      prompt_tokens: of the request, without what it generated.
      junction: see `Hit`.
      keyed_tokens: up to which its attention pages have their keys; a multiple of the unit.
      answer_end: tokens and bundle of the last kept state inside the answer; None if there is none.
      running_state: bundle of the state after the last planned step; empty without recurrent
        layers.
      quiet_until: a decoding step that ends here or before changes nothing in the table.
    """

    attention: tuple[int, ...]
    states: Columns
    prompt_tokens: int
    junction: int
    keyed_tokens: int
    answer_end: tuple[int, Bundle] | None = None
    running_state: Bundle = ()
    quiet_until: int = 0

    @property
    def pages(self) -> tuple[int, ...]:
        """All pages, in the order in which they are released: tails before heads."""
        kept = self.answer_end[1] if self.answer_end else ()
        states = [column.pages for column in reversed(self.states.columns)]
        # Group by group, as a state's pages belong to different groups.
        by_group = [page for group in zip(*states, strict=True) for page in group]
        return (*reversed(self.attention), *by_group, *kept)


class PageTable(NamedTuple):
    """Owners, contents and keys of all pages. A named tuple, since every step makes new ones.

    Attributes:
      num_pages: pages of the pool, the null page included.
      free_bits: bit `p` is set where page `p` is free. One integer is a set that costs a
        microsecond to copy at ten thousand pages; the lowest page is handed out first.
      refs: references of each page that has any.
      idle: stamp of each idle page; `queue`: idle page by stamp, the smallest is handed out first.
      oldest: no stamp in `queue` is smaller. `next_stamp`: larger than all of them.
      attention, states: entries by key, oldest first.
      page_keys: keys of each page that has any.
      owners: by request id.
      published: entries that each owner has made or started from.
      committed: id of the last step whose result is known.
      tickets: announced transfers by id.
      pins: pages with a reference that ends when the step being planned is complete as a plan: what
        it copies from must not be handed out in the same step.
      parted: reusable bundles from which their producers part in the step being planned; they are
        not used before the next step.
      num_evicted: entries that were lost because their page was handed out.
      touched: entries that came or went since the last step was committed, in order.
    """

    geometry: PageGeometry
    policy: CachePolicy
    num_pages: int
    free_bits: int
    refs: Map[int, int]
    idle: Map[int, int]
    queue: Map[int, int]
    attention: Map[bytes, tuple[Entry, ...]]
    states: Map[bytes, tuple[Entry, ...]]
    page_keys: Map[int, PageKeys]
    owners: Map[str, Allocation]
    published: Map[str, tuple[PublishedKey, ...]]
    tickets: Map[str, Ticket]
    oldest: int = 0
    next_stamp: int = 0
    committed: int = NEVER
    pins: tuple[int, ...] = ()
    parted: tuple[Bundle, ...] = ()
    num_evicted: int = 0
    touched: tuple[Touch, ...] = ()

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be handed out, idle ones included."""
        return self.free_bits.bit_count() + len(self.idle)

    @property
    def column_tokens(self) -> int | None:
        """Tokens of a state column; None if a request's state stays in one page."""
        return self.geometry.page_tokens if self.policy.enabled else None


def empty_table(
    geometry: PageGeometry, num_pages: int, policy: CachePolicy | None = None
) -> PageTable:
    """A table with every usable page free.

    Args:
      policy: default is to reuse nothing.

    Raises:
      ConfigError: the pool is too small for one request, or the policy does not fit the pages.
    """
    capacity(geometry, num_pages)
    policy = policy or no_reuse(geometry)
    check_policy(policy, geometry)
    return PageTable(
        geometry=geometry,
        policy=policy,
        num_pages=num_pages,
        free_bits=(1 << num_pages) - 2,
        refs=Map(),
        idle=Map(),
        queue=Map(),
        attention=Map(),
        states=Map(),
        page_keys=Map(),
        owners=Map(),
        published=Map(),
        tickets=Map(),
    )


def held(table: PageTable, request_id: str) -> tuple[int, ...]:
    """Pages that a request references in each group, attention first."""
    allocation = table.owners.get(request_id)
    if allocation is None:
        return (0,) * (1 + table.geometry.num_state_pages)
    num_states = len(allocation.states.columns) + (allocation.answer_end is not None)
    return (len(allocation.attention), *(num_states,) * table.geometry.num_state_pages)


def entries(table: PageTable) -> Iterator[tuple[int, bytes, int, int]]:
    """All visible entries as (group, key, page, tokens); group 0 is attention."""
    for index, first_group in ((table.attention, 0), (table.states, 1)):
        for key, found in index.items():
            for entry in found:
                if entry.step <= table.committed:
                    for group, page in enumerate(entry.pages, start=first_group):
                        yield group, key, page, entry.tokens


def owned(table: PageTable, request_id: str) -> Allocation:
    """The pages of a request.

    Raises:
      InvariantError: it has none.
    """
    allocation = table.owners.get(request_id)
    if allocation is None:
        raise InvariantError(f"request {request_id!r} has no pages; expected it to be admitted")
    return allocation
