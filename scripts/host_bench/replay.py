"""Carries out cache calls on the page table of this project and times each of them.

Prefix keys are made outside of the timed calls, and the time to read the clock is taken off. Where
the scheduler makes no call, because a step changes nothing in the table, only the test for that is
timed.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

from host_bench.calls import Script
from host_bench.clock import Clock, reading_ns

from serving import page_table
from serving.page_table import Chunk, Hit, KeyChain, OutOfPages, PageTable, chain_of, extend_chain
from serving.replay.setup import set_up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a replay took and found.

    Attributes:
      ns: nanoseconds of each call, without the reading of the clock.
      free: pages that are free in the end.
    """

    ns: list[int]
    answers: list[Any]
    free: int


class Replay:
    """One run of a script on the page table. Prefix keys are made outside of the timed calls."""

    def __init__(self, script: Script, now: Clock):
        setup = set_up(script.config)
        self._table: PageTable = setup.state.table
        self._config = script.config
        self._now = now
        self._calls = script.calls
        self._requests = script.requests
        self._step = -1
        self._in_flight: collections.deque[int] = collections.deque()
        self._hits: dict[str, Hit] = {}
        self._first_known: dict[str, int] = {}
        self._chains: dict[str, KeyChain] = {}
        for name, one in script.requests.items():
            chain = chain_of(
                one.salt, script.config.unit_tokens, setup.policy.hash_lookahead_tokens
            )
            self._chains[name] = extend_chain(chain, one.tokens[: one.prompt_tokens])
        fill = script.config.scheduler
        self._num_spare = int(fill.watermark * (script.config.usable_pages + 1))

    def run(self) -> Timing:
        """Carry out all calls."""
        overhead = reading_ns(self._now)
        gc.collect()
        gc.freeze()
        ns: list[int] = []
        answers: list[Any] = []
        for kind, *args in self._calls:
            taken, answer = getattr(self, kind)(*args)
            ns.append(max(0, taken - overhead))
            answers.append(answer)
        gc.unfreeze()
        return Timing(ns=ns, answers=answers, free=self._table.num_free)

    def plan(self) -> tuple[int, None]:
        self._step += 1
        return 0, None

    def lookup(self, name: str, known: int) -> tuple[int, Any]:
        keys = self._keys(name, known)
        start = self._now()
        hit = page_table.lookup(self._table, keys, known - 1)
        taken = self._now() - start
        self._hits[name], self._first_known[name] = hit, known
        return taken, [hit.tokens, hit.junction]

    def admit(self, name: str, end: int, has_others: bool) -> tuple[int, Any]:
        hit, known = self._hits[name], self._first_known[name]
        chunk = self._chunk(name, hit.tokens, end, known, hit.tokens, 0)
        start = self._now()
        fits = hit.is_ready and self._try(
            lambda: page_table.admit(
                self._table,
                name,
                hit,
                chunk,
                prompt_tokens=self._requests[name].prompt_tokens,
                room_for=known if self._config.scheduler.reserve_full_prompt else 0,
                num_spare=self._num_spare if has_others else 0,
            )
        )
        return self._now() - start, fits

    def extend(
        self, name: str, first: int, end: int, known: int, processed: int, num_drafts: int
    ) -> tuple[int, Any]:
        is_decode = first >= self._first_known[name]
        chunk = self._chunk(name, first, end, known, processed, num_drafts)
        start = self._now()
        # As the scheduler does it: most decoding steps change nothing.
        fits = is_decode and end <= self._table.owners[name].quiet_until
        fits = fits or self._try(lambda: page_table.extend(self._table, name, chunk))
        return self._now() - start, fits

    def launch(self) -> tuple[int, None]:
        self._in_flight.append(self._step)
        start = self._now()
        self._table = page_table.settle(self._table)
        return self._now() - start, None

    def complete(self) -> tuple[int, None]:
        step = self._in_flight.popleft()
        start = self._now()
        self._table = page_table.commit_step(self._table, step)
        return self._now() - start, None

    def publish(self, name: str, known: int, computed: int, sampled: int) -> tuple[int, None]:
        keys = self._keys(name, known)
        num_named = len(keys) * self._config.unit_tokens
        start = self._now()
        # As the scheduler does it: mostly all is published already.
        if min(computed, num_named) >= page_table.next_key(self._table, name):
            self._table = page_table.publish(self._table, name, computed, keys)
        return self._now() - start, None

    def release(self, name: str, is_preempted: bool, computed: int) -> tuple[int, None]:
        keys = self._chains[name].keys
        start = self._now()
        self._table = page_table.release(self._table, name, computed=computed, keys=keys)
        return self._now() - start, None

    def reset(self) -> tuple[int, Any]:
        start = self._now()
        self._table = page_table.reset(self._table)
        return self._now() - start, True

    def _try(self, change: Callable[[], tuple[PageTable, Any]]) -> bool:
        try:
            self._table, _ = change()
        except OutOfPages:
            return False
        return True

    def _keys(self, name: str, known: int) -> tuple[bytes, ...]:
        chain = self._chains[name]
        if known >= chain.next_at:
            chain = extend_chain(chain, self._requests[name].tokens[chain.num_tokens : known])
            self._chains[name] = chain
        return chain.keys

    def _chunk(
        self, name: str, start: int, end: int, known: int, processed: int, num_drafts: int
    ) -> Chunk:
        prefill_end = max(self._requests[name].prompt_tokens, self._first_known[name] - 1)
        keys = self._keys(name, known)
        return Chunk(self._step, start, end, prefill_end, processed, known, keys, num_drafts)
