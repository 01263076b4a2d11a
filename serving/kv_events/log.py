"""The numbered events of all replicas, of which a bounded part is kept for subscribers that resume.

A number is a moment: it has a batch of every replica, empty where nothing happened. So each replica
counts 1, 2, 3, ... without holes, and one number says where a subscriber stands with all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from serving.kv_events.events import Event, num_bytes, split
from serving.request import RequestError

# A message may have 4 MiB; this one takes some milliseconds to make.
MAX_BATCH_BYTES = 1 << 19
MAX_MOMENTS = 8192
MAX_BYTES = 64 << 20


class Moment(NamedTuple):
    """All events of one number.

    Attributes:
      time_s: seconds since the epoch.
      events: of each replica.
    """

    number: int
    time_s: float
    events: tuple[tuple[Event, ...], ...]


class EventLog:
    """The events since the start, of which the last ones are kept.

    Args:
      max_moments, max_bytes: that are kept at most; the latest moment always is.

    Attributes:
      last: number of the latest moment; 0 before the first.
    """

    def __init__(
        self, num_replicas: int, *, max_moments: int = MAX_MOMENTS, max_bytes: int = MAX_BYTES
    ):
        self._num_replicas = num_replicas
        self._max_moments, self._max_bytes = max_moments, max_bytes
        self._moments: dict[int, Moment] = {}
        self._num_bytes = 0
        self.last = 0

    @property
    def first(self) -> int:
        """Number of the first moment that is kept."""
        return self.last - len(self._moments) + 1

    def append(self, events: Sequence[tuple[Event, ...]], time_s: float) -> None:
        """Add what happened to each replica, as one moment or, if it is much, as several."""
        parts = itertools.zip_longest(
            *(split(part, MAX_BATCH_BYTES) for part in events), fillvalue=()
        )
        for part in parts:
            self.last += 1
            self._moments[self.last] = Moment(self.last, time_s, part)
            self._num_bytes += _size(part)
        while len(self._moments) > self._max_moments or (
            self._num_bytes > self._max_bytes and len(self._moments) > 1
        ):
            self._num_bytes -= _size(self._moments.pop(self.first).events)

    def check_start(self, number: int) -> None:
        """Refuse to go on after a number from which something is missing.

        Raises:
          RequestError: OUT_OF_RANGE.
        """
        if not self.first - 1 <= number <= self.last:
            raise RequestError(
                "OUT_OF_RANGE",
                f"start_sequence_number is out of range: got {number}; expected "
                f"{self.first - 1}..{self.last}; start from 0 for what is held now",
            )

    def at(self, number: int) -> Moment:
        """The moment of a number that is not after the last.

        Raises:
          RequestError: DATA_LOSS, it is not kept any more.
        """
        found = self._moments.get(number)
        if found is None:
            raise RequestError(
                "DATA_LOSS",
                f"the subscriber is too slow: it needs {number}, and {self.first}..{self.last} are "
                "kept; start from 0 for what is held now",
            )
        return found


def _size(events: Sequence[tuple[Event, ...]]) -> int:
    return sum(map(num_bytes, events))
