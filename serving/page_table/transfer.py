"""Pages that a remote writer fills (cache-semantics.md section 9). Pure functions.

Life of such a page: clearing -> receivable -> receiving -> private of a request, or free. Remote
writes do not wait for the device's programs, so a page is shown to a writer only after its clearing
has completed in the device's order, and from then on it is not cleared, evicted or handed out until
the writer is known to have stopped. An expired ticket whose writer may still write keeps its pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.page_table.edit import Edit
from serving.page_table.effects import Clear, Effect
from serving.page_table.lifecycle import publish
from serving.page_table.states import Column, Columns, column_of
from serving.page_table.table import Allocation, PageTable
from serving.page_table.tickets import Ticket
from serving.request import InvariantError


class NotReceivable(Exception):
    """The pages of a ticket are still being cleared; the table is unchanged."""


def receive(
    table: PageTable, ticket_id: str, num_tokens: int, *, clear_step: int, expires_at: int
) -> tuple[PageTable, tuple[Effect, ...]]:
    """Take pages for a prefix of `num_tokens` tokens that a remote writer will fill.

    Args:
      clear_step: id of the step with which the effects are carried out.

    Raises:
      OutOfPages: too few pages are free.
      InvariantError: the ticket exists, or its clearing would be in the past.
    """
    if ticket_id in table.tickets or clear_step <= table.committed:
        raise InvariantError(
            f"ticket {ticket_id!r} cannot be issued: got clear_step {clear_step}; expected a new "
            f"ticket and a step after {table.committed}"
        )
    edit = Edit(table)
    attention = edit.take(table.geometry.attention_pages(num_tokens))
    (state,) = edit.take_bundles(1)
    edit.set_ticket(ticket_id, Ticket("held", attention, state, num_tokens, clear_step, expires_at))
    return edit.finish(), (Clear(attention),)


def advertise(table: PageTable, ticket_id: str) -> tuple[PageTable, Ticket]:
    """Show the pages of a ticket to its writer, which may write from now on.

    Raises:
      NotReceivable: their clearing has not completed.
      InvariantError: there is no such ticket, or it was shown before.
    """
    ticket = _ticket(table, ticket_id, ("held",))
    if ticket.clear_step > table.committed:
        raise NotReceivable(
            f"ticket {ticket_id!r} is being cleared by step {ticket.clear_step}; expected a step "
            f"up to {table.committed}, which is committed"
        )
    return _with_stage(table, ticket_id, ticket._replace(stage="receiving"))


def accept(
    table: PageTable,
    ticket_id: str,
    request_id: str,
    *,
    prompt_tokens: int,
    keys: Sequence[bytes],
) -> PageTable:
    """The writer is done: the pages are private to a request that goes on after them, and what is
    worth keeping is reusable.

    Raises:
      InvariantError: no writer had the pages, nobody waits for them, or the request has pages.
    """
    ticket = _ticket(table, ticket_id, ("receiving",))
    if request_id in table.owners:
        raise InvariantError(f"request {request_id!r} has pages; expected none before a transfer")
    columns = Columns()
    if ticket.state:
        place = column_of(ticket.tokens, table.column_tokens)
        columns = Columns((Column(place, ticket.state, ticket.tokens),), place + 1)
    edit = Edit(table)
    edit.drop_ticket(ticket_id)
    edit.set_owner(
        request_id,
        Allocation(
            attention=ticket.attention,
            states=columns,
            prompt_tokens=prompt_tokens,
            junction=0,
            keyed_tokens=0,
        ),
    )
    return publish(edit.finish(), request_id, ticket.tokens, keys)


def fail_transfer(table: PageTable, ticket_id: str) -> PageTable:
    """The writer has stopped without success, or an expired one has stopped: free the pages.

    Raises:
      InvariantError: there is no such ticket, or no writer had its pages.
    """
    return _free(table, ticket_id, _ticket(table, ticket_id, ("receiving", "expired")))


def expire(table: PageTable, now: int) -> PageTable:
    """Give up the tickets whose time has come. Pages that a writer knows stay out of use."""
    for ticket_id, ticket in table.tickets.items():
        if ticket.expires_at > now:
            continue
        if ticket.stage == "held":
            table = _free(table, ticket_id, ticket)
        elif ticket.stage == "receiving":
            table, _ = _with_stage(table, ticket_id, ticket._replace(stage="expired"))
    return table


def _free(table: PageTable, ticket_id: str, ticket: Ticket) -> PageTable:
    edit = Edit(table)
    edit.release(ticket.pages)
    edit.drop_ticket(ticket_id)
    return edit.finish()


def _with_stage(table: PageTable, ticket_id: str, ticket: Ticket) -> tuple[PageTable, Ticket]:
    edit = Edit(table)
    edit.set_ticket(ticket_id, ticket)
    return edit.finish(), ticket


def _ticket(table: PageTable, ticket_id: str, stages: Sequence[str]) -> Ticket:
    ticket = table.tickets.get(ticket_id)
    if ticket is None or ticket.stage not in stages:
        raise InvariantError(
            f"ticket {ticket_id!r} is {ticket.stage if ticket else 'unknown'}; expected one "
            f"that is {' or '.join(stages)}"
        )
    return ticket
