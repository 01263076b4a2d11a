"""Spans of calls: whose trace they continue, what they tell, and how their phases follow."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from serving.plan import Admission, Output
from serving.request import RequestError
from tests.fakes import fake_request

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from serving.rpc.spans import CallTrace, Traces

TRACE_ID, SPAN_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
PARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"


class Sent:
    """Traces, and the spans that they sent when they are closed."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces = Traces(self._exporter, "fake")

    def spans(self) -> dict[str, ReadableSpan]:
        self.traces.close()
        every = self._exporter.get_finished_spans()
        assert len({span.name for span in every}) == len(every)
        return {span.name.split()[0]: span for span in every}


@pytest.fixture
def sent() -> Iterator[Sent]:
    one = Sent()
    yield one
    one.traces.close()


def output(request_id: str = "a", *token_ids: int, **changes: Any) -> Output:
    values: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": len(token_ids)}
    return Output(request_id=request_id, token_ids=token_ids, **values | changes)


def admit(trace: CallTrace, request_id: str = "a") -> None:
    trace.admitted(Admission(request_id, 0, 0))


@pytest.mark.parametrize(
    ("metadata", "is_continued"),
    [
        ((("traceparent", PARENT),), True),
        ((("user-agent", "x"), ("traceparent", PARENT), ("data-bin", b"\0")), True),
        ((("traceparent", "nonsense"),), False),
        ((), False),
    ],
)
def test_a_span_continues_the_trace_of_its_caller(
    sent: Sent, metadata: Sequence[tuple[str, str | bytes]], is_continued: bool
) -> None:
    with sent.traces.call("a", metadata):
        pass
    span = sent.spans()["text_completion"]
    assert span.context is not None
    assert (span.context.trace_id == TRACE_ID) == is_continued
    assert (span.parent.span_id if span.parent else None) == (SPAN_ID if is_continued else None)


def test_a_call_that_its_caller_does_not_sample_sends_nothing(sent: Sent) -> None:
    with sent.traces.call("a", (("traceparent", PARENT[:-1] + "0"),)) as trace:
        trace.submitted([fake_request("a")])
        trace.passed(output("a", 1, finish_reason="stop"))
    assert not sent.spans()
    assert sent.traces.num_ended == 0


def test_an_answered_call_tells_what_was_asked_and_given(sent: Sent) -> None:
    requests = [fake_request("a", max_tokens=7), fake_request("a#1", max_tokens=7)]
    with sent.traces.call("a", ()) as trace:
        trace.submitted(requests)
        admit(trace)
        admit(trace, "a#1")
        trace.passed(output("a#1", 1, 2, cached_tokens=4))
        admit(trace, "a#1")  # after a preemption
        trace.passed(output("a", 1, cached_tokens=4, finish_reason="stop"))
        trace.passed(output("a#1", 3, completion_tokens=3, finish_reason="length"))
    span = sent.spans()["text_completion"]
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert attributes.pop("k3jax.queue_time") >= 0
    sampling = requests[0].sampling
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.id": "a",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": len(requests[0].prompt),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "k3jax.preemptions": 1,
    }
    assert [event.name for event in span.events] == ["resumed"]


@pytest.mark.parametrize(
    ("num_steps", "phases"),
    [(0, ()), (1, ("queue",)), (2, ("queue", "prefill")), (3, ("queue", "prefill", "decode"))],
)
def test_phases_follow_each_other_to_the_end_of_the_call(
    sent: Sent, num_steps: int, phases: tuple[str, ...]
) -> None:
    with sent.traces.call("a", ()) as trace:
        steps = (
            lambda: trace.submitted([fake_request("a")]),
            lambda: admit(trace),
            lambda: trace.passed(output("a", 1)),
        )
        for step in steps[:num_steps]:
            step()
    spans = sent.spans()
    whole = spans.pop("text_completion")
    assert tuple(spans) == phases
    assert all(span.parent == whole.context for span in spans.values())
    times = [(span.start_time or 0, span.end_time or 0) for span in spans.values()]
    ends = [whole.start_time or 0, *(time for pair in times for time in pair), whole.end_time or 0]
    assert ends == sorted(ends)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RequestError("INVALID_ARGUMENT", "n is wrong"), "INVALID_ARGUMENT", "n is wrong"),
        (asyncio.CancelledError(), "CANCELLED", "the client left, or its deadline passed"),
        (KeyError("secret"), "INTERNAL", "KeyError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_call_without_an_answer_tells_why(
    sent: Sent, error: BaseException, status: str, message: str
) -> None:
    with pytest.raises(type(error)), sent.traces.call("a", ()):
        raise error
    span = sent.spans()["text_completion"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, message)
    assert (span.attributes or {})["error.type"] == status
    assert "secret" not in span.to_json()


def test_an_aborted_call_is_no_answer(sent: Sent) -> None:
    with sent.traces.call("a", ()) as trace:
        trace.submitted([fake_request("a")])
        trace.passed(output("a", finish_reason="abort"))
    span = sent.spans()["text_completion"]
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "CANCELLED"


class Away(InMemorySpanExporter):
    """Sends nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_spans_that_were_not_sent_can_be_told_from_those_that_were(sent: Sent) -> None:
    away = Traces(Away(), "fake")
    for traces in (away, sent.traces):
        with traces.call("a", ()):
            pass
        traces.close()
    assert (away.num_ended, away.num_sent) == (1, 0)
    assert (sent.traces.num_ended, sent.traces.num_sent) == (1, 1)


def test_the_server_program_loads_the_library_for_traces_only() -> None:
    look = "import serving.cli, sys; sys.exit('opentelemetry' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True)
