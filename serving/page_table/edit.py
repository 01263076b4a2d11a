"""One change of a page table: references, keys and owners, edited in place and then frozen."""

from __future__ import annotations

from collections.abc import Iterable

from serving.page_table.states import Bundle
from serving.page_table.table import (
    Allocation,
    Entry,
    OutOfPages,
    PageKeys,
    PageTable,
    PublishedKey,
    Touch,
)
from serving.page_table.tickets import Ticket

# Entries of one key: a prefix that is continued a thousand times need not be kept a thousand times.
MAX_COPIES = 8


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
        "_pins",
        "_published",
        "_queue",
        "_refs",
        "_states",
        "_tickets",
        "_touched",
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
        self._published = table.published
        self._tickets = table.tickets
        self._pins = table.pins
        self._parted = table.parted
        self._num_evicted = table.num_evicted
        self._touched: list[Touch] = []

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
            self._published,
            self._tickets,
            self._oldest,
            self._next_stamp,
            base.committed,
            self._pins,
            self._parted,
            self._num_evicted,
            (*base.touched, *self._touched) if self._touched else base.touched,
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
        """Whether somebody else may read the pages: then they must not be written to."""
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

    def publish(self, entry: Entry, key: bytes, *, is_state: bool, owner: str) -> bool:
        """Make pages of a request reusable under a key, unless enough others are; whether they were
        not yet."""
        index = self._states if is_state else self._attention
        found = index.get(key, ())
        if len(found) >= MAX_COPIES or any(other.pages == entry.pages for other in found):
            return False
        index[key] = (*found, entry)
        self._touched.append(Touch(is_state, key, owner, entry.tokens, entry.step))
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
        self._touched.append(Touch(found.is_state, key))
        if left:
            index[key] = left
        else:
            del index[key]
        for other in gone.pages:
            keys = tuple(old for old in self._page_keys[other].keys if old != key)
            if keys:
                self._page_keys[other] = PageKeys(found.is_state, keys)
            else:
                self._drop_keys(other)

    def forget(self, page: int) -> int:
        """Remove all entries of a page, and of its bundle; how many there were."""
        found = self._page_keys.get(page)
        if found is None:
            return 0
        index = self._states if found.is_state else self._attention
        bundle: Bundle = (page,)
        self._touched += [Touch(found.is_state, key) for key in found.keys]
        for key in found.keys:
            entries = index[key]
            if len(entries) == 1:
                bundle = entries[0].pages
                del index[key]
                continue
            bundle = next(entry.pages for entry in entries if page in entry.pages)
            index[key] = tuple(entry for entry in entries if entry.pages != bundle)
        for other in bundle:
            self._drop_keys(other)
        return len(found.keys)

    def _drop_keys(self, page: int) -> None:
        """A page can be found under no key any more."""
        del self._page_keys[page]
        if page in self._idle:
            del self._queue[self._idle.pop(page)]
            self._free_bits |= 1 << page

    # ---- owners ----

    def set_owner(self, request_id: str, allocation: Allocation) -> None:
        self._owners = self._owners.set(request_id, allocation)

    def drop_owner(self, request_id: str) -> None:
        self._owners = self._owners.delete(request_id)

    def add_published(self, request_id: str, entries: Iterable[PublishedKey]) -> None:
        old = self._published.get(request_id, ())
        self._published = self._published.set(request_id, (*old, *entries))

    def drop_published(self, request_id: str) -> None:
        if request_id in self._published:
            self._published = self._published.delete(request_id)

    def set_ticket(self, ticket_id: str, ticket: Ticket) -> None:
        self._tickets = self._tickets.set(ticket_id, ticket)

    def drop_ticket(self, ticket_id: str) -> None:
        self._tickets = self._tickets.delete(ticket_id)
