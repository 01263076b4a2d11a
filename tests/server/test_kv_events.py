"""A router that subscribes to the cache's events: what it knows is what requests then reuse."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import grpc.aio
import pytest

from serving.kv_events.log import EventLog
from serving.page_table import CachePolicy
from serving.rpc import kv_events
from serving.rpc.protocol import common
from tests.fakes import fake_geometry
from tests.server.harness import (
    DEADLINE_S,
    Harness,
    SlowExecutor,
    collect,
    fake_load,
    request,
    serving,
    status_of,
)

UNIT = 2
SYSTEM = tuple(range(10, 31))  # 21 tokens: five pages and a bit
POLICY = CachePolicy(
    unit_tokens=UNIT, key_every_unit=True, checkpoint_junctions=True, keep_answer_end=True
)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "LOOK_S", 0.01)
    monkeypatch.setattr(kv_events, "HEARTBEAT_S", 0.05)


def keep_few(monkeypatch: pytest.MonkeyPatch, moments: int) -> None:
    monkeypatch.setattr(kv_events, "EventLog", functools.partial(EventLog, max_moments=moments))


class Router:
    """What a gateway makes of one subscription: blocks by rank and hash, and where it stands."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.cursors: dict[int, int] = {}
        self.kinds: list[str] = []
        self.loads: list[common.EngineLoad] = []

    def subscribe(self, harness: Harness, **fields: Any) -> None:
        """Subscribe from where the router stands."""
        fields = {"start_sequence_number": self.cursors.get(0, 0)} | fields
        self.call = harness.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(**fields))

    async def read(self) -> common.KvEventBatch:
        async with asyncio.timeout(DEADLINE_S):
            batch = await self.call.read()
        assert isinstance(batch, common.KvEventBatch), "the subscription has ended"
        self._take(batch)
        return batch

    async def settle(self) -> None:
        """Read until the server has nothing to send, and nothing runs."""
        now = time.time()
        while True:
            batch = await self.read()
            is_last = batch.load.load_only and batch.dp_rank == 0 and batch.timestamp > now
            if is_last and not batch.load.running_requests:
                return

    def known_tokens(self, prompt: tuple[int, ...], rank: int = 0) -> int:
        """Tokens of a prompt, less one, that the router expects to be reused."""
        parent, count = None, 0
        children = {value: key for key, value in self.blocks.get(rank, {}).items()}
        for start in range(0, (len(prompt) - 1) // UNIT * UNIT, UNIT):
            parent = children.get((parent, prompt[start : start + UNIT]))
            if parent is None:
                break
            count = start + UNIT
        return count

    def _take(self, batch: common.KvEventBatch) -> None:
        rank, number, cursor = batch.dp_rank, batch.sequence_number, self.cursors.get(batch.dp_rank)
        self.loads.append(batch.load)
        assert batch.HasField("load")
        if batch.load.load_only:
            assert not batch.events
            assert number == (cursor or 0)
            return
        if batch.HasField("snapshot"):
            if not batch.snapshot.index:
                assert batch.events[0].HasField("cleared")
                self.cursors.clear()
        else:
            assert number == (cursor or 0) + 1
        self.cursors[rank] = number
        for event in batch.events:
            self.kinds.append(event.WhichOneof("data"))
            self._apply(rank, event)

    def _apply(self, rank: int, event: common.KvCacheEvent) -> None:
        blocks = self.blocks.setdefault(rank, {})
        if event.HasField("cleared"):
            blocks.clear()
        for block_hash in event.removed.block_hashes:
            del blocks[block_hash]
        parent = None
        if event.stored.HasField("parent_block_hash"):
            parent = event.stored.parent_block_hash
            assert parent in blocks
        for block in event.stored.blocks:
            assert block.block_size == len(block.token_ids) == UNIT
            assert block.block_hash not in blocks
            blocks[block.block_hash] = (parent, tuple(block.token_ids))
            parent = block.block_hash


async def ask(harness: Harness, name: str, prompt: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Reused tokens and the answer."""
    answer = await collect(harness.stub.Generate(request(name, prompt)))
    assert answer.complete is not None
    return answer.complete.cached_tokens, answer.token_ids


async def test_router_knows_what_requests_reuse():
    async with serving(fake_load(policy=POLICY)) as harness:
        router = Router()
        router.subscribe(harness)
        prompt = (*SYSTEM, 1, 2, 3)
        _, answer = await ask(harness, "cold", prompt)
        await router.settle()
        assert router.known_tokens(prompt) == 22
        assert (await ask(harness, "same", prompt))[0] == 22
        turn = (*prompt, *answer[:-1], 7, 8)
        await router.settle()
        assert router.known_tokens(turn) == 26  # the state at the end of the answer
        assert (await ask(harness, "turn", turn))[0] == 26
        fork = (*SYSTEM[:9], 4, 5, 6)  # where no state is: the one that it leaves serves the next
        await router.settle()
        assert router.known_tokens(fork) == 8
        assert (await ask(harness, "fork", fork))[0] == 0
        assert (await ask(harness, "warm", (*SYSTEM[:9], 7, 8, 9)))[0] == 8
        flushed = await harness.stub.FlushCache(common.FlushCacheRequest(timeout_s=5))
        assert flushed.success
        await router.settle()
        assert router.blocks == {0: {}}
        assert router.kinds[-1] == "cleared"
        router.call.cancel()


async def test_router_resumes_where_it_was_and_learns_the_same_from_a_snapshot():
    async with serving(fake_load(policy=POLICY)) as harness:
        router = Router()
        router.subscribe(harness)
        await ask(harness, "a", (*SYSTEM, 1, 2, 3))
        await router.settle()
        router.call.cancel()
        before = dict(router.cursors)
        for i in range(4):
            await ask(harness, f"b{i}", (*SYSTEM[: 4 * i + 3], 40 + i, 2, 3, 4))
        router.subscribe(harness)
        batch = await router.read()
        assert batch.sequence_number == before[0] + 1
        assert not batch.HasField("snapshot")
        await router.settle()
        fresh = Router()  # the gateway was restarted
        fresh.subscribe(harness)
        batch = await fresh.read()
        assert (batch.snapshot.index, batch.snapshot.count) == (0, 1)
        assert batch.snapshot.blocks == len(router.blocks[0]) > 10
        await fresh.settle()
        assert fresh.blocks == router.blocks
        assert fresh.cursors == router.cursors
        await ask(harness, "c", (*SYSTEM, 50, 51, 52))
        await asyncio.gather(router.settle(), fresh.settle())
        assert fresh.blocks == router.blocks
        assert fresh.known_tokens((*SYSTEM, 50, 51, 52)) == 22
        for one in (router, fresh):
            one.call.cancel()


async def test_number_that_is_not_kept_is_refused(monkeypatch: pytest.MonkeyPatch):
    keep_few(monkeypatch, 2)
    async with serving(fake_load(policy=POLICY)) as harness:
        for i in range(5):
            await ask(harness, f"r{i}", (i, *SYSTEM))
        for number in (1, 1000):
            start = common.SubscribeKvEventsRequest(start_sequence_number=number)
            status, text, num_replies = await status_of(harness.stub.SubscribeKvEvents(start))
            assert (status, num_replies) == ("OUT_OF_RANGE", 0)
            assert f"got {number}; expected " in text
        router = Router()
        router.subscribe(harness)
        await router.settle()
        assert [router.known_tokens((i, *SYSTEM)) for i in range(5)] == [20] * 5
        router.call.cancel()


async def test_replicas_count_alike_and_keep_their_blocks_apart():
    load = fake_load(policy=POLICY, num_replicas=2)
    async with serving(load, num_replicas=2) as harness:
        router = Router()
        router.subscribe(harness)
        for rank, first in enumerate((60, 61)):
            message = request(f"r{rank}", (first, *SYSTEM))
            message.data_parallel_rank = rank
            await collect(harness.stub.Generate(message))
        await router.settle()
        for rank, first in enumerate((60, 61)):
            known = [router.known_tokens((first, *SYSTEM), one) for one in (0, 1)]
            assert known == [20 * (one == rank) for one in (0, 1)]
        assert router.cursors[0] == router.cursors[1] >= 2
        fresh = Router()
        fresh.subscribe(harness)
        await fresh.settle()
        assert (fresh.blocks, fresh.cursors) == (router.blocks, router.cursors)
        router.call.cancel()
        await ask(harness, "more", (62, *SYSTEM))
        router.subscribe(harness)
        await asyncio.gather(router.settle(), fresh.settle())
        assert (fresh.blocks, fresh.cursors) == (router.blocks, router.cursors)
        for one in (router, fresh):
            one.call.cancel()


async def test_loads_are_pushed_when_they_change_and_while_nothing_happens():
    executor = SlowExecutor(fake_geometry(page_tokens=64))
    sizes = {"page_tokens": 64, "max_rows": 1, "max_prefill_rows": 1, "max_context_tokens": 3000}
    load = fake_load(executor, **sizes)
    async with serving(load) as harness:
        router, late = Router(), Router()
        router.subscribe(harness, load_records_before_first_batch=True)
        late.subscribe(harness)
        first = await router.read()
        assert (first.sequence_number, first.load.load_only) == (0, True)
        assert first.load.max_running_requests == 1
        assert not first.load.HasField("engine_silence_ms")
        assert first.load.HasField("max_total_num_tokens")
        calls = [harness.stub.Generate(request(f"r{i}", max_tokens=2900)) for i in range(2)]
        await harness.until(lambda: harness.counts().waiting == 1)
        while not router.loads[-1].waiting_requests:
            await router.read()
        busy = router.loads[-1]
        assert (busy.running_requests, busy.waiting_requests) == (1, 1)
        assert busy.token_usage == busy.active_token_usage > 0
        assert busy.HasField("engine_silence_ms")
        for call in calls:
            call.cancel()
        await harness.until_idle()
        await router.settle()
        samples = [one.sample for one in router.loads]
        assert samples == sorted(set(samples))
        with pytest.raises(TimeoutError):  # no events, so no batch without the flag
            async with asyncio.timeout(0.2):
                await late.call.read()
        router.call.cancel()


async def test_subscriber_that_does_not_read_loses_its_place_and_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    keep_few(monkeypatch, 4)
    # Small windows, so that the transport holds little of what the router has not read.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    policy = CachePolicy(unit_tokens=UNIT, key_every_unit=True)
    load = fake_load(
        policy=policy, page_tokens=64, max_context_tokens=6000, max_prefill_tokens=4096
    )
    async with serving(load, channel_options=options) as harness:
        router = Router()
        router.subscribe(harness)
        await ask(harness, "a", SYSTEM)
        await router.read()
        for i in range(60):
            prompt = tuple((7 * i + j * j) % 90 for j in range(1500))
            await ask(harness, f"r{i}", prompt)
        with pytest.raises(grpc.aio.AioRpcError, match="start from 0") as caught:
            await router.settle()
        assert caught.value.code().name == "DATA_LOSS"
        assert router.cursors[0] < 60
        again = Router()
        again.subscribe(harness)
        await again.settle()
        assert again.known_tokens(prompt) == 1498
        again.call.cancel()


async def test_bug_in_the_events_ends_subscriptions_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
):
    async with serving(fake_load(policy=POLICY)) as harness:
        router = Router()
        router.subscribe(harness, load_records_before_first_batch=True)
        await router.read()
        monkeypatch.setattr(kv_events.HeldPrefixes, "update", None)
        await ask(harness, "a", SYSTEM)
        async with asyncio.timeout(DEADLINE_S):
            while await router.call.read():
                pass
        again = harness.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())
        status, text, _ = await status_of(again)
        assert status == "UNAVAILABLE"
        assert "events have failed" in text
        assert (await ask(harness, "b", SYSTEM))[0] == 20


async def test_drain_ends_subscriptions_first():
    load = fake_load(SlowExecutor(fake_geometry()), policy=POLICY)
    async with serving(load) as harness:
        router = Router()
        router.subscribe(harness)
        await ask(harness, "a", SYSTEM)
        await router.settle()
        call = harness.stub.Generate(request("b", max_tokens=50))
        await harness.until(lambda: harness.counts().running == 1)
        begin_s = time.monotonic()
        harness.server.stop()
        async with asyncio.timeout(DEADLINE_S):
            while await router.call.read():
                pass
            assert (await router.call.code()).name == "OK"
            status, _, _ = await status_of(
                harness.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())
            )
            assert status == "UNAVAILABLE"
            assert len((await collect(call)).token_ids) == 50
            await harness.running
        assert time.monotonic() - begin_s < 1.0  # less than the grace of the server's end
