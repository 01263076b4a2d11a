"""Prometheus metrics of the server: what the engine has counted, and what clients have waited for.

A scrape reads the engine's latest counts, so serving costs nothing for them. Times are counted in
buckets on the event loop as outputs pass. Counters never fall (KF-V06), and a scrape that fails is
an HTTP error of that scrape alone.

| metric | what |
|---|---|
| `k3jax_requests_total{finish_reason}` | calls of Generate by their end, or status |
| `k3jax_time_to_first_token_seconds` | from the call's arrival |
| `k3jax_inter_token_latency_seconds` | of tokens but the first; those of a chunk share |
| `k3jax_request_latency_seconds` | whole calls that were answered |
| `k3jax_requests_{running,waiting}{replica}` | now |
| `k3jax_pages{replica,state}` | held by requests, kept for reuse (`idle`), `empty` |
| `k3jax_{prompt,generation}_tokens_total` | accepted and generated |
| `k3jax_reused_tokens_total{kind}` | prompt tokens found in the cache, by where their state lay |
| `k3jax_expert_load_total{rank}` | (token, expert) pairs computed |
| `k3jax_spans_total{state}` | spans of traces that ended, and those that were sent |
| the others | as their help says |
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from serving.counts import Counts
from serving.request import RequestError
from serving.rpc.lifecycle import Lifecycle

if TYPE_CHECKING:
    from serving.plan import Output
    from serving.rpc.spans import Traces

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_REQUEST_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Distribution:
    """A histogram that one thread writes.

    Args:
      bounds: upper bounds of its buckets in ascending order; one without bound follows.
    """

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, help: str) -> Metric:
        """The histogram as Prometheus reads it."""
        bounds = (*map(str, self._bounds), "+Inf")
        totals = itertools.accumulate(tuple(self._counts))
        return HistogramMetricFamily(
            name, help, buckets=list(zip(bounds, totals, strict=True)), sum_value=self._sum
        )


class Metrics(Collector):
    """Collects the metrics of a server. Written on the event loop, read by the HTTP thread.

    Args:
      lifecycle: leads to the engine, once there is one.
      traces: of calls, if they are asked for.
    """

    def __init__(self, lifecycle: Lifecycle, traces: Traces | None = None):
        self._lifecycle, self._traces = lifecycle, traces
        self._ended: collections.Counter[str] = collections.Counter()
        self._first_token = Distribution(_FIRST_TOKEN_S)
        self._between_tokens = Distribution(_BETWEEN_TOKENS_S)
        self._request = Distribution(_REQUEST_S)

    @contextlib.contextmanager
    def request(self) -> Generator[RequestMetrics]:
        """Measure one call of `Generate`, however it ends."""
        call = RequestMetrics(self._first_token, self._between_tokens, time.monotonic())
        reason = "cancelled"
        try:
            yield call
            reason = call.finish_reason or "cancelled"
            self._request.add(time.monotonic() - call.begin_s)
        except RequestError as error:
            reason = error.status
            raise
        except Exception:
            reason = "INTERNAL"
            raise
        finally:
            self._ended[reason] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics at this moment."""
        yield _counter(
            "k3jax_requests", "Calls of Generate by their end.", "finish_reason", dict(self._ended)
        )
        yield self._first_token.family(
            "k3jax_time_to_first_token_seconds", "From a call's arrival to its first token."
        )
        yield self._between_tokens.family(
            "k3jax_inter_token_latency_seconds", "Between tokens of a call."
        )
        yield self._request.family("k3jax_request_latency_seconds", "Whole calls.")
        is_serving = GaugeMetricFamily("k3jax_serving", "Whether new requests are taken.")
        is_serving.add_metric((), float(self._lifecycle.is_serving))
        yield is_serving
        if self._traces is not None:
            spans = {"ended": self._traces.num_ended, "sent": self._traces.num_sent}
            yield _counter(
                "k3jax_spans", "Spans of traces; ended ones are to be sent.", "state", spans
            )
        served = self._lifecycle.served
        if served is not None:
            yield from _of_engine(served.engine.counts())
            age = GaugeMetricFamily("k3jax_step_age_seconds", "Age of the oldest step in flight.")
            age.add_metric((), served.engine.step_age_s())
            yield age
            compilations = CounterMetricFamily(
                "k3jax_compilations", "Programs compiled while serving; each held requests up."
            )
            compilations.add_metric((), served.compilations())
            yield compilations


