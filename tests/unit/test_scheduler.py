"""The scheduler: requests come in, steps go out, results come back, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.config import ConfigError
from serving import scheduler
from serving.page_table import CachePolicy, empty_table
from serving.plan import StepPlan, StepResult
from serving.request import InvariantError, Request, RequestError, SamplingParams
from serving.scheduler import chunk_end
from tests.fakes import (
    EOS,
    VOCAB_SIZE,
    SchedulerDriver,
    fake_geometry,
    fake_limits,
    fake_request,
    make_driver,
    solo_tokens,
)


def plan_kinds(driver: SchedulerDriver) -> list[str]:
    return [plan.bucket.kind for plan in driver.executor.plans]


def row_ids(plan: StepPlan | None) -> list[str]:
    return [] if plan is None else [row.request_id for row in plan.rows]


# ---- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "temperature",
            -0.1,
            "temperature is out of range: got -0.1; expected a finite number >= 0",
        ),
        ("temperature", math.nan, "temperature is out of range: got nan"),
        ("temperature", math.inf, "temperature is out of range: got inf"),
        ("top_p", 0.0, "top_p is out of range: got 0.0; expected 0 < top_p <= 1"),
        ("top_p", 1.01, "top_p is out of range: got 1.01"),
        ("top_p", math.nan, "top_p is out of range: got nan"),
        ("top_k", 2**31, "top_k is out of range: got 2147483648"),
        ("seed", -1, "seed is out of range: got -1; expected 0..4294967295"),
        ("seed", 2**32, "seed is out of range: got 4294967296"),
        ("max_tokens", 0, "max_tokens is out of range: got 0; expected >= 1"),
        ("max_tokens", -3, "max_tokens is out of range: got -3; expected >= 1"),
        ("min_tokens", 2, "min_tokens is out of range: got 2; expected 0..max_tokens 1"),
        ("min_p", math.nan, "min_p is out of range: got nan"),
        (
            "frequency_penalty",
            -2.5,
            "frequency_penalty is out of range: got -2.5; expected -2 to 2",
        ),
        ("repetition_penalty", 0.0, "repetition_penalty is out of range: got 0.0"),
        ("logprobs", 21, "logprobs is out of range: got 21; expected 0..20"),
        ("logit_bias", ((3, math.nan),), r"logit_bias\[3\] is out of range: got nan"),
        ("stop", ("a", ""), r"stop is out of range: got strings of \[1, 0\] characters"),
        ("stop", ("a",) * 33, "stop is out of range: got 33 strings; expected at most 32"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused_by_name(field: str, value: Any, message: str):
    with pytest.raises(RequestError, match=message) as raised:
        SamplingParams(**{"seed": 0, "max_tokens": 1, field: value})
    assert raised.value.status == "INVALID_ARGUMENT"


@pytest.mark.parametrize("top_k", [-1, 0, 1, VOCAB_SIZE, 2**31 - 1])
def test_any_top_k_of_32_bits_is_taken(top_k: int):
    assert SamplingParams(seed=0, max_tokens=1, top_k=top_k).top_k == top_k


def test_an_empty_request_id_is_refused():
    with pytest.raises(RequestError, match="request_id is empty"):
        fake_request("")


@pytest.mark.parametrize(
    ("token", "ignore_eos", "ends"),
    [(EOS, False, True), (EOS, True, False), (7, False, True), (7, True, True), (8, False, False)],
)
def test_ignore_eos_suppresses_the_models_ids_but_not_the_requests(
    token: int, ignore_eos: bool, ends: bool
):
    request = fake_request(stop_token_ids=(7,), ignore_eos=ignore_eos)
    assert request.ends_with(token) == ends


def test_limits_that_exclude_each_other_are_reported_together():
    good = fake_limits(fake_geometry())
    with pytest.raises(ConfigError) as raised:
        dataclasses.replace(
            good, max_waiting=0, max_waiting_tokens=63, buckets=(Bucket("decode", 2, 2, 1),)
        )
    assert raised.value.problems == (
        "max_waiting is out of range: got 0; expected >= 1",
        "max_waiting_tokens is out of range: got 63; expected >= 64",
        "no decode bucket is large enough: got (tokens, rows) [(2, 2)]; expected one with at least "
        "(4, 4)",
        "no prefill bucket is large enough: got (tokens, rows) []; expected one with at least "
        "(16, 2)",
    )


def test_buckets_too_narrow_for_the_longest_request_are_refused():
    limits = fake_limits(fake_geometry(page_tokens=8), max_context_tokens=64)
    with pytest.raises(ConfigError, match=r"no prefill bucket is wide enough: got 8 pages a row"):
        scheduler.initial_state(empty_table(fake_geometry(page_tokens=4), 100), limits)


# ---- admission checks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (fake_request(prompt=()), "prompt is empty: got 0 tokens; expected at least 1"),
        (fake_request(prompt=(1, 97)), r"prompt\[1\] is not in the vocabulary: got 97; .* 0..96"),
        (fake_request(prompt=(-1,)), r"prompt\[0\] is not in the vocabulary: got -1"),
        (fake_request(stop_token_ids=(3, 97)), r"stop_token_ids\[1\] is not in the vocabulary"),
        (fake_request(prompt=(1,) * 64), "prompt is too long: got 64 tokens; expected at most 63"),
        (
            fake_request(prompt=(1,) * 60, max_tokens=5),
            r"exceed the context: got 60 \+ 5 = 65; expected at most 64; lower max_tokens to 4",
        ),
    ],
)
def test_kf_v09_a_request_that_can_never_be_served_is_refused(request_: Request, message: str):
    with pytest.raises(RequestError, match=message) as raised:
        scheduler.check_request(request_, fake_limits(fake_geometry()))
    assert raised.value.status == "INVALID_ARGUMENT"


def test_kf_c16_a_request_larger_than_the_pool_is_refused_and_one_that_fills_it_finishes():
    driver = make_driver(page_tokens=4, num_state_pages=3, num_pages=1 + 3 + 4)
    assert driver.limits.max_new_tokens(10) == 7  # 16 cached tokens; the last one needs no place
    with pytest.raises(RequestError, match=r"never fits the cache: got 10 .* = 18; .* at most 17"):
        driver.submit(fake_request("big", (1,) * 10, max_tokens=8))
    exact = fake_request("a", (1,) * 10, max_tokens=7)
    driver.submit(exact)
    driver.finish()
    assert driver.tokens("a") == solo_tokens(exact)


def test_a_prompt_that_fills_the_pool_is_admitted():
    driver = make_driver(page_tokens=4, num_state_pages=3, num_pages=1 + 3 + 4)
    driver.submit(fake_request("a", (1,) * 16, max_tokens=1))
    driver.finish()
    assert driver.finish_reason("a") == "length"


@pytest.mark.parametrize(("prompt_tokens", "room"), [(1, 63), (63, 1), (64, 0), (100, 0)])
def test_kf_v09_max_new_tokens_is_the_room_in_the_context(prompt_tokens: int, room: int):
    assert fake_limits(fake_geometry()).max_new_tokens(prompt_tokens) == room


@pytest.mark.parametrize("is_running", [False, True])
def test_kf_v01_a_live_id_is_refused_while_it_waits_or_runs(is_running: bool):
    driver = make_driver()
    first = fake_request("a", (1, 2, 3), max_tokens=5)
    driver.submit(first)
    if is_running:
        driver.step()
    before = driver.state
    with pytest.raises(RequestError, match="request_id is in use: got 'a'") as raised:
        scheduler.submit(driver.state, driver.limits, fake_request("a", (9,)))
    assert raised.value.status == "ALREADY_EXISTS"
    assert driver.state is before
    driver.finish()
    assert driver.tokens("a") == solo_tokens(first)


def test_an_id_can_be_used_again_after_its_request_has_ended():
    driver = make_driver()
    driver.submit(fake_request("a"))
    driver.finish()
    second = fake_request("a", (7, 8))
    driver.submit(second)
    driver.finish()
    assert driver.tokens("a") == solo_tokens(second)


def test_kf_v07_a_full_queue_refuses_by_count_and_by_tokens_and_serves_what_it_accepted():
    driver = make_driver(max_rows=1, max_prefill_rows=1, max_waiting=2, max_waiting_tokens=64)
    driver.submit(fake_request("runs", (1,) * 40))  # finds a free row, so it is not queued
    driver.submit(fake_request("a", (1,) * 30))
    with pytest.raises(RequestError, match="got 30 waiting tokens and a prompt of 35") as raised:
        driver.submit(fake_request("big", (1,) * 35))
    assert raised.value.status == "RESOURCE_EXHAUSTED"
    driver.submit(fake_request("b"))
    with pytest.raises(RequestError, match="got 2 waiting requests; expected fewer than 2"):
        driver.submit(fake_request("c"))
    driver.finish()
    for request_id in ("runs", "a", "b"):
        assert driver.finish_reason(request_id) == "length"


def test_a_burst_at_an_idle_server_fills_its_rows_and_its_queue():
    driver = make_driver(max_rows=2, max_waiting=4)
    for index in range(6):
        driver.submit(fake_request(f"r{index}"))
    with pytest.raises(RequestError, match="the queue is full"):
        driver.submit(fake_request("r6"))


# ---- chunks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "budget", "max_budget", "expected"),
    [
        (0, 10, 16, 16, 10),  # ends the prefill, inside a page
        (0, 40, 16, 16, 16),
        (0, 40, 19, 20, 16),  # rounded down to a page
        (16, 40, 19, 20, 32),
        (32, 40, 19, 20, 40),
        (0, 40, 7, 16, 0),  # a page fits a whole step: wait for one
        (0, 5, 7, 16, 5),  # but the end of a prefill needs no page
        (0, 40, 5, 5, 5),  # a page is wider than a step: private pieces
        (5, 40, 5, 5, 8),  # up to the end of the page
        (8, 40, 5, 5, 13),
        (38, 40, 5, 5, 40),
        (5, 40, 16, 16, 8),  # from inside a page no further than its end
        (5, 7, 16, 16, 7),
        (0, 40, 0, 16, 0),
    ],
)
def test_chunks_end_on_page_boundaries(
    start: int, end: int, budget: int, max_budget: int, expected: int
):
    got = chunk_end(
        start,
        end,
        prompt_tokens=end,
        junction=0,
        budget_tokens=budget,
        max_budget_tokens=max_budget,
        page_tokens=8,
        policy=CachePolicy(unit_tokens=8, enabled=False),
    )
    assert got == expected


@pytest.mark.parametrize(
    ("start", "known", "junction", "export", "ends"),
    [
        (0, 32, 0, None, [24, 30, 32]),  # the last page boundary, the tail, the end
        (0, 33, 0, None, [32, 33]),  # the tail is a page boundary
        (0, 32, 0, 2, [32]),  # the tail's state is exported
        (0, 30, 17, None, [16, 24, 28, 30]),  # a junction, at its page
        (4, 30, 17, None, [8, 16, 24, 28, 30]),
        (0, 7, 0, None, [6, 7]),
    ],
)
def test_chunks_stop_where_a_state_is_kept(
    start: int, known: int, junction: int, export: int | None, ends: list[int]
):
    policy = CachePolicy(unit_tokens=2, export_tokens=export)
    got = [start]
    while got[-1] < known:
        got.append(
            chunk_end(
                got[-1],
                known,
                prompt_tokens=known,
                junction=junction,
                budget_tokens=100,
                max_budget_tokens=100,
                page_tokens=8,
                policy=policy,
            )
        )
    assert got[1:] == ends


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_once():
    driver = make_driver(page_tokens=4, max_prefill_tokens=10)
    request = fake_request("a", range(1, 20), max_tokens=1)
    driver.submit(request)
    driver.finish()
    rows = [plan.rows[0] for plan in driver.executor.plans]
    assert [(row.start, row.length, row.samples) for row in rows] == [
        (0, 8, False),
        (8, 8, False),
        (16, 3, True),
    ]
    assert driver.tokens("a") == solo_tokens(request)


def test_a_page_wider_than_a_step_is_filled_in_pieces():
    driver = make_driver(page_tokens=16, max_prefill_tokens=6)
    request = fake_request("a", range(1, 40), max_tokens=3)
    driver.submit(request)
    driver.finish()
    ends = [row.start + row.length for plan in driver.executor.plans[:8] for row in plan.rows]
    assert ends == [6, 12, 16, 22, 28, 32, 38, 39]
    assert driver.tokens("a") == solo_tokens(request)


def test_pages_are_handed_out_chunk_by_chunk():
    driver = make_driver(page_tokens=4, max_prefill_tokens=8, num_state_pages=2)
    driver.submit(fake_request("a", range(1, 20)))
    owned: list[int] = []
    for _ in range(3):
        driver.step()
        owned.append(len(driver.state.table.owners["a"].attention))
    assert owned == [2, 4, 5]


# ---- batching -------------------------------------------------------------------------------


def test_several_prompts_share_a_prefill_step_within_its_budget():
    driver = make_driver(max_prefill_tokens=16, max_prefill_rows=3, page_tokens=4)
    for name, length in {"a": 7, "b": 7, "c": 7}.items():
        driver.submit(fake_request(name, range(length)))
    plan = driver.plan()
    assert plan is not None
    assert row_ids(plan) == ["a", "b"]  # 2 tokens are left, too few for a page of c
    assert [row.length for row in plan.rows] == [7, 7]


def test_no_more_rows_share_a_prefill_step_than_allowed():
    driver = make_driver(max_prefill_tokens=16, max_prefill_rows=2)
    for name in "abc":
        driver.submit(fake_request(name, (1, 2)))
    assert row_ids(driver.plan()) == ["a", "b"]


def test_requests_are_admitted_first_come_first_served():
    driver = make_driver(max_rows=2, max_prefill_rows=1)
    for name in "abcd":
        driver.submit(fake_request(name, (1, 2), max_tokens=3))
    driver.finish()
    first_rows = [
        row.request_id for plan in driver.executor.plans for row in plan.rows if row.start == 0
    ]
    assert first_rows == ["a", "b", "c", "d"]


def test_a_large_request_at_the_head_is_not_overtaken():
    driver = make_driver(page_tokens=4, num_state_pages=1, num_pages=1 + 9)
    driver.submit(fake_request("a", range(8), max_tokens=1))
    driver.submit(fake_request("big", range(28), max_tokens=1))
    driver.submit(fake_request("c", (1, 2), max_tokens=1))
    assert row_ids(driver.plan()) == ["a"]
    assert row_ids(driver.plan()) == []
    driver.finish()
    assert driver.finish_reason("big") == driver.finish_reason("c") == "length"


def test_prefill_and_decode_alternate_while_both_have_work():
    driver = make_driver(page_tokens=4, max_prefill_tokens=4)
    driver.submit(fake_request("a", (1, 2), max_tokens=6))
    driver.step()
    driver.submit(fake_request("b", range(16), max_tokens=2))
    driver.finish(lookahead=0)
    assert plan_kinds(driver) == ["prefill", "decode"] * 5


def test_a_running_request_keeps_its_slot_and_slots_are_reused():
    driver = make_driver(max_rows=2)
    driver.submit(fake_request("a", (1, 2), max_tokens=8))
    driver.submit(fake_request("b", (3, 4), max_tokens=2))
    driver.submit(fake_request("c", (5, 6), max_tokens=2))
    driver.finish()
    slots: dict[str, set[int]] = {}
    for plan in driver.executor.plans:
        for row in plan.rows:
            slots.setdefault(row.request_id, set()).add(row.slot)
    assert slots == {"a": {0}, "b": {1}, "c": {1}}


def test_eight_requests_give_the_tokens_of_their_solo_runs():
    driver = make_driver(max_rows=4, max_prefill_rows=2)
    requests = [
        fake_request(name, range(3 + i), max_tokens=9, seed=i) for i, name in enumerate("abcdefgh")
    ]
    for request in requests:
        driver.submit(request)
    driver.finish()
    assert {r.request_id: driver.tokens(r.request_id) for r in requests} == {
        r.request_id: solo_tokens(r) for r in requests
    }


def test_the_smallest_bucket_that_holds_the_step_is_used():
    driver = make_driver(max_rows=4, page_tokens=4, max_context_tokens=64)
    driver.submit(fake_request("a", (1, 2), max_tokens=2))
    driver.step()
    plan = driver.plan()
    assert plan is not None
    assert plan.bucket == min(b for b in driver.limits.buckets if b.kind == "decode")


# ---- one step ahead -------------------------------------------------------------------------


def test_a_decode_may_be_planned_before_the_token_it_reads_is_known():
    driver = make_driver()
    request = fake_request("a", (1, 2, 3), max_tokens=4)
    driver.submit(request)
    plans = [driver.plan() for _ in range(4)]
    rows = [plan.rows[0] for plan in plans if plan is not None]
    assert [(row.start, row.tokens) for row in rows] == [
        (0, (1, 2, 3)),
        (3, None),
        (4, None),
        (5, None),
    ]
    for _ in range(4):
        driver.commit()
    assert driver.tokens("a") == solo_tokens(request)


def test_tokens_in_flight_count_towards_max_tokens():
    driver = make_driver()
    driver.submit(fake_request("a", (1, 2, 3), max_tokens=2))
    assert driver.plan() is not None
    assert driver.plan() is not None
    assert driver.plan() is None
    driver.commit()
    assert driver.plan() is None
    driver.commit()
    assert driver.finish_reason("a") == "length"


def test_the_surplus_token_after_a_stop_is_dropped():
    driver = make_driver(scripted={("a", 4): EOS})
    driver.submit(fake_request("a", (1, 2, 3), max_tokens=9))
    for _ in range(3):
        driver.plan()
    for _ in range(3):
        driver.commit()
    last = driver.outputs["a"][-1]
    assert driver.finish_reason("a") == "stop"
    assert driver.tokens("a")[-1] == EOS
    assert len(driver.tokens("a")) == 2
    assert last.matched_token_id == EOS
    assert (last.prompt_tokens, last.completion_tokens) == (3, 2)
    assert driver.state.table.num_free == driver.state.table.num_usable


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    driver = make_driver(scripted={("a", 4): EOS})
    driver.submit(fake_request("a", (1, 2, 3), max_tokens=2))
    driver.finish()
    assert driver.finish_reason("a") == "stop"


def test_eos_goes_on_when_it_is_ignored():
    driver = make_driver(scripted={("a", 4): EOS})
    driver.submit(fake_request("a", (1, 2, 3), max_tokens=3, ignore_eos=True))
    driver.finish()
    assert driver.finish_reason("a") == "length"
    assert len(driver.tokens("a")) == 3


def test_outputs_carry_increments_and_totals():
    driver = make_driver()
    driver.submit(fake_request("a", (1, 2, 3), max_tokens=3))
    driver.finish()
    outputs = driver.outputs["a"]
    assert [len(output.token_ids) for output in outputs] == [1, 1, 1]
    assert [output.completion_tokens for output in outputs] == [1, 2, 3]
    assert {output.prompt_tokens for output in outputs} == {3}


def test_a_result_out_of_order_or_of_another_size_stops_the_engine():
    driver = make_driver()
    driver.submit(fake_request("a"))
    driver.plan()
    tokens, finite = np.zeros(1, np.int32), np.ones(1, np.bool_)
    with pytest.raises(InvariantError, match=r"out of order: got step 7; .* \[0\]"):
        scheduler.commit(driver.state, StepResult(step_id=7, tokens=tokens, finite=finite))
    with pytest.raises(InvariantError, match="got 2 tokens and 1 flags; expected 1"):
        scheduler.commit(
            driver.state, StepResult(step_id=0, tokens=np.zeros(2, np.int32), finite=finite)
        )


# ---- leaving --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_aborted_request_releases_everything_in_every_phase(num_steps: int):
    driver = make_driver(page_tokens=4, max_prefill_tokens=8)
    driver.submit(fake_request("a", range(14), max_tokens=9))
    for _ in range(num_steps):
        driver.plan()  # left in flight
    driver.abort("a")
    assert driver.finish_reason("a") == "abort"
    assert driver.state.table.num_free == driver.state.table.num_usable
    driver.finish()
    assert driver.tokens("a") == ()


def test_kf_c14_waiting_requests_that_leave_release_all_that_was_reserved_for_them():
    """The pages are those of a server on which they never were."""
    tables = []
    running = fake_request("runs", (*range(12), 50), max_tokens=9)
    for num_waiting in (0, 50):
        driver = make_driver(max_rows=1, max_prefill_rows=1, policy=CachePolicy(unit_tokens=2))
        driver.submit(fake_request("first", range(12)))
        driver.finish()
        driver.submit(running)
        driver.step()
        for index in range(num_waiting):
            driver.submit(fake_request(f"r{index}", (*range(12), index)))
        driver.step()
        for index in range(num_waiting):
            error = RequestError("CANCELLED", "gone") if index % 2 else None
            driver.abort(f"r{index}", error=error)
        tables.append(driver.state.table)
        driver.finish()
        assert driver.tokens("runs") == solo_tokens(running)
    without, with_waiting = tables
    assert without.refs == with_waiting.refs
    assert without.num_free == with_waiting.num_free


def test_abort_is_idempotent_and_ignores_unknown_ids():
    driver = make_driver()
    driver.submit(fake_request("a"))
    driver.abort("a")
    before = driver.state
    assert scheduler.abort(driver.state, "a") == (before, None)
    assert scheduler.abort(driver.state, "nobody") == (before, None)


def test_an_abort_with_an_error_carries_it():
    driver = make_driver()
    driver.submit(fake_request("a"))
    error = RequestError("DEADLINE_EXCEEDED", "too late")
    driver.abort("a", error=error)
    assert driver.finish_reason("a") == "error"
    assert driver.outputs["a"][-1].error is error


def test_kf_s04_a_result_in_flight_does_not_reach_a_new_request_of_the_same_id():
    driver = make_driver()
    driver.submit(fake_request("a", (1, 2, 3)))
    driver.plan()
    driver.abort("a")
    second = fake_request("a", (50, 60), max_tokens=3)
    driver.submit(second)
    driver.plan()
    assert driver.commit() == ()
    driver.finish()
    assert driver.tokens("a") == solo_tokens(second)


def test_a_step_whose_rows_are_all_gone_still_has_to_be_committed():
    driver = make_driver()
    driver.submit(fake_request("a"))
    driver.plan()
    driver.abort("a")
    assert not scheduler.is_idle(driver.state)
    assert driver.commit() == ()
    assert scheduler.is_idle(driver.state)


def test_kf_k09_logits_that_are_not_finite_end_only_their_request():
    driver = make_driver(not_finite={("a", 4)})
    other = fake_request("b", (4, 5, 6), max_tokens=6)
    driver.submit(fake_request("a", (1, 2, 3), max_tokens=6))
    driver.submit(other)
    driver.finish()
    last = driver.outputs["a"][-1]
    assert driver.finish_reason("a") == "error"
    assert last.token_ids == ()
    assert last.completion_tokens == 1
    assert last.error is not None
    assert last.error.status == "INTERNAL"
    assert "not finite at position 4" in last.error.message
    assert driver.tokens("b") == solo_tokens(other)
    assert driver.state.table.num_free == driver.state.table.num_usable


# ---- out of pages ---------------------------------------------------------------------------


def tight_driver(**options: int) -> SchedulerDriver:
    """Two requests of 4 prompt tokens fit, but not both of their outputs."""
    return make_driver(page_tokens=4, num_state_pages=1, num_pages=1 + 5, **options)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_kf_c15_the_youngest_request_is_preempted_and_ends_with_the_same_tokens(lookahead: int):
    driver = tight_driver()
    requests = [fake_request(name, (1, 2, 3), max_tokens=8, seed=i) for i, name in enumerate("ab")]
    for request in requests:
        driver.submit(request)
    driver.finish(lookahead=lookahead)
    assert driver.state.num_preemptions == 1
    assert {row.request_id for row in driver.executor.plans[-1].rows} == {"b"}
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)


def test_kf_c15_eight_requests_with_states_for_two_all_end():
    driver = make_driver(page_tokens=4, num_state_pages=2, num_pages=1 + 2 * 2 + 5, max_rows=8)
    requests = [fake_request(f"r{i}", range(3 + i % 3), max_tokens=7, seed=i) for i in range(8)]
    for request in requests:
        driver.submit(request)
    driver.finish()
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)


def test_a_preempted_request_is_prefilled_again_with_what_it_generated():
    driver = tight_driver()
    for name in "ab":
        driver.submit(fake_request(name, (1, 2, 3), max_tokens=8))
    driver.finish(lookahead=0)
    again = [
        row
        for plan in driver.executor.plans
        for row in plan.rows
        if row.request_id == "b" and row.start == 0
    ]
    assert [row.length for row in again] == [3, 5]
    assert again[1].tokens == (1, 2, 3, *driver.tokens("b")[:2])


def test_a_preempted_request_goes_before_those_that_wait():
    driver = tight_driver()
    for name in "abc":
        driver.submit(fake_request(name, (1, 2, 3), max_tokens=8))
    while not driver.state.num_preemptions:
        driver.step()
    assert [entry.request.request_id for entry in driver.state.waiting] == ["b", "c"]


def test_the_youngest_request_waits_for_a_page_that_an_older_one_has():
    driver = make_driver(page_tokens=4, num_state_pages=1, num_pages=1 + 5, max_prefill_rows=1)
    requests = [fake_request(name, (1, 2, 3, 4), max_tokens=5) for name in "ab"]
    for request in requests:
        driver.submit(request)
    driver.finish()
    assert driver.state.num_preemptions == 0
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)


def test_a_request_is_not_admitted_into_pages_that_running_ones_need_next():
    driver = make_driver(page_tokens=4, num_state_pages=1, num_pages=1 + 6, max_prefill_tokens=4)
    driver.submit(fake_request("a", range(12), max_tokens=1))  # 4 pages in the end, 2 at first
    driver.submit(fake_request("b", range(6), max_tokens=1))  # 3 pages
    assert row_ids(driver.step()) == ["a"]
    assert driver.state.table.num_free == 4
    assert row_ids(driver.step()) == ["a"]
    driver.finish()
    assert driver.state.num_preemptions == 0


def test_planning_does_not_change_the_state_it_was_given():
    driver = tight_driver()
    for name in "ab":
        driver.submit(fake_request(name, (1, 2, 3), max_tokens=8))
    before = driver.state
    first = scheduler.plan(before, driver.limits)
    second = scheduler.plan(before, driver.limits)
    assert first == second
    assert before.in_flight == ()
    assert not before.table.owners


# ---- slow clients ---------------------------------------------------------------------------


def test_a_paused_request_keeps_its_pages_and_others_go_on():
    driver = make_driver()
    requests = [fake_request(name, (1, 2, 3), max_tokens=6) for name in "ab"]
    for request in requests:
        driver.submit(request)
    driver.step()
    driver.paused.add("a")
    owned = driver.state.table.owners["a"]
    while driver.step() is not None:
        pass
    assert driver.finish_reason("b") == "length"
    assert len(driver.outputs["a"]) == 1
    assert driver.state.table.owners["a"] == owned
    driver.paused.clear()
    driver.finish()
    assert driver.tokens("a") == solo_tokens(requests[0])


def test_a_paused_request_gives_its_pages_to_a_running_one_that_needs_them():
    driver = tight_driver()
    requests = [fake_request(name, (1, 2, 3), max_tokens=8) for name in "ab"]
    for request in requests:
        driver.submit(request)
    driver.step()
    driver.paused.add("a")
    while driver.step() is not None:
        pass
    assert driver.finish_reason("b") == "length"
    driver.paused.clear()
    driver.finish()
    for request in requests:
        assert driver.tokens(request.request_id) == solo_tokens(request)


@pytest.mark.parametrize("sizes", [{"num_pages": 1 + 5}, {"num_pages": 50, "max_rows": 2}])
def test_requests_that_only_paused_ones_hold_up_are_served(sizes: dict[str, int]):
    driver = make_driver(page_tokens=4, num_state_pages=1, **sizes)
    for name in "ab":
        driver.submit(fake_request(name, (1, 2, 3), max_tokens=8))
    driver.step()
    driver.paused |= {"a", "b"}
    driver.submit(fake_request("c", (1, 2, 3), max_tokens=2))
    while driver.step() is not None:
        pass
    assert driver.finish_reason("c") == "length"


def test_what_could_be_reused_does_not_keep_a_request_behind_a_paused_one():
    driver = make_driver(
        page_tokens=4,
        num_state_pages=1,
        num_pages=8,
        policy=CachePolicy(unit_tokens=2, keep_answer_end=True),
    )
    prompt = tuple(range(1, 12))
    driver.submit(fake_request("first", prompt, max_tokens=1))
    driver.finish()
    driver.submit(fake_request("slow", (50, 51), max_tokens=9))
    driver.step()
    driver.paused = {"slow"}
    # A hit inside a page needs a copy of it and a state beside what is shared: 2 pages too many.
    request = fake_request("next", (*prompt, 20, 21), max_tokens=4)
    driver.submit(request)
    for _ in range(12):
        driver.step()
    assert driver.tokens("next") == solo_tokens(request)


def test_a_paused_request_in_the_queue_is_passed_over():
    driver = make_driver()
    driver.submit(fake_request("a"))
    driver.submit(fake_request("b"))
    driver.paused.add("a")
    assert row_ids(driver.plan()) == ["b"]


# ---- invariants -----------------------------------------------------------------------------


def test_check_state_names_what_is_broken():
    driver = make_driver()
    driver.submit(fake_request("a"))
    driver.plan()
    state = driver.state
    limits = dataclasses.replace(driver.limits)
    waiting = scheduler.submit(scheduler.initial_state(state.table, limits), limits, fake_request())
    broken = {
        "waits and runs": dataclasses.replace(state, waiting=waiting.waiting),
        "requests with pages and running requests differ": dataclasses.replace(state, running={}),
        "starts at 0; expected 1": dataclasses.replace(
            state, running={"a": state.running["a"]._replace(computed=1)}
        ),
        "slots are shared or out of range": dataclasses.replace(
            state, running={"a": state.running["a"]._replace(slot=9)}
        ),
    }
    for message, value in broken.items():
        with pytest.raises(InvariantError, match=message):
            scheduler.check_state(value, limits)
