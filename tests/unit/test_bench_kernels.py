"""Cases, processes and results of `scripts/bench_kernels.py`. Nothing is measured by default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as for the script itself

import bench_kernels  # noqa: E402
from kernel_bench import moe  # noqa: E402
from kernel_bench.case import Case, Work  # noqa: E402


def _no_work() -> Work:
    raise ValueError("no device")


def test_k3s_experts_have_every_number_of_rows() -> None:
    shapes = {case.shape for case in moe.cases()}
    assert {f"rows{rows}-local{local}" for rows in (1, 8, 64) for local in (112, 896)} <= shapes


def test_the_floor_is_that_of_bytes_or_operations() -> None:
    def floor(num_bytes: float, num_flops: float) -> float:
        work = Work(
            call=lambda: None, inputs=[], weights=(), num_bytes=num_bytes, num_flops=num_flops
        )
        return work.floor_s

    assert floor(4.3e12, 0) == 1
    assert floor(4.3e12, 2 * 790e12) == 2


@pytest.mark.parametrize("limit_s", [0.05, 60.0])
def test_a_case_that_fails_or_hangs_has_a_line_for_each_implementation(limit_s: float) -> None:
    case = Case(op="none", shape="such", build=_no_work, limit_s=limit_s)  # unknown to the process
    lines = bench_kernels._run(case, jobs=1)
    assert [line["implementation"] for line in lines] == ["xla", "mosaic", "mosaic+pdl"]
    expected = "no result within" if limit_s < 1 else "KeyError"
    assert all(expected in line["failure"] for line in lines)
    assert "failed" in bench_kernels._rows(lines)


def test_smoke_prints_a_row_and_writes_json(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "bench_kernels.py")
    command = [sys.executable, script, "--smoke", "--only", "moe_experts"]
    output = tmp_path / "kernels.jsonl"
    ended = subprocess.run(
        [*command, "--json", str(output)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (line,) = map(json.loads, output.read_text().splitlines())
    assert line["implementation"] == "xla"
    assert line["us"] > 0
    assert line["busy_us"] > 0
    assert line["times_xla"] == 1
    assert "moe_experts/smoke" in ended.stdout
