"""The way of outputs from the engine's thread to the call that waits for them.

The engine never waits for a client: it hands each output over and goes on. A stream that its client
does not read holds a bounded number of tokens, because it pauses its request in the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from serving.plan import Output


class OutputStream:
    """Outputs of one request, for one reader. Lives on the event loop.

    Args:
      max_tokens: tokens that may wait for the reader before the request is paused. Steps already in
        flight may add a few.
      pause, resume: stop and continue the request in the engine.
    """

    def __init__(self, *, max_tokens: int, pause: Callable[[], None], resume: Callable[[], None]):
        self._max_tokens, self._pause, self._resume = max_tokens, pause, resume
        self._token_ids: list[int] = []
        self._latest: Output | None = None
        self._is_paused = False
        self._arrived = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the last output has arrived."""
        return self._latest is not None and self._latest.finish_reason is not None

    def deliver(self, output: Output) -> None:
        """Add an output; what comes after the last one is dropped."""
        if self.has_ended:
            return
        self._token_ids += output.token_ids
        self._latest = output
        if not self._is_paused and len(self._token_ids) >= self._max_tokens:
            self._is_paused = True
            self._pause()
        self._arrived.set()

    async def next(self) -> Output:
        """Wait for outputs and return all that are there as one."""
        await self._arrived.wait()
        self._arrived.clear()
        assert self._latest is not None  # it is what has arrived
        output = self._latest._replace(token_ids=tuple(self._token_ids))
        self._token_ids.clear()
        if self._is_paused:
            self._is_paused = False
            self._resume()
        return output


class OutputBridge:
    """Carries outputs from the engine's thread to streams on the event loop.

    All outputs of a step cross with one wake-up of the loop, however many rows the step has.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.Lock()
        self._crossing: list[tuple[OutputStream, Output]] = []

    def post(self, stream: OutputStream, output: Output) -> None:
        """Send an output to its stream. Called in any thread."""
        with self._lock:
            self._crossing.append((stream, output))
            is_first = len(self._crossing) == 1
        if is_first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            crossing, self._crossing = self._crossing, []
        for stream, output in crossing:
            stream.deliver(output)
