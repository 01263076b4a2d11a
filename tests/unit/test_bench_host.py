"""The command-line contract of `scripts/bench_host.py`, without a baseline. Nothing about times."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "data" / "cache"


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/bench_host.py", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_tiny_run_writes_one_json_line_a_case_and_a_table(tmp_path: Path):
    shutil.copy(TRACES / "g07_cow_resume_two_readers.json", tmp_path)
    out = tmp_path / "out.jsonl"
    result = run(
        "--cases", "golden", "lookup", "hash", "step", "--traces", tmp_path, "--json", out,
        "--repeats", "2", "--tokens", "4000", "--rows", "2", "--steps", "5", "--clock", "cpu",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = {line["case"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(lines) == [
        "golden/g07_cow_resume_two_readers", "golden/all",
        "lookup/again", "lookup/diverging", "lookup/unrelated",
        "hash/tuple", "hash/array", "step/2_rows",
    ]  # fmt: skip
    for name, line in lines.items():
        assert line["commit"]
        assert line["device"].keys() == {"cpu", "cores", "machine", "python"}
        assert line["versions"].keys() >= {"k3jax", "numpy", "baseline"}
        assert line["clock"] == "cpu"
        low, high = min(line["samples"]["ours"]), max(line["samples"]["ours"])
        assert 0 < low <= line["median"]["ours"] <= high
        assert name in result.stdout
    assert lines["golden/all"]["shapes"]["requests"] == 3
    assert lines["lookup/again"]["shapes"]["hit"] == 3968
    assert lines["lookup/diverging"]["shapes"]["junction"] == 1536
    assert len(lines["step/2_rows"]["samples"]["ours"]) == 5
    assert lines["step/2_rows"]["parts"].keys() == {"plan", "pack", "commit"}
    assert lines["hash/tuple"]["bound"] == {"kind": "at least", "value": 100.0, "source": "goal"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nothing"], "argument --cases: invalid choice: 'nothing'"),
        (["--rows", "0"], "argument --rows: got 0; expected >= 1"),
        (["--cases", "golden", "--traces", "serving"], "serving has no traces; expected files g*"),
        (["--vllm-python", "/bin/false"], "the baseline ended: no message"),
        (["--vllm-python", "/none"], "/none does not start: "),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
