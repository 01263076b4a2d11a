"""One workload through one engine, a request at a time, and single steps on the device."""

from __future__ import annotations

import collections
import dataclasses
import queue
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from speculation_bench.variants import Built

from serving.engine import Engine
from serving.executor import Executor, Handle
from serving.packing import pack_group
from serving.page_table import empty_table
from serving.plan import GroupPlan, GroupResult, Output, RowPlan, StepPlan
from serving.request import Request, SamplingParams

_CHAINS, _CHAIN_S, _MOST_STEPS = 5, 0.1, 30
_STOP_S = 5.0


class CaseFailed(Exception):
    """A request did not end as it should, or not in time."""


class Step(NamedTuple):
    """A decoding step of one request.

    Attributes:
      num_drafts: verified ones. num_taken: of these, those that stayed.
      done_s: when its result was there.
      is_next: whether the step before it was one of the same request too.
    """

    num_drafts: int
    num_taken: int
    done_s: float
    is_next: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """A workload's answers.

    Attributes:
      tokens: of each answer.
      decoded_tokens, seconds: of all answers, from each one's first token on, which comes of the
        prompt.
    """

    tokens: tuple[tuple[int, ...], ...]
    decoded_tokens: int
    seconds: float
    steps: tuple[Step, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.decoded_tokens / self.seconds

    @property
    def step_s(self) -> list[float]:
        """Seconds from one result to the next of the same request."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [after.done_s - before.done_s for before, after in pairs if after.is_next]


class Recording:
    """An executor that notes the decoding steps of an engine with one row."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._plans: collections.deque[GroupPlan] = collections.deque()
        self._decoding: str | None = None
        self.steps: list[Step] = []
        self.row: RowPlan | None = None

    def dispatch(self, plan: GroupPlan) -> Handle:
        self._plans.append(plan)
        return self._executor.dispatch(plan)

    def collect(self, handle: Handle) -> GroupResult:
        result = self._executor.collect(handle)
        done_s = time.perf_counter()
        plan = self._plans.popleft()
        (step,), (drawn,) = plan.plans, result.results
        assert step is not None  # with one replica a step has rows
        assert drawn is not None
        (row,) = step.rows
        if plan.bucket.kind == "prefill":
            self._decoding = None
            return result
        num_taken = len(drawn.accepted[0]) if row.num_drafts else 0
        is_next = self._decoding == row.request_id
        self.steps.append(Step(row.num_drafts, num_taken, done_s, is_next))
        self._decoding, self.row = row.request_id, row
        return result


def play(
    built: Built,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    until_s: float,
) -> tuple[Played, RowPlan]:
    """Answer prompts one after the other through an engine of their own.

    Args:
      until_s: of the monotonic clock.

    Returns:
      The answers, and the last decoding row.

    Raises:
      CaseFailed: a request was refused or ended with an error, or time is up.
    """
    recording = Recording(built.executor)
    table = empty_table(built.geometry, built.num_pages)
    engine = Engine(recording, built.limits, (table,))
    engine.start()
    try:
        answers = [
            _answer(
                engine,
                Request(
                    request_id=f"r{number}",
                    prompt=tuple(prompt),
                    sampling=SamplingParams(
                        temperature=temperature, seed=number, max_tokens=max_tokens, ignore_eos=True
                    ),
                    eos_token_ids=(),
                ),
                until_s,
            )
            for number, prompt in enumerate(prompts)
        ]
    finally:
        engine.stop()
        is_stopped = engine.join(_STOP_S)
    if not is_stopped:
        raise CaseFailed(f"a step hangs: got {engine.step_age_s():.0f} s")
    assert recording.row is not None
    played = Played(
        tokens=tuple(tokens for tokens, _ in answers),
        decoded_tokens=sum(len(tokens) - 1 for tokens, _ in answers),
        seconds=sum(seconds for _, seconds in answers),
        steps=tuple(recording.steps),
    )
    return played, recording.row


def _answer(
    engine: Engine[Handle], request: Request, until_s: float
) -> tuple[tuple[int, ...], float]:
    """The tokens of a request, and the seconds from the first to the last."""
    news: queue.SimpleQueue[tuple[float, Output]] = queue.SimpleQueue()
    tokens: list[int] = []
    times: list[float] = []
    try:
        accepted = engine.submit(request, lambda output: news.put((time.perf_counter(), output)))
        accepted.result(timeout=max(0.0, until_s - time.monotonic()))
        while True:
            now_s, output = news.get(timeout=max(0.0, until_s - time.monotonic()))
            tokens += output.token_ids
            times.append(now_s)
            if output.finish_reason == "length":
                return tuple(tokens), times[-1] - times[0]
            if output.finish_reason is not None:
                raise CaseFailed(f"{request.request_id} ended: {output.error}")
    except (TimeoutError, queue.Empty) as error:
        raise CaseFailed(
            f"out of time: got {len(tokens)} tokens of {request.request_id}"
        ) from error


def device_step_s(built: Built, row: RowPlan, tokens: Sequence[int]) -> float:
    """Median seconds of a full decoding step on the device alone: steps are started one behind the
    other, and only the last is waited for. No engine may be running.

    Args:
      row: a decoding row of an engine of `built`. Its pages are used, and not good for it after.
      tokens: to verify; the first and as many as there are drafts.
    """
    (bucket,) = (bucket for bucket in built.limits.buckets if bucket.kind == "decode")
    room = len(row.attention_pages) * built.geometry.page_tokens - bucket.tokens
    row = row._replace(
        start=min(row.start, room), length=bucket.tokens, num_drafts=bucket.num_drafts,
        tokens=tuple(tokens[: bucket.tokens]),
    )  # fmt: skip
    step = StepPlan(step_id=0, bucket=bucket, rows=(row,), clear_pages=())
    plan = GroupPlan(step_id=0, bucket=bucket, plans=(step,))
    packed = pack_group(plan, built.model.program.num_recurrent_groups, 1)

    def chain(num_steps: int) -> float:
        start_s = time.perf_counter()
        results = [built.model.run(bucket, packed) for _ in range(num_steps)]
        results[-1].block_until_ready()
        return (time.perf_counter() - start_s) / num_steps

    chain(1)
    num_steps = max(2, min(_MOST_STEPS, int(_CHAIN_S / chain(1))))
    return statistics.median(chain(num_steps) for _ in range(_CHAINS))
