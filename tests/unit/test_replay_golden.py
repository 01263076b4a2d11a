"""Recorded answers against this scheduler, and the command that replays them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serving import scheduler
from serving.plan import StepPlan
from serving.replay import Report, parse_trace, replay

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "cache"
FILES = sorted(path.name for path in FOLDER.glob("g*.json"))
HAZARDS = sorted(path.name for path in FOLDER.glob("hazards/z*.json"))


def replay_file(path: Path) -> Report:
    return replay(parse_trace(json.loads(path.read_text())))


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/replay_cache.py", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_recorded_file_is_here():
    index = json.loads((FOLDER / "index.json").read_text())
    listed = {scenario["file"] for scenario in index["scenarios"]}
    assert {*FILES, *(f"hazards/{name}" for name in HAZARDS)} >= listed
    assert len(FILES) >= 32


@pytest.mark.parametrize("name", FILES)
def test_answers_are_the_recorded_ones(name: str):
    report = replay_file(FOLDER / name)
    assert report.first is None
    assert report.num_steps > 0


@pytest.mark.parametrize("name", HAZARDS)
def test_nothing_reads_wrong_bytes_where_the_recorded_engine_did(name: str):
    report = replay_file(FOLDER / "hazards" / name)
    assert (report.violations, report.error) == ((), None)


def without_copies(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, copies=())


def without_clears(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, clear_pages=())


def in_place(plan: StepPlan) -> StepPlan:
    rows = tuple(row._replace(state_target=row.state_source) for row in plan.rows)
    return dataclasses.replace(plan, rows=rows)


def with_short_copies(plan: StepPlan) -> StepPlan:
    copies = tuple(copy._replace(num_tokens=copy.num_tokens - 1) for copy in plan.copies)
    return dataclasses.replace(plan, copies=copies)


@pytest.mark.parametrize(
    ("fault", "rules"),
    [
        (without_copies, {"prefix"}),
        (with_short_copies, {"prefix"}),
        (without_clears, {"foreign"}),
        (in_place, {"published"}),
    ],
)
def test_fault_between_scheduler_and_device_is_seen(
    fault: Callable[[StepPlan], StepPlan], rules: set[str], monkeypatch: pytest.MonkeyPatch
):
    plan = scheduler.plan

    def faulty(*args, **kwargs):
        state, step = plan(*args, **kwargs)
        return state, step if step is None else fault(step)

    monkeypatch.setattr(scheduler, "plan", faulty)
    report = replay_file(FOLDER / "g07_cow_resume_two_readers.json")
    assert {violation.rule for violation in report.violations} >= rules


def test_command_prints_a_line_for_each_file_and_fails_if_an_answer_differs(tmp_path: Path):
    data = json.loads((FOLDER / FILES[0]).read_text())
    data["trace"][1]["expect"]["free"] += 1
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(data))
    result = run(FOLDER / FILES[0], wrong)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["mismatches"], line["violations"]) for line in lines] == [(0, 0), (1, 0)]
    assert lines[0] == {
        "file": str(FOLDER / FILES[0]),
        "mismatches": 0,
        "violations": 0,
        "first": None,
    }
    assert lines[1]["first"].startswith("op 1: free differs: got ")
    assert result.returncode == 1


def test_command_skips_the_list_of_traces():
    result = run(FOLDER / "index.json", FOLDER / FILES[0])
    assert [json.loads(line)["file"] for line in result.stdout.splitlines()] == [
        str(FOLDER / FILES[0])
    ]
    assert "index.json: skipped" in result.stderr
    assert result.returncode == 0


def test_command_refuses_a_malformed_file_in_one_line(tmp_path: Path):
    path = tmp_path / "bad.json"
    path.write_text('{"format": 1, "name": ""}')
    result = run(path)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"replay_cache.py: {path}: name is malformed: got ''; expected a string that is not empty"
    ]


def test_command_runs_random_workloads():
    result = run("--generate", "3", "--seed", "7")
    summary = json.loads(result.stdout)
    assert result.returncode == 0, summary
    assert summary["workloads"] == 3
    assert summary["steps"] > 0
