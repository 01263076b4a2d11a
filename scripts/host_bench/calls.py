"""Cache calls of whole workloads, as recorded or as this project's scheduler makes them.

A `Script` holds only numbers and names, so that another engine can carry out the same calls
(`vllm_cache.py`). Calls, in the order in which a scheduler makes them:

    plan                                              a step begins
    lookup NAME KNOWN                                 a waiting request with KNOWN tokens
    admit NAME END HAS_OTHERS                         its first chunk, from the hit to END
    extend NAME START END KNOWN PROCESSED DRAFTS      next chunk or token of a running request
    launch                                            the step is complete as a plan
    complete                                          the oldest step that was launched is done
    publish NAME KNOWN COMPUTED SAMPLED               ... and this is how far it brought a request
    release NAME IS_PREEMPTED COMPUTED                a request gives its pages back
    reset                                             forget all entries
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serving import page_table, scheduler
from serving.plan import StepPlan, StepResult
from serving.replay import Trace, parse_trace
from serving.replay.setup import make_request, set_up
from serving.replay.trace import Abort, Add, Reset, Step, TraceConfig, num_tokens, token_ids

type Call = list[Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Tokens of one request, prompt and answer."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    salt: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A workload as cache calls.

    Attributes:
      answers: of each call: `[hit, junction]` of a lookup, whether there was room for an admit or
        extend, None for others.
      publishes_late: whether entries can come to be after the plan: with drafts, or with steps in
        flight.
    """

    name: str
    config: TraceConfig
    requests: Mapping[str, Source]
    calls: tuple[Call, ...]
    answers: tuple[Any, ...]
    publishes_late: bool

    def followed_by(self, requests: Mapping[str, Source], calls: Sequence[Call]) -> Script:
        """The script with further requests and calls; the answers to these are not known."""
        return dataclasses.replace(
            self,
            requests={**self.requests, **requests},
            calls=(*self.calls, *calls),
            answers=(*self.answers, *[None] * len(calls)),
        )

    def to_json(self) -> dict[str, Any]:
        """All that a replay needs, as JSON values."""
        config = self.config
        states = [group for group in config.groups if group.kind == "recurrent"]
        return {
            "config": {
                "num_pages": config.usable_pages + 1,
                "page_tokens": config.page_tokens,
                "unit_tokens": config.unit_tokens,
                "num_state_groups": len(states),
                "num_slots": states[0].spec_slots if states else 0,
                "export_tokens": (
                    states[0].export_align_tokens if states and states[0].can_export else None
                ),
                "retention_tokens": config.retention_tokens,
                "max_model_tokens": config.scheduler.max_model_tokens,
                "max_step_tokens": config.scheduler.max_step_tokens,
                "reserve_full_prompt": config.scheduler.reserve_full_prompt,
                "watermark": config.scheduler.watermark,
                "tail_drop": config.spec.tail_drop,
                "checkpoint_junctions": config.spec.shared_prefix_checkpoint,
                "lookahead_slots": config.spec.lookahead_slots,
                "lookahead_tokens": config.spec.hash_lookahead_tokens,
                "publishes_late": self.publishes_late,
            },
            "requests": {name: dataclasses.asdict(one) for name, one in self.requests.items()},
            "calls": self.calls,
        }


@dataclasses.dataclass(slots=True)
class _Live:
    """A request while its calls are written down."""

    source: Source
    known: int
    processed: int = 0
    runs: bool = False


@dataclasses.dataclass(slots=True)
class _Writer:
    """Collects the calls of a workload. Mutable, and never leaves the function that fills it."""

    requests: dict[str, _Live] = dataclasses.field(default_factory=dict[str, _Live])
    calls: list[Call] = dataclasses.field(default_factory=list[Call])
    answers: list[Any] = dataclasses.field(default_factory=list[Any])

    def write(self, *call: Any, answer: Any = None) -> None:
        self.calls.append(list(call))
        self.answers.append(answer)

    def add(self, op: Add) -> None:
        tokens = token_ids(op.prompt) + token_ids(op.output)
        source = Source(tokens=tokens, prompt_tokens=num_tokens(op.prompt), salt=op.salt)
        self.requests[op.request_id] = _Live(source, source.prompt_tokens)

    def lookup(self, name: str, hit: int, junction: int) -> None:
        self.write("lookup", name, self.requests[name].known, answer=[hit, junction])

    def grow(self, name: str, start: int, end: int, drafts: int, fits: bool) -> None:
        live = self.requests[name]
        if live.runs:
            call = ["extend", name, start, end, live.known, live.processed, drafts]
        else:
            call = ["admit", name, end, any(one.runs for one in self.requests.values())]
            live.runs, live.processed = fits, start
        self.write(*call, answer=fits)

    def done(self, name: str, computed: int, sampled: int) -> None:
        live = self.requests[name]
        live.known += sampled
        live.processed = computed
        self.write("publish", name, live.known, computed, sampled)

    def release(self, name: str, *, is_preempted: bool = False) -> None:
        live = self.requests[name]
        self.write("release", name, is_preempted, live.processed)
        live.runs, live.processed = False, 0

    def finish(self, name: str, config: TraceConfig) -> Script:
        return Script(
            name=name,
            config=config,
            requests={name: live.source for name, live in self.requests.items()},
            calls=tuple(self.calls),
            answers=tuple(self.answers),
            publishes_late=config.spec.draft_tokens > 0 or config.scheduler.async_depth > 1,
        )


