"""The scheduler's state: one immutable value, and the small changes that several operations share.

Invariants are verified by `check_state`. Nothing here is ever changed in place: a mapping that is
part of a state is never written to again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from k3jax.buckets import Kind
from k3jax.config import ConfigError
from k3jax.results import TokenLogprobs
from serving import page_table
from serving.page_table import KeyChain, PageTable
from serving.plan import RowPlan
from serving.request import InvariantError, Request
from serving.scheduler import drafting
from serving.scheduler.limits import Limits
from serving.scheduler.stats import CacheStats
from serving.scheduler.token_log import EMPTY_LOG, TokenLog


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request without pages.

    Attributes:
      chain: prefix keys of the known tokens.
      arrival: counts up with each request.
      output: what it had generated when it was preempted; empty for a new request.
      cached_tokens: see `Output`; None before the first admission.
      draft_rate: as of `Running`.
      hit_tokens: what was reusable when it was queued. Only an estimate of the work that it brings.
    """

    request: Request
    chain: KeyChain
    arrival: int
    output: TokenLog = EMPTY_LOG
    cached_tokens: int | None = None
    hit_tokens: int = 0
    draft_rate: float = drafting.FIRST_RATE

    @property
    def num_tokens(self) -> int:
        """Tokens that are known, and must be computed before the next one can be sampled."""
        return len(self.request.prompt) + self.output.num_tokens

    def prefill_end(self, limits: Limits) -> int:
        """Tokens to compute before the request decodes.

        What is drawn for an answer with drafts depends on where the steps that verify them begin.
        So a preempted request that samples leaves its newest token to decoding, and goes on as if
        nothing had happened (KF-V15).
        """
        sampling = self.request.sampling
        goes_on = limits.num_drafts and self.output.num_tokens and sampling.temperature > 0
        return self.num_tokens - int(goes_on and sampling.grammar is None)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether all of the prompt has to be computed, for its log probabilities."""
        return self.request.sampling.prompt_logprobs is not None and not self.output.num_tokens


class Running(NamedTuple):
    """A request that owns pages and a row. A named tuple, since every step makes one a row.

    Attributes:
      output: generated tokens of committed steps.
      slot: entry in the device's token buffer.
      prefill_end: see `Waiting`. Until so many tokens are computed the request takes part in
        prefill steps, then in decode steps.
      computed: tokens that committed steps have written to the cache.
      chain: prefix keys of the known tokens.
      arrival, cached_tokens: as of `Waiting`.
      draft_rate: chance that a draft is taken; see `scheduler.drafting`.
      prompt_logprobs: of the prompt's computed part, as far as they are wanted and not told yet.
    """

    request: Request
    output: TokenLog
    slot: int
    prefill_end: int
    computed: int
    chain: KeyChain
    arrival: int
    cached_tokens: int
    draft_rate: float = drafting.FIRST_RATE
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def known(self) -> int:
        """Tokens whose ids the host has."""
        return len(self.request.prompt) + self.output.num_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """As of `Waiting`."""
        return self.request.sampling.prompt_logprobs is not None and not self.output.num_tokens

    @property
    def split_end(self) -> int:
        """Where aligned chunks end: before the last token of the prefill, or with the prompt
        (cache-semantics.md section 6)."""
        return max(len(self.request.prompt), self.prefill_end - 1)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens of positions `start` to `end`."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        output = self.output.tokens()
        offset = len(prompt)
        return prompt[start:] + output[max(0, start - offset) : end - offset]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A step that was planned and not committed.

    Attributes:
      rows: of its plan, in order.
      live: requests whose results still count, and how many tokens of each the cache holds after
        the step. A request that is aborted, preempted or finished is withdrawn here, so that a
        later admission of the same id cannot receive an old result (KF-S04).
    """

    step_id: int
    rows: tuple[RowPlan, ...]
    live: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Everything that decides what the next step does.

    Attributes:
      waiting: first come, first served; preempted requests are put back in front.
      running: by request id, in order of admission.
      in_flight: oldest step first.
      last_kind: of the step planned last; the two kinds alternate when both have work.
      num_arrivals: requests submitted so far.
      stats: of the prefix cache.
    """

    table: PageTable
    waiting: tuple[Waiting, ...] = ()
    running: Mapping[str, Running] = dataclasses.field(default_factory=dict[str, Running])
    in_flight: tuple[InFlight, ...] = ()
    next_step_id: int = 0
    last_kind: Kind = "decode"
    num_preemptions: int = 0
    num_arrivals: int = 0
    stats: CacheStats = dataclasses.field(default_factory=CacheStats)


def initial_state(table: PageTable, limits: Limits) -> SchedulerState:
    """A state without requests.

    Raises:
      ConfigError: no bucket is wide enough for the pages of the longest request.
    """
    needed = table.geometry.attention_pages(limits.max_request_tokens - 1)
    for kind in ("prefill", "decode"):
        widest = max(bucket.pages for bucket in limits.buckets if bucket.kind == kind)
        if widest < needed:
            raise ConfigError(
                f"no {kind} bucket is wide enough: got {widest} pages a row; expected {needed} "
                f"pages of {table.geometry.page_tokens} tokens for {limits.max_request_tokens} "
                "tokens"
            )
    return SchedulerState(table=table)


def is_idle(state: SchedulerState) -> bool:
    """Whether no request is open and no step is in flight."""
    return not (state.waiting or state.running or state.in_flight)


def has_free_row(state: SchedulerState, limits: Limits) -> bool:
    """Whether there is a row that neither a running nor a waiting request takes."""
    return len(state.running) + len(state.waiting) < limits.max_rows


def planned_ends(state: SchedulerState) -> Mapping[str, int]:
    """Tokens in the cache once every step in flight is done, for each request that has one."""
    ends: dict[str, int] = {}
    for step in state.in_flight:
        ends.update(step.live)
    return ends


def in_order(running: Mapping[str, Running], limits: Limits) -> Iterable[tuple[str, Running]]:
    """The most important request first: by priority and arrival, or else in order of admission."""
    if not limits.by_priority:
        return running.items()
    return sorted(running.items(), key=lambda item: (item[1].request.priority, item[1].arrival))


def waiting_in_order(state: SchedulerState, limits: Limits) -> tuple[Waiting, ...]:
    """The queue, the entry to be admitted first in front."""
    if not limits.by_priority:
        return state.waiting
    return tuple(sorted(state.waiting, key=lambda one: (one.request.priority, one.arrival)))


def stop_running(
    state: SchedulerState, request_id: str, *, is_tainted: bool = False
) -> SchedulerState:
    """Release a running request's pages and row, and withdraw it from the steps in flight.

    The steps may still write to the pages: the next owner's clear comes after them on the device.

    Args:
      is_tainted: nothing that it computed may be reused.
    """
    row = state.running[request_id]
    table = page_table.release(
        state.table,
        request_id,
        computed=row.computed,
        keys=row.chain.keys,
        is_at_rest=not any(request_id in step.live for step in state.in_flight),
        is_tainted=is_tainted,
    )
    return dataclasses.replace(
        state,
        table=table,
        running=_without(state.running, request_id),
        in_flight=tuple(
            dataclasses.replace(step, live=_without(step.live, request_id))
            if request_id in step.live
            else step
            for step in state.in_flight
        ),
    )


def preempt(state: SchedulerState, request_id: str) -> SchedulerState:
    """Put a running request back in front of the queue; it will recompute all it knows.

    Tokens in flight are dropped: nobody has seen them, and the request samples them again.
    """
    row = state.running[request_id]
    state = stop_running(state, request_id)
    entry = Waiting(
        request=row.request,
        chain=row.chain,
        arrival=row.arrival,
        output=row.output,
        cached_tokens=row.cached_tokens,
        draft_rate=row.draft_rate,
    )
    return dataclasses.replace(
        state, waiting=(entry, *state.waiting), num_preemptions=state.num_preemptions + 1
    )


def check_state(state: SchedulerState, limits: Limits) -> None:
    """Verify the invariants of a state and of its page table.

    Raises:
      InvariantError: naming every request that breaks one.
    """
    page_table.check(state.table)
    problems: list[str] = []
    waiting_ids = [entry.request.request_id for entry in state.waiting]
    if len({*waiting_ids, *state.running}) != len(waiting_ids) + len(state.running):
        problems.append("a request is in the queue twice, or waits and runs")
    if set(state.table.owners) != set(state.running):
        problems.append("requests with pages and running requests differ")
    slots = [row.slot for row in state.running.values()]
    if len(set(slots)) != len(slots) or not all(0 <= slot < limits.max_rows for slot in slots):
        problems.append(f"slots are shared or out of range: got {slots}")
    problems += [
        f"step {step.step_id} has live rows of requests that do not run"
        for step in state.in_flight
        if step.live.keys() - state.running.keys()
    ]
    for request_id, row in state.running.items():
        problems += [f"{request_id!r}: {problem}" for problem in _check_row(state, row)]
    if problems:
        raise InvariantError("; ".join(problems))


def _check_row(state: SchedulerState, row: Running) -> list[str]:
    problems: list[str] = []
    request_id = row.request.request_id
    position = row.computed
    for step in state.in_flight:
        if request_id not in step.live:
            continue
        planned = next(other for other in step.rows if other.request_id == request_id)
        if planned.start != position:
            problems.append(f"step {step.step_id} starts at {planned.start}; expected {position}")
        position = planned.start + planned.length - planned.num_drafts
    if position > row.request.max_cached_tokens:
        problems.append(
            f"{position} tokens are computed or in flight; expected at most "
            f"{row.request.max_cached_tokens}"
        )
    owned = state.table.owners.get(request_id)
    if owned and len(owned.attention) < state.table.geometry.attention_pages(position):
        problems.append(f"{len(owned.attention)} attention pages do not hold {position} tokens")
    return problems


def _without[V](mapping: Mapping[str, V], key: str) -> dict[str, V]:
    return {other: value for other, value in mapping.items() if other != key}
