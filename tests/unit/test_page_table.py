"""The page table as a value: who owns what, and what must be cleared."""

from __future__ import annotations

import dataclasses

import pytest

from k3jax.config import ConfigError
from serving import page_table
from serving.page_table import Allocation, Clear, OutOfPages, PageTable
from serving.request import InvariantError
from tests.fakes import fake_geometry


@pytest.fixture
def table() -> PageTable:
    """Pages 1 to 9 of 4 tokens each; a request takes two state pages."""
    return page_table.empty_table(fake_geometry(page_tokens=4, num_state_pages=2), 10)


def test_an_empty_table_has_every_page_free_but_the_null_page(table: PageTable):
    assert table.free_pages == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert table.num_free == table.num_usable == 9
    page_table.check(table)


def test_a_pool_too_small_for_one_request_is_refused():
    geometry = fake_geometry(num_state_pages=2)
    assert page_table.empty_table(geometry, 4).num_free == 3
    with pytest.raises(ConfigError, match="num_pages is too small: got 3; expected >= 4"):
        page_table.empty_table(geometry, 3)


@pytest.mark.parametrize(("num_tokens", "num_attention"), [(1, 1), (4, 1), (5, 2), (28, 7)])
def test_admit_hands_out_state_pages_and_enough_attention_pages(
    table: PageTable, num_tokens: int, num_attention: int
):
    table, effects = page_table.admit(table, "a", num_tokens)
    owned = table.owners["a"]
    assert len(owned.states) == 2
    assert len(owned.attention) == num_attention
    assert table.num_free == 9 - 2 - num_attention
    page_table.check(table)
    assert effects == (Clear(tuple(range(1, num_attention + 3))),)


def test_every_page_that_is_handed_out_is_cleared(table: PageTable):
    table, admitted = page_table.admit(table, "a", 1)
    table, extended = page_table.extend(table, "a", 9)
    cleared = [page for effect in (*admitted, *extended) for page in effect.pages]
    assert sorted(cleared) == sorted(table.owners["a"].pages)


def test_a_page_is_cleared_again_for_its_next_owner(table: PageTable):
    first, effects = page_table.admit(table, "a", 28)
    released, _ = page_table.release(first, "a")
    _, again = page_table.admit(released, "b", 28)
    assert again == effects


def test_extend_appends_pages_and_keeps_those_that_are_there(table: PageTable):
    table, _ = page_table.admit(table, "a", 4)
    before = table.owners["a"]
    table, effects = page_table.extend(table, "a", 9)
    after = table.owners["a"]
    assert after.states == before.states
    assert after.attention[:1] == before.attention
    assert len(after.attention) == 3
    assert effects == (Clear(after.attention[1:]),)


@pytest.mark.parametrize("num_tokens", [0, 3, 5, 8])
def test_extend_within_the_pages_changes_nothing(table: PageTable, num_tokens: int):
    table, _ = page_table.admit(table, "a", 5)
    extended, effects = page_table.extend(table, "a", num_tokens)
    assert extended is table
    assert effects == ()


def test_out_of_pages_leaves_the_table_as_it_was(table: PageTable):
    table, _ = page_table.admit(table, "a", 20)
    snapshot = dataclasses.replace(table)
    with pytest.raises(OutOfPages, match="too few free pages: got 2; expected 3"):
        page_table.admit(table, "b", 1)
    with pytest.raises(OutOfPages, match="too few free pages: got 2; expected 3"):
        page_table.extend(table, "a", 29)
    assert table == snapshot
    page_table.check(table)


def test_a_request_may_take_the_last_page(table: PageTable):
    table, _ = page_table.admit(table, "a", 28)
    assert table.num_free == 0
    assert table.free_pages == ()
    page_table.check(table)


def test_release_gives_all_pages_back(table: PageTable):
    full, _ = page_table.admit(table, "a", 9)
    full, _ = page_table.admit(full, "b", 4)
    released, effects = page_table.release(full, "a")
    assert effects == ()
    assert released.owners.keys() == {"b"}
    assert released.num_free == 9 - 3
    assert page_table.release(released, "b")[0] == table


def test_release_is_idempotent(table: PageTable):
    full, _ = page_table.admit(table, "a", 9)
    once, _ = page_table.release(full, "a")
    twice, effects = page_table.release(once, "a")
    assert twice is once
    assert effects == ()


def test_older_values_stay_valid(table: PageTable):
    full, _ = page_table.admit(table, "a", 9)
    page_table.extend(full, "a", 28)
    page_table.release(full, "a")
    assert len(full.owners["a"].attention) == 3
    assert table.owners == {}


def test_admitting_twice_or_extending_a_stranger_is_a_bug(table: PageTable):
    table, _ = page_table.admit(table, "a", 1)
    with pytest.raises(InvariantError, match="'a' was admitted twice"):
        page_table.admit(table, "a", 1)
    with pytest.raises(InvariantError, match="'b' has no pages"):
        page_table.extend(table, "b", 1)


def test_a_model_without_recurrent_layers_takes_attention_pages_only():
    table = page_table.empty_table(fake_geometry(page_tokens=4, num_state_pages=0), 4)
    table, _ = page_table.admit(table, "a", 9)
    assert table.owners["a"] == Allocation(attention=(1, 2, 3), states=())


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        (Allocation((3,), (4, 5)), r"pages \[3, 4, 5\] are free and owned"),
        (Allocation((1,), (2, 1)), r"pages \[1, 2\] are free and owned, or owned twice"),
        (Allocation((0,), ()), r"pages \[0\] are not usable"),
        (Allocation((10,), ()), r"pages \[10\] are not usable"),
    ],
)
def test_check_names_pages_that_are_owned_wrongly(
    table: PageTable, owned: Allocation, message: str
):
    with pytest.raises(InvariantError, match=message):
        page_table.check(dataclasses.replace(table, owners={"a": owned}))


def test_check_names_pages_that_are_lost_or_invented(table: PageTable):
    with pytest.raises(InvariantError, match=r"pages \[7\] are neither free nor owned"):
        page_table.check(dataclasses.replace(table, free_bits=table.free_bits ^ (1 << 7)))
    with pytest.raises(InvariantError, match=r"pages \[0\] are not usable"):
        page_table.check(dataclasses.replace(table, free_bits=table.free_bits | 1))
    with pytest.raises(InvariantError, match="beyond the pool of 10"):
        page_table.check(dataclasses.replace(table, free_bits=table.free_bits | 1 << 10))
