"""Show where the time of a trace went: programs, kernels, and what the device waited.

    python scripts/read_trace.py trace

A trace is a folder of `scripts/trace.py`, or of a server's StartProfile. For every program:
how often it ran, how many operations it launched, how long some operation was running (`busy`) and
how long a run took from its first operation to the end of its last (`span`). The rest of the span
the device waited for launches, or for the host. Below are the operations that took most.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One operation on a device.

    Attributes:
      module, run: the program and which of its runs. kernel: its name there.
    """

    module: str
    run: str
    kernel: str
    start_us: float
    duration_us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """A program; times and counts are means of a run.

    Attributes:
      kernels: name, launches and microseconds of each kernel, those with most time first.
    """

    module: str
    runs: int
    launches: float
    busy_us: float
    span_us: float
    kernels: Sequence[tuple[str, float, float]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="DIR")
    parser.add_argument("--top", type=int, default=25, help="kernels of each program (default: 25)")
    args = parser.parse_args()
    files = sorted(args.trace.rglob("*.xplane.pb"))
    if not files:
        print(f"read_trace.py: no trace: got {args.trace}; expected a folder with *.xplane.pb")
        return 2
    for summary in summaries(event for file in files for event in read(file)):
        print(
            f"{summary.module}: {summary.runs} runs, {summary.launches:.0f} operations, "
            f"busy {summary.busy_us:.0f} us of {summary.span_us:.0f} us"
        )
        for kernel, launches, us in summary.kernels[: args.top]:
            print(f"{us:12.1f} us {launches:8.1f} x  {kernel[:100]}")
    return 0


def profiled(call: Callable[[], object]) -> Summary:
    """What one call of a compiled program does on the device; XLA replays no graphs meanwhile.

    Raises:
      ValueError: no operation ran.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        found = summaries(
            event for file in sorted(Path(folder).rglob("*.xplane.pb")) for event in read(file)
        )
    if not found:
        raise ValueError("the trace is empty: got no operation; expected those of a program")
    return found[0]


def read(file: Path) -> Iterator[Event]:
    """The operations of a trace: of its accelerators, or of the CPU if there are none."""
    from jax.profiler import ProfileData

    planes = list(ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in devices or planes:
        for line in plane.lines:
            for event in line.events:
                stats: dict[str, Any] = dict(event.stats)
                if "hlo_op" in stats:
                    yield Event(
                        module=str(stats.get("hlo_module", "?")),
                        run=f"{file} {plane.name} {stats.get('run_id', '')}",
                        kernel=event.name,
                        start_us=event.start_ns / 1e3,
                        duration_us=event.duration_ns / 1e3,
                    )


def summaries(events: Iterable[Event]) -> list[Summary]:
    """One summary a program, the longest first."""
    by_run: dict[str, dict[str, list[Event]]] = collections.defaultdict(dict)
    for event in events:
        by_run[event.module].setdefault(event.run, []).append(event)
    found = [_summary(module, list(runs.values())) for module, runs in by_run.items()]
    return sorted(found, key=lambda summary: -summary.span_us * summary.runs)


def _summary(module: str, runs: list[list[Event]]) -> Summary:
    count = len(runs)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in (event for run in runs for event in run):
        times[event.kernel].append(event.duration_us)
    kernels = [(name, len(each) / count, sum(each) / count) for name, each in times.items()]
    return Summary(
        module=module,
        runs=count,
        launches=sum(map(len, runs)) / count,
        busy_us=sum(map(_busy_us, runs)) / count,
        span_us=sum(map(_span_us, runs)) / count,
        kernels=sorted(kernels, key=lambda kernel: -kernel[2]),
    )


def _span_us(run: list[Event]) -> float:
    return max(e.start_us + e.duration_us for e in run) - min(e.start_us for e in run)


def _busy_us(run: list[Event]) -> float:
    """Time in which at least one operation ran."""
    busy, end = 0.0, float("-inf")
    for event in sorted(run, key=lambda event: event.start_us):
        stop = event.start_us + event.duration_us
        busy += max(0.0, stop - max(end, event.start_us))
        end = max(end, stop)
    return busy


if __name__ == "__main__":
    sys.exit(main())
