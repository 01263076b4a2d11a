"""The page table as one immutable value, and the edit that makes the next one.

Life of a page: free -> private (cleared first if it will hold attention entries) -> published <->
shared -> free. Published pages that nobody references are *idle*: reusable, and handed out, least
recently released first, once no free page is left. `serving.page_table.transfer` adds the life of
pages that a remote writer fills.

Invariants (`check`; cache-semantics.md section 10): every usable page is exactly one of free, idle,
referenced; reference counts equal the references of requests and transfers; keys point to pages and
pages to keys; a state is reusable only at the number of tokens that it summarizes.
"""

from __future__ import annotations

from collections import Counter
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


class PendingKey(NamedTuple):
    """An entry whose step was not committed when it was made; it goes if its request does."""

    step: int
    key: bytes
    page: int


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
      pending: keys that a request has published for steps in flight, and perhaps older ones.
      committed: id of the last step whose result is known.
      tickets: announced transfers by id.
      pins: pages with a reference that ends when the step being planned is complete as a plan: what
        it copies from must not be handed out in the same step.
      parted: reusable bundles from which their producers part in the step being planned; they are
        not used before the next step.
      num_evicted: entries that were lost because their page was handed out.
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
    pending: Map[str, tuple[PendingKey, ...]]
    tickets: Map[str, Ticket]
    oldest: int = 0
    next_stamp: int = 0
    committed: int = NEVER
    pins: tuple[int, ...] = ()
    parted: tuple[Bundle, ...] = ()
    num_evicted: int = 0

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be handed out, idle ones included."""
        return self.free_bits.bit_count() + len(self.idle)

    @property
    def is_fine_grained(self) -> bool:
        """Whether hits may end inside a page."""
        return self.policy.unit_tokens < self.geometry.page_tokens

    @property
    def column_tokens(self) -> int | None:
        """Tokens of a state column; None if a request's state stays in one page."""
        return self.geometry.page_tokens if self.policy.enabled else None

    def is_kept(self, pages: Bundle) -> bool:
        """Whether somebody else may read the pages: then they must not be written to."""
        return any(page in self.page_keys or self.refs.get(page, 0) > 1 for page in pages)


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
        pending=Map(),
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