class RequestMetrics:
    """Times of one call.

    Attributes:
      begin_s: when it arrived, monotonic.
      finish_reason: of its last output; None before.
    """

    def __init__(self, first_token: Distribution, between_tokens: Distribution, begin_s: float):
        self._first_token, self._between_tokens = first_token, between_tokens
        self._last_s: dict[str, float] = {}  # by answer
        self.begin_s = begin_s
        self.finish_reason: str | None = None

    def passed(self, output: Output) -> None:
        """Count an output on its way to the client."""
        self.finish_reason = output.finish_reason
        count = len(output.token_ids)
        if not count:
            return
        now_s = time.monotonic()
        last_s = self._last_s.get(output.request_id)
        if not self._last_s:
            self._first_token.add(now_s - self.begin_s)
        elif last_s is not None:
            self._between_tokens.add((now_s - last_s) / count, count)
        self._last_s[output.request_id] = now_s


def serve_metrics(metrics: Metrics, host: str, port: int) -> int:
    """Answer scrapes in a thread of its own, at `/metrics`; return the port.

    Args:
      port: 0 takes a free one.

    Raises:
      OSError: the address cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    server, _ = start_http_server(port, host, registry)
    return server.server_port


def _of_engine(counts: Counts) -> Iterator[Metric]:
    labels = ("replica",)
    running = GaugeMetricFamily("k3jax_requests_running", "Requests in steps.", labels=labels)
    waiting = GaugeMetricFamily("k3jax_requests_waiting", "Requests in the queue.", labels=labels)
    pages = GaugeMetricFamily(
        "k3jax_pages", "Pages of the pool by state.", labels=("replica", "state")
    )
    for rank, part in enumerate(counts.replicas):
        replica = str(rank)
        running.add_metric((replica,), part.running)
        waiting.add_metric((replica,), part.waiting)
        pages.add_metric((replica, "held"), part.total_pages - part.free_pages)
        pages.add_metric((replica, "idle"), part.idle_pages)
        pages.add_metric((replica, "empty"), part.free_pages - part.idle_pages)
    yield from (running, waiting, pages)
    cache = counts.cache
    for name, help, value in (
        ("k3jax_steps", "Steps of the model.", counts.steps),
        ("k3jax_prompt_tokens", "Prompt tokens of accepted requests.", counts.prompt_tokens),
        ("k3jax_generation_tokens", "Generated tokens.", counts.generated_tokens),
        ("k3jax_padding_tokens", "Places of steps that held no token.", cache.padding_tokens),
        ("k3jax_preemptions", "Requests that gave their pages back.", counts.preemptions),
        ("k3jax_evictions", "Prefixes that were forgotten for their pages.", counts.evictions),
        ("k3jax_looked_up_tokens", "Tokens looked up in the cache.", cache.looked_up_tokens),
        ("k3jax_state_missed_tokens", "Found without a state.", cache.state_missed_tokens),
        ("k3jax_copied_pages", "Pages copied on write.", cache.copied_pages),
        ("k3jax_tried_drafts", "Draft tokens verified.", cache.tried_drafts),
        ("k3jax_taken_drafts", "Draft tokens accepted.", cache.taken_drafts),
    ):
        yield _counter(name, help, None, {"": value})
    reused = {
        "full": cache.full_hit_tokens,
        "partial": cache.partial_hit_tokens,
        "junction": cache.junction_hit_tokens,
    }
    yield _counter("k3jax_reused_tokens", "Prompt tokens found in the cache.", "kind", reused)
    load = {str(rank): pairs for rank, pairs in enumerate(counts.expert_load)}
    yield _counter("k3jax_expert_load", "(token, expert) pairs computed.", "rank", load)


def _counter(name: str, help: str, label: str | None, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, help, labels=(label,) if label else ())
    for key, value in values.items():
        family.add_metric((key,) if label else (), value)
    return family
