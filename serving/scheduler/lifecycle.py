"""How a request enters, advances and leaves: `submit`, `commit`, `abort`. Pure functions on
`SchedulerState`."""

from __future__ import annotations

import dataclasses

from serving.plan import FinishReason, Output, StepResult
from serving.request import InvariantError, Request, RequestError
from serving.scheduler.limits import Limits
from serving.scheduler.state import Running, SchedulerState, Waiting, stop_running


def submit(state: SchedulerState, limits: Limits, request: Request) -> SchedulerState:
    """Put a request that passed `check_request` at the end of the queue.

    Raises:
      RequestError: ALREADY_EXISTS, the id is live (KF-V01); RESOURCE_EXHAUSTED, the queue is full,
        by requests or by tokens (KF-V07). The state is unchanged.
    """
    request_id = request.request_id
    if request_id in state.running or _find_waiting(state, request_id) is not None:
        raise RequestError(
            "ALREADY_EXISTS",
            f"request_id is in use: got {request_id!r}; expected an id that no live request has",
        )
    # A request that finds a free row is not queued: it waits for the next turn only.
    free_rows = limits.max_rows - len(state.running)
    is_queued = len(state.waiting) >= free_rows
    queued = state.waiting[free_rows:]
    if is_queued and len(queued) >= limits.max_waiting:
        raise RequestError(
            "RESOURCE_EXHAUSTED",
            f"the queue is full: got {len(queued)} waiting requests; expected fewer than "
            f"{limits.max_waiting}; retry later",
        )
    queued_tokens = sum(entry.num_tokens for entry in queued)
    if is_queued and queued_tokens + len(request.prompt) > limits.max_waiting_tokens:
        raise RequestError(
            "RESOURCE_EXHAUSTED",
            f"the queue is full: got {queued_tokens} waiting tokens and a prompt of "
            f"{len(request.prompt)}; expected at most {limits.max_waiting_tokens} together; retry "
            "later",
        )
    return dataclasses.replace(state, waiting=(*state.waiting, Waiting(request=request)))


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
    if isinstance(live, Running):
        state = stop_running(state, request_id)
    else:
        others = tuple(entry for entry in state.waiting if entry is not live)
        state = dataclasses.replace(state, waiting=others)
    return state, Output(
        request_id=request_id,
        token_ids=(),
        finish_reason="abort" if error is None else "error",
        prompt_tokens=len(live.request.prompt),
        completion_tokens=live.output.num_tokens,
        error=error,
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
    running = dict(state.running)
    outputs: list[Output] = []
    tokens, finite = result.tokens.tolist(), result.finite.tolist()
    for planned, token, is_finite in zip(step.rows, tokens, finite, strict=True):
        request_id = planned.request_id
        computed = step.live.get(request_id)
        if computed is None:
            continue
        request, output, slot, prefill_end, _ = running[request_id]
        if planned.samples:
            if is_finite:
                output = output.append(token)
                outputs.append(_token_output(request, token, computed))
            else:
                outputs.append(_not_finite_output(running[request_id]))
        running[request_id] = Running(request, output, slot, prefill_end, computed)
    state = dataclasses.replace(state, running=running, in_flight=tuple(later))
    for news in outputs:
        if news.finish_reason is not None:
            state = stop_running(state, news.request_id)
    return state, tuple(outputs)


def _token_output(request: Request, token: int, computed: int) -> Output:
    """News of the token that follows `computed` tokens in the cache."""
    prompt_tokens = len(request.prompt)
    completion_tokens = computed + 1 - prompt_tokens
    reason: FinishReason | None = None
    if request.ends_with(token):
        reason = "stop"
    elif completion_tokens >= request.sampling.max_tokens:
        reason = "length"
    return Output(
        request_id=request.request_id,
        token_ids=(token,),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        finish_reason=reason,
        matched_token_id=token if reason == "stop" else None,
    )


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
    )


def _find_waiting(state: SchedulerState, request_id: str) -> Waiting | None:
    return next((e for e in state.waiting if e.request.request_id == request_id), None)
