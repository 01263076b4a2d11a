"""Traces of calls, from a real server to a collector that takes OTLP over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.page_table import CachePolicy
from serving.processes.children import free_ports
from serving.rpc.protocol import Stub
from tests.fakes import fake_geometry
from tests.server.harness import (
    PROMPT,
    SlowExecutor,
    collect,
    fake_load,
    messages,
    request,
    serving,
    status_of,
)
from tests.server.test_process import process

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from serving.rpc.spans import Traces, open_traces

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent.

    Attributes:
      spans: messages of OTLP.
      resources: attributes of what sent them.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for part in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in part.resource.attributes})
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def call(self, request_id: str) -> tuple[Any, dict[str, Any]]:
        """The span of a call, and its attributes."""
        for span in self.spans:
            attributes = {one.key: value(one.value) for one in span.attributes}
            if attributes.get("gen_ai.response.id") == request_id:
                return span, attributes
        raise AssertionError(f"there is no span of {request_id}")

    def children(self, span: Any) -> list[str]:
        return [one.name for one in self.spans if one.parent_span_id == span.span_id]


def value(one: Any) -> Any:
    """Of an attribute."""
    if one.HasField("array_value"):
        return [value(part) for part in one.array_value.values]
    return getattr(one, one.WhichOneof("value"))


@contextlib.contextmanager
def listening() -> Iterator[tuple[Collector, str]]:
    """A collector and its address."""
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, Traces]]:
    """A collector, and traces that it gets."""
    with listening() as (collector, address):
        traces = open_traces(address, "fake")
        try:
            yield collector, traces
        finally:
            traces.close()


async def test_answered_refused_and_cancelled_calls_arrive_at_a_collector() -> None:
    with collecting() as (collector, traces):
        async with serving(fake_load(SlowExecutor(fake_geometry())), traces=traces) as harness:
            whole = request("whole", max_tokens=6, stream=False)
            await collect(harness.stub.Generate(whole, metadata=PARENT))
            replies = harness.stub.Generate(request("two", max_tokens=3, n=2))
            assert sum([reply.HasField("complete") async for reply in replies]) == 2
            assert (await status_of(harness.stub.Generate(request("bad", top_p=2.0))))[0]
            left = harness.stub.Generate(request("left", max_tokens=40))
            await left.read()
            left.cancel()
            replies = aiter(harness.stub.Generate(request("ended", max_tokens=40)))
            await anext(replies)
            await harness.stub.Abort(messages.AbortRequest(request_ids=["ended"]))
            assert [reply async for reply in replies][-1].complete.finish_reason == "abort"
            await harness.until_idle()
            await harness.until(lambda: traces.num_ended == 4 * 4 + 1)
        await asyncio.to_thread(traces.close)
        families = {family.name: family for family in harness.service.metrics.collect()}
    span, attributes = collector.call("whole")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert (span.name, span.status.code) == ("text_completion fake", 0)
    assert attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes["k3jax.preemptions"] == 0
    assert collector.children(span) == ["queue", "prefill", "decode"]
    _, attributes = collector.call("two")
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert attributes["gen_ai.usage.output_tokens"] == 6
    span, attributes = collector.call("bad")
    assert (span.status.code, attributes["error.type"]) == (2, "INVALID_ARGUMENT")
    assert not collector.children(span)
    for name in ("left", "ended"):
        span, attributes = collector.call(name)
        assert (span.status.code, attributes["error.type"]) == (2, "CANCELLED")
        assert collector.children(span) == ["queue", "prefill", "decode"]
    assert collector.resources[0]["service.name"] == "k3jax"
    samples = {one.labels["state"]: one.value for one in families["k3jax_spans"].samples}
    assert samples == {"ended": len(collector.spans), "sent": len(collector.spans)}


async def test_preemptions_are_counted_for_the_call_that_had_them() -> None:
    # As many pages as two requests cannot share to their ends: tests/server/test_metrics.py.
    policy = CachePolicy(unit_tokens=2, key_every_unit=True)
    load = fake_load(SlowExecutor(fake_geometry(), num_pages=11), num_pages=11, policy=policy)
    with collecting() as (collector, traces):
        async with serving(load, traces=traces) as harness:
            calls = [harness.stub.Generate(request(id, max_tokens=9)) for id in "ab"]
            await asyncio.gather(*map(collect, calls))
            num_preemptions = harness.counts().preemptions
        await asyncio.to_thread(traces.close)
    assert num_preemptions > 0
    calls = [collector.call(id) for id in "ab"]
    assert sum(known["k3jax.preemptions"] for _, known in calls) == num_preemptions
    assert sum(len(span.events) for span, _ in calls) == num_preemptions


def stopped(folder: Path, endpoint: str) -> str:
    """The log of a server process that answered a call and was told to end."""
    with process("--port", "0", "--otlp-endpoint", endpoint, cache=folder) as server:
        address = server.until_line("ready ").split()[1]
        with grpc.insecure_channel(address) as channel:
            list(Stub(channel).Generate(request("last")))
        server.child.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    return server.stderr


def test_the_last_spans_are_sent_when_the_server_ends(tmp_path: Path) -> None:
    with listening() as (collector, address):
        log = stopped(tmp_path, address)
    span, attributes = collector.call("last")
    assert attributes["gen_ai.request.model"] == "k3-tiny"
    assert collector.children(span) == ["queue", "prefill", "decode"]
    assert "traces_closed ended=4 sent=4" in log


@pytest.mark.slow
def test_a_collector_that_is_away_holds_up_neither_calls_nor_the_end(tmp_path: Path) -> None:
    log = stopped(tmp_path, f"127.0.0.1:{free_ports(1)[0]}")
    assert "request_id=last finish_reason=length" in log
    assert "while exporting traces" in log
    assert "traces_closed ended=4 sent=0" in log
