"""Several replicas as one scheduler: where requests go, and that all take the same steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from k3jax.buckets import Bucket
from serving import replicas
from serving.page_table import CachePolicy, InUse
from serving.plan import GroupPlan, GroupResult, StepResult
from serving.request import InvariantError, RequestError
from tests.fakes import (
    ReplicasDriver,
    fake_geometry,
    fake_request,
    make_replicas,
    solo_tokens,
)

CACHE = CachePolicy(unit_tokens=4)
PREFIX = tuple(range(12))


def served(driver: ReplicasDriver, *names: str) -> list[int]:
    """Submit small requests; returns their replicas."""
    return [driver.submit(fake_request(name, (1, 2, 3), max_tokens=4)) for name in names]


def names_of(plan: GroupPlan) -> list[list[str]]:
    """Requests with rows in a step, replica by replica."""
    return [[row.request_id for row in step.rows] if step else [] for step in plan.plans]


def warm(driver: ReplicasDriver, place: int, prompt: tuple[int, ...]) -> None:
    """Leave a prompt in the cache of one replica."""
    for number in range(place):
        assert driver.submit(fake_request(f"other{number}", (90,), max_tokens=1)) == number
    assert driver.submit(fake_request("warm", prompt, max_tokens=1)) == place
    driver.finish()


# ---- where a new request goes ---------------------------------------------------------------


def test_requests_spread_over_replicas():
    driver = make_replicas(3)
    assert served(driver, *"abcdef") == [0, 1, 2, 0, 1, 2]


def test_a_request_goes_where_less_is_left_to_prefill():
    driver = make_replicas(2)
    driver.submit(fake_request("long", range(30), max_tokens=9))
    assert served(driver, *"ab") == [1, 1]
    driver.abort("b")
    while driver.replicas[0].running.keys() != {"long"} or not driver.tokens("long"):
        driver.step()
    assert served(driver, "c") == [0]  # it is only one request now, as on the other


def test_a_request_goes_where_its_prefix_is():
    driver = make_replicas(3, policy=CACHE)
    warm(driver, 2, PREFIX)
    assert driver.submit(fake_request("a", (*PREFIX, 50))) == 2
    assert driver.submit(fake_request("b", (*PREFIX, 51))) == 0  # too little to wait for
    driver.finish()
    assert driver.outputs["a"][-1].cached_tokens == 8
    assert driver.outputs["b"][-1].cached_tokens == 0


def test_a_long_prefix_outweighs_an_open_request():
    driver = make_replicas(
        2, policy=CachePolicy(unit_tokens=16), geometry=fake_geometry(page_tokens=16),
        max_context_tokens=512, max_prefill_tokens=512,
    )  # fmt: skip
    prefix = tuple(number % 90 for number in range(320))
    warm(driver, 1, prefix)
    places = [driver.submit(fake_request(f"r{i}", (*prefix, i))) for i in range(4)]
    assert places == [1, 1, 1, 0]


def test_no_request_queues_while_another_replica_has_a_free_row():
    driver = make_replicas(2, policy=CACHE, max_rows=1, max_prefill_rows=1)
    warm(driver, 1, PREFIX)
    requests = [fake_request(name, (*PREFIX, 50)) for name in "abc"]
    assert [driver.submit(request) for request in requests] == [1, 0, 1]


# ---- what is refused ------------------------------------------------------------------------


def test_an_id_is_live_on_any_replica():
    driver = make_replicas(2)
    served(driver, *"ab")
    for name in "ab":
        with pytest.raises(RequestError, match="request_id is in use"):
            driver.submit(fake_request(name))


def test_the_queue_is_shared_and_full_only_when_no_replica_has_a_free_row():
    driver = make_replicas(2, max_rows=2, max_waiting=3)
    served(driver, *"abcdefg")  # four rows and three places
    before = driver.replicas
    with pytest.raises(RequestError, match="got 3 waiting requests; expected fewer than 3"):
        driver.submit(fake_request("h"))
    assert driver.replicas is before
    driver.abort("b")
    assert served(driver, "h") == [1]


def test_tokens_in_the_queues_are_counted_together():
    driver = make_replicas(2, max_rows=1, max_prefill_rows=1, max_waiting_tokens=64)
    served(driver, *"ab")
    for name in "cd":
        driver.submit(fake_request(name, range(30)))
    with pytest.raises(RequestError, match="got 60 waiting tokens and a prompt of 5"):
        driver.submit(fake_request("e", range(5)))


def test_a_request_goes_to_the_replica_that_it_names_and_stays():
    driver = make_replicas(2, max_rows=1, max_prefill_rows=1)
    driver.submit(fake_request("long", (7,), max_tokens=9))
    pinned = dataclasses.replace(fake_request("pinned", (1, 2), max_tokens=2), replica=0)
    assert driver.submit(pinned) == 0
    for _ in range(4):
        driver.step()
        assert driver.place_of("pinned") == 0
    assert not driver.replicas[1].running
    driver.finish()
    assert driver.tokens("pinned") == solo_tokens(pinned)


@pytest.mark.parametrize("replica", [-1, 2])
def test_a_replica_that_does_not_exist_is_refused(replica: int):
    driver = make_replicas(2)
    before = driver.replicas
    with pytest.raises(RequestError, match=rf"got {replica}; expected 0\.\.1"):
        driver.submit(dataclasses.replace(fake_request(), replica=replica))
    assert driver.replicas == before


# ---- moving on ------------------------------------------------------------------------------


def test_a_request_that_waits_for_a_row_moves_to_a_free_one():
    driver = make_replicas(2, policy=CACHE, max_rows=1, max_prefill_rows=1)
    late = fake_request("late", (*PREFIX, 50))
    driver.submit(fake_request("long", (7,), max_tokens=30))
    driver.submit(fake_request("short", PREFIX, max_tokens=2))
    assert driver.submit(late) == 0
    while not driver.outputs["short"] or driver.replicas[1].running:
        driver.step()
        assert driver.place_of("late") == 0
    driver.step()
    assert driver.place_of("late") == 1
    assert "long" in driver.replicas[0].running
    driver.finish()
    assert driver.outputs["late"][-1].cached_tokens == 8  # of the pages of `short`
    assert driver.tokens("late") == solo_tokens(late)


def test_a_request_that_ran_stays():
    driver = make_replicas(2, max_rows=2, num_pages=12, max_context_tokens=32)
    names = ["a", "x", "b", "y"]
    for name in names:
        driver.submit(fake_request(name, (1, 2, 3), max_tokens=12 if name in "ab" else 1))
    driver.step()
    driver.step()
    while not driver.replicas[0].waiting:
        driver.step()
    (preempted,) = (entry.request.request_id for entry in driver.replicas[0].waiting)
    assert not driver.replicas[1].running
    driver.step()
    assert driver.place_of(preempted) == 0
    driver.finish()
    assert {len(driver.tokens(name)) for name in "ab"} == {12}


def test_a_request_that_waits_for_pages_moves_to_free_ones():
    driver = make_replicas(2, num_pages=12, max_context_tokens=32)
    driver.submit(fake_request("big", range(24), max_tokens=8))  # 6 of 11 pages, 3 states
    driver.submit(fake_request("small", (1,), max_tokens=1))
    assert driver.submit(fake_request("next", range(5))) == 1
    driver.abort("next")
    driver.submit(fake_request("filler", (1,), max_tokens=1))
    assert driver.submit(fake_request("next", range(5))) == 0
    assert names_of(driver.step()) == [["big"], ["small", "filler"]]
    assert names_of(driver.step())[1] == ["next"]
    driver.finish()


def test_no_more_requests_move_than_a_prefill_step_admits():
    driver = make_replicas(2, max_rows=3, max_prefill_rows=2)
    for number in range(12):
        driver.submit(fake_request(f"r{number}", (7,), max_tokens=40))
    while len(driver.replicas[0].running) < 3:
        driver.step()
    stuck = [entry.request.request_id for entry in driver.replicas[0].waiting]
    for number in range(1, 12, 2):
        driver.abort(f"r{number}")
    driver.plan()
    assert stuck == ["r6", "r8", "r10"]
    assert [driver.place_of(name) for name in stuck] == [1, 1, 0]


# ---- steps ----------------------------------------------------------------------------------


def test_kinds_alternate_for_all_replicas_together():
    driver = make_replicas(2)
    driver.submit(fake_request("long", range(60), max_tokens=2))
    driver.submit(fake_request("short", (1,), max_tokens=10))
    steps = [driver.step() for _ in range(6)]
    assert [step.bucket.kind for step in steps] == ["prefill", "decode"] * 3
    assert [names_of(step) for step in steps[:4]] == [
        [["long"], ["short"]], [[], ["short"]], [["long"], []], [[], ["short"]]
    ]  # fmt: skip


def test_all_plans_have_the_smallest_bucket_that_holds_each():
    driver = make_replicas(
        3, max_context_tokens=20000, max_prefill_tokens=256, num_pages=6000,
        max_waiting_tokens=20000,
    )  # fmt: skip
    lengths = {"a": 3, "b": 200, "c": 100}
    for name, length in lengths.items():
        driver.submit(fake_request(name, (1,) * length, max_tokens=2))
    step = driver.step()
    assert names_of(step) == [["a"], ["b"], ["c"]]
    assert step.bucket == Bucket("prefill", 256, 2, 4096)
    assert {plan.bucket for plan in step.plans if plan} == {step.bucket}
    padding = [state.stats.padding_tokens for state in driver.replicas]
    assert padding == [256 - length for length in lengths.values()]


def test_an_idle_replica_takes_its_turn_empty():
    driver = make_replicas(2)
    served(driver, "a")
    step = driver.step()
    assert [plan is None for plan in step.plans] == [False, True]
    assert driver.replicas[1].stats.padding_tokens == step.bucket.tokens
    driver.step()
    served(driver, "b")
    late = driver.step()
    assert names_of(late) == [[], ["b"]]
    assert late.step_id == 2
    driver.finish()
    assert driver.tokens("a") == driver.tokens("b") == solo_tokens(fake_request("a"))


def test_without_work_there_is_no_step():
    driver = make_replicas(2)
    assert driver.plan() is None
    served(driver, "a")
    driver.paused.add("a")
    assert driver.plan() is None
    assert not replicas.is_idle(driver.replicas)


def test_mixed_steps_are_prefill_steps_for_all():
    driver = make_replicas(2, batching="mixed", max_prefill_rows=4)
    served(driver, "a")
    driver.step()
    served(driver, "b")
    step = driver.step()
    assert names_of(step) == [["a"], ["b"]]
    assert step.bucket.kind == "prefill"
    driver.finish()
    assert driver.tokens("a") == driver.tokens("b")


# ---- leaving --------------------------------------------------------------------------------


def test_an_aborted_row_s_result_is_ignored_and_its_replica_goes_on():
    driver = make_replicas(2)
    served(driver, *"abc")
    driver.plan()
    output = driver.abort("b")
    assert output is not None
    assert output.finish_reason == "abort"
    assert driver.abort("b") is None
    driver.commit()
    assert driver.tokens("b") == ()
    driver.finish()
    assert driver.tokens("a") == driver.tokens("c") == solo_tokens(fake_request("a"))
    assert [state.table.num_free for state in driver.replicas] == [99, 99]


def test_preemption_is_a_matter_of_one_replica():
    driver = make_replicas(2, num_pages=14, max_context_tokens=40)
    requests = [fake_request(name, (1, 2), max_tokens=30, seed=i) for i, name in enumerate("abcd")]
    for request in requests:
        driver.submit(request)
    driver.finish()
    assert all(state.num_preemptions for state in driver.replicas)
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)


def test_results_must_be_those_of_the_oldest_step():
    driver = make_replicas(2)
    served(driver, "a")
    first = driver.plan()
    assert first is not None
    good = StepResult(step_id=0, tokens=np.zeros(1, np.int32), finite=np.ones(1, np.bool_))
    for step_id, results in ((1, (good, None)), (0, (None, good)), (0, (good, good)), (0, (good,))):
        with pytest.raises(InvariantError, match="results are out of order"):
            replicas.commit(driver.replicas, GroupResult(step_id=step_id, results=results))


def test_prefixes_are_forgotten_everywhere_or_nowhere():
    driver = make_replicas(2, policy=CACHE)
    warm(driver, 1, PREFIX)
    driver.submit(fake_request("a", (*PREFIX, 50), max_tokens=8))
    driver.step()
    with pytest.raises(InUse):
        replicas.reset(driver.replicas)
    driver.finish()
    assert driver.outputs["a"][-1].cached_tokens == 8
    driver.replicas = replicas.reset(driver.replicas)
    driver.submit(fake_request("b", (*PREFIX, 50)))
    driver.finish()
    assert driver.outputs["b"][-1].cached_tokens == 0
