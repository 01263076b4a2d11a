"""The engine: one thread that owns the schedulers' state and keeps the device one step ahead.

Other threads post events to one inbox; the engine takes them at the top of each turn, plans a
step, starts it, and only then waits for the step before it. Nothing else touches the schedulers'
state, of which there is one a replica. The thread sleeps when no request can go on, and never
sleeps while a step's result is outstanding.

Every accepted request gets exactly one output with a finish reason, whatever happens. An exception
in the loop ends all open requests with INTERNAL and the engine with health `failed`: the state of
the device is unknown then, so the process has to end too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol

from k3jax.controls import RowMask
from serving import replicas, scheduler
from serving.counts import Counts, Totals, count
from serving.grammars import GrammarMatcher
from serving.inbox import (
    Abort,
    Drain,
    Event,
    Flush,
    Inbox,
    OnAdmitted,
    OnOutput,
    Pause,
    Resume,
    Stop,
    Submit,
)
from serving.kv_events.news import OnNews, Watch
from serving.page_table import InUse, PageTable
from serving.plan import GroupPlan, GroupResult, Output, RowPlan
from serving.record import Committed, Ended, Flushed, Planned, Recorder, Submitted
from serving.replicas import Replicas
from serving.request import Request, RequestError
from serving.scheduler import Limits
from serving.stopping import StopMatcher

logger = logging.getLogger(__name__)

HealthStatus = Literal["starting", "serving", "draining", "stopped", "failed"]


class Executor[Handle](Protocol):
    """The device side of the engine. Used by the engine's thread only."""

    def dispatch(self, plan: GroupPlan) -> Handle:
        """Start a step after all earlier ones, without waiting for any."""
        ...

    def collect(self, handle: Handle) -> GroupResult:
        """Wait for a step's result. Steps are collected in the order of their dispatch."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether requests are served; `message` says why not."""

    status: HealthStatus
    message: str = ""


