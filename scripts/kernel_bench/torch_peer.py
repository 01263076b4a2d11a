"""Timing of PyTorch calls on a GPU, for the peers of cases. Imports torch, so import it late."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

SAMPLES = 7
REPEATS = 10


def time_calls(calls: Sequence[Callable[[], Any]], *, graph: bool = False) -> dict[str, float]:
    """Time one of `calls`, which do the same on different data, by CUDA events.

    With `graph`, they are captured and replayed, which takes the host's share out; without it the
    time is that of calls that do not wait for each other.

    Raises:
      ImportError: there is no GPU for torch.
    """
    if not torch.cuda.is_available():
        raise ImportError("torch has no GPU")
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in (*calls, *calls):  # compiles and tunes
                call()
        torch.cuda.synchronize()

        def run() -> None:
            for call in calls:
                call()

        replay = run
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run()
            replay = captured.replay
        samples = [_sample_us(replay) / len(calls) for _ in range(SAMPLES)]
    return {"us": statistics.median(samples), "us_min": min(samples), "us_max": max(samples)}


def _sample_us(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / REPEATS
