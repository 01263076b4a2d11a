"""Show the cache and the requests of a server at any step of a record (`serve.py --record FILE`).

The record is replayed on the schedulers themselves, without a device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from k3jax.config import ConfigError
from serving.page_table import PageTable
from serving.plan import StepPlan
from serving.record import Moment, RecordError, read_record, replay
from serving.request import InvariantError
from serving.scheduler import SchedulerState

_KEY_CHARS = 8


def main(argv: list[str] | None = None) -> int:
    """Print the state at a step and return the exit code."""
    parser = argparse.ArgumentParser(prog="view_cache.py", description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, metavar="LOG", help="file of `serve.py --record`")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="show the moment after step N was planned (default: the end of the record)",
    )
    args = parser.parse_args(argv)
    try:
        moment = find(args.record, args.step)
    except (RecordError, ConfigError, InvariantError, UnicodeDecodeError, OSError) as error:
        print(f"view_cache.py: error: {args.record}: {error}", file=sys.stderr)
        return 1
    for line in describe(moment):
        print(line)
    return 0


def find(path: Path, step_id: int | None) -> Moment:
    """Replay a record up to the planning of a step, or to its end.

    Raises:
      RecordError: the step, or any event, is not there.
    """
    setup, events = read_record(path)
    last, last_step = None, None
    for last in replay(setup, events):
        if last.plan is not None:
            last_step = last.plan.step_id
            if last_step == step_id:
                return last
    if last is None or step_id is not None:
        raise RecordError(f"step {step_id} is not in {path}: its last one is {last_step}")
    return last


def describe(moment: Moment) -> Iterator[str]:
    """The lines that show a moment, one replica after the other."""
    plans = moment.plan.plans if moment.plan is not None else (None,) * len(moment.replicas)
    for number, (state, plan) in enumerate(zip(moment.replicas, plans, strict=True)):
        if len(moment.replicas) > 1:
            yield f"replica {number}:"
        yield from _describe_replica(state, plan)


def _describe_replica(state: SchedulerState, plan: StepPlan | None) -> Iterator[str]:
    table = state.table
    in_flight = ", ".join(str(step.step_id) for step in state.in_flight) or "none"
    yield f"step {state.next_step_id - 1} was planned last; in flight: {in_flight}"
    yield (
        f"pool: {table.num_usable} pages of {table.geometry.page_tokens} tokens, "
        f"{table.free_bits.bit_count()} free, {len(table.idle)} idle, {len(table.refs)} in use; "
        f"a key every {table.policy.unit_tokens} tokens"
    )
    counts = {
        **state.stats._asdict(),
        "evicted_entries": table.num_evicted,
        "preemptions": state.num_preemptions,
    }
    yield f"counts: {' '.join(f'{name}={count}' for name, count in counts.items())}"
    yield f"running: {len(state.running)}"
    for request_id, row in state.running.items():
        prompt = len(row.request.prompt)
        yield (
            f"  {request_id} slot={row.slot} computed={row.computed} prompt={prompt} "
            f"cached={row.cached_tokens} output={row.output.num_tokens}"
        )
    yield f"waiting: {len(state.waiting)}"
    for entry in state.waiting:
        prompt = len(entry.request.prompt)
        yield f"  {entry.request.request_id} prompt={prompt} output={entry.output.num_tokens}"
    if plan is not None:
        yield from _describe_plan(plan)
    yield "pages:"
    yield from _describe_pages(table)


def _describe_plan(plan: StepPlan) -> Iterator[str]:
    bucket = plan.bucket
    yield f"step {plan.step_id}: {bucket.kind} of {bucket.tokens} tokens, {bucket.rows} rows"
    if plan.clear_pages:
        yield f"  clear {_ranges(plan.clear_pages)}"
    for copy in plan.copies:
        yield f"  copy {copy.source} to {copy.target}, {copy.num_tokens} tokens"
    for admitted in plan.admitted:
        yield f"  admit {admitted.request_id} hit={admitted.hit_tokens} " + (
            f"junction={admitted.junction}"
        )
    for row in plan.rows:
        text = f"  {row.request_id} tokens {row.start} to {row.start + row.length - 1}"
        if row.state_target:
            text += f", state {_ranges(row.state_source)} to {_ranges(row.state_target)}"
        if row.export is not None:
            text += f", state after {row.export.position} to {_ranges(row.export.pages)}"
        yield text


def _describe_pages(table: PageTable) -> Iterator[str]:
    uses, keys = _uses(table), _keys(table)
    for page in sorted({*table.refs, *table.idle}):
        words = [f"{page:5} {_page_state(table, page):9}", *uses[page]]
        yield "  ".join([*words, *keys[page]])
    free = [page for page in range(1, table.num_pages) if table.free_bits >> page & 1]
    yield f"      free       {_ranges(free) or 'none'}"


def _page_state(table: PageTable, page: int) -> str:
    if page in table.idle:
        return "idle"
    if table.refs[page] > 1:
        return "shared"
    return "published" if page in table.page_keys else "private"


def _uses(table: PageTable) -> dict[int, list[str]]:
    """Who holds each page, and for what."""
    uses: dict[int, list[str]] = defaultdict(list)
    page_tokens = table.geometry.page_tokens

    def note_attention(owner: str, pages: Iterable[int]) -> None:
        for i, page in enumerate(pages):
            uses[page].append(f"{owner}[{i * page_tokens}:{(i + 1) * page_tokens}]")

    def note_state(owner: str, pages: Iterable[int], what: str) -> None:
        for page in pages:
            uses[page].append(f"{owner} state {what}")

    for request_id, allocation in table.owners.items():
        note_attention(request_id, allocation.attention)
        for column in allocation.states.columns:
            # The count of the running state may be behind: quiet steps do not touch the table.
            is_running = column.pages == allocation.running_state
            note_state(request_id, column.pages, "running" if is_running else f"@{column.tokens}")
        if allocation.answer_end is not None:
            tokens, pages = allocation.answer_end
            note_state(request_id, pages, f"@{tokens} of the answer")
    for ticket_id, ticket in table.tickets.items():
        owner = f"ticket {ticket_id} ({ticket.stage})"
        note_attention(owner, ticket.attention)
        note_state(owner, ticket.state, f"@{ticket.tokens}")
    return uses


def _keys(table: PageTable) -> dict[int, list[str]]:
    """Under which keys each page can be found, with the tokens of the prefix."""
    keys: dict[int, list[str]] = defaultdict(list)
    for kind, index in (("kv", table.attention), ("state", table.states)):
        for key, entries in index.items():
            for entry in entries:
                text = f"{kind}:{key.hex()[:_KEY_CHARS]}@{entry.tokens}"
                if entry.step > table.committed:
                    text += f" after step {entry.step}"
                for page in entry.pages:
                    keys[page].append(text)
    return keys


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as `1-3,7`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(group[0][1], group[-1][1]) for group in (list(run) for _, run in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


if __name__ == "__main__":
    sys.exit(main())
