"""What the pages of a pool hold after each step: a device that computes nothing but keeps track.

Every token slot of an attention page holds the identity of the whole prefix that ends there; a
state page holds the identity of the prefix that its state summarizes. The model sees step plans
and the tokens of each request, nothing of the page table, and reports every read of bytes that are
not the reader's own prefix (content model of `tests/data/cache/README.md`). It starts from a pool
that is full of states.

Order of a step, as on the device: clear, copy, read, write. Stricter than the README where a
published page is written, where one request overwrites what another still needs, and where a row
needs bytes that only this step writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from serving.page_table import NULL_PAGE
from serving.plan import PageCopy, RowPlan, StepPlan
from serving.replay.prefixes import STALE, PrefixIds
from serving.replay.violations import Rule, Violation


class _State(NamedTuple):
    """Of recurrent group `group` (from 0) after the prefix `prefix`."""

    group: int
    prefix: int


class _Extent(NamedTuple):
    """What a request needs until its next row: the slots of its first `num_tokens` tokens, and the
    pages of its running state."""

    attention: tuple[int, ...]
    num_tokens: int
    states: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    tokens: tuple[int, ...]
    prefixes: tuple[int, ...]  # identity of the first n tokens, n = 0 .. len(tokens)


class ContentModel:
    """The pages of one pool.

    Args:
      num_pages: the null page included.
      num_state_pages: recurrent groups.
    """

    def __init__(self, *, num_pages: int, page_tokens: int, num_state_pages: int):
        self._page_tokens = page_tokens
        self._num_state_pages = num_state_pages
        self._ids = PrefixIds()
        self._slots = [[STALE] * page_tokens for _ in range(num_pages)]
        self._states: list[_State | None] = [None] * num_pages
        self._is_foreign = [True] * num_pages
        self._sequences: dict[str, _Sequence] = {}
        self._extents: dict[str, _Extent] = {}
        self._token_buffer: dict[int, int] = {}
        self._step_id = -1
        self._frozen: Mapping[int, int] = {}
        self._writers: dict[int, set[str]] = {}
        self._violations: list[Violation] = []

    def add(self, request_id: str, tokens: Sequence[int]) -> None:
        """Make a request known, with its prompt and all that it will generate."""
        self._sequences[request_id] = _Sequence(tuple(tokens), self._ids.of(tokens))

    def release(self, request_id: str) -> None:
        """The request needs its pages no longer."""
        self._extents.pop(request_id, None)

    def execute(
        self,
        plan: StepPlan,
        *,
        accepted: Mapping[str, int],
        frozen: Mapping[int, int],
        live: Set[str],
    ) -> tuple[Violation, ...]:
        """Run one step.

        Args:
          accepted: drafts that turn out right, by request; none where it is missing.
          frozen: published pages, and how many slots of each may not change; a state page counts
            as all its slots.
          live: requests that still own the pages of their rows.
        """
        self._step_id, self._frozen, self._writers = plan.step_id, frozen, {}
        self._violations = []
        for page in plan.clear_pages:
            self._guard("", page, 0)
            self._wipe(page)
            self._is_foreign[page] = False
        self._copy(plan.copies)
        rows = [row for row in plan.rows if self._is_sound(row)]
        for row in rows:
            self._check_tokens(row)
            self._check_attention(row)
            self._check_state(row)
            if row.request_id in live:
                pages = self._extents.get(row.request_id, _Extent((), 0, frozenset())).states
                self._extents[row.request_id] = _Extent(row.attention_pages, row.start, pages)
        for row in rows:
            self._write_attention(row, accepted.get(row.request_id, 0))
        for row in rows:
            self._write_states(row, accepted.get(row.request_id, 0), row.request_id in live)
        for row in rows:
            self._check_race(row)
            if row.samples or row.goes_on:
                self._sample(row, accepted.get(row.request_id, 0))
        return tuple(self._violations)

    def check_entry(self, group: int, page: int, request_id: str, num_tokens: int) -> str | None:
        """Whether a page holds what a reusable entry promises.

        Args:
          group: 0 for attention, then each recurrent group.
          request_id: a request that begins with the entry's prefix.

        Returns:
          What is wrong, if anything.
        """
        prefixes = self._sequences[request_id].prefixes
        if group:
            want = _State(group - 1, prefixes[num_tokens])
            is_right = self._states[page] == want
        else:
            start = (num_tokens - 1) // self._page_tokens * self._page_tokens
            want = list(prefixes[start + 1 : num_tokens + 1])
            is_right = self._slots[page][: num_tokens - start] == want
        if is_right and not (group == 0 and self._is_foreign[page]):
            return None
        return (
            f"page {page} does not hold the first {num_tokens} tokens of {request_id!r} for "
            f"group {group}"
        )

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        targets = [copy.target for copy in copies]
        if len(set(targets)) < len(targets) or set(targets) & {copy.source for copy in copies}:
            self._report("copies", "", f"a target is used twice, or is a source: got {copies}")
        gathered = [self._slots[copy.source][: copy.num_tokens] for copy in copies]
        for copy, slots in zip(copies, gathered, strict=True):
            self._guard("", copy.target, 0)
            if copy.source == NULL_PAGE:
                self._report("null", "", "the null page is the source of a copy")
            self._slots[copy.target][: copy.num_tokens] = slots
            self._states[copy.target] = None

    def _is_sound(self, row: RowPlan) -> bool:
        """Whether the model can follow a row's fields."""
        bundles = (row.state_source, row.state_target, *row.draft_states)
        if row.export is not None:
            bundles = (*bundles, row.export.pages)
        end = row.start + row.length
        problem = ""
        if row.request_id not in self._sequences:
            problem = "the request is not known"
        elif not 0 <= row.num_drafts < row.length or row.start < 0:
            problem = f"start, length, drafts are {row.start}, {row.length}, {row.num_drafts}"
        elif any(len(bundle) != self._num_state_pages for bundle in bundles):
            problem = f"state pages are not one a recurrent group: {bundles}"
        elif row.draft_states and len(row.draft_states) < row.num_drafts:
            problem = f"{len(row.draft_states)} states for {row.num_drafts} drafts"
        elif row.export is not None and not row.start < row.export.position < end:
            problem = f"position {row.export.position} is not inside {row.start}..{end}"
        elif len(row.attention_pages) * self._page_tokens < end:
            problem = f"{len(row.attention_pages)} attention pages do not hold {end} tokens"
        elif end - row.num_drafts > len(self._sequences[row.request_id].tokens):
            problem = f"the row goes on to {end} tokens, which the request never has"
        if problem:
            self._report("plan", row.request_id, problem)
        return not problem

    def _check_tokens(self, row: RowPlan) -> None:
        known = self._sequences[row.request_id].tokens
        if row.tokens is None:
            got, end = (self._token_buffer.get(row.slot),), row.start + 1
        else:
            got, end = row.tokens[: row.length - row.num_drafts], row.start + row.length
            end -= row.num_drafts
        if got != known[row.start : end]:
            where = "the token buffer" if row.tokens is None else "the row"
            detail = f"tokens {row.start}..{end} in {where} are not those of the request"
            self._report("tokens", row.request_id, detail)

    def _check_attention(self, row: RowPlan) -> None:
        prefixes = self._sequences[row.request_id].prefixes
        width, end = self._page_tokens, row.start + row.length
        for column, page in enumerate(row.attention_pages[: -(-end // width)]):
            first = column * width
            count = min(width, row.start - first)
            if count > 0 and self._slots[page][:count] != list(
                prefixes[first + 1 : first + 1 + count]
            ):
                detail = f"page {page} does not hold tokens {first}..{first + count}"
                self._report("prefix", row.request_id, detail)
            if self._is_foreign[page]:
                detail = f"attention page {page} holds bytes of a state"
                self._report("foreign", row.request_id, detail)

    def _check_state(self, row: RowPlan) -> None:
        if row.start == 0:
            return
        prefix = self._sequences[row.request_id].prefixes[row.start]
        for group, page in enumerate(row.state_source):
            if self._states[page] != _State(group, prefix):
                detail = f"page {page} does not hold the state of group {group} at {row.start}"
                self._report("state", row.request_id, detail)

    def _check_race(self, row: RowPlan) -> None:
        for page in row.state_source if row.start else ():
            if self._writers.get(page, set()) - {row.request_id}:
                self._report("race", row.request_id, f"state page {page} is written in this step")

    def _write_attention(self, row: RowPlan, accepted: int) -> None:
        width = self._page_tokens
        for position, prefix in enumerate(self._new_prefixes(row, accepted), start=row.start):
            page, slot = row.attention_pages[position // width], position % width
            if position == row.start or slot == 0:
                self._guard(row.request_id, page, slot)
                self._writers.setdefault(page, set()).add(row.request_id)
            self._slots[page][slot] = prefix
            self._states[page] = None

    def _write_states(self, row: RowPlan, accepted: int, is_live: bool) -> None:
        new = self._new_prefixes(row, accepted)
        verified = row.length - row.num_drafts
        # Without pages for the drafts the device recovers the state of the accepted ones.
        last = verified if row.draft_states else verified + accepted
        written = [(row.state_target, new[last - 1])]
        for index, bundle in enumerate(row.draft_states[: row.num_drafts]):
            written.append((bundle, new[verified + index]))
        running = written[accepted][0] if row.draft_states else row.state_target
        if row.export is not None:
            written.append((row.export.pages, new[row.export.position - row.start - 1]))
        for bundle, prefix in written:
            for group, page in enumerate(bundle):
                self._guard(row.request_id, page, 0)
                if page in self._writers:
                    self._report("race", row.request_id, f"page {page} is written twice")
                self._writers.setdefault(page, set()).add(row.request_id)
                self._wipe(page)
                self._states[page] = _State(group, prefix)
                self._is_foreign[page] = True
        if is_live:
            num_tokens = row.start + verified + accepted
            self._extents[row.request_id] = _Extent(
                row.attention_pages, num_tokens, frozenset(running)
            )

    def _new_prefixes(self, row: RowPlan, accepted: int) -> list[int]:
        """Identities of the prefixes that end at each of the row's tokens; wrong drafts have one
        that nothing else has."""
        right = row.length - row.num_drafts + accepted
        first = row.start + 1
        prefixes = self._sequences[row.request_id].prefixes[first : first + right]
        return [*prefixes, *(self._ids.other() for _ in range(row.length - right))]

    def _sample(self, row: RowPlan, accepted: int) -> None:
        known = self._sequences[row.request_id].tokens
        position = row.start + row.length - row.num_drafts + accepted
        if position < len(known):
            self._token_buffer[row.slot] = known[position]

    def _guard(self, writer: str, page: int, first_slot: int) -> None:
        """Report a write to a page, from `first_slot` on, that must not happen."""
        if page == NULL_PAGE:
            self._report("null", writer, "the null page is written")
        if self._frozen.get(page, 0) > first_slot:
            detail = f"page {page} is written from slot {first_slot} on, but is published"
            self._report("published", writer, detail)
        for other, extent in self._extents.items():
            if other == writer:
                continue
            is_needed = page in extent.states
            if page in extent.attention:
                first = extent.attention.index(page) * self._page_tokens
                is_needed = is_needed or first + first_slot < extent.num_tokens
            if is_needed:
                detail = f"page {page} is written from slot {first_slot} on, but {other!r} needs it"
                self._report("shared", writer, detail)

    def _wipe(self, page: int) -> None:
        self._slots[page] = [STALE] * self._page_tokens
        self._states[page] = None

    def _report(self, rule: Rule, request_id: str, detail: str) -> None:
        self._violations.append(Violation(self._step_id, rule, request_id, detail))
