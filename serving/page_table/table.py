"""Which page belongs to which request: one immutable value, and functions that return the next one.

Every function returns the new table and the effects that the device must carry out, in order,
before the next step touches the pages. A function that raises leaves the table as it was, because
nothing is ever changed in place.

Life of a page: free -> (handed out with a `Clear`) clearing -> private -> free. A page of either
kind is cleared each time it is handed out, since its last owner may have left float32 state in it
that reads as NaN elsewhere (KF-C01), and since a recurrent layer must start from zeros (KF-C02). A
page may be freed while a step in flight still writes to it: the device works in order, so the next
owner's clear comes after that write.

Invariants (`check`; cache-semantics.md section 10): every usable page is either free or owned, and
owned once; page 0 is neither.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from serving.page_table.alignment import PageGeometry, capacity
from serving.request import InvariantError

NULL_PAGE = 0  # padding points here; never handed out


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; the table is unchanged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Clear:
    """Set these pages to zero in every layer position."""

    pages: tuple[int, ...]


Effect = Clear


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Pages of one request.

    Attributes:
      attention: page of each `page_tokens` positions from 0.
      states: one a recurrent group, in the order of `CacheSpec.recurrent_groups`.
    """

    attention: tuple[int, ...]
    states: tuple[int, ...]

    @property
    def pages(self) -> tuple[int, ...]:
        return self.attention + self.states


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Owners of all pages.

    Attributes:
      num_pages: pages of the pool, the null page included.
      free_bits: bit `p` is set where page `p` is free. One integer is a set that costs a
        microsecond to copy at ten thousand pages; the lowest page is handed out first.
      owners: by request id.
    """

    geometry: PageGeometry
    num_pages: int
    free_bits: int
    owners: Mapping[str, Allocation]

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return self.free_bits.bit_count()

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(page for page in range(self.num_pages) if self.free_bits >> page & 1)


def empty_table(geometry: PageGeometry, num_pages: int) -> PageTable:
    """A table with every usable page free.

    Raises:
      ConfigError: the pool is too small for one request.
    """
    capacity(geometry, num_pages)
    return PageTable(
        geometry=geometry, num_pages=num_pages, free_bits=(1 << num_pages) - 2, owners={}
    )


def admit(
    table: PageTable, request_id: str, num_tokens: int
) -> tuple[PageTable, tuple[Effect, ...]]:
    """Give a new request its state pages, and attention pages for `num_tokens` tokens.

    Raises:
      OutOfPages: too few pages are free.
      InvariantError: the request already has pages.
    """
    if request_id in table.owners:
        raise InvariantError(f"request {request_id!r} was admitted twice; expected no pages of it")
    num_states = table.geometry.num_state_pages
    free_bits, pages = _take(table.free_bits, table.geometry.request_pages(num_tokens))
    allocation = Allocation(attention=pages[num_states:], states=pages[:num_states])
    return _with_owner(table, request_id, allocation, free_bits), (Clear(pages),)


def extend(
    table: PageTable, request_id: str, num_tokens: int
) -> tuple[PageTable, tuple[Effect, ...]]:
    """Grow a request so that it holds `num_tokens` tokens in all; it never shrinks.

    Raises:
      OutOfPages: too few pages are free.
      InvariantError: the request has no pages.
    """
    old = table.owners.get(request_id)
    if old is None:
        raise InvariantError(f"request {request_id!r} has no pages; expected it to be admitted")
    missing = table.geometry.attention_pages(num_tokens) - len(old.attention)
    if missing <= 0:
        return table, ()
    free_bits, pages = _take(table.free_bits, missing)
    allocation = Allocation(attention=old.attention + pages, states=old.states)
    return _with_owner(table, request_id, allocation, free_bits), (Clear(pages),)


def release(table: PageTable, request_id: str) -> tuple[PageTable, tuple[Effect, ...]]:
    """Free all pages of a request. Releasing a request without pages changes nothing."""
    allocation = table.owners.get(request_id)
    if allocation is None:
        return table, ()
    free_bits = table.free_bits
    for page in allocation.pages:
        free_bits |= 1 << page
    owners = {owner: pages for owner, pages in table.owners.items() if owner != request_id}
    return dataclasses.replace(table, free_bits=free_bits, owners=owners), ()


def check(table: PageTable) -> None:
    """Verify the invariants of the module.

    Raises:
      InvariantError: naming the pages that break one.
    """
    uses = Counter(table.free_pages)
    for allocation in table.owners.values():
        uses.update(allocation.pages)
    usable = set(range(NULL_PAGE + 1, table.num_pages))
    problems = {
        "free and owned, or owned twice": sorted(page for page, n in uses.items() if n > 1),
        "neither free nor owned": sorted(usable - uses.keys()),
        "not usable, but free or owned": sorted(uses.keys() - usable),
    }
    broken = [f"pages {pages} are {what}" for what, pages in problems.items() if pages]
    if table.free_bits >> table.num_pages:
        broken.append(f"free_bits names pages beyond the pool of {table.num_pages}")
    if broken:
        raise InvariantError("; ".join(broken))


def _take(free_bits: int, count: int) -> tuple[int, tuple[int, ...]]:
    """Remove the `count` lowest pages from a set of free pages."""
    if free_bits.bit_count() < count:
        raise OutOfPages(f"too few free pages: got {free_bits.bit_count()}; expected {count}")
    pages: list[int] = []
    for _ in range(count):
        lowest = free_bits & -free_bits
        pages.append(lowest.bit_length() - 1)
        free_bits ^= lowest
    return free_bits, tuple(pages)


def _with_owner(
    table: PageTable, request_id: str, allocation: Allocation, free_bits: int
) -> PageTable:
    return dataclasses.replace(
        table, free_bits=free_bits, owners={**table.owners, request_id: allocation}
    )
