"""How a request enters, advances and leaves: `submit`, `commit`, `abort`. Pure functions on
`SchedulerState`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from serving import page_table
from serving.page_table import KeyChain, PageTable, chain_of, extend_chain
from serving.plan import FinishReason, Output, StepResult
from serving.request import InvariantError, Request, RequestError
from serving.scheduler import drafting
from serving.scheduler.limits import Limits
from serving.scheduler.state import (
    InFlight,
    Running,
    SchedulerState,
    Waiting,
    has_free_row,
    stop_running,
)
from serving.scheduler.token_log import TokenLog


def chain_of_prompt(table: PageTable, request: Request) -> KeyChain:
    """Prefix keys of a prompt. Long prompts take milliseconds, so this may be done beforehand."""
    policy = table.policy
    chain = chain_of(request.cache_salt, policy.unit_tokens, policy.hash_lookahead_tokens)
    return extend_chain(chain, request.prompt) if policy.enabled else chain


def submit(
    state: SchedulerState, limits: Limits, request: Request, *, chain: KeyChain | None = None
) -> SchedulerState:
    """Put a request that passed `check_request` at the end of the queue.

    Args:
      chain: of `chain_of_prompt`; made here if it is not given.

    Raises:
      RequestError: ALREADY_EXISTS, the id is live (KF-V01); RESOURCE_EXHAUSTED, the queue is full,
        by requests or by tokens (KF-V07). The state is unchanged.
    """
    check_queue((state,), limits, request)
    return enqueue(state, request, chain or chain_of_prompt(state.table, request))


def check_queue(states: Sequence[SchedulerState], limits: Limits, request: Request) -> None:
    """Refuse a request that cannot be queued now.

    Args:
      states: of all replicas. They share `max_waiting` and `max_waiting_tokens`; no request is
        refused while one of them has a free row.

    Raises:
      RequestError: see `submit`.
    """
    request_id = request.request_id
    for state in states:
        if request_id in state.running or _find_waiting(state, request_id) is not None:
            raise RequestError(
                "ALREADY_EXISTS",
                f"request_id is in use: got {request_id!r}; expected an id that no live request "
                "has",
            )
    if any(has_free_row(state, limits) for state in states):
        return
    # A request that finds a free row is not queued: it waits for the next turn only.
    queued = [
        entry for state in states for entry in state.waiting[limits.max_rows - len(state.running) :]
    ]
    if len(queued) >= limits.max_waiting:
        raise RequestError(
            "RESOURCE_EXHAUSTED",
            f"the queue is full: got {len(queued)} waiting requests; expected fewer than "
            f"{limits.max_waiting}; retry later",
        )
    queued_tokens = sum(entry.num_tokens for entry in queued)
    if queued_tokens + len(request.prompt) > limits.max_waiting_tokens:
        raise RequestError(
            "RESOURCE_EXHAUSTED",
            f"the queue is full: got {queued_tokens} waiting tokens and a prompt of "
            f"{len(request.prompt)}; expected at most {limits.max_waiting_tokens} together; retry "
            "later",
        )


def enqueue(
    state: SchedulerState, request: Request, chain: KeyChain, *, hit_tokens: int = 0
) -> SchedulerState:
    """Put a request that passed `check_queue` at the end of a queue.

    Args:
      hit_tokens: see `Waiting`.
    """
    entry = Waiting(request=request, chain=chain, arrival=state.num_arrivals, hit_tokens=hit_tokens)
    return dataclasses.replace(
        state, waiting=(*state.waiting, entry), num_arrivals=state.num_arrivals + 1
    )


def withdraw(state: SchedulerState, entry: Waiting) -> SchedulerState:
    """Take an entry out of the queue."""
    others = tuple(other for other in state.waiting if other is not entry)
    return dataclasses.replace(state, waiting=others)


def abort(
    state: SchedulerState, request_id: str, *, error: RequestError | None = None
) -> tuple[SchedulerState, Output | None]:
    """End a request now, wherever it is, and free everything it holds.

    Args:
      error: why the server ends it; None if its client left.

    Returns:
      The state, and the request's last output, or None if no such request is live (KF-V03).
    """
    live = state.running.get(request_id) or _find_waiting(state, request_id)
    if live is None:
        return state, None
    state = stop_running(state, request_id) if isinstance(live, Running) else withdraw(state, live)
    return state, Output(
        request_id=request_id,
        token_ids=(),
        finish_reason="abort" if error is None else "error",
        prompt_tokens=len(live.request.prompt),
        completion_tokens=live.output.num_tokens,
        error=error,
        cached_tokens=live.cached_tokens or 0,
    )


def commit(state: SchedulerState, result: StepResult) -> tuple[SchedulerState, tuple[Output, ...]]:
    """Apply the result of the oldest step in flight.

    Rows that were withdrawn meanwhile are ignored: a surplus token after a stop, an aborted or
      preempted request.

    Returns:
      The state, and one output for every live row that sampled, in row order.

    Raises:
      InvariantError: the result is not the oldest step's, or not one entry a row.
    """
    if not state.in_flight or state.in_flight[0].step_id != result.step_id:
        expected = [step.step_id for step in state.in_flight]
        raise InvariantError(
            f"results are out of order: got step {result.step_id}; expected the first of {expected}"
        )
    step, *later = state.in_flight
    if len(result.tokens) != len(step.rows) or len(result.finite) != len(step.rows):
        raise InvariantError(
            f"the result of step {step.step_id} does not match its rows: got "
            f"{len(result.tokens)} tokens and {len(result.finite)} flags; expected "
            f"{len(step.rows)}"
        )
    table = page_table.commit_step(state.table, step.step_id)
    unit_tokens = table.policy.unit_tokens
    is_looking_ahead = table.policy.hash_lookahead_tokens > 0
    running = dict(state.running)
    outputs: list[Output] = []
    tried_drafts = taken_drafts = 0
    tokens, finite = result.tokens.tolist(), result.finite.tolist()
    accepted = result.accepted or itertools.repeat(())
    for planned, token, is_finite, drafts in zip(step.rows, tokens, finite, accepted, strict=False):
        request_id = planned.request_id
        computed = step.live.get(request_id)
        if computed is None:
            continue
        request, output, slot, prefill_end, _, chain, arrival, cached_tokens, rate, told = running[
            request_id
        ]
        if planned.num_drafts:
            rate = drafting.updated_rate(rate, planned.num_drafts, len(drafts))
            tried_drafts += planned.num_drafts
            taken_drafts += len(drafts)
        if planned.samples:
            if not is_finite:
                outputs.append(_not_finite_output(running[request_id]))
            elif drafts:
                computed += len(drafts)
                output, news = _take_tokens(request, output, (*drafts, token), cached_tokens)
                outputs.append(news)
            else:
                output = output.append(token)
                total = computed + 1 - len(request.prompt)
                outputs.append(_news(request, (token,), total, cached_tokens))
        row = Running._make(  # as in planning: faster than the constructor
            (
                request, output, slot, prefill_end, computed, chain, arrival, cached_tokens, rate,
                told,
            )
        )  # fmt: skip
        running[request_id] = row
        # Keys change at the end of a unit only; a token is known one step before it is computed.
        if drafts or is_looking_ahead or (computed + 1) % unit_tokens <= 1:
            running[request_id], table = _publish(row, table)
    if result.logprobs or result.prompt_logprobs:
        _tell_logprobs(step, result, running, outputs)
    state = dataclasses.replace(state, table=table, running=running, in_flight=tuple(later))
    if tried_drafts:
        stats = state.stats._replace(
            tried_drafts=state.stats.tried_drafts + tried_drafts,
            taken_drafts=state.stats.taken_drafts + taken_drafts,
        )
        state = dataclasses.replace(state, stats=stats)
    for news in outputs:
        if news.finish_reason is not None:
            state = stop_running(state, news.request_id, is_tainted=news.finish_reason == "error")
    return state, tuple(outputs)


def _tell_logprobs(
    step: InFlight, result: StepResult, running: dict[str, Running], outputs: list[Output]
) -> None:
    """Add log probabilities to the outputs of requests that ask for them.

    Those of a prompt gather in its row until the first token comes.
    """
    places = {output.request_id: place for place, output in enumerate(outputs)}
    for index, planned in enumerate(step.rows):
        request_id = planned.request_id
        if request_id not in step.live:
            continue
        row = running[request_id]
        if planned.scored and result.prompt_logprobs:
            # What follows the prompt's last token is no part of it.
            last = len(row.request.prompt) - 1 - planned.start
            more = result.prompt_logprobs[index][:last]
            row = row._replace(prompt_logprobs=row.prompt_logprobs + more)
        if request_id in places:
            output = outputs[places[request_id]]
            told = result.logprobs[index] if result.logprobs else ()
            outputs[places[request_id]] = output._replace(
                logprobs=told[: len(output.token_ids)], prompt_logprobs=row.prompt_logprobs
            )
            row = row._replace(prompt_logprobs=())
        running[request_id] = row


def _publish(row: Running, table: PageTable) -> tuple[Running, PageTable]:
    """Make reusable what a row's tokens gave a key to only after its step was planned."""
    chain, request_id = row.chain, row.request.request_id
    if not table.policy.enabled:
        return row, table
    if row.known >= chain.next_at:
        chain = extend_chain(chain, row.tokens(chain.num_tokens, row.known))
        row = row._replace(chain=chain)
    if min(row.computed, chain.num_tokens) >= page_table.next_key(table, request_id):
        table = page_table.publish(table, request_id, row.computed, chain.keys)
    return row, table


