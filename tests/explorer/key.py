"""When two worlds of the explorer are the same: a key that leaves out what makes no difference.

Pages are numbered in the order in which the key meets them; steps count from the next one; of the
idle pages' stamps only the order counts; statistics are left out. Two worlds with equal keys can do
the same things, up to these names (`test_explorer` tries it).
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from immutables import Map

from serving.page_table.table import Entry, PageTable
from serving.plan import StepPlan
from tests.explorer.world import World

_STATUSES = ("new", "live", "remote", "gone", "done")
_STAGES = ("held", "receiving", "expired")
_VISIBLE = 1  # steps relative to the next one are 0 or negative


def world_key(
    world: World,
    names: tuple[str, ...],
    key_numbers: Mapping[bytes, int],
    *,
    has_remote: bool = False,
) -> bytes:
    """The key of a world.

    Args:
      has_remote: beside remote writers steps are executed later than planned. Then free pages are
        not all alike, and so the order of the pages' numbers counts.
    """
    state, table = world.state, world.state.table
    numbers = {name: number for number, name in enumerate(names)}
    found: dict[int, int] = {}

    def page(number: int) -> int:
        return found.setdefault(number, len(found))

    def pages(many: Iterable[int]) -> tuple[int, ...]:
        return tuple(page(one) for one in many)

    def step(number: int) -> int:
        return number - state.next_step_id if number > table.committed else _VISIBLE

    running = tuple(
        (numbers[name], row.output.num_tokens, row.slot, row.prefill_end, row.computed)
        for name, row in state.running.items()
    )
    waiting = tuple((numbers[e.request.request_id], e.output.num_tokens) for e in state.waiting)
    in_flight = tuple(
        (
            step(one.step_id),
            len(one.rows),
            tuple(
                (numbers[row.request_id], one.live[row.request_id], int(row.samples))
                for row in one.rows
                if row.request_id in one.live
            ),
        )
        for one in state.in_flight
    )
    owners = tuple(
        (
            numbers[name],
            pages(one.attention),
            tuple((c.place, pages(c.pages), c.tokens) for c in one.states.columns),
            (one.states.width, one.states.running, int(one.states.had_drafts)),
            (one.junction, one.keyed_tokens, one.quiet_until),
            pages(one.running_state),
            (one.answer_end[0], pages(one.answer_end[1])) if one.answer_end else (),
        )
        for name, one in ((name, table.owners[name]) for name in names if name in table.owners)
    )
    tickets = tuple(
        (
            numbers[name],
            _STAGES.index(one.stage),
            pages(one.pages),
            step(one.clear_step),
            int(numbers[name] in world.landed),
        )
        for name, one in ((name, table.tickets[name]) for name in names if name in table.tickets)
    )
    idle = pages(table.queue[stamp] for stamp in sorted(table.queue.keys()))
    rest = (pages(table.pins), tuple(pages(one) for one in table.parted))
    pending = _pending(table, names, key_numbers, page)
    queue = tuple(_step_key(one, numbers, pages) for one in world.queue)
    key = (
        tuple((_STATUSES.index(life.status), life.num_attempts) for life in world.lives),
        running,
        waiting,
        in_flight,
        int(state.last_kind == "decode"),
        owners,
        tickets,
        idle,
        rest,
        _entries(table.attention, key_numbers, pages, step),
        _entries(table.states, key_numbers, pages, step),
        tuple((number, key, one, step(at)) for number, key, one, at in pending),
        queue,
        pages(sorted(world.clears)),
        pages(range(1, table.num_pages)) if has_remote else (),
        world.device.token_buffer,
        tuple(world.device.pages[number] for number in found),
    )
    # Version 2 writes equal values as equal bytes: later ones depend on which of them are shared.
    return blake2b(marshal.dumps(key, 2), digest_size=16).digest()


def _entries(
    index: Map[bytes, tuple[Entry, ...]], key_numbers: Mapping[bytes, int], pages: Any, step: Any
) -> tuple[tuple[Any, ...], ...]:
    by_number = sorted((key_numbers[key], found) for key, found in index.items())
    return tuple(
        (number, tuple((pages(one.pages), one.tokens, step(one.step)) for one in found))
        for number, found in by_number
    )


def _pending(
    table: PageTable, names: tuple[str, ...], key_numbers: Mapping[bytes, int], page: Any
) -> list[tuple[int, int, int, int]]:
    return sorted(
        (number, key_numbers[one.key], page(one.page), one.step)
        for number, name in enumerate(names)
        for one in table.published.get(name, ())
        if one.step > table.committed
    )


def _step_key(
    step: StepPlan, numbers: Mapping[str, int], pages: Any
) -> tuple[tuple[Any, ...], ...]:
    rows = tuple(
        (
            numbers[row.request_id],
            row.slot,
            row.start,
            row.length,
            int(row.samples),
            int(row.tokens is None),
            pages(row.attention_pages),
            pages(row.state_source),
            pages(row.state_target),
            (row.export.position, pages(row.export.pages)) if row.export is not None else (),
        )
        for row in step.rows
    )
    copies = tuple((*pages(copy[:2]), copy.num_tokens) for copy in step.copies)
    return (rows, copies, pages(sorted(step.clear_pages)))
