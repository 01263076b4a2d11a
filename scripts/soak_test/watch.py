"""What a server process shows of itself: its memory, and its metrics."""

from __future__ import annotations

import re
import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def resident_bytes(pid: int) -> int:
    """Memory that the process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024


def scrape(port: int) -> dict[str, float]:
    """Values of all metrics, by name and labels as they are written."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        return parse(reply.read().decode())


def parse(text: str) -> dict[str, float]:
    """See `scrape`."""
    return {
        f"{name}{{{labels}}}" if labels else name: float(value)
        for name, labels, value in _LINE.findall(text)
    }


def total(values: Mapping[str, float], start: str) -> float:
    """Sum of the metrics whose name with labels starts so."""
    return sum(value for name, value in values.items() if name.startswith(start))


def growth(samples: Sequence[float]) -> float:
    """How much larger the last quarter is than the second one, as a share; medians of both."""
    quarter = len(samples) // 4
    if not quarter:
        return 0.0
    early = statistics.median(samples[quarter : 2 * quarter])
    return statistics.median(samples[-quarter:]) / early - 1
