"""Tables of `scripts/report_kernels.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import report_kernels


def _line(implementation: str, us: float | None) -> str:
    line = {"op": "op", "shape": "rows1", "implementation": implementation}
    if us is None:
        return json.dumps(line | {"failure": "hung"})
    measured = {"us": us, "gb_per_s": 4.0, "tflop_per_s": 0.5, "floor_us": 10, "times_floor": 2}
    return json.dumps(line | measured)


def test_a_row_has_the_last_kernel_and_how_much_longer_the_others_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [_line("xla", 50.0), _line("mosaic", 99.0), _line("mosaic", 20.0), _line("fla", None)]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(results) + "\n")
    monkeypatch.setattr(sys, "argv", ["report_kernels.py", str(path)])
    assert report_kernels.main() == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert row == "| rows1 | 20 | 4 | 0.5 | 10 | 2 | - | - | 50 | 2.5 |"
