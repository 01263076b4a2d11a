"""Pages that a remote writer fills: every stage of a ticket, and every refusal."""

from __future__ import annotations

import pytest

from serving import page_table
from serving.page_table import (
    CachePolicy,
    Chunk,
    Clear,
    NotReceivable,
    OutOfPages,
    PageTable,
    lookup,
    unit_keys,
)
from serving.request import InvariantError
from tests.fakes import fake_geometry

PROMPT = tuple(range(10, 20))
KEYS = unit_keys(PROMPT, 2)
NUM_TOKENS = 8  # of the prompt that the writer brings: two pages


def make_table(num_state_pages: int = 2, retention_tokens: int | None = 0) -> PageTable:
    """Pages 1 to 9 of 4 tokens each."""
    geometry = fake_geometry(page_tokens=4, num_state_pages=num_state_pages)
    policy = CachePolicy(
        unit_tokens=4 - 2 * (num_state_pages > 0), retention_tokens=retention_tokens
    )
    return page_table.empty_table(geometry, 10, policy)


def received(table: PageTable, ticket_id: str = "t", **changes: int) -> PageTable:
    values = {"clear_step": 0, "expires_at": 100} | changes
    return page_table.receive(table, ticket_id, NUM_TOKENS, **values)[0]


def advertised(table: PageTable, ticket_id: str = "t") -> PageTable:
    table = page_table.commit_step(received(table, ticket_id), 0)
    return page_table.advertise(table, ticket_id)[0]


def accepted(table: PageTable, request_id: str = "a") -> PageTable:
    return page_table.accept(table, "t", request_id, prompt_tokens=len(PROMPT), keys=KEYS)


def is_empty(table: PageTable) -> bool:
    page_table.check(table)
    return not table.tickets and table.free_bits == make_table().free_bits


# ---- receive ----------------------------------------------------------------------------------


def test_receive_takes_attention_and_state_pages_and_clears_only_the_former():
    table, effects = page_table.receive(make_table(), "t", NUM_TOKENS, clear_step=3, expires_at=100)
    page_table.check(table)
    ticket = table.tickets["t"]
    assert ticket.stage == "held"
    assert (len(ticket.attention), len(ticket.state)) == (2, 2)
    assert (ticket.tokens, ticket.clear_step, ticket.expires_at) == (NUM_TOKENS, 3, 100)
    assert effects == (Clear(ticket.attention),)
    assert table.num_free == 9 - 4


@pytest.mark.parametrize(("num_tokens", "num_attention"), [(1, 1), (4, 1), (5, 2)])
def test_receive_takes_the_pages_that_the_tokens_need(num_tokens: int, num_attention: int):
    table, _ = page_table.receive(make_table(), "t", num_tokens, clear_step=0, expires_at=1)
    assert len(table.tickets["t"].attention) == num_attention


def test_received_pages_are_nobody_elses():
    table = received(received(make_table()), "other")
    first, second = table.tickets["t"].pages, table.tickets["other"].pages
    assert len({*first, *second}) == len(first) + len(second)
    with pytest.raises(OutOfPages, match="too few free pages: got 1; expected 2"):
        received(table, "third")


def test_a_receive_that_finds_too_few_pages_changes_nothing():
    table = received(make_table())
    before = (table.free_bits, dict(table.refs), dict(table.tickets))
    with pytest.raises(OutOfPages):
        page_table.receive(table, "big", 30, clear_step=0, expires_at=1)
    assert (table.free_bits, dict(table.refs), dict(table.tickets)) == before


def test_receive_evicts_idle_pages_but_not_referenced_ones():
    table = page_table.release(accepted(advertised(make_table())), "a")
    assert len(table.idle) == 4
    table, _ = page_table.receive(table, "big", 28, clear_step=1, expires_at=1)
    page_table.check(table)
    assert table.num_free == 0
    assert not table.idle
    assert not list(page_table.entries(table))


def test_a_ticket_is_issued_once_and_cleared_in_the_future():
    table = received(make_table())
    with pytest.raises(InvariantError, match="'t' cannot be issued"):
        received(table)
    late = page_table.commit_step(make_table(), 5)
    with pytest.raises(
        InvariantError, match="clear_step 5; expected a new ticket and a step after"
    ):
        received(late, clear_step=5)


