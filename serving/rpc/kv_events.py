"""`SubscribeKvEvents`: what the caches hold, as events with numbers, and the load with each batch.

A subscriber that starts at N gets what came after N, if that is still kept; else OUT_OF_RANGE tells
it to start at 0. From 0 it gets the present state of all replicas as one snapshot, in chunks whose
numbers end at the present one (`KvSnapshotChunk`), and from there every event.

Each moment is sent as a batch of every replica, the first replica's last: gateways resume from the
first one's number, so it must not be ahead of the others (see `serving.kv_events.log`).

A subscription holds a number and no events. It reads them from the log at the pace of its
subscriber, and ends with DATA_LOSS if that falls so far behind that they are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from serving.kv_events.events import Cleared, Event, Removed, Stored, split
from serving.kv_events.held import HeldPrefixes, runs
from serving.kv_events.log import MAX_BATCH_BYTES, EventLog, Moment
from serving.kv_events.news import News
from serving.request import RequestError
from serving.rpc.edge import Context
from serving.rpc.logs import log_exception
from serving.rpc.protocol import common

# Given whether everything is wanted: the load of each replica now.
ReadLoads = Callable[[bool], list[common.EngineLoad]]

MAX_SUBSCRIBERS = 64
# More than the log's `MAX_BATCH_BYTES`: so a state never has more chunks than there were batches,
# and there are numbers for all of them.
MAX_CHUNK_BYTES = MAX_BATCH_BYTES * 3 // 2
LOOK_S = 0.2  # how often the load is looked at
HEARTBEAT_S = 2.0  # a gateway may take 15 s of silence for the end of the server


class KvPublisher:
    """The events of all replicas and their subscribers. Lives on the event loop.

    If a bug keeps the events from being made, subscriptions end; requests are still served.

    Args:
      log: default is an empty one.
    """

    def __init__(self, num_replicas: int, unit_tokens: int, *, log: EventLog | None = None):
        self._num_replicas, self._unit_tokens = num_replicas, unit_tokens
        self._log = log or EventLog(num_replicas)
        self._held: list[HeldPrefixes | None] = [None] * num_replicas
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._crossing: list[tuple[int, News]] = []
        self._changed = asyncio.Event()  # replaced once it is set
        self._num_subscribers = 0
        self._has_ended = False

    def post(self, news: Sequence[tuple[int, News]]) -> None:
        """Take news of replicas. Called from the engine's thread; the work is done elsewhere."""
        with self._lock:
            is_first = not self._crossing
            self._crossing += news
        if is_first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._follow)

    def end(self) -> None:
        """End all subscriptions, and take no more."""
        self._has_ended = True
        self._wake()

    async def serve(
        self, request: common.SubscribeKvEventsRequest, context: Context, read_loads: ReadLoads
    ) -> None:
        """Serve one subscription until `end`.

        Raises:
          RequestError: OUT_OF_RANGE or DATA_LOSS, see above; UNAVAILABLE, after `end`;
            RESOURCE_EXHAUSTED, there are too many subscriptions.
        """
        if self._has_ended:
            raise RequestError(
                "UNAVAILABLE",
                "no subscription is taken: the server is stopping, or its log tells that its cache "
                "events have failed",
            )
        if self._num_subscribers >= MAX_SUBSCRIBERS:
            raise RequestError(
                "RESOURCE_EXHAUSTED",
                f"too many subscriptions: got {self._num_subscribers}; expected fewer than "
                f"{MAX_SUBSCRIBERS}",
            )
        start = request.start_sequence_number
        if start:
            self._log.check_start(start)
        self._num_subscribers += 1
        try:
            await context.send_initial_metadata(())  # a gateway waits half a second for it
            sender = _Sender(context, read_loads, self._unit_tokens)
            await self._run(sender, start, request.load_records_before_first_batch)
        finally:
            self._num_subscribers -= 1

    async def _run(self, sender: _Sender, number: int, has_early_loads: bool) -> None:
        if not number and self._log.last:
            number = self._log.last
            await sender.send(self._snapshot(number))
        while not self._has_ended:
            changed = self._changed  # before the look: what comes later sets it
            while number < self._log.last and not self._has_ended:
                number += 1
                await sender.send(_batches(self._log.at(number), self._unit_tokens))
            if number or has_early_loads:
                await sender.send_load(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await changed.wait()

    def _follow(self) -> None:
        """Make events of the news."""
        with self._lock:
            crossing, self._crossing = self._crossing, []
        if self._has_ended:
            return
        try:
            self._append(crossing)
        except Exception as error:  # a bug; what would follow could not be right
            log_exception("kv_events_failed", error)
            self.end()

    def _append(self, crossing: list[tuple[int, News]]) -> None:
        events: list[tuple[Event, ...]] = [()] * self._num_replicas
        for rank, news in crossing:
            held = self._held[rank]
            if held is None:
                held = self._held[rank] = HeldPrefixes(news.table)
            events[rank] += held.update(news)
        if any(events):
            self._log.append(events, time.time())
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _snapshot(self, last: int) -> Iterator[common.KvEventBatch]:
        """What is held now, which is at number `last`, as chunks of one replica after another."""
        parts = [
            split([] if held is None else list(runs(held.blocks())), MAX_CHUNK_BYTES) or [()]
            for held in self._held
        ]
        num_blocks = sum(held.num_blocks for held in self._held if held is not None)
        return _chunks(parts, last, num_blocks, self._unit_tokens)


def _chunks(
    parts: list[list[tuple[Event, ...]]], last: int, num_blocks: int, unit_tokens: int
) -> Iterator[common.KvEventBatch]:
    """Number the chunks of each replica so that they end at `last`, the first replica last."""
    time_s = time.time()
    index, count = 0, sum(map(len, parts))
    for rank, chunks in reversed(list(enumerate(parts))):
        for number, events in enumerate(chunks, start=last - len(chunks) + 1):
            batch = common.KvEventBatch(
                sequence_number=number,
                timestamp=time_s,
                dp_rank=rank,
                snapshot=common.KvSnapshotChunk(index=index, count=count, blocks=num_blocks),
            )
            _add_events(batch, events if index else (Cleared(), *events), unit_tokens)
            yield batch
            index += 1


class _Sender:
    """The messages of one subscription, each with the load of its replica."""

    def __init__(self, context: Context, read_loads: ReadLoads, unit_tokens: int):
        self._context, self._read_loads, self._unit_tokens = context, read_loads, unit_tokens
        self._num_sent = 0
        self._shown: list[tuple[float, ...]] = []
        self._sent_s = float("-inf")

    async def send(self, batches: Iterable[common.KvEventBatch]) -> None:
        """Send batches, with the loads of now."""
        loads = self._read_loads(not self._num_sent)
        for batch in batches:
            await self._write(batch, loads[batch.dp_rank])
        self._note(loads)

    async def send_load(self, number: int) -> None:
        """Send the loads of all replicas, if they have changed or none was sent for long."""
        loads = self._read_loads(True)
        if _shown(loads) == self._shown and time.monotonic() - self._sent_s < HEARTBEAT_S:
            return
        for rank in reversed(range(len(loads))):
            loads[rank].load_only = True
            batch = common.KvEventBatch(sequence_number=number, timestamp=time.time(), dp_rank=rank)
            await self._write(batch, loads[rank])
        self._note(loads)

    async def _write(self, batch: common.KvEventBatch, load: common.EngineLoad) -> None:
        self._num_sent += 1
        batch.load.CopyFrom(load)
        batch.load.sample = self._num_sent
        await self._context.write(batch)

    def _note(self, loads: list[common.EngineLoad]) -> None:
        self._shown, self._sent_s = _shown(loads), time.monotonic()


def _shown(loads: list[common.EngineLoad]) -> list[tuple[float, ...]]:
    """What of the loads is sent at once when it changes."""
    return [
        (
            load.running_requests,
            load.waiting_requests,
            load.waiting_uncached_tokens,
            load.token_usage,
        )
        for load in loads
    ]


def _batches(moment: Moment, unit_tokens: int) -> Iterator[common.KvEventBatch]:
    """The batches of a moment, the first replica's last."""
    for rank, events in reversed(list(enumerate(moment.events))):
        batch = common.KvEventBatch(
            sequence_number=moment.number, timestamp=moment.time_s, dp_rank=rank
        )
        _add_events(batch, events, unit_tokens)
        yield batch


def _add_events(batch: common.KvEventBatch, events: Iterable[Event], unit_tokens: int) -> None:
    for event in events:
        match event:
            case Stored():
                stored = batch.events.add().stored
                if event.parent is not None:
                    stored.parent_block_hash = event.parent
                for block_hash, token_ids in event.blocks:
                    stored.blocks.add(
                        block_hash=block_hash, token_ids=token_ids, block_size=unit_tokens
                    )
            case Removed():
                batch.events.add().removed.block_hashes.extend(event.block_hashes)
            case Cleared():
                batch.events.add().cleared.SetInParent()
