"""The way of outputs from the engine's thread to the call that waits for them.

The engine never waits for a client: it hands each output over and goes on. A stream that its client
does not read holds a bounded number of tokens, because it pauses its request in the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from k3jax.results import TokenLogprobs
from serving.plan import Output


class OutputStream:
    """Outputs of one request, for one reader. Lives on the event loop.

    Args:
      max_tokens: tokens that may wait for the reader before the request is paused. Steps already in
        flight may add a few.
      pause, resume: stop and continue the request in the engine.
      arrived: set when there is something to take; several streams may share it.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        pause: Callable[[], None],
        resume: Callable[[], None],
        arrived: asyncio.Event,
    ):
        self._max_tokens, self._pause, self._resume = max_tokens, pause, resume
        self._arrived = arrived
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._latest: Output | None = None
        self._has_news = self._is_paused = False

    @property
    def has_ended(self) -> bool:
        """Whether the last output has arrived."""
        return self._latest is not None and self._latest.finish_reason is not None

    def deliver(self, output: Output) -> None:
        """Add an output; what comes after the last one is dropped."""
        if self.has_ended:
            return
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        self._latest, self._has_news = output, True
        if not self._is_paused and len(self._token_ids) >= self._max_tokens:
            self._is_paused = True
            self._pause()
        self._arrived.set()

    def take(self) -> Output | None:
        """Return all outputs that are there as one, if there are any."""
        if not self._has_news or self._latest is None:
            return None
        output = self._latest._replace(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )
        self._token_ids.clear()
        self._logprobs.clear()
        self._prompt_logprobs = ()
        self._has_news = False
        if self._is_paused:
            self._is_paused = False
            self._resume()
        return output


async def next_outputs(
    streams: Sequence[OutputStream], arrived: asyncio.Event
) -> list[tuple[int, Output]]:
    """Wait for outputs; return all that are there, by the index of their stream.

    Args:
      arrived: that all streams share.
    """
    await arrived.wait()
    arrived.clear()
    taken = [(index, stream.take()) for index, stream in enumerate(streams)]
    return [(index, output) for index, output in taken if output is not None]


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