# ---- advertise --------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [-1, 1])
def test_pages_are_not_shown_before_their_clearing_is_committed(committed: int):
    table = page_table.commit_step(received(make_table(), clear_step=2), committed)
    with pytest.raises(NotReceivable, match="'t' is being cleared by step 2"):
        page_table.advertise(table, "t")
    assert table.tickets["t"].stage == "held"


@pytest.mark.parametrize("committed", [2, 7])
def test_pages_are_shown_once_their_clearing_is_committed(committed: int):
    table = page_table.commit_step(received(make_table(), clear_step=2), committed)
    pages = table.tickets["t"].pages
    table, ticket = page_table.advertise(table, "t")
    page_table.check(table)
    assert ticket == table.tickets["t"]
    assert (ticket.stage, ticket.pages) == ("receiving", pages)
    assert table.num_free == 9 - 4


def test_pages_are_shown_once():
    with pytest.raises(InvariantError, match="'t' is receiving; expected one that is held"):
        page_table.advertise(advertised(make_table()), "t")
    with pytest.raises(InvariantError, match="'x' is unknown; expected one that is held"):
        page_table.advertise(make_table(), "x")


# ---- accept -----------------------------------------------------------------------------------


def test_accept_gives_the_pages_to_the_request_without_a_copy():
    table = advertised(make_table())
    ticket = table.tickets["t"]
    table = accepted(table)
    page_table.check(table)
    assert not table.tickets
    owned = table.owners["a"]
    assert owned.attention == ticket.attention
    assert [(column.pages, column.tokens) for column in owned.states.columns] == [
        (ticket.state, NUM_TOKENS)
    ]
    assert page_table.held(table, "a") == (2, 1, 1)


def test_accepted_prefixes_can_be_reused_at_once_by_their_keys():
    table = advertised(make_table())
    ticket = table.tickets["t"]
    assert lookup(table, KEYS, len(PROMPT) - 1).tokens == 0
    table = accepted(table)
    hit = lookup(table, KEYS, len(PROMPT) - 1)
    assert (hit.tokens, hit.attention, hit.state) == (NUM_TOKENS, ticket.attention, ticket.state)
    assert hit.is_ready


def test_kf_c12_a_prefix_whose_state_is_not_kept_is_no_hit():
    """A whole page boundary before the last one of a longer prompt."""
    table = advertised(make_table())
    prompt = (*PROMPT, 1, 2, 3, 4, 5, 6)
    keys = unit_keys(prompt, 2)
    table = page_table.accept(table, "t", "a", prompt_tokens=len(prompt), keys=keys)
    hit = lookup(table, keys, len(prompt) - 1)
    assert (hit.tokens, hit.junction) == (0, NUM_TOKENS)


def test_the_request_goes_on_after_the_transferred_tokens():
    """The state is reusable, so the request's own state moves on to another bundle."""
    table = advertised(make_table())
    ticket = table.tickets["t"]
    chunk = Chunk(
        step_id=1,
        start=NUM_TOKENS,
        end=len(PROMPT),
        prefill_end=len(PROMPT),
        processed=NUM_TOKENS,
        known=len(PROMPT),
        keys=KEYS,
    )
    table, effects = page_table.extend(accepted(table), "a", chunk)
    page_table.check(table)
    move = next(effect for effect in effects if isinstance(effect, page_table.Move))
    assert move.source == ticket.state
    assert not {*move.target} & {*ticket.state}
    cleared = [page for effect in effects if isinstance(effect, Clear) for page in effect.pages]
    assert not {*cleared} & {*ticket.pages}


def test_released_pages_of_a_transfer_stay_reusable():
    table = page_table.release(accepted(advertised(make_table())), "a")
    page_table.check(table)
    assert table.num_free == table.num_usable
    assert lookup(table, KEYS, len(PROMPT) - 1).tokens == NUM_TOKENS


