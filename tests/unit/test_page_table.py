"""The page table as a value: who owns what, what is cleared and copied, what can be reused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from immutables import Map

from k3jax.config import ConfigError
from serving import page_table
from serving.page_table import (
    MISS,
    Allocation,
    CachePolicy,
    Chunk,
    Clear,
    Copy,
    Effect,
    InUse,
    Move,
    OutOfPages,
    PageTable,
    unit_keys,
)
from serving.page_table.edit import MAX_COPIES
from serving.page_table.states import Column, Columns
from serving.request import InvariantError
from tests.fakes import fake_geometry

A = tuple(range(100, 140))  # tokens of a prompt


@pytest.fixture
def table() -> PageTable:
    """Pages 1 to 9 of 4 tokens each; a state takes two pages; nothing is reused."""
    return page_table.empty_table(fake_geometry(page_tokens=4, num_state_pages=2), 10)


@pytest.fixture
def cache() -> PageTable:
    """Pages 1 to 29 of 6 tokens each, keys of 2 tokens; a state takes two pages."""
    geometry = fake_geometry(page_tokens=6, num_state_pages=2)
    return page_table.empty_table(geometry, 30, CachePolicy(unit_tokens=2))


def chunk(start: int, end: int, *, step: int = 0, processed: int | None = None) -> Chunk:
    """A chunk without keys."""
    processed = start if processed is None else processed
    return Chunk(step, start, end, end, processed, end, ())


def admit(table: PageTable, name: str, end: int) -> tuple[PageTable, tuple[Effect, ...]]:
    return page_table.admit(table, name, MISS, chunk(0, end), prompt_tokens=end)


class Run:
    """One request, chunk by chunk, each a step that is committed at once unless said otherwise."""

    def __init__(self, cache: PageTable, name: str, tokens: Sequence[int]):
        self.table, self.name, self.tokens = cache, name, tuple(tokens)
        self.keys = unit_keys(self.tokens, cache.policy.unit_tokens)
        self.hit = page_table.lookup(cache, self.keys, len(self.tokens) - 1)
        self.computed = self.hit.tokens

    def step(self, end: int, *, commit: bool = True) -> tuple[Effect, ...]:
        step_id = self.table.committed + 1
        known = len(self.tokens)
        part = Chunk(step_id, self.computed, end, known, self.computed, known, self.keys)
        if self.name in self.table.owners:
            self.table, effects = page_table.extend(self.table, self.name, part)
        else:
            self.table, effects = page_table.admit(
                self.table, self.name, self.hit, part, prompt_tokens=known
            )
        self.table = page_table.settle(self.table)
        page_table.check(self.table)
        if commit:
            self.table = page_table.commit_step(self.table, step_id)
        self.computed = end
        return effects

    def end(self) -> PageTable:
        table = page_table.release(self.table, self.name, computed=self.computed, keys=self.keys)
        page_table.check(table)
        return table


def hit_of(table: PageTable, tokens: Sequence[int]) -> int:
    keys = unit_keys(tuple(tokens), table.policy.unit_tokens)
    return page_table.lookup(table, keys, len(tokens) - 1).tokens


# ---- pages and owners -----------------------------------------------------------------------


def test_an_empty_table_has_every_page_free_but_the_null_page(table: PageTable):
    assert table.num_free == table.num_usable == 9
    page_table.check(table)


def test_a_pool_too_small_for_one_request_is_refused():
    geometry = fake_geometry(num_state_pages=2)
    assert page_table.empty_table(geometry, 4).num_free == 3
    with pytest.raises(ConfigError, match="num_pages is too small: got 3; expected >= 4"):
        page_table.empty_table(geometry, 3)


@pytest.mark.parametrize(("num_tokens", "num_attention"), [(1, 1), (4, 1), (5, 2), (28, 7)])
def test_admit_hands_out_a_state_and_enough_attention_pages(
    table: PageTable, num_tokens: int, num_attention: int
):
    table, effects = admit(table, "a", num_tokens)
    owned = table.owners["a"]
    assert page_table.held(table, "a") == (num_attention, 1, 1)
    assert table.num_free == 9 - 2 - num_attention
    page_table.check(table)
    state = owned.running_state
    assert effects == (Clear(owned.attention), Move(state, state))


def test_a_page_is_cleared_again_for_its_next_owner(table: PageTable):
    first, effects = admit(table, "a", 28)
    _, again = admit(page_table.release(first, "a"), "b", 28)
    assert again == effects


def test_extend_appends_attention_pages_and_moves_the_state_along(table: PageTable):
    table, _ = admit(table, "a", 4)
    before = table.owners["a"]
    table, effects = page_table.extend(table, "a", chunk(4, 9))
    after = table.owners["a"]
    assert after.attention[:1] == before.attention
    assert len(after.attention) == 3
    # Nothing is reused, so the state stays where it is.
    assert after.running_state == before.running_state
    state = before.running_state
    assert effects == (Clear(after.attention[1:]), Move(state, state))


def test_a_state_gets_a_bundle_of_its_own_in_each_page(cache: PageTable):
    run = Run(cache, "a", A[:20])
    run.step(6)
    old = run.table.owners["a"].running_state
    *_, move = run.step(12)
    new = run.table.owners["a"].running_state
    assert move == Move(old, new)
    assert page_table.held(run.table, "a") == (2, 2, 2)
    run.step(18)
    assert page_table.held(run.table, "a") == (3, 2, 2)  # the first one is given up


def test_out_of_pages_leaves_the_table_as_it_was(table: PageTable):
    table, _ = admit(table, "a", 20)
    snapshot = table._replace()
    with pytest.raises(OutOfPages, match="too few free pages: got 2; expected 3"):
        admit(table, "b", 1)
    with pytest.raises(OutOfPages, match="too few free pages: got 2; expected 3"):
        page_table.extend(table, "a", chunk(20, 29))
    assert table == snapshot
    page_table.check(table)


def test_admission_keeps_room_for_the_whole_request_and_a_reserve(table: PageTable):
    with pytest.raises(OutOfPages, match="got 9; expected 10"):
        page_table.admit(table, "a", MISS, chunk(0, 4), prompt_tokens=30, room_for=30)
    with pytest.raises(OutOfPages, match="got 9; expected 10"):
        page_table.admit(table, "a", MISS, chunk(0, 4), prompt_tokens=28, room_for=28, num_spare=1)
    table, _ = page_table.admit(table, "a", MISS, chunk(0, 4), prompt_tokens=28, room_for=28)
    assert page_table.held(table, "a") == (1, 1, 1)  # but takes only what it needs now


def test_release_gives_all_pages_back_and_is_idempotent(table: PageTable):
    full, _ = admit(table, "a", 9)
    full, _ = admit(full, "b", 4)
    released = page_table.release(full, "a")
    assert set(released.owners) == {"b"}
    assert released.num_free == 9 - 3
    assert page_table.release(released, "a") is released
    assert page_table.release(released, "b") == table


def test_older_values_stay_valid(table: PageTable):
    full, _ = admit(table, "a", 9)
    page_table.extend(full, "a", chunk(9, 28))
    page_table.release(full, "a")
    assert len(full.owners["a"].attention) == 3
    assert not table.owners


def test_admitting_twice_or_extending_a_stranger_is_a_bug(table: PageTable):
    table, _ = admit(table, "a", 1)
    with pytest.raises(InvariantError, match="'a' was admitted twice"):
        admit(table, "a", 1)
    with pytest.raises(InvariantError, match="'b' has no pages"):
        page_table.extend(table, "b", chunk(0, 1))


def test_a_model_without_recurrent_layers_takes_attention_pages_only():
    table = page_table.empty_table(fake_geometry(page_tokens=4, num_state_pages=0), 4)
    table, effects = admit(table, "a", 9)
    assert page_table.held(table, "a") == (3,)
    assert effects == (Clear((1, 2, 3)),)


def _owner(attention: tuple[int, ...], state: tuple[int, ...]) -> Allocation:
    columns = Columns((Column(0, state, 1),), 1, 0) if state else Columns()
    return Allocation(attention, columns, 1, 0, 0)


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        (_owner((3,), (4, 5)), r"pages \[3, 4, 5\] are more than one of free, idle, referenced"),
        (_owner((1,), (2, 1)), r"pages \[1, 2\] are counted with other references"),
        (_owner((0,), ()), r"pages \[0\] are not usable"),
        (_owner((10,), ()), r"pages \[10\] are not usable"),
    ],
)
def test_check_names_pages_that_are_owned_wrongly(
    table: PageTable, owned: Allocation, message: str
):
    with pytest.raises(InvariantError, match=message):
        page_table.check(table._replace(owners=Map({"a": owned})))


def test_check_names_pages_that_are_lost_or_invented(table: PageTable):
    for bits, message in [
        (table.free_bits ^ (1 << 7), r"pages \[7\] are neither free, idle nor referenced"),
        (table.free_bits | 1, r"pages \[0\] are not usable"),
        (table.free_bits | 1 << 10, "beyond the pool of 10"),
    ]:
        with pytest.raises(InvariantError, match=message):
            page_table.check(table._replace(free_bits=bits))


def test_check_names_a_state_that_is_reusable_at_another_length(cache: PageTable):
    run = Run(cache, "a", A[:13])
    run.step(12)
    page_table.check(run.table)
    owned = run.table.owners["a"]
    moved = owned._replace(
        states=owned.states._replace(
            columns=tuple(column._replace(tokens=13) for column in owned.states.columns)
        )
    )
    with pytest.raises(InvariantError, match="holds 13 tokens; expected 12"):
        page_table.check(run.table._replace(owners=Map({"a": moved})))


# ---- policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unit_tokens": 4}, "unit_tokens does not divide the page: got 4; expected a divisor of "),
        ({"unit_tokens": 0}, "unit_tokens is out of range: got 0; expected >= 1"),
        (
            {"unit_tokens": 2, "retention_tokens": 8},
            "retention_tokens does not fit the page: got 8; expected 0 or a multiple of "
            "page_tokens = 6",
        ),
        ({"unit_tokens": 2, "export_tokens": 0}, "export_tokens is out of range: got 0"),
    ],
)
def test_kf_c18_a_policy_that_does_not_fit_the_page_is_refused(fields: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        page_table.empty_table(fake_geometry(page_tokens=6), 30, CachePolicy(**fields))


def test_units_below_the_page_need_recurrent_layers():
    geometry = fake_geometry(page_tokens=6, num_state_pages=0)
    with pytest.raises(ConfigError, match="unit_tokens needs recurrent layers"):
        page_table.empty_table(geometry, 30, CachePolicy(unit_tokens=2))


# ---- reuse ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "reused"), [(2, 8), (6, 6)])
def test_the_worked_example(unit: int, reused: int):
    """Page 6: of `a b c d e f g h`, a request with two more tokens reuses 8 with units of 2, and 6
    with whole pages."""
    geometry = fake_geometry(page_tokens=6, num_state_pages=2)
    policy = CachePolicy(unit_tokens=unit, keep_answer_end=True)
    run = Run(page_table.empty_table(geometry, 30, policy), "a", b"abcdefgh")
    run.step(6)
    run.step(8)
    again = Run(run.end(), "b", b"abcdefghxy")
    assert again.hit.tokens == reused
    assert hit_of(again.table, b"abcdefgh") == 6  # a resend computes its last token


@pytest.mark.parametrize(("unit", "reused"), [(128, 4992), (6144, 0)])
def test_a_system_prompt_shorter_than_a_page(unit: int, reused: int):
    """5,000 tokens of system prompt on pages of 6,144 tokens: a miss without partial hits."""
    geometry = fake_geometry(page_tokens=6144, num_state_pages=3)
    cache = page_table.empty_table(geometry, 40, CachePolicy(unit_tokens=unit))
    system = tuple(range(5000))
    run = Run(cache, "a", system)
    for end in (4992, 5000) if unit == 128 else (5000,):
        run.step(end)
    assert hit_of(run.end(), (*system, *range(60_000, 60_300))) == reused


def test_kf_c09_nothing_is_reused_before_its_step_is_committed(cache: PageTable):
    run = Run(cache, "a", A[:13])
    run.step(12, commit=False)
    found = page_table.lookup(run.table, run.keys, 12)
    assert (found.tokens, found.is_ready) == (12, False)
    assert list(page_table.entries(run.table)) == []
    run.table = page_table.commit_step(run.table, 0)
    assert page_table.lookup(run.table, run.keys, 12).is_ready
    assert sorted(t for _, _, _, t in page_table.entries(run.table)) == [6, 12, 12, 12]


def test_kf_c09_what_was_not_computed_vanishes_with_its_request(cache: PageTable):
    run = Run(cache, "a", A[:13])
    run.step(6)
    run.step(12, commit=False)
    table = page_table.commit_step(page_table.release(run.table, "a", computed=6), 1)
    page_table.check(table)
    assert sorted(t for _, _, _, t in page_table.entries(table)) == [6]
    assert hit_of(table, A[:13]) == 0


def test_kf_c11_the_last_whole_unit_is_reused_and_not_the_final_state(cache: PageTable):
    run = Run(cache, "a", A[:13])
    for end in (12, 13):
        run.step(end)
    table = run.end()
    assert hit_of(table, A[:13]) == 12
    assert hit_of(table, A[:12]) == 0  # the state at 12 is one token too far


def test_a_hit_inside_a_page_copies_the_valid_slots_and_reads_the_state_in_place(
    cache: PageTable,
):
    first = Run(cache, "a", A[:11])
    for end in (6, 10, 11):
        first.step(end)
    table = first.end()
    run = Run(table, "b", (*A[:10], 1, 2, 3))
    assert run.hit.tokens == 10
    shared, state = run.hit.attention[1], run.hit.state
    cleared, copied, moved = run.step(12)
    private = run.table.owners["b"].attention[1]
    assert private != shared
    assert cleared == Clear((private,))
    assert copied == Copy(shared, private, 4)
    assert isinstance(moved, Move)
    assert moved.source == state
    assert not {*moved.target} & {*state}
    # The source is whole for the next one, also while b goes on.
    assert hit_of(run.table, (*A[:10], 9, 9, 9)) == 10


def test_kf_c08_a_producer_parts_from_the_state_that_it_published(cache: PageTable):
    run = Run(cache, "a", A[:11])
    run.step(6)
    run.step(10)
    kept = run.table.owners["a"].running_state
    *_, move = run.step(11)
    assert move == Move(kept, run.table.owners["a"].running_state)
    assert run.table.owners["a"].running_state != kept
    keys = unit_keys(A[:11], 2)
    assert page_table.lookup(run.table, keys, 10).state == kept


def test_a_full_page_keeps_the_key_of_the_tail_in_it(cache: PageTable):
    """Promotion: both keys point to one page, whose bytes only grow."""
    run = Run(cache, "a", A[:11])
    for end in (6, 10, 11):
        run.step(end)
    run.tokens, run.keys = A[:18], unit_keys(A[:18], 2)
    run.step(18)
    keys = {t for group, _, _, t in page_table.entries(run.table) if group == 0}
    assert keys == {6, 10, 12, 18}


def test_the_second_request_leaves_a_state_at_the_junction_and_the_third_uses_it(
    cache: PageTable,
):
    first = Run(cache, "a", (*A[:14], *range(10)))
    for end in (18, 22, 24):
        first.step(end)
    second = Run(first.end(), "b", (*A[:14], *range(50, 60)))
    assert (second.hit.tokens, second.hit.junction) == (0, 12)
    second.step(12)
    assert hit_of(second.table, (*A[:14], 7, 7)) == 12
    found = page_table.lookup(second.table, unit_keys(A[:14], 2), 13)
    assert found.is_junction


def test_kf_c05_shared_prefix_that_ends_inside_a_page_is_reused_from_the_third_request_on():
    """To within a unit, though no page is full."""
    geometry = fake_geometry(page_tokens=24, num_state_pages=2)
    policy = CachePolicy(unit_tokens=2, key_every_unit=True, checkpoint_junctions=True)
    first = Run(page_table.empty_table(geometry, 30, policy), "a", (*A[:11], 1, 2, 3))
    for end in (12, 14):
        first.step(end)
    second = Run(first.end(), "b", (*A[:11], 4, 5, 6))
    assert (second.hit.tokens, second.hit.junction) == (0, 10)
    for end in (10, 12, 14):
        second.step(end)
    assert hit_of(second.end(), (*A[:11], 7, 8, 9)) == 10


def test_idle_pages_are_reused_oldest_first_and_lose_their_keys(cache: PageTable):
    table = cache
    for name, start in (("a", 0), ("b", 100)):
        run = Run(table, name, range(start, start + 13))
        for end in (12, 13):
            run.step(end)
        table = run.end()
    assert table.num_free == 29
    big, _ = admit(table, "big", 6 * 23)  # 25 pages, of which 21 are free without keys
    page_table.check(big)
    assert big.num_evicted > 0
    assert hit_of(big, range(13)) == 0
    assert hit_of(big, range(100, 113)) == 12


def test_kf_c04_reuse_ends_at_the_deepest_state_that_is_left():
    geometry = fake_geometry(page_tokens=6, num_state_pages=2)
    policy = CachePolicy(unit_tokens=2, retention_tokens=None)
    run = Run(page_table.empty_table(geometry, 30, policy), "a", A[:19])
    for end in (6, 12, 18, 19):
        run.step(end)
    table, hits = run.end(), []
    while hit := page_table.lookup(table, run.keys, 18).tokens:
        hits.append(hit)
        # Of both recurrent groups, one loses its state; the attention pages stay.
        table = page_table.evict(table, page_table.lookup(table, run.keys, 18).state[1:])
        page_table.check(table)
    assert hits == [18, 12, 6]
    assert {t for group, _, _, t in page_table.entries(table) if group == 0} == {6, 12, 18}


def test_evict_and_reset_forget_entries(cache: PageTable):
    run = Run(cache, "a", A[:13])
    run.step(12)
    with pytest.raises(InUse, match="the cache is in use: got 4 referenced pages"):
        page_table.reset(run.table)
    gone = page_table.evict(run.table, run.table.owners["a"].attention[:1])
    page_table.check(gone)
    assert hit_of(gone, A[:13]) == 0
    assert hit_of(page_table.reset(run.end()), A[:13]) == 0


def test_a_prefix_that_many_continue_is_kept_a_few_times_only(cache: PageTable):
    geometry = fake_geometry(page_tokens=6, num_state_pages=1)
    policy = CachePolicy(unit_tokens=2, key_every_unit=True)
    table = page_table.empty_table(geometry, 200, policy)
    for last in range(30):
        run = Run(table, f"r{last}", (*A[:5], 200 + last))
        for end in (4, 6)[run.computed // 4 :]:
            run.step(end)
        table = run.end()
    assert max(len(found) for found in table.attention.values()) == MAX_COPIES
    assert hit_of(table, (*A[:5], 7)) == 4


def test_a_salt_hides_a_prefix(cache: PageTable):
    run = Run(cache, "a", A[:13])
    run.step(12)
    keys = unit_keys(A[:13], 2, salt="tenant")
    assert page_table.lookup(run.table, keys, 12).tokens == 0


def test_the_last_state_of_an_answer_is_kept_for_the_next_turn():
    geometry = fake_geometry(page_tokens=6, num_state_pages=2)
    policy = CachePolicy(unit_tokens=2, keep_answer_end=True)
    table = page_table.empty_table(geometry, 30, policy)
    prompt, answer = A[:5], A[5:16]
    run = Run(table, "a", prompt)
    for end in (4, 5):
        run.step(end)
    run.tokens, run.keys = A[:16], unit_keys(A[:16], 2)
    for end in range(6, 16):  # one token a step
        step_id = run.table.committed + 1
        part = Chunk(step_id, end - 1, end, len(prompt), end - 1, 16, run.keys)
        run.table, _ = page_table.extend(run.table, "a", part)
        run.table = page_table.commit_step(page_table.settle(run.table), step_id)
        page_table.check(run.table)
    run.computed = 15
    assert page_table.held(run.table, "a") == (3, 2, 2)
    table = run.end()
    assert hit_of(table, (*prompt, *answer, 1, 2, 3)) == 14
    assert table.num_free == 29
    assert hit_of(page_table.release(run.table, "a", computed=13, keys=run.keys), A[:16]) == 4


def test_the_state_of_a_request_at_rest_is_kept_if_it_is_at_a_unit_boundary():
    geometry = fake_geometry(page_tokens=6, num_state_pages=2)
    policy = CachePolicy(unit_tokens=2, keep_answer_end=True)
    run = Run(page_table.empty_table(geometry, 30, policy), "a", A[:14])
    run.step(6)
    run.step(8)
    ends = {
        at_rest: page_table.release(run.table, "a", computed=8, keys=run.keys, is_at_rest=at_rest)
        for at_rest in (False, True)
    }
    assert hit_of(ends[False], A[:14]) == 0
    assert hit_of(ends[True], A[:14]) == 8
    page_table.check(ends[True])


def test_logits_that_were_not_finite_leave_nothing_behind(cache: PageTable):
    run = Run(cache, "a", A[:11])
    for end in (6, 10, 11):  # the states at 6 and 10 are no longer the request's own
        run.step(end)
    assert page_table.held(run.table, "a") == (2, 1, 1)
    table = page_table.release(run.table, "a", computed=11, keys=run.keys, is_tainted=True)
    page_table.check(table)
    assert list(page_table.entries(table)) == []


def test_what_a_request_with_bad_logits_started_from_is_not_reused_either(cache: PageTable):
    first = Run(cache, "a", A[:11])
    for end in (6, 10, 11):
        first.step(end)
    run = Run(first.end(), "b", (*A[:10], 1, 2, 3))
    run.step(12)
    run.step(13)
    table = page_table.release(run.table, "b", computed=13, keys=run.keys, is_tainted=True)
    page_table.check(table)
    assert hit_of(table, A[:11]) == 0


def test_a_state_may_be_overwritten_in_place_when_no_page_is_left():
    geometry = fake_geometry(page_tokens=6, num_state_pages=2)
    table = page_table.empty_table(geometry, 6, CachePolicy(unit_tokens=2))  # three pages, a state
    run = Run(table, "a", A[:14])
    run.step(12)
    part = Chunk(1, 12, 14, 14, 12, 14, run.keys)
    with pytest.raises(OutOfPages):
        page_table.extend(run.table, "a", part)
    extended, effects = page_table.extend(run.table, "a", part, in_place=True)
    page_table.check(extended)
    state = run.table.owners["a"].running_state
    assert effects[-1] == Move(state, state)
    assert all(group == 0 for group, *_ in page_table.entries(extended))
