"""The numbered log of cache events, and how events are cut to messages."""

from __future__ import annotations

import array

import pytest

from serving.kv_events.events import Block, Cleared, Removed, Stored, num_bytes, split
from serving.kv_events.log import EventLog
from serving.request import RequestError


def run_of(first: int, count: int, *, parent: int | None = None, tokens: int = 3) -> Stored:
    ids = array.array("I", range(tokens))
    return Stored(parent, tuple(Block(first + i, ids) for i in range(count)))


def test_split_keeps_order_and_joins_runs_by_their_parents():
    events = (Cleared(), run_of(1, 100, parent=-5), Removed(tuple(range(200, 300))), run_of(500, 2))
    parts = split(events, 1000)
    assert len(parts) > 5
    assert all(num_bytes(part) <= 1000 for part in parts)
    blocks: list[Block] = []
    hashes: list[int] = []
    parent: int | None = -5
    for event in (event for part in parts for event in part):
        if isinstance(event, Stored):
            assert event.parent == (None if event.blocks[0].block_hash == 500 else parent)
            blocks += event.blocks
            parent = event.blocks[-1].block_hash
        elif isinstance(event, Removed):
            hashes += event.block_hashes
    assert [block.block_hash for block in blocks] == [*range(1, 101), 500, 501]
    assert hashes == list(range(200, 300))
    assert parts[0][0] == Cleared()


def test_split_gives_a_block_that_is_too_large_a_part_of_its_own():
    parts = split((run_of(1, 2, tokens=1000),), 1000)
    assert [part[0].parent for part in parts] == [None, 1]
    assert split((), 1000) == []


def test_log_numbers_all_replicas_alike_and_keeps_the_last_moments():
    log = EventLog(2, max_moments=3)
    log.check_start(0)
    for count in range(1, 6):
        log.append([(run_of(count, 1),), ()], 0.5 * count)
    assert (log.first, log.last) == (3, 5)
    assert log.at(4) == (4, 2.0, ((run_of(4, 1),), ()))
    for number in (2, 5):
        log.check_start(number)
    for number in (1, 6):
        with pytest.raises(RequestError, match=f"got {number}; expected 2..5") as caught:
            log.check_start(number)
        assert caught.value.status == "OUT_OF_RANGE"
    with pytest.raises(RequestError, match="too slow") as caught:
        log.at(2)
    assert caught.value.status == "DATA_LOSS"


def test_log_is_bounded_by_bytes_too():
    log = EventLog(1, max_bytes=1000)
    for first in range(50):
        log.append([(run_of(first, 4),)], 0.0)
    assert log.last == 50
    kept = sum(num_bytes(log.at(number).events[0]) for number in range(log.first, 51))
    assert 0 < kept <= 1000
    log.append([(run_of(100, 400),)], 0.0)  # more than all that may be kept
    assert log.first == log.last == 51
