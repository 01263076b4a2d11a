"""Traces of calls for OpenTelemetry: one span a call of `Generate`, sent by OTLP.

Imported only if traces are asked for, since the library is an optional one (`otel` among the
extras). A call's span continues the trace that the caller's W3C `traceparent` names, and has three
children, which follow each other: `queue`, `prefill`, `decode`. Attributes have the names of
OpenTelemetry's conventions for generative AI where those have one; prompts and answers are no part
of them. Spans are made on the event loop, and sent in batches by a thread of the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import os
import time
from collections.abc import Generator, Iterable, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.plan import Admission, Output
from serving.request import Request, RequestError

_OPERATION = "text_completion"
_PHASES = ("queue", "prefill", "decode")


class Traces:
    """Makes the spans of a server. Lives on the event loop.

    The library's environment variables hold, for example `OTEL_TRACES_SAMPLER` and
    `OTEL_SERVICE_NAME`.

    Args:
      exporter: sends spans.
      model: what clients call the model.
    """

    def __init__(self, exporter: SpanExporter, model: str):
        self._model = model
        self._sent = _Counted(exporter)
        self._batches = _CountedBatches(self._sent)
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "k3jax"),
                "service.version": importlib.metadata.version("k3jax"),
            }
        )
        # It would wait for half a minute at exit, if nobody takes the spans.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._batches)
        self._tracer = self._provider.get_tracer("k3jax")

    @property
    def num_ended(self) -> int:
        """Spans that were to be sent."""
        return self._batches.num_spans

    @property
    def num_sent(self) -> int:
        """Those that were. The others are under way, or lost, of which the library logs why."""
        return self._sent.num_spans

    @contextlib.contextmanager
    def call(
        self, request_id: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> Generator[CallTrace]:
        """Trace one call of `Generate`, however it ends.

        Args:
          metadata: of the call.
        """
        headers = {name: value for name, value in metadata if isinstance(value, str)}
        context = TraceContextTextMapPropagator().extract(headers, Context())
        trace = CallTrace(self._tracer, self._model, request_id, context)
        try:
            yield trace
        except RequestError as error:
            trace.fail(error.status, error.message)
            raise
        except asyncio.CancelledError:
            trace.fail("CANCELLED", "the client left, or its deadline passed")
            raise
        except Exception as error:
            trace.fail("INTERNAL", type(error).__name__)
            raise
        finally:
            trace.end()

    def close(self) -> None:
        """Send what is left, and end. Blocks, for half a minute if nobody takes it."""
        self._provider.shutdown()


class CallTrace:
    """The span of one call. Written on the event loop, except by `admitted`.

    Args:
      context: that of the caller.
    """

    def __init__(self, tracer: Tracer, model: str, request_id: str, context: Context):
        self._tracer = tracer
        self._begin_ns = time.time_ns()
        self._submitted_ns: int | None = None
        self._first_token_ns: int | None = None
        self._admissions: list[tuple[int, Admission]] = []
        self._latest: dict[str, Output | None] = {}  # by answer
        self._span = tracer.start_span(
            f"{_OPERATION} {model}",
            context,
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": _OPERATION,
                "gen_ai.request.model": model,
                "gen_ai.response.id": request_id,
            },
            start_time=self._begin_ns,
        )

    def submitted(self, requests: Sequence[Request]) -> None:
        """Note what is asked for, now that it goes to the engine.

        Args:
          requests: one for each answer.
        """
        self._submitted_ns = time.time_ns()
        self._latest = {request.request_id: None for request in requests}
        sampling = requests[0].sampling
        self._span.set_attributes(
            {
                "gen_ai.request.choice.count": len(requests),
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.seed": sampling.seed,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.usage.input_tokens": len(requests[0].prompt),
            }
        )

    def admitted(self, admission: Admission) -> None:
        """Note that an answer gets its first step, or goes on after a preemption. Called in the
        engine's thread."""
        self._admissions.append((time.time_ns(), admission))

    def passed(self, output: Output) -> None:
        """Note an output on its way to the client."""
        if output.token_ids and self._first_token_ns is None:
            self._first_token_ns = time.time_ns()
        self._latest[output.request_id] = output
        if output.finish_reason == "abort":
            self.fail("CANCELLED", "aborted by a call of Abort")

    def fail(self, status: str, message: str) -> None:
        """Note why there is no whole answer."""
        self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.set_attribute("error.type", status)

    def end(self) -> None:
        """End the span and make its children."""
        if self._span.is_recording():
            self._describe()
        self._span.end()

    def _describe(self) -> None:
        outputs = [output for output in self._latest.values() if output is not None]
        attributes: dict[str, int | float | list[str]] = {
            "gen_ai.response.finish_reasons": [
                one.finish_reason for one in outputs if one.finish_reason is not None
            ],
            "gen_ai.usage.output_tokens": sum(one.completion_tokens for one in outputs),
            "gen_ai.usage.cache_read.input_tokens": max(
                (one.cached_tokens for one in outputs), default=0
            ),
        }
        if self._first_token_ns is not None:
            first_s = (self._first_token_ns - self._begin_ns) * 1e-9
            attributes["gen_ai.response.time_to_first_chunk"] = first_s
        if self._submitted_ns is not None:
            attributes["k3jax.preemptions"] = self._tell_resumed()
            attributes["k3jax.queue_time"] = self._make_children(self._submitted_ns)
        self._span.set_attributes(attributes)

    def _tell_resumed(self) -> int:
        """Add an event for each answer that went on after a preemption; return how many."""
        known: set[str] = set()
        num_resumed = 0
        for time_ns, admission in self._admissions:
            if admission.request_id in known:
                num_resumed += 1
                self._span.add_event("resumed", timestamp=time_ns)
            known.add(admission.request_id)
        return num_resumed

    def _make_children(self, submitted_ns: int) -> float:
        """Make a span for each phase that was entered; return the seconds in the queue."""
        borders = [submitted_ns]
        if self._admissions:
            borders.append(self._admissions[0][0])
        if self._first_token_ns is not None:
            borders.append(self._first_token_ns)
        borders.append(time.time_ns())
        context = set_span_in_context(self._span, Context())
        for name, (begin_ns, end_ns) in zip(_PHASES, itertools.pairwise(borders), strict=False):
            self._tracer.start_span(name, context, start_time=begin_ns).end(end_ns)
        return (borders[1] - submitted_ns) * 1e-9


def open_traces(endpoint: str, model: str) -> Traces:
    """Traces that a collector gets.

    Args:
      endpoint: `HOST:PORT`, in the clear, or `https://HOST:PORT`. It need not be there yet.
    """
    is_clear = not endpoint.startswith("https://")
    return Traces(OTLPSpanExporter(endpoint=endpoint, insecure=is_clear), model)


class _Counted(SpanExporter):
    """Counts the spans that an exporter could send."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self.num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_spans += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _CountedBatches(BatchSpanProcessor):
    """Counts the spans that are to be sent."""

    num_spans = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self.num_spans += 1
        super().on_end(span)