def recorded_calls(data: Any) -> Script:
    """The manager calls that a recorded trace lists, from its decoded JSON."""
    trace = parse_trace(data)
    writer = _Writer()
    open_steps: collections.deque[dict[str, tuple[int, int]]] = collections.deque()
    for item, raw in zip(trace.items, data["trace"], strict=True):
        kind, expect = raw["op"]["op"], raw["expect"]
        if isinstance(item.op, Add):
            writer.add(item.op)
        elif isinstance(item.op, Reset):
            writer.write("reset", answer=True)
        calls = collections.deque(expect.get("calls", ()))
        if kind in ("step", "schedule"):
            writer.write("plan")
            open_steps.append(_write_plan(writer, calls, expect.get("drafts", {})))
            writer.write("launch")
        if kind in ("step", "complete"):
            writer.write("complete")
            for name, (end, drafts) in open_steps.popleft().items():
                sampled = expect["sampled"].get(name, 0)
                if writer.requests[name].runs:
                    writer.done(name, end + (sampled - 1 if drafts else 0), sampled)
        for _, name, *_ in (call for call in calls if call[0] == "free"):
            writer.release(name)
    return writer.finish(trace.name, trace.config)


def _write_plan(
    writer: _Writer, calls: collections.deque[Any], drafts: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Move the calls of a planned step; returns verified tokens and drafts of each row."""
    rows: dict[str, tuple[int, int]] = {}
    while calls and calls[0][0] in ("lookup", "alloc", "preempt"):
        kind, name, *args = calls.popleft()
        if kind == "lookup":
            writer.lookup(name, *args)
        elif kind == "preempt":
            writer.release(name, is_preempted=True)
            rows.pop(name, None)
        else:
            start, length, fits, _ = args
            num_drafts = drafts.get(name, 0)
            writer.grow(name, start, start + length, num_drafts, fits)
            if fits:
                rows[name] = start + length - num_drafts, num_drafts
    return rows


def scheduled_calls(trace: Trace) -> Script:
    """The calls that this project's scheduler makes for a trace.

    Calls that did not lead to a row are left out.

    Raises:
      ValueError: the trace has drafts or keeps several steps in flight.
    """
    config = trace.config
    if config.spec.draft_tokens or config.scheduler.async_depth > 1:
        raise ValueError(f"{trace.name} has drafts or steps in flight; expected neither")
    setup = set_up(config)
    state, limits, writer = setup.state, setup.limits, _Writer()
    for item in trace.items:
        match item.op:
            case Add() as op:
                writer.add(op)
                state = scheduler.submit(state, limits, make_request(op))
            case Step():
                before = state.running.keys()
                state, plan = scheduler.plan(state, limits)
                if plan is None:
                    continue
                for name in before - state.running.keys():
                    writer.release(name, is_preempted=True)
                _write_step(writer, plan)
                state, outputs = scheduler.commit(state, _result(writer, plan))
                sampled = {output.request_id: len(output.token_ids) for output in outputs}
                for row in plan.rows:
                    end = row.start + row.length
                    writer.done(row.request_id, end, sampled.get(row.request_id, 0))
                for output in outputs:
                    if output.finish_reason:
                        writer.release(output.request_id)
            case Abort(name):
                if name in state.running:
                    writer.release(name)
                state, _ = scheduler.abort(state, name)
            case Reset():
                writer.write("reset", answer=True)
                table = page_table.reset(state.table)
                state = dataclasses.replace(state, table=table)
            case _:
                pass
    return writer.finish(trace.name, config)


def _write_step(writer: _Writer, plan: StepPlan) -> None:
    writer.write("plan")
    admitted = {news.request_id: news for news in plan.admitted}
    for row in plan.rows:
        news = admitted.get(row.request_id)
        if news is not None:
            writer.lookup(row.request_id, news.hit_tokens, news.junction)
        writer.grow(row.request_id, row.start, row.start + row.length, 0, True)
    writer.write("launch")
    writer.write("complete")


def _result(writer: _Writer, plan: StepPlan) -> StepResult:
    """The scripted tokens of a step."""
    tokens = [
        writer.requests[row.request_id].source.tokens[row.start + row.length] if row.samples else 0
        for row in plan.rows
    ]
    return StepResult(
        step_id=plan.step_id,
        tokens=np.array(tokens, np.int32),
        finite=np.ones(len(tokens), np.bool_),
    )
