"""Prometheus metrics: what a scrape shows of calls, the engine and the cache."""

from __future__ import annotations

import asyncio
import itertools
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.page_table import CachePolicy
from serving.rpc.lifecycle import Lifecycle
from serving.rpc.metrics import Distribution, Metrics, serve_metrics
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

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "k3jax.json"


async def scrape(port: int) -> dict[tuple[str, ...], float]:
    """All samples: by name, and the values of their labels."""
    url = f"http://127.0.0.1:{port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_scrape_agrees_with_what_was_answered_refused_and_cancelled():
    async with serving(fake_load(SlowExecutor(fake_geometry()))) as harness:
        port = serve_metrics(harness.service.metrics, "127.0.0.1", 0)
        answers = [
            await collect(harness.stub.Generate(request(name, max_tokens=6, stream=stream)))
            for name, stream in (("a", True), ("b", False))
        ]
        assert (await status_of(harness.stub.Generate(request("c", top_p=2.0))))[0]
        call = harness.stub.Generate(request("d", max_tokens=40))
        await call.read()
        harness.engine.pause("d")  # it runs until the scrape is there
        running = await scrape(port)
        call.cancel()
        await harness.until_idle()
        samples = await scrape(port)
    assert running["k3jax_requests_running", "0"] == 1
    assert running["k3jax_pages", "0", "held"] > 0
    assert samples["k3jax_requests_running", "0"] == 0
    assert samples["k3jax_pages", "0", "held"] == 0
    total = sum(samples["k3jax_pages", "0", state] for state in ("held", "idle", "empty"))
    assert total == harness.counts().total_pages
    ends = {key[1]: value for key, value in samples.items() if key[0] == "k3jax_requests_total"}
    assert ends == {"length": 2, "INVALID_ARGUMENT": 1, "cancelled": 1}
    assert samples["k3jax_time_to_first_token_seconds_count",] == 3
    assert samples["k3jax_request_latency_seconds_count",] == 2
    first_chunk = len(answers[0].chunks[0].token_ids)
    assert samples["k3jax_inter_token_latency_seconds_count",] >= 6 - first_chunk
    assert samples["k3jax_prompt_tokens_total",] == 3 * len(PROMPT)
    assert samples["k3jax_generation_tokens_total",] >= 13
    assert samples["k3jax_serving",] == 1


async def test_kf_v05_gauges_of_an_idle_server_are_true_without_new_traffic():
    executor = SlowExecutor(fake_geometry(page_tokens=64), num_pages=200, max_rows=20)
    load = fake_load(
        executor, page_tokens=64, num_pages=200, max_rows=20, max_prefill_rows=20,
        max_context_tokens=3000,
    )  # fmt: skip
    async with serving(load) as harness:
        port = serve_metrics(harness.service.metrics, "127.0.0.1", 0)
        ids = [f"r{index}" for index in range(20)]
        calls = [harness.stub.Generate(request(id, max_tokens=2900)) for id in ids]
        answers = [asyncio.create_task(collect(call)) for call in calls]
        await harness.until(lambda: harness.counts().running == 20)
        await harness.stub.Abort(messages.AbortRequest(request_ids=ids))
        await asyncio.gather(*answers)
        await asyncio.sleep(0.5)  # of the two seconds
        samples = await scrape(port)
    assert samples["k3jax_requests_running", "0"] == 0
    assert samples["k3jax_requests_waiting", "0"] == 0
    assert samples["k3jax_pages", "0", "held"] == 0


async def test_kf_v06_counters_never_fall_and_count_a_preempted_prompt_once():
    # Three state pages each, and four pages of four tokens for both.
    policy = CachePolicy(unit_tokens=2, key_every_unit=True)
    load = fake_load(SlowExecutor(fake_geometry(), num_pages=11), num_pages=11, policy=policy)
    async with serving(load) as harness:
        port = serve_metrics(harness.service.metrics, "127.0.0.1", 0)
        calls = [harness.stub.Generate(request(id, max_tokens=9)) for id in "ab"]
        answers = [asyncio.create_task(collect(call)) for call in calls]
        scrapes = [await scrape(port)]
        while not all(answer.done() for answer in answers):
            scrapes.append(await scrape(port))
        scrapes.append(await scrape(port))
        assert harness.counts().preemptions > 0
    counters = [key for key in scrapes[-1] if key[0].endswith("_total")]
    for before, after in itertools.pairwise(scrapes):
        assert all(before.get(key, 0) <= after.get(key, 0) for key in counters)
    assert scrapes[-1]["k3jax_prompt_tokens_total",] == 2 * len(PROMPT)
    assert scrapes[-1]["k3jax_generation_tokens_total",] == 2 * 9


async def test_the_dashboard_asks_for_metrics_that_exist():
    names = set(re.findall(r"k3jax_[a-z_]+", DASHBOARD.read_text()))
    async with serving() as harness:
        await collect(harness.stub.Generate(request()))
        there = {one.name for family in harness.service.metrics.collect() for one in family.samples}
    assert len(names) > 15
    assert not names - there


async def test_metrics_are_there_before_the_model():
    port = serve_metrics(Metrics(Lifecycle()), "127.0.0.1", 0)
    samples = await scrape(port)
    assert samples["k3jax_serving",] == 0
    assert ("k3jax_steps_total",) not in samples


def test_a_distribution_counts_values_up_to_and_with_their_bound():
    distribution = Distribution((0.1, 1.0))
    for value, times in ((0.1, 1), (0.5, 2), (7.0, 1)):
        distribution.add(value, times)
    samples = distribution.family("x", "help").samples
    buckets = {one.labels["le"]: one.value for one in samples if one.name == "x_bucket"}
    assert buckets == {"0.1": 1, "1.0": 3, "+Inf": 4}
    assert {one.name: one.value for one in samples if "le" not in one.labels} == {
        "x_count": 4,
        "x_sum": pytest.approx(8.1),
    }