def _take_tokens(
    request: Request, output: TokenLog, tokens: tuple[int, ...], cached_tokens: int
) -> tuple[TokenLog, Output]:
    """Append several tokens to a request, as far as it goes on."""
    for count, token in enumerate(tokens, start=1):
        output = output.append(token)
        news = _news(request, tokens[:count], output.num_tokens, cached_tokens)
        if news.finish_reason is not None or count == len(tokens):
            return output, news
    raise InvariantError("a row sampled no token; expected at least one")


def _news(request: Request, tokens: tuple[int, ...], total: int, cached_tokens: int) -> Output:
    """What a client hears of its request's new tokens; `total` counts all generated ones."""
    reason: FinishReason | None = None
    if request.ends_with(tokens[-1]):
        reason = "stop"
    elif total >= request.sampling.max_tokens:
        reason = "length"
    matched = tokens[-1] if reason == "stop" else None
    return Output._make(
        (
            request.request_id, tokens, len(request.prompt), total, reason, matched, None,
            cached_tokens, None, (), (),
        )
    )  # fmt: skip


def _not_finite_output(row: Running) -> Output:
    """End a request whose logits are not finite, without a token (KF-K09)."""
    position = len(row.request.prompt) + row.output.num_tokens
    return Output(
        request_id=row.request.request_id,
        token_ids=(),
        finish_reason="error",
        prompt_tokens=len(row.request.prompt),
        completion_tokens=row.output.num_tokens,
        error=RequestError(
            "INTERNAL",
            f"the model's logits are not finite at position {position}; expected finite numbers; "
            "other requests are unaffected",
        ),
        cached_tokens=row.cached_tokens,
    )


def _find_waiting(state: SchedulerState, request_id: str) -> Waiting | None:
    return next((e for e in state.waiting if e.request.request_id == request_id), None)
