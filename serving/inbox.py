"""What other threads ask of the engine, and the inbox that carries it.

No event is ever lost: once the inbox is closed, `post` says so to its caller, and `close` returns
what had not been taken, so that somebody answers it.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from serving.grammars import GrammarMatcher
from serving.page_table import KeyChain
from serving.plan import Admission, Output
from serving.request import Request
from serving.stopping import StopMatcher

OnOutput = Callable[[Output], None]
OnAdmitted = Callable[[Admission], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Submit:
    """A new request with the prefix keys of its prompt, what finds its stop strings and what its
    grammar allows, if it has any; `accepted` tells its sender the engine's decision, and
    `on_admitted`, if there is one, that steps of it begin."""

    request: Request
    on_output: OnOutput
    accepted: Future[None]
    chain: KeyChain
    matcher: StopMatcher | None = None
    grammar: GrammarMatcher | None = None
    on_admitted: OnAdmitted | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """End requests, if they are live."""

    request_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """Stop scheduling a request."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """Schedule a request again."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Flush:
    """Forget all prefixes; `flushed` fails with `InUse` while a request holds pages."""

    flushed: Future[None]


@dataclasses.dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new requests; `drained` is done when the open ones have ended."""

    drained: Future[None]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """End everything."""


Event = Submit | Abort | Pause | Resume | Flush | Drain | Stop


class Inbox:
    """A queue with many writers and one reader, which can be closed."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closing = threading.Lock()  # no event may enter after the last reading
        self._is_closed = False

    def post(self, event: Event) -> bool:
        """Add an event, from any thread; false if the inbox is closed."""
        with self._closing:
            if not self._is_closed:
                self._events.put(event)
            return not self._is_closed

    def take(self, *, may_wait: bool) -> list[Event]:
        """All events in order. With `may_wait`, sleep until there is one."""
        events = [self._events.get()] if may_wait else []
        while not self._events.empty():  # reliable, since nobody else reads
            events.append(self._events.get())
        return events

    def close(self) -> list[Event]:
        """Take no more events; returns those that are left."""
        with self._closing:
            self._is_closed = True
        return self.take(may_wait=False)
