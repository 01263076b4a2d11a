"""What `scripts/read_trace.py` makes of the operations of a trace."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # as for the script itself

from read_trace import Event, summaries


def test_overlapping_operations_are_busy_once_and_gaps_are_not() -> None:
    def event(run: str, kernel: str, start_us: float, duration_us: float) -> Event:
        return Event(
            module="step", run=run, kernel=kernel, start_us=start_us, duration_us=duration_us
        )

    (summary,) = summaries(
        [
            event("a", "copy", 20, 4),
            event("a", "dot", 0, 10),
            event("a", "add", 5, 10),
            event("b", "dot", 100, 20),
        ]
    )
    assert (summary.runs, summary.launches) == (2, 2.0)
    assert summary.busy_us == (15 + 4 + 20) / 2
    assert summary.span_us == (24 + 20) / 2
    assert list(summary.kernels) == [("dot", 1.0, 15.0), ("add", 0.5, 5.0), ("copy", 0.5, 2.0)]
