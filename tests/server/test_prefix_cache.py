"""What clients see of the prefix cache: counts of reused tokens, loads, and how to empty it."""

from __future__ import annotations

import logging

import pytest

from serving.page_table import CachePolicy
from serving.rpc.protocol import common, messages
from tests.fakes import fake_geometry, fake_request, solo_tokens
from tests.server.harness import (
    DEADLINE_S,
    Harness,
    SlowExecutor,
    collect,
    fake_load,
    request,
    serving,
)

UNIT = 2
SYSTEM = tuple(range(10, 31))  # 21 tokens: five pages and a bit


def load(*, enabled: bool = True):
    policy = CachePolicy(
        unit_tokens=UNIT,
        enabled=enabled,
        key_every_unit=True,
        checkpoint_junctions=True,
        keep_answer_end=True,
    )
    return fake_load(policy=policy)


async def ask(harness: Harness, request_id: str, prompt: tuple[int, ...], **fields: bool):
    """The answer to a prompt, which must be what it is without any cache."""
    answer = await collect(harness.stub.Generate(request(request_id, prompt, **fields)))
    assert answer.complete is not None
    got = answer.token_ids or tuple(answer.complete.output_ids)
    assert got == solo_tokens(fake_request(request_id, prompt))
    return answer


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_second_request_with_a_system_prompt_reports_cached_tokens(stream: bool):
    async with serving(load()) as harness:
        cold = await ask(harness, "cold", (*SYSTEM, 1, 2, 3), stream=stream)
        same = await ask(harness, "same", (*SYSTEM, 1, 2, 3), stream=stream)
        await ask(harness, "fork", (*SYSTEM, 4, 5, 6), stream=stream)
        warm = await ask(harness, "warm", (*SYSTEM, 7, 8, 9), stream=stream)
    assert cold.complete.cached_tokens == 0
    assert same.complete.cached_tokens == 22  # all units but the last token's
    assert warm.complete.cached_tokens == 20  # the page boundary at which the prompts forked
    assert [chunk.cached_tokens for chunk in warm.chunks] == [20] * len(warm.chunks)


async def test_next_turn_reuses_the_answer_too():
    async with serving(load()) as harness:
        first = await ask(harness, "first", SYSTEM)
        second = await ask(harness, "second", (*SYSTEM, *first.token_ids, 7, 8))
    assert len(SYSTEM) < second.complete.cached_tokens <= len(SYSTEM) + 3


async def test_kf_c05_loads_of_tenants_that_share_a_prefix_tell_what_was_missed():
    """Four prompts that share 17 tokens: the second finds no state there, the others do."""
    shared, unique = SYSTEM[:17], [tuple(range(n, n + 7)) for n in (40, 50, 60, 70)]
    async with serving(load()) as harness:
        answers = [await ask(harness, f"r{own[0]}", (*shared, *own)) for own in unique]
        stats = harness.counts().cache
    assert [answer.complete.cached_tokens for answer in answers] == [0, 0, 16, 16]
    assert (stats.num_misses, stats.num_state_misses, stats.state_missed_tokens) == (1, 1, 16)
    assert (stats.junction_hit_tokens, stats.looked_up_tokens) == (32, 4 * 24)


async def test_nothing_is_reused_when_the_cache_is_off():
    async with serving(load(enabled=False)) as harness:
        await ask(harness, "a", SYSTEM)
        again = await ask(harness, "b", SYSTEM)
    assert again.complete.cached_tokens == 0


async def test_loads_show_the_hit_rate_and_count_kept_pages_as_free():
    async with serving(load()) as harness:
        for request_id in "abcd":
            await ask(harness, request_id, SYSTEM)
        (reply,) = (await harness.stub.GetLoads(messages.GetLoadsRequest())).loads
        info = await harness.stub.GetServerInfo(messages.GetServerInfoRequest())
    assert reply.cache_hit_rate == pytest.approx(3 * 20 / (4 * 21))
    assert (reply.num_used_tokens, reply.token_usage) == (0, 0)
    assert info.block_size == UNIT


async def test_flush_makes_the_next_request_cold():
    async with serving(load()) as harness:
        await ask(harness, "a", SYSTEM)
        reply = await harness.stub.FlushCache(common.FlushCacheRequest())
        cold = await ask(harness, "b", SYSTEM)
    assert reply.success
    assert cold.complete.cached_tokens == 0


async def test_flush_waits_for_running_requests_only_as_long_as_it_is_told_to():
    executor = SlowExecutor(fake_geometry(page_tokens=64))
    policy = CachePolicy(unit_tokens=UNIT)
    long_load = fake_load(executor, page_tokens=64, max_context_tokens=3000, policy=policy)
    async with serving(long_load) as harness:
        call = harness.stub.Generate(request("a", SYSTEM, max_tokens=2900))
        await harness.until(lambda: harness.counts().generated_tokens > 0)
        refused = await harness.stub.FlushCache(common.FlushCacheRequest())
        patient = harness.stub.FlushCache(common.FlushCacheRequest(timeout_s=DEADLINE_S))
        assert not refused.success
        assert "the cache is in use" in refused.message
        call.cancel()
        assert (await patient).success


async def test_counters_are_logged_at_the_end(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="serving"):
        async with serving(load()) as harness:
            await ask(harness, "a", SYSTEM)
            await ask(harness, "b", SYSTEM)
    (fields,) = (entry.fields for entry in caplog.records if entry.message == "closed")
    assert fields["looked_up_tokens"] == 42
    assert fields["partial_hit_tokens"] + fields["full_hit_tokens"] == 20
    assert fields["prompt_tokens"] == 42
    assert fields["cleared_pages"] >= 6
