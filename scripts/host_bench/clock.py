"""Clocks of the host benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

type Clock = Callable[[], int]

# On a quiet machine both say the same; where others run too, `cpu` leaves out what they take.
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}


def reading_ns(now: Clock) -> int:
    """Nanoseconds that pass between two readings with nothing between them."""
    return int(statistics.median(-now() + now() for _ in range(1001)))
