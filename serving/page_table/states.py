"""Which pages hold the recurrent states of one request (cache-semantics.md sections 2, 5, 6).

A *bundle* is the pages of one state, one a recurrent group. States lie in *columns*: the state
after `n` tokens belongs to column `(n - 1) // page_tokens`, as if states were stored page by page,
but only few columns hold a bundle. Each column knows how many tokens its state summarizes;
everything else is derived from that number.

A step reads the state at its start and writes the state at its end. Where a bundle must stay as it
is, because others may resume from it, the end goes to another bundle: no state is ever copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Bundle = tuple[int, ...]

SCRATCH = -1  # tokens of a column whose bytes mean nothing


class Column(NamedTuple):
    """One state.

    Attributes:
      place: in the row of columns.
      tokens: that the state summarizes once every planned step is done; `SCRATCH` for none.
    """

    place: int
    pages: Bundle
    tokens: int


class Columns(NamedTuple):
    """The states of one request.

    Attributes:
      columns: those that have a bundle, by ascending place.
      width: columns in all, empty ones and slots for drafts included.
      running: place of the column where the state after the last planned step is, or the state
        before its drafts if it had some.
      had_drafts: whether the last planned step had drafts, with a slot for each. Without slots the
        device settles the running state itself once it knows what was accepted.
    """

    columns: tuple[Column, ...] = ()
    width: int = 0
    running: int = SCRATCH
    had_drafts: bool = False


class Move(NamedTuple):
    """What a step does to the states of a request: an effect for the device.

    Attributes:
      source, target: read before and written after the step.
      draft_states: written after each draft.
      export: written at the exported position, if there is one; `export_at` tokens.
    """

    source: Bundle
    target: Bundle
    draft_states: tuple[Bundle, ...] = ()
    export: Bundle | None = None
    export_at: int = 0


class Need(NamedTuple):
    """What a step needs.

    Attributes:
      source: column of the state before the step, if there is one.
      target: place of the state after it.
      missing: places that need a bundle; `moved` are scratch bundles that are used for them first.
      kept: columns that stay.
      parted: bundles that the request gives up, because it would write to them though others may
        still read them.
    """

    source: Column | None
    target: int
    missing: tuple[int, ...]
    moved: tuple[Bundle, ...]
    kept: tuple[Column, ...]
    parted: tuple[Bundle, ...]

    @property
    def num_new(self) -> int:
        return len(self.missing) - len(self.moved)


def column_of(tokens: int, page_tokens: int | None) -> int:
    """Column of the state after `tokens` tokens; all states share one if `page_tokens` is None."""
    return 0 if page_tokens is None else (tokens - 1) // page_tokens


def source_of(states: Columns, start: int) -> Column | None:
    """The column whose state is that after `start` tokens; None for a request without a state.

    Steps without a draft advance the running state in place, so its count may be behind.
    """
    if states.running != SCRATCH and not states.had_drafts:
        return next(c for c in states.columns if c.place == states.running)
    return next((c for c in reversed(states.columns) if c.tokens == start), None)


def need(
    states: Columns,
    start: int,
    end: int,
    *,
    num_slots: int,
    has_export: bool,
    page_tokens: int | None,
    is_kept: Callable[[Bundle], bool],
) -> Need:
    """What a step from `start` to `end` (drafts included) needs.

    Args:
      is_kept: whether a bundle must not be written to.
    """
    target = column_of(end, page_tokens)
    first, last = target - has_export, target + num_slots
    slots = range(states.width - num_slots, states.width) if states.running != SCRATCH else ()
    kept: list[Column] = []
    moved: list[Bundle] = []
    parted: list[Bundle] = []
    for column in states.columns:
        place, pages, _ = column
        is_left_behind = place < first and place in slots
        if not (is_left_behind or first <= place <= last):
            kept.append(column)
        elif is_kept(pages):
            parted.append(pages)
        elif is_left_behind:
            moved.append(pages)
        else:
            kept.append(column)
    present = [column.place for column in kept]
    missing = tuple([place for place in range(first, last + 1) if place not in present])
    source = source_of(states, start)
    return Need(source, target, missing, tuple(moved), tuple(kept), tuple(parted))


def advance(
    start: int, end: int, needed: Need, new: Sequence[Bundle], *, num_drafts: int, num_slots: int,
    export_at: int,
) -> tuple[Columns, Move]:  # fmt: skip
    """Carry out what `need` found.

    Args:
      new: `needed.num_new` bundles.
      export_at: tokens of the exported state; 0 for none.
    """
    source, target = needed.source, needed.target
    bundles = [*needed.moved, *new]
    pages = {column.place: column.pages for column in needed.kept}
    tokens = {column.place: column.tokens for column in needed.kept}
    if source is not None and source.place in tokens:
        tokens[source.place] = start
    for place, bundle in zip(needed.missing, bundles, strict=True):
        pages[place] = bundle
    # Without slots only the device knows how many drafts the state will include.
    tokens[target] = SCRATCH if num_drafts and not num_slots else end - num_drafts
    for slot in range(1, num_slots + 1):
        tokens[target + slot] = end - num_drafts + slot if slot <= num_drafts else SCRATCH
    if export_at:
        tokens[target - 1] = export_at
    columns = tuple([Column(place, pages[place], tokens[place]) for place in sorted(pages)])
    move = Move(
        pages[target] if source is None else source.pages,
        pages[target],
        tuple([pages[target + j] for j in range(1, min(num_drafts, num_slots) + 1)]),
        pages[target - 1] if export_at else None,
        export_at,
    )
    had_drafts = num_drafts > 0 and num_slots > 0
    return Columns(columns, target + num_slots + 1, target, had_drafts), move


def split_stale(
    states: Columns, processed: int, page_tokens: int | None
) -> tuple[tuple[Bundle, ...], Columns]:
    """Bundles of columns that no step to come reads, last one first, and the other columns."""
    if page_tokens is None or not states.columns:
        return (), states
    first = column_of(processed, page_tokens)
    if states.columns[0].place >= first:
        return (), states
    stale = tuple(c.pages for c in reversed(states.columns) if c.place < first)
    return stale, states._replace(columns=states.columns[len(stale) :])


def settled(states: Columns, computed: int) -> Columns:
    """The states after a step with drafts but without slots, whose outcome is known now."""
    return states._replace(
        columns=tuple(
            c._replace(tokens=computed) if c.place == states.running and c.tokens == SCRATCH else c
            for c in states.columns
        )
    )


def with_boundary(states: Columns, boundary: int, page_tokens: int) -> Columns:
    """Put the state at a page boundary, which a draft reached, into the column of that boundary."""
    home = column_of(boundary, page_tokens)
    found = next((c for c in states.columns if c.tokens == boundary), None)
    if found is None or found.place == home:
        return states
    columns = {c.place: c for c in states.columns if c.place != found.place}
    if home in columns:
        columns[found.place] = columns[home]._replace(place=found.place)
    columns[home] = found._replace(place=home)
    return states._replace(columns=tuple(columns[index] for index in sorted(columns)))


def relabel(states: Columns, column: Column, place: int) -> Columns:
    """Put the running state into another column, if that is free."""
    if any(c.place == place for c in states.columns):
        return states
    columns = [c for c in states.columns if c.place != column.place]
    columns.append(column._replace(place=place))
    return states._replace(
        columns=tuple(sorted(columns)), width=max(states.width, place + 1), running=place
    )
