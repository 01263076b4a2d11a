"""A device as a value, for the explorer: what each page holds, by the identity of prefixes.

A page is a tuple of ints: an attention page has one entry a token slot, the identity of the whole
prefix that ends there or `EMPTY`; a state page is `(STATE, group, identity)`; `POISON` is a page
that nobody may rely on. This is the content model of `tests/data/cache/README.md`, stricter in
two points: slots that a row has not filled must be empty in every page it reads, and a page that is
under transfer must not be touched by a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from serving.plan import RowPlan, StepPlan
from serving.replay.prefixes import PrefixIds

Page = tuple[int, ...]

EMPTY = 0
STATE = -1
POISON: Page = (-2,)


class Story(NamedTuple):
    """A request as the script has it.

    Attributes:
      tokens: prompt and all that the device samples for it.
      prefixes: identity of the first n tokens, n = 0 .. len(tokens); never `EMPTY` from n = 1 on.
    """

    tokens: tuple[int, ...]
    prefixes: tuple[int, ...]


class Device(NamedTuple):
    """Pages of the pool and the token buffer."""

    pages: tuple[Page, ...]
    token_buffer: tuple[int, ...]


class Wrong(Exception):
    """A page does not hold what its reader needs, or is touched while it must not be."""


def make_stories(sequences: Mapping[str, tuple[int, ...]]) -> dict[str, Story]:
    """Equal prefixes have equal identities, whichever request they belong to."""
    ids = PrefixIds()
    return {name: Story(tokens, ids.of(tokens)) for name, tokens in sequences.items()}


def fresh_device(num_pages: int, num_slots: int) -> Device:
    """A pool of pages that nobody may rely on."""
    return Device((POISON,) * num_pages, (EMPTY,) * num_slots)


def execute(
    device: Device,
    step: StepPlan,
    stories: Mapping[str, Story],
    page_tokens: int,
    fenced: Set[int] = frozenset(),
) -> Device:
    """Run one step: clear, copy, then read everything, then write everything.

    Args:
      fenced: pages that a remote writer may write to at any time.

    Raises:
      Wrong: naming the page.
    """
    pages, buffer = list(device.pages), list(device.token_buffer)
    for page in step.clear_pages:
        _touch(page, fenced, "cleared")
        pages[page] = (EMPTY,) * page_tokens
    targets = [copy.target for copy in step.copies]
    if len({*targets}) < len(targets) or {*targets} & {copy.source for copy in step.copies}:
        raise Wrong(f"copies depend on each other: {step.copies}")
    gathered = [pages[copy.source][: copy.num_tokens] for copy in step.copies]
    for copy, slots in zip(step.copies, gathered, strict=True):
        _touch(copy.target, fenced, "the target of a copy")
        pages[copy.target] = slots + pages[copy.target][copy.num_tokens :]
    for row in step.rows:
        _read(row, stories[row.request_id], pages, buffer, page_tokens)
    _check_writers(step)
    for row in step.rows:
        story = stories[row.request_id]
        _write(row, story, pages, page_tokens, fenced)
        if row.samples or row.goes_on:
            buffer[row.slot] = story.tokens[row.start + row.length]
    return Device(tuple(pages), tuple(buffer))


def write_remotely(
    device: Device,
    story: Story,
    num_tokens: int,
    attention: tuple[int, ...],
    state: tuple[int, ...],
    page_tokens: int,
) -> Device:
    """What a remote writer leaves in the pages that it was shown."""
    pages = list(device.pages)
    for column, page in enumerate(attention):
        first = column * page_tokens
        slots = story.prefixes[first + 1 : min(num_tokens, first + page_tokens) + 1]
        pages[page] = slots + pages[page][len(slots) :]
    for group, page in enumerate(state):
        pages[page] = (STATE, group, story.prefixes[num_tokens])
    return device._replace(pages=tuple(pages))


def check_entry(
    device: Device, group: int, page: int, num_tokens: int, identity: Page, page_tokens: int
) -> None:
    """A page must hold what a reusable entry promises.

    Args:
      group: 0 for attention, then each recurrent group.
      identity: of every prefix of the entry's, from 0 to `num_tokens` tokens.

    Raises:
      Wrong: naming the page.
    """
    if group:
        is_right = device.pages[page] == (STATE, group - 1, identity[num_tokens])
    else:
        first = (num_tokens - 1) // page_tokens * page_tokens
        want = identity[first + 1 : num_tokens + 1]
        is_right = device.pages[page][: len(want)] == want
    if not is_right:
        raise Wrong(
            f"page {page} is reusable in group {group} at {num_tokens} tokens, but holds "
            f"{device.pages[page]}"
        )


def _touch(page: int, fenced: Set[int], how: str) -> None:
    if page == 0:
        raise Wrong(f"the null page is {how}")
    if page in fenced:
        raise Wrong(f"page {page} is under transfer, and is {how}")


def _read(
    row: RowPlan, story: Story, pages: list[Page], buffer: list[int], page_tokens: int
) -> None:
    """Everything that a row reads must be its own prefix."""
    who, end = repr(row.request_id), row.start + row.length
    tokens = (buffer[row.slot],) if row.tokens is None else row.tokens
    if tokens != story.tokens[row.start : end]:
        raise Wrong(f"{who} computes {tokens} at {row.start}, which are not its tokens")
    if len(row.attention_pages) * page_tokens < end:
        raise Wrong(f"{who} has {len(row.attention_pages)} attention pages for {end} tokens")
    for column, page in enumerate(row.attention_pages[: -(-end // page_tokens)]):
        first = column * page_tokens
        own = story.prefixes[first + 1 : max(first, min(row.start, first + page_tokens)) + 1]
        want = own + (EMPTY,) * (page_tokens - len(own))
        if pages[page] != want:
            raise Wrong(
                f"{who} starts at {row.start} and reads attention page {page}: it holds "
                f"{pages[page]}; expected {want}"
            )
    if not row.start:
        return
    for group, page in enumerate(row.state_source):
        want = (STATE, group, story.prefixes[row.start])
        if pages[page] != want:
            raise Wrong(
                f"{who} resumes at {row.start} from state page {page}: it holds {pages[page]}; "
                f"expected {want}"
            )


def _check_writers(step: StepPlan) -> None:
    """No page is written twice in a step, and no row's source is written by another row."""
    writers: dict[int, str] = {}
    for row in step.rows:
        exported = row.export.pages if row.export is not None else ()
        for page in (*row.state_target, *exported):
            if page in writers:
                raise Wrong(f"page {page} is written twice in step {step.step_id}")
            writers[page] = row.request_id
    for row in step.rows:
        for page in row.state_source if row.start else ():
            if writers.get(page, row.request_id) != row.request_id:
                raise Wrong(f"{row.request_id!r} reads state page {page}, which the step writes")


def _write(
    row: RowPlan, story: Story, pages: list[Page], page_tokens: int, fenced: Set[int]
) -> None:
    end = row.start + row.length
    for column in range(row.start // page_tokens, -(-end // page_tokens)):
        page, first = row.attention_pages[column], column * page_tokens
        _touch(page, fenced, "written")
        low, high = max(row.start, first), min(end, first + page_tokens)
        old = pages[page]
        if any(old[low - first : high - first]) or len(old) != page_tokens:
            raise Wrong(f"{row.request_id!r} writes to page {page}, which was not clean: {old}")
        new = story.prefixes[low + 1 : high + 1]
        pages[page] = old[: low - first] + new + old[high - first :]
    written = [(row.state_target, end)]
    if row.export is not None:
        written.append((row.export.pages, row.export.position))
    for bundle, position in written:
        for group, page in enumerate(bundle):
            _touch(page, fenced, "written")
            pages[page] = (STATE, group, story.prefixes[position])
