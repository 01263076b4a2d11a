"""Other projects' kernels in `scripts/bench_kernels.py`: timed, skipped where not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # as for the script itself

import bench_kernels
from kernel_bench.case import Case, Work
from kernel_bench.measure import measure_peer


def _no_work() -> Work:
    raise ValueError("no device")


def _case(**peers: Any) -> Case:
    return Case(op="none", shape="such", build=_no_work, implementations=("xla",), peers=peers)


def _missing() -> dict[str, Any]:
    raise ImportError("No module named 'other'")


def test_a_peer_has_a_line_with_its_time_or_why_there_is_none() -> None:
    timed = measure_peer(_case(other=lambda: {"us": 2.5}), "other")
    assert (timed["implementation"], timed["us"]) == ("other", 2.5)
    skipped = measure_peer(_case(other=_missing), "other")
    assert skipped["skipped"] == "No module named 'other'"
    failed = measure_peer(_case(other=_no_work), "other")
    assert failed["failure"] == "ValueError: no device"
    rows = bench_kernels._rows([timed, skipped, failed]).splitlines()
    for row, text in zip(rows, ("2.5", "skipped: No module", "failed: ValueError"), strict=True):
        assert text in row


def test_a_peers_time_is_compared_with_the_floor_and_with_xla(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def process(
        case: Case, expected: tuple[str, ...], limit_s: float, *options: str
    ) -> list[dict[str, Any]]:
        us = 40.0 if options else 20.0
        assert options == (("--peer", "other") if expected == ("other",) else ())
        return [{"implementation": expected[0], "us": us} | ({} if options else {"floor_us": 10.0})]

    monkeypatch.setattr(bench_kernels, "_process", process)
    xla, other = bench_kernels._run(_case(other=_missing), jobs=1)
    assert xla["times_xla"] == 1
    assert (other["times_xla"], other["floor_us"], other["times_floor"]) == (2, 10, 4)