def test_accept_works_without_recurrent_layers():
    table = make_table(num_state_pages=0)
    table, _ = page_table.receive(table, "t", NUM_TOKENS, clear_step=0, expires_at=1)
    assert table.tickets["t"].state == ()
    table, _ = page_table.advertise(page_table.commit_step(table, 0), "t")
    keys = unit_keys(PROMPT, 4)
    table = page_table.accept(table, "t", "a", prompt_tokens=len(PROMPT), keys=keys)
    page_table.check(table)
    assert page_table.held(table, "a") == (2,)
    assert lookup(table, keys, len(PROMPT) - 1).tokens == NUM_TOKENS


def test_only_a_writer_that_is_waited_for_can_be_done():
    with pytest.raises(InvariantError, match="'t' is unknown; expected one that is receiving"):
        accepted(make_table())
    with pytest.raises(InvariantError, match="'t' is held; expected one that is receiving"):
        accepted(received(make_table()))
    with pytest.raises(InvariantError, match="'t' is expired; expected one that is receiving"):
        accepted(page_table.expire(advertised(make_table()), 100))


def test_a_request_with_pages_accepts_nothing():
    table = accepted(advertised(make_table()))
    table, _ = page_table.receive(table, "t", 1, clear_step=1, expires_at=9)
    table, _ = page_table.advertise(page_table.commit_step(table, 1), "t")
    with pytest.raises(InvariantError, match="'a' has pages; expected none before a transfer"):
        accepted(table)


# ---- fail -------------------------------------------------------------------------------------


def test_kf_c12_a_failed_transfer_gives_its_pages_back_and_publishes_nothing():
    table = page_table.fail_transfer(advertised(make_table()), "t")
    assert is_empty(table)
    assert not list(page_table.entries(table))


def test_only_a_writer_that_has_the_pages_can_fail():
    with pytest.raises(InvariantError, match="'t' is unknown; expected one that is receiving or"):
        page_table.fail_transfer(make_table(), "t")
    with pytest.raises(InvariantError, match="'t' is held; expected one that is receiving or exp"):
        page_table.fail_transfer(received(make_table()), "t")
    done = accepted(advertised(make_table()))
    with pytest.raises(InvariantError, match="'t' is unknown"):
        page_table.fail_transfer(done, "t")


# ---- expire -----------------------------------------------------------------------------------


def test_an_expired_ticket_that_nobody_saw_gives_its_pages_back():
    assert is_empty(page_table.expire(received(make_table()), 100))


def test_an_expired_ticket_keeps_its_pages_until_its_writer_has_stopped():
    table = page_table.expire(advertised(make_table()), 100)
    page_table.check(table)
    assert table.tickets["t"].stage == "expired"
    assert table.num_free == 9 - 4
    with pytest.raises(OutOfPages):
        page_table.receive(table, "big", 16, clear_step=1, expires_at=1)
    assert is_empty(page_table.fail_transfer(table, "t"))


@pytest.mark.parametrize("now", [0, 99])
def test_tickets_that_have_time_stay_as_they_are(now: int):
    table = advertised(make_table())
    assert page_table.expire(table, now) is table
    assert page_table.expire(received(make_table()), now).tickets["t"].stage == "held"


def test_each_ticket_has_its_own_time():
    table = received(received(make_table(), expires_at=5), "later", expires_at=6)
    table = page_table.expire(table, 5)
    page_table.check(table)
    assert set(table.tickets) == {"later"}


def test_expiring_again_changes_nothing():
    table = page_table.expire(advertised(make_table()), 100)
    again = page_table.expire(table, 200)
    assert again.tickets["t"] == table.tickets["t"]
    assert again.num_free == table.num_free


# ---- what others may do meanwhile -------------------------------------------------------------


def test_pages_under_transfer_are_neither_evicted_nor_forgotten():
    table = advertised(make_table())
    pages = table.tickets["t"].pages
    table = page_table.evict(table, pages)
    page_table.check(table)
    assert table.tickets["t"].pages == pages
    with pytest.raises(page_table.InUse, match="got 4 referenced pages"):
        page_table.reset(table)


def test_check_names_pages_that_a_transfer_shares_with_the_free_list():
    table = advertised(make_table())
    wrong = table._replace(free_bits=table.free_bits | 1 << table.tickets["t"].state[0])
    with pytest.raises(InvariantError, match="more than one of free, idle, referenced"):
        page_table.check(wrong)
