"""When a host counts as lost. Times come in from outside, so that this can be tested."""

from __future__ import annotations

import collections
import dataclasses

LAST_PHASE = "ready"  # of the start
BEAT_S = 0.5  # between two signs of life
SILENCE_S = 4.5  # nine of them missed
# While a process compiles, its threads may wait long for their turn. That it ended is seen anyway.
START_SILENCE_S = 60.0
_TAKE_S = 5.0  # a host that lives and has nothing to do takes the next call at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Seconds after which a host is lost.

    Attributes:
      silence_s: without any message, once requests are served.
      start_silence_s: the same before that.
      take_s: a call is not taken although the host has finished all earlier ones.
      step_s: a step has not finished.
    """

    silence_s: float = SILENCE_S
    start_silence_s: float = START_SILENCE_S
    take_s: float = _TAKE_S
    step_s: float


class HostWatch:
    """What host 0 knows of another host."""

    def __init__(self, limits: WatchLimits, now_s: float):
        self._limits = limits
        self._silence_s = limits.start_silence_s
        self._heard_s = now_s
        self._untaken: collections.deque[tuple[int, float]] = collections.deque()
        self._unfinished: collections.deque[tuple[int, float]] = collections.deque()
        self._finished_s = now_s

    def start_serving(self) -> None:
        """From now on the host has no excuse for silence."""
        self._silence_s = self._limits.silence_s

    def sent(self, sequence: int, now_s: float, *, is_step: bool) -> None:
        """A call was sent."""
        self._untaken.append((sequence, now_s))
        if is_step:
            self._unfinished.append((sequence, now_s))

    def heard(self, now_s: float) -> None:
        """Any message came."""
        self._heard_s = now_s

    def acknowledged(self, taken: int, finished: int, now_s: float) -> None:
        """The host has taken all calls up to one, and finished all steps up to another."""
        while self._untaken and self._untaken[0][0] <= taken:
            self._untaken.popleft()
        while self._unfinished and self._unfinished[0][0] <= finished:
            self._unfinished.popleft()
            self._finished_s = now_s

    def verdict(self, now_s: float) -> str | None:
        """Why the host is lost, or None."""
        silence_s = now_s - self._heard_s
        if silence_s > self._silence_s:
            return f"is silent for {silence_s:.1f} s"
        if self._untaken:
            sequence, sent_s = self._untaken[0]
            is_busy = bool(self._unfinished) and self._unfinished[0][0] < sequence
            waits_s = now_s - max(sent_s, self._finished_s)
            if not is_busy and waits_s > self._limits.take_s:
                return f"hangs: it lives, but did not take call {sequence} for {waits_s:.1f} s"
        if self._unfinished:
            sequence, sent_s = self._unfinished[0]
            runs_s = now_s - max(sent_s, self._finished_s)
            if runs_s > self._limits.step_s:
                return f"hangs: step {sequence} did not finish within {runs_s:.1f} s"
        return None
