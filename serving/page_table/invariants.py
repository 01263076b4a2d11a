"""What must hold for every page table (cache-semantics.md section 10).

Every usable page is exactly one of free, idle, referenced. Reference counts equal the references of
requests, transfers and the step being planned. Keys point to pages and pages to keys. A state is
reusable only at the number of tokens that it summarizes.
"""

from __future__ import annotations

from collections import Counter

from serving.page_table.states import Bundle
from serving.page_table.table import NULL_PAGE, PageTable
from serving.request import InvariantError


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
