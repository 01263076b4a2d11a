"""Which prefixes are told as held, on tables made by hand; random ones are in
`tests/property/test_kv_events.py`."""

from __future__ import annotations

from serving import page_table
from serving.kv_events.events import Cleared, Stored, block_hash
from serving.kv_events.held import HeldPrefixes
from serving.kv_events.news import News, Source
from serving.page_table import CachePolicy, PageTable, chain_of, empty_table, extend_chain
from serving.page_table.edit import Edit
from serving.page_table.table import NEVER, Entry
from serving.scheduler.token_log import EMPTY_LOG
from tests.fakes import fake_geometry

UNIT = 2
PROMPT = tuple(range(10, 20))
CHAIN = extend_chain(chain_of("", UNIT), PROMPT)
SOURCES = {"a": Source(CHAIN, PROMPT, EMPTY_LOG), "b": Source(CHAIN, PROMPT, EMPTY_LOG)}
STATE, OTHER_STATE = (11,), (12,)


class Teller:
    """A table that is edited, and what is told of it."""

    def __init__(self) -> None:
        policy = CachePolicy(unit_tokens=UNIT, key_every_unit=True)
        self.table = empty_table(fake_geometry(num_state_pages=1), 30, policy)
        self.held = HeldPrefixes(self.table)

    def publish(self, pages: tuple[int, ...], units: int, *, step: int = NEVER, owner: str = "a"):
        """Make pages reusable as MLA entries, or as a state if they are one."""
        edit = Edit(self.table)
        is_state = pages in (STATE, OTHER_STATE)
        entry = Entry(pages, UNIT * units, step)
        assert edit.publish(entry, CHAIN.keys[units - 1], is_state=is_state, owner=owner)
        return self._told(edit.finish())

    def evict(self, *pages: int):
        return self._told(page_table.evict(self.table, pages))

    def commit(self, step: int):
        return self._told(page_table.commit_step(self.table, step))

    def _told(self, table: PageTable):
        is_commit = table.committed != self.table.committed
        touched = table.touched[0 if is_commit else len(self.table.touched) :]
        self.table = table
        return self.held.update(News(table, touched, SOURCES))


def told_hashes(events) -> list[int]:
    (event,) = events
    assert isinstance(event, Stored)
    assert event.parent is None
    return [block.block_hash for block in event.blocks]


def hashes(units: int) -> list[int]:
    return [block_hash(key) for key in CHAIN.keys[:units]]


def test_a_prefix_is_held_once_its_state_and_all_pages_before_are_there():
    teller = Teller()
    assert teller.publish(STATE, 5) == ()
    assert teller.publish((3,), 5) == ()
    assert teller.publish((1,), 2) == ()
    assert teller.publish((2,), 3) == ()  # inside the second page
    assert told_hashes(teller.publish((2,), 4)) == hashes(5)
    assert teller.evict(1) == (Cleared(),)
    assert told_hashes(teller.publish((4,), 2, owner="b")) == hashes(5)
    assert teller.evict(*STATE) == (Cleared(),)


def test_a_copy_that_is_still_computed_counts_once_the_visible_one_is_gone():
    teller = Teller()
    teller.publish((1,), 1)
    assert told_hashes(teller.publish(STATE, 1)) == hashes(1)
    assert teller.publish(OTHER_STATE, 1, step=5, owner="b") == ()
    assert teller.evict(*STATE) == (Cleared(),)
    assert teller.commit(4) == ()
    assert told_hashes(teller.commit(5)) == hashes(1)


def test_what_was_withdrawn_before_its_step_is_never_told():
    teller = Teller()
    teller.publish((1,), 1)
    assert teller.publish(STATE, 1, step=5) == ()
    assert teller.evict(*STATE) == ()
    assert teller.commit(5) == ()
    assert teller.held.num_blocks == 0
