"""The schedulers of all attention replicas as one: pure functions on an immutable value.

A replica is one `dp` rank of the mesh. It has attention weights, a page pool, a page table and rows
of its own, so it has a scheduler of its own. Experts lie over all ranks and exchange tokens, so in
a step every replica runs the same program: the same kind of step, in the smallest bucket that holds
the plan of each. A replica without rows of that kind runs it empty.

The kinds alternate for all replicas together. What the schedulers take turns by is kept in lock
step (`check_replicas`): the id of the next step, and the kind of the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from k3jax import buckets
from k3jax.buckets import Bucket
from serving import balancing, page_table, scheduler
from serving.page_table import KeyChain, PageTable
from serving.plan import GroupPlan, GroupResult, Output, StepPlan
from serving.request import InvariantError, Request, RequestError
from serving.scheduler import Limits, SchedulerState

type Replicas = tuple[SchedulerState, ...]

NO_REQUESTS: frozenset[str] = frozenset()


def initial_replicas(tables: Sequence[PageTable], limits: Limits) -> Replicas:
    """Replicas without requests, one a page table.

    Args:
      limits: of each replica, but for `max_waiting` and `max_waiting_tokens`, which they share.

    Raises:
      ConfigError: see `scheduler.initial_state`.
    """
    return tuple(scheduler.initial_state(table, limits) for table in tables)


def submit(
    replicas: Replicas, limits: Limits, request: Request, *, chain: KeyChain | None = None
) -> Replicas:
    """Put a request that passed `check_request` in the queue of one replica.

    Raises:
      RequestError: INVALID_ARGUMENT, the request names a replica that does not exist; for others
        see `scheduler.submit`. The queue is full when the requests that wait for a row
        anywhere are too many; while any replica has a free row, it is not.
    """
    if request.replica is not None and not 0 <= request.replica < len(replicas):
        raise RequestError(
            "INVALID_ARGUMENT",
            f"data_parallel_rank is out of range: got {request.replica}; expected "
            f"0..{len(replicas) - 1}",
        )
    scheduler.check_queue(replicas, limits, request)
    chain = chain or scheduler.chain_of_prompt(replicas[0].table, request)
    number, hit_tokens = 0, 0
    if len(replicas) > 1:
        number, hit_tokens = balancing.choose(replicas, limits, chain, request)
    state = scheduler.enqueue(replicas[number], request, chain, hit_tokens=hit_tokens)
    return (*replicas[:number], state, *replicas[number + 1 :])


def abort(
    replicas: Replicas, request_id: str, *, error: RequestError | None = None
) -> tuple[Replicas, Output | None]:
    """End a request now, wherever it is; see `scheduler.abort`."""
    for number, before in enumerate(replicas):
        state, output = scheduler.abort(before, request_id, error=error)
        if output is not None:
            return (*replicas[:number], state, *replicas[number + 1 :]), output
    return replicas, None


def plan(
    replicas: Replicas, limits: Limits, *, paused: Set[str] = NO_REQUESTS
) -> tuple[Replicas, GroupPlan | None]:
    """Choose the next step of all replicas; see `scheduler.plan`.

    Returns:
      The replicas with the step in flight, and the step, or None if no request can go on now.
    """
    replicas = balancing.rebalance(replicas, limits, paused)
    for kind in scheduler.turns(replicas[0], limits):
        planned = [
            scheduler.plan(state, limits, paused=paused, kinds=(kind,)) for state in replicas
        ]
        replicas = tuple(state for state, _ in planned)
        plans = [step for _, step in planned if step is not None]
        if plans:
            bucket = _common_bucket(limits, plans)
            joined = [_join(state, step, plans[0].step_id, bucket) for state, step in planned]
            return tuple(state for state, _ in joined), GroupPlan(
                step_id=plans[0].step_id, bucket=bucket, plans=tuple(step for _, step in joined)
            )
    return replicas, None


def commit(
    replicas: Replicas, result: GroupResult
) -> tuple[Replicas, tuple[tuple[Output, ...], ...]]:
    """Apply the result of the oldest step in flight; see `scheduler.commit`.

    Returns:
      The replicas, and the outputs of each.

    Raises:
      InvariantError: the result is not the oldest step's, or not one of each replica with rows.
    """
    oldest = [state.in_flight[0].step_id if state.in_flight else None for state in replicas]
    expected = min((step_id for step_id in oldest if step_id is not None), default=None)
    runs = [step_id == result.step_id for step_id in oldest]
    if expected != result.step_id or runs != [one is not None for one in result.results]:
        raise InvariantError(
            f"results are out of order: got step {result.step_id} of replicas "
            f"{[i for i, one in enumerate(result.results) if one is not None]}; expected step "
            f"{expected} of those with rows in it, of oldest steps {oldest}"
        )
    committed = [
        (state, ()) if one is None else scheduler.commit(state, one)
        for state, one in zip(replicas, result.results, strict=True)
    ]
    return tuple(state for state, _ in committed), tuple(outputs for _, outputs in committed)


def reset(replicas: Replicas) -> Replicas:
    """Forget all prefixes that could be reused.

    Raises:
      InUse: a request of any replica holds pages; nothing is forgotten then.
    """
    return tuple(
        dataclasses.replace(state, table=page_table.reset(state.table)) for state in replicas
    )


def is_idle(replicas: Replicas) -> bool:
    """Whether no request is open and no step is in flight."""
    return all(scheduler.is_idle(state) for state in replicas)


def check_replicas(replicas: Replicas, limits: Limits) -> None:
    """Verify the invariants of every replica, and those between them.

    Raises:
      InvariantError: naming what breaks one.
    """
    for state in replicas:
        scheduler.check_state(state, limits)
    turns = {(state.next_step_id, state.last_kind) for state in replicas}
    if len(turns) != 1:
        raise InvariantError(f"replicas are out of step: got next steps and last kinds {turns}")
    ids = [entry.request.request_id for state in replicas for entry in state.waiting]
    ids += [request_id for state in replicas for request_id in state.running]
    if len(set(ids)) != len(ids):
        raise InvariantError(f"a request is on two replicas: got {sorted(ids)}")


def _common_bucket(limits: Limits, plans: Sequence[StepPlan]) -> Bucket:
    """The smallest bucket that holds every plan."""
    if len(plans) == 1:
        return plans[0].bucket
    is_prefill = any(step.bucket.kind == "prefill" for step in plans)
    return buckets.choose(
        limits.buckets,
        "prefill" if is_prefill else "decode",
        tokens=max(sum(row.length for row in step.rows) for step in plans),
        rows=max(len(step.rows) for step in plans),
        pages=max(len(row.attention_pages) for step in plans for row in step.rows),
    )


def _join(
    state: SchedulerState, step: StepPlan | None, step_id: int, bucket: Bucket
) -> tuple[SchedulerState, StepPlan | None]:
    """Bring a replica and its plan in step with the others: the bucket is the common one, and a
    replica without rows has taken its turn."""
    if step is not None and step.bucket == bucket:
        return state, step
    padding = bucket.tokens - (0 if step is None else step.bucket.tokens)
    stats = state.stats
    return dataclasses.replace(
        state,
        next_step_id=step_id + 1,
        last_kind=bucket.kind,
        stats=stats._replace(padding_tokens=stats.padding_tokens + padding),
    ), step and dataclasses.replace(step, bucket=bucket)