class Edit:
    """One change of a table. Mutable, and never leaves the function that makes it."""

    __slots__ = (
        "_attention",
        "_base",
        "_free_bits",
        "_idle",
        "_next_stamp",
        "_num_evicted",
        "_oldest",
        "_owners",
        "_page_keys",
        "_parted",
        "_pending",
        "_pins",
        "_queue",
        "_refs",
        "_states",
        "_tickets",
    )

    def __init__(self, table: PageTable):
        self._base = table
        self._free_bits = table.free_bits
        self._refs = table.refs.mutate()
        self._idle = table.idle.mutate()
        self._queue = table.queue.mutate()
        self._oldest = table.oldest
        self._next_stamp = table.next_stamp
        self._attention = table.attention.mutate()
        self._states = table.states.mutate()
        self._page_keys = table.page_keys.mutate()
        self._owners = table.owners
        self._pending = table.pending
        self._tickets = table.tickets
        self._pins = table.pins
        self._parted = table.parted
        self._num_evicted = table.num_evicted

    def finish(self) -> PageTable:
        """The next table."""
        base = self._base
        return PageTable(
            base.geometry,
            base.policy,
            base.num_pages,
            self._free_bits,
            self._refs.finish(),
            self._idle.finish(),
            self._queue.finish(),
            self._attention.finish(),
            self._states.finish(),
            self._page_keys.finish(),
            self._owners,
            self._pending,
            self._tickets,
            self._oldest,
            self._next_stamp,
            base.committed,
            self._pins,
            self._parted,
            self._num_evicted,
        )

    @property
    def num_free(self) -> int:
        return self._free_bits.bit_count() + len(self._idle)

    # ---- references ----

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out pages with one reference each: free ones, then the least recently used.

        Raises:
          OutOfPages: too few pages can be handed out.
        """
        if self.num_free < count:
            raise OutOfPages(f"too few free pages: got {self.num_free}; expected {count}")
        pages: list[int] = []
        for _ in range(count):
            if not self._free_bits:
                while self._oldest not in self._queue:
                    self._oldest += 1
                # Frees the other pages of a bundle too, which may serve the next turn of the loop.
                self._num_evicted += self.forget(self._queue[self._oldest])
            lowest = self._free_bits & -self._free_bits
            pages.append(lowest.bit_length() - 1)
            self._free_bits ^= lowest
            self._refs[pages[-1]] = 1
        return tuple(pages)

    def take_bundles(self, count: int) -> tuple[Bundle, ...]:
        """Hand out `count` bundles.

        Raises:
          OutOfPages: too few pages can be handed out.
        """
        size = self._base.geometry.num_state_pages
        pages = self.take(count * size)
        return tuple(pages[i * size : (i + 1) * size] for i in range(count))

    def reference(self, pages: Bundle) -> None:
        """Add a reference to pages that are referenced or idle."""
        for page in pages:
            count = self._refs.get(page, 0)
            if not count:
                del self._queue[self._idle.pop(page)]
            self._refs[page] = count + 1

    def release(self, pages: Bundle) -> None:
        """Take a reference back; a page without one is idle if it has keys, else free."""
        for page in pages:
            count = self._refs[page]
            if count > 1:
                self._refs[page] = count - 1
                continue
            del self._refs[page]
            if page in self._page_keys:
                self._idle[page] = self._next_stamp
                self._queue[self._next_stamp] = page
                self._next_stamp += 1
            else:
                self._free_bits |= 1 << page

    def num_references(self, page: int) -> int:
        return self._refs.get(page, 0)

    def is_kept(self, pages: Bundle) -> bool:
        """As `PageTable.is_kept`."""
        return any(page in self._page_keys or self.num_references(page) > 1 for page in pages)

    def pin(self, pages: Bundle) -> None:
        """Hand the caller's reference to the step being planned."""
        self._pins = (*self._pins, *pages)

    def part(self, bundle: Bundle) -> None:
        """Note that a producer leaves its reusable bundle in the step being planned."""
        self._parted = (*self._parted, bundle)

    def unpin(self) -> None:
        """Take back the references of the step that was planned."""
        self.release(self._pins)
        self._pins = self._parted = ()

    # ---- keys ----

    def publish(self, entry: Entry, key: bytes, *, is_state: bool) -> bool:
        """Make pages reusable under a key; whether they were not yet."""
        index = self._states if is_state else self._attention
        found = index.get(key, ())
        if any(other.pages == entry.pages for other in found):
            return False
        index[key] = (*found, entry)
        for page in entry.pages:
            old = self._page_keys.get(page)
            keys = (*old.keys, key) if old is not None else (key,)
            self._page_keys[page] = PageKeys(is_state, keys)
        return True

    def withdraw(self, key: bytes, page: int) -> None:
        """Remove the entry of a page under one key, if it is there."""
        found = self._page_keys.get(page)
        if found is None or key not in found.keys:
            return
        index = self._states if found.is_state else self._attention
        left = tuple(entry for entry in index[key] if page not in entry.pages)
        gone = next(entry for entry in index[key] if page in entry.pages)
        if left:
            index[key] = left
        else:
            del index[key]
        for other in gone.pages:
            keys = tuple(old for old in self._page_keys[other].keys if old != key)
            if keys:
                self._page_keys[other] = PageKeys(found.is_state, keys)
                continue
            del self._page_keys[other]
            if other in self._idle:
                del self._queue[self._idle.pop(other)]
                self._free_bits |= 1 << other

    def forget(self, page: int) -> int:
        """Remove all entries of a page; how many there were."""
        found = self._page_keys.get(page)
        if found is None:
            return 0
        for key in found.keys:
            self.withdraw(key, page)
        return len(found.keys)

    # ---- owners ----

    def set_owner(self, request_id: str, allocation: Allocation) -> None:
        self._owners = self._owners.set(request_id, allocation)

    def drop_owner(self, request_id: str) -> None:
        self._owners = self._owners.delete(request_id)

    def set_pending(self, request_id: str, pending: tuple[PendingKey, ...]) -> None:
        if pending:
            self._pending = self._pending.set(request_id, pending)
        elif request_id in self._pending:
            self._pending = self._pending.delete(request_id)

    def set_ticket(self, ticket_id: str, ticket: Ticket) -> None:
        self._tickets = self._tickets.set(ticket_id, ticket)

    def drop_ticket(self, ticket_id: str) -> None:
        self._tickets = self._tickets.delete(ticket_id)