class Engine[Handle]:
    """Serves requests on an executor. All methods but `run` may be called from any thread.

    Args:
      executor: runs the steps.
      limits: of the schedulers.
      tables: page tables without owners, one a replica.
      recorder: is told what the schedulers are; default is to keep no record.
      on_failure: called from the engine's thread after an exception ended it.
      clock: monotonic, in seconds.

    Raises:
      ConfigError: the buckets do not hold the longest request.
    """

    def __init__(
        self,
        executor: Executor[Handle],
        limits: Limits,
        tables: Sequence[PageTable],
        *,
        recorder: Recorder | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._executor = executor
        self._limits = limits
        self._chain_of = functools.partial(scheduler.chain_of_prompt, tables[0])
        self._recorder = recorder or Recorder()
        self._on_failure = on_failure
        self._clock = clock
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        # Read by any thread, replaced whole by the engine's.
        self._health = Health(status="starting")
        self._step_started_s: float | None = None
        # Of the engine's thread alone.
        self._replicas = replicas.initial_replicas(tables, limits)
        self._watch: Watch | None = None
        self._totals = Totals(generated_tokens=(0,) * len(tables))
        self._on_output: dict[str, OnOutput] = {}
        self._matchers: dict[str, StopMatcher] = {}
        self._grammars: dict[str, GrammarMatcher] = {}
        self._on_admitted: dict[str, OnAdmitted] = {}
        self._paused: set[str] = set()
        self._in_flight: collections.deque[tuple[Handle, float]] = collections.deque()
        self._drains: list[Future[None]] = []
        self._is_stopping = False
        # Again read by any thread.
        self._shown = (self._replicas, self._totals)

    def watch_caches(self, on_news: OnNews) -> None:
        """Report every change of what can be reused. To be called before `start`.

        Args:
          on_news: called from the engine's thread; it must not block or raise.
        """
        self._watch = Watch(self.num_replicas, on_news)

    def start(self) -> None:
        """Run the engine in its own thread."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the engine's thread to end; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(
        self,
        request: Request,
        on_output: OnOutput,
        *,
        matcher: StopMatcher | None = None,
        grammar: GrammarMatcher | None = None,
        on_admitted: OnAdmitted | None = None,
    ) -> Future[None]:
        """Hand in a request.

        Args:
          on_output: called from the engine's thread, after acceptance, for each output of the
            request. It must not block; if it raises, the request is aborted.
          matcher: finds the stop strings of the request, if it has any.
          grammar: says which tokens may come next, if the request has a grammar.
          on_admitted: called from the engine's thread when a step admits the request, again after
            each preemption. It must neither block nor raise.

        Returns:
          Done once the engine has accepted the request. Fails with `RequestError` if it is refused,
          and then `on_output` is never called. Cancelling it before that withdraws the request.
        """
        accepted: Future[None] = Future()
        try:
            scheduler.check_request(request, self._limits)  # long prompts: not in the engine's time
        except RequestError as error:
            accepted.set_exception(error)
            return accepted
        chain = self._chain_of(request)
        self._post(Submit(request, on_output, accepted, chain, matcher, grammar, on_admitted))
        return accepted

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now. Ids that are not live are ignored (KF-V03)."""
        self._post(Abort(tuple(request_ids)))

    def pause(self, request_id: str) -> None:
        """Do not schedule a request until `resume`: its client does not keep up."""
        self._post(Pause(request_id))

    def resume(self, request_id: str) -> None:
        """Undo `pause`."""
        self._post(Resume(request_id))

    def flush(self) -> Future[None]:
        """Forget all prefixes that could be reused. Fails with `InUse` while a request holds pages,
        and with `RequestError` if the engine does not serve."""
        flushed: Future[None] = Future()
        self._post(Flush(flushed))
        return flushed

    def drain(self) -> Future[None]:
        """Refuse new requests from now on; done when all open ones have ended."""
        drained: Future[None] = Future()
        self._post(Drain(drained))
        return drained

    def stop(self) -> None:
        """End all open requests with UNAVAILABLE, and the engine's thread after them."""
        self._post(Stop())

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    def health(self) -> Health:
        return self._health

    def counts(self) -> Counts:
        return count(*self._shown)

    def step_age_s(self) -> float:
        """Seconds since the oldest step in flight was started; 0 without one (KF-K10)."""
        started_s = self._step_started_s
        return 0.0 if started_s is None else self._clock() - started_s

    def run(self) -> None:
        """Serve until `stop`. Normally called by `start`."""
        try:
            self._health = Health(status="serving")
            may_sleep = False
            while not self._is_stopping:
                for event in self._inbox.take(may_wait=may_sleep):
                    self._apply(event)
                may_sleep = not self._take_turn()
                self._show()
            self._shut_down()
        except BaseException as error:
            self._fail(error)

    def _take_turn(self) -> bool:
        """Start the next step, then apply the result of the one before; whether there was any."""
        self._recorder.write(Planned(self._paused))
        after, step = replicas.plan(self._replicas, self._limits, paused=self._paused)
        self._become(after)
        if step is not None:
            if self._on_admitted:
                self._tell_admitted(step)
            lost: dict[str, RequestError] = {}
            if self._grammars:
                step, lost = self._masked(step)
            self._in_flight.append((self._executor.dispatch(step), self._clock()))
            self._note_oldest_step()
            for request_id, error in lost.items():
                self._end(request_id, error=error)
        has_result_due = len(self._in_flight) > (0 if step is None else 1)
        if has_result_due:
            self._collect_oldest()
        if self._drains and replicas.is_idle(self._replicas):
            self._resolve_drains()
        return step is not None or has_result_due

    def _collect_oldest(self) -> None:
        handle, _ = self._in_flight[0]
        result = self._executor.collect(handle)
        self._in_flight.popleft()
        self._note_oldest_step()
        self._recorder.write(Committed(result))
        after, outputs = replicas.commit(self._replicas, result)
        self._become(after, outputs)
        if self._grammars:
            for output in itertools.chain.from_iterable(outputs):
                if (grammar := self._grammars.get(output.request_id)) is not None:
                    grammar.accept(output.token_ids)
        if self._matchers:
            outputs = tuple(tuple(map(self._end_at_stop, part)) for part in outputs)
        generated = tuple(sum(len(output.token_ids) for output in part) for part in outputs)
        self._totals = self._totals.with_step(generated, result.expert_load)
        self._show()
        for output in itertools.chain.from_iterable(outputs):
            self._deliver(output)

    def _tell_admitted(self, step: GroupPlan) -> None:
        for admission in itertools.chain.from_iterable(one.admitted for one in step.plans if one):
            if (on_admitted := self._on_admitted.get(admission.request_id)) is not None:
                on_admitted(admission)

    def _masked(self, step: GroupPlan) -> tuple[GroupPlan, dict[str, RequestError]]:
        """The step with what the grammars let come next, and the requests whose grammar cannot be
        followed any further. A row with a grammar has no token in flight."""
        lost: dict[str, RequestError] = {}

        def masks(rows: Sequence[RowPlan]) -> Iterator[RowMask]:
            for row in rows:
                if row.samples and row.sampling.grammar is not None:
                    try:
                        yield RowMask(row.slot, self._grammars[row.request_id].mask())
                    except RequestError as error:
                        lost[row.request_id] = error

        plans = (
            one and dataclasses.replace(one, masks=tuple(masks(one.rows))) for one in step.plans
        )
        return dataclasses.replace(step, plans=tuple(plans)), lost

    def _become(self, after: Replicas, outputs: Sequence[Sequence[Output]] = ()) -> None:
        """Enter the replicas' next state; `outputs` are those of the commit that led to it."""
        if self._watch is not None:
            self._watch.look(self._replicas, after, outputs)
        self._replicas = after

    def _end_at_stop(self, output: Output) -> Output:
        """End a request whose tokens complete a stop string; those behind it are dropped."""
        matcher = self._matchers.get(output.request_id)
        # The text of a token that ends the request is no part of the answer's.
        num_tokens = len(output.token_ids) - (output.matched_token_id is not None)
        match = matcher and matcher.find(output.token_ids[:num_tokens])
        if match is None:
            return output
        if output.finish_reason is None:
            self._recorder.write(Ended(output.request_id))
            self._become(replicas.abort(self._replicas, output.request_id)[0])
        return output._replace(
            token_ids=output.token_ids[: match.num_tokens],
            completion_tokens=output.completion_tokens - len(output.token_ids) + match.num_tokens,
            logprobs=output.logprobs[: match.num_tokens],
            finish_reason="stop",
            matched_token_id=None,
            matched_stop=match.stop,
        )

    def _note_oldest_step(self) -> None:
        self._step_started_s = self._in_flight[0][1] if self._in_flight else None

    def _apply(self, event: Event) -> None:
        match event:
            case Submit():
                self._accept(event)
            case Abort():
                for request_id in event.request_ids:
                    self._end(request_id, error=None)
            case Pause():
                if event.request_id in self._on_output:
                    self._paused.add(event.request_id)
            case Resume():
                self._paused.discard(event.request_id)
            case Flush():
                self._flush(event)
            case Drain():
                self._drains.append(event.drained)
                if self._health.status == "serving":
                    self._health = Health(status="draining", message="the server is shutting down")
            case Stop():
                self._is_stopping = True

    def _accept(self, event: Submit) -> None:
        if not event.accepted.set_running_or_notify_cancel():
            return  # its client has left already
        try:
            if self._is_stopping or self._health.status != "serving":
                raise _unavailable("stopping" if self._is_stopping else self._health.status)
            self._recorder.write(Submitted(event.request))
            self._replicas = replicas.submit(
                self._replicas, self._limits, event.request, chain=event.chain
            )
        except RequestError as error:
            event.accepted.set_exception(error)
            return
        self._on_output[event.request.request_id] = event.on_output
        if event.matcher is not None:
            self._matchers[event.request.request_id] = event.matcher
        if event.grammar is not None:
            self._grammars[event.request.request_id] = event.grammar
        if event.on_admitted is not None:
            self._on_admitted[event.request.request_id] = event.on_admitted
        prompt_tokens = self._totals.prompt_tokens + len(event.request.prompt)
        self._totals = self._totals._replace(prompt_tokens=prompt_tokens)
        self._show()
        event.accepted.set_result(None)

    def _flush(self, event: Flush) -> None:
        if not event.flushed.set_running_or_notify_cancel():
            return
        self._recorder.write(Flushed())
        try:
            self._become(replicas.reset(self._replicas))
        except InUse as error:
            event.flushed.set_exception(error)
        else:
            event.flushed.set_result(None)

    def _end(self, request_id: str, *, error: RequestError | None) -> None:
        self._recorder.write(Ended(request_id, error))
        after, output = replicas.abort(self._replicas, request_id, error=error)
        self._become(after)
        if output is not None:
            self._show()
            self._deliver(output)

    def _deliver(self, output: Output) -> None:
        """Pass an output on. A callback that raises costs only its own request."""
        request_id = output.request_id
        on_output = self._on_output.get(request_id)
        if on_output is None:
            return  # its callback failed on an earlier output of the same step
        if output.finish_reason is not None:
            self._forget(request_id)
        try:
            on_output(output)
        except Exception:
            logger.exception("output_callback_failed", extra={"request_id": request_id})
            self._forget(request_id)
            self._recorder.write(Ended(request_id))
            self._become(replicas.abort(self._replicas, request_id)[0])
            self._show()

    def _forget(self, request_id: str) -> None:
        self._on_output.pop(request_id, None)
        self._matchers.pop(request_id, None)
        self._grammars.pop(request_id, None)
        self._on_admitted.pop(request_id, None)
        self._paused.discard(request_id)

    def _resolve_drains(self) -> None:
        for drained in self._drains:
            _resolve(drained)
        self._drains.clear()

    def _show(self) -> None:
        """Show other threads the present state, before they can see what came of it elsewhere."""
        self._shown = (self._replicas, self._totals)

    def _end_all(self, error: RequestError) -> None:
        for request_id in tuple(self._on_output):
            self._end(request_id, error=error)

    def _shut_down(self) -> None:
        self._end_all(_unavailable("stopping"))
        while self._in_flight:  # leave the device idle; no row of these steps is live
            self._collect_oldest()
        self._close(Health(status="stopped", message="the engine was stopped"))

    def _fail(self, error: BaseException) -> None:
        message = f"the engine failed: {type(error).__name__}: {error}"
        logger.critical("engine_failed", exc_info=error)
        self._health = Health(status="failed", message=message)
        self._step_started_s = None
        try:
            self._end_all(RequestError("INTERNAL", message))
        finally:  # whatever else is broken, nobody may wait for this engine
            self._close(self._health)
            if self._on_failure is not None:
                self._on_failure(error)

    def _post(self, event: Event) -> None:
        if not self._inbox.post(event):
            self._refuse(event)

    def _close(self, health: Health) -> None:
        """Take no event any more, and answer those that came too late."""
        self._health = health
        self._recorder.close()
        for event in self._inbox.close():
            self._refuse(event)
        self._resolve_drains()

    def _refuse(self, event: Event) -> None:
        match event:
            case Submit():
                if event.accepted.set_running_or_notify_cancel():
                    event.accepted.set_exception(_unavailable(self._health.status))
            case Flush():
                if event.flushed.set_running_or_notify_cancel():
                    event.flushed.set_exception(_unavailable(self._health.status))
            case Drain():
                _resolve(event.drained)
            case _:
                pass  # nothing is live that it could mean


def _resolve(future: Future[None]) -> None:
    """Set the result of a future that its holder may have cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_result(None)


def _unavailable(status: str) -> RequestError:
    return RequestError(
        "UNAVAILABLE",
        f"the engine takes no requests: got status {status!r}; expected 'serving'; retry elsewhere",
    )
