"""Reading ahead: order, memory bound, and a clean end after an error."""

import threading

import pytest

from k3jax.weights.stream import read_ahead


def test_results_come_in_order():
    got = list(read_ahead(range(50), lambda i: i * i, cost=lambda i: 1, max_cost=7, threads=4))
    assert got == [(i, i * i) for i in range(50)]


def test_items_in_flight_stay_within_the_bound():
    lock, flying, peak = threading.Lock(), 0, 0

    def produce(item: int) -> int:
        nonlocal flying, peak
        with lock:
            flying += item
            peak = max(peak, flying)
        return item

    for item, _ in read_ahead([3, 5, 2, 4, 1] * 20, produce, cost=int, max_cost=8, threads=4):
        with lock:
            flying -= item
    assert 5 < peak <= 8


def test_several_threads_work_at_once():
    together = threading.Barrier(3, timeout=30)
    got = read_ahead(range(3), lambda _: together.wait(), cost=lambda i: 1, max_cost=3, threads=3)
    assert sorted(result for _, result in got) == [0, 1, 2]


def test_an_item_above_the_bound_goes_alone():
    got = list(read_ahead([9, 1, 9], str, cost=int, max_cost=4, threads=2))
    assert [result for _, result in got] == ["9", "1", "9"]


def test_an_error_reaches_the_consumer_and_starts_nothing_new():
    started: list[int] = []

    def produce(item: int) -> int:
        started.append(item)
        if item == 2:
            raise OSError("no disk")
        return item

    got = []
    with pytest.raises(OSError, match="no disk"):
        got.extend(read_ahead(range(100), produce, cost=lambda i: 1, max_cost=3, threads=1))
    assert max(started) <= 5


def test_a_consumer_may_stop_early():
    started: list[int] = []
    stream = read_ahead(
        range(1000), lambda i: started.append(i), cost=lambda i: 1, max_cost=4, threads=2
    )
    next(stream)
    stream.close()
    assert len(started) <= 5