def check(table: PageTable) -> None:
    """Verify the invariants of the module.

    Raises:
      InvariantError: naming the pages that break one.
    """
    references = Counter[int]()
    for allocation in table.owners.values():
        references.update(allocation.pages)
    for ticket in table.tickets.values():
        references.update(ticket.pages)
    references.update(table.pins)
    free = {page for page in range(table.num_pages) if table.free_bits >> page & 1}
    usable = set(range(NULL_PAGE + 1, table.num_pages))
    uses = Counter((*free, *table.idle, *references))
    referenced = dict(table.refs)
    keyed, idle = set(table.page_keys), set(table.idle)
    problems: dict[str, list[int]] = {
        "more than one of free, idle, referenced": sorted(p for p, n in uses.items() if n > 1),
        "neither free, idle nor referenced": sorted(usable - uses.keys()),
        "not usable, but free, idle or referenced": sorted(uses.keys() - usable),
        "counted with other references than they have": sorted(
            page
            for page in references.keys() | referenced.keys()
            if references[page] != referenced.get(page, 0)
        ),
        "idle without a key": sorted(idle - keyed),
        "free with a key": sorted(free & keyed),
    }
    broken = [f"pages {pages} are {what}" for what, pages in problems.items() if pages]
    if table.free_bits >> table.num_pages:
        broken.append(f"free_bits names pages beyond the pool of {table.num_pages}")
    broken += _check_queue(table) + _check_keys(table) + _check_states(table)
    if broken:
        raise InvariantError("; ".join(broken))


def _check_queue(table: PageTable) -> list[str]:
    if {page: stamp for stamp, page in table.queue.items()} != dict(table.idle):
        return ["the queue and the idle pages differ"]
    stamps = table.queue.keys()
    if any(not table.oldest <= stamp < table.next_stamp for stamp in stamps):
        return [f"stamps are outside {table.oldest}..{table.next_stamp - 1}: got {sorted(stamps)}"]
    return []


def _check_keys(table: PageTable) -> list[str]:
    listed = Counter[tuple[bool, int, bytes]]()
    for is_state, index in ((False, table.attention), (True, table.states)):
        for key, found in index.items():
            listed.update((is_state, page, key) for entry in found for page in entry.pages)
    kept = Counter(
        (keys.is_state, page, key) for page, keys in table.page_keys.items() for key in keys.keys
    )
    return [] if listed == kept else ["entries and the keys of pages differ"]


def _check_states(table: PageTable) -> list[str]:
    """A state that can be reused is not where the next step of its request will write."""
    broken: list[str] = []
    lengths: dict[Bundle, int] = {}
    for found in table.states.values():
        for entry in found:
            if lengths.setdefault(entry.pages, entry.tokens) != entry.tokens:
                broken.append(f"bundle {entry.pages} is reusable at two lengths")
    for request_id, allocation in table.owners.items():
        for column in allocation.states.columns:
            if column.tokens >= 0 and lengths.get(column.pages, column.tokens) != column.tokens:
                broken.append(
                    f"{request_id!r}: bundle {column.pages} holds {column.tokens} tokens; expected "
                    f"{lengths[column.pages]}, at which it is reusable"
                )
    return broken
