"""`scripts/view_cache.py` on a record of two requests that share a prefix."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import view_cache
from serving.page_table import CachePolicy
from serving.plan import GroupResult
from serving.record import Committed, Planned, Submitted, open_recorder
from tests.fakes import SchedulerDriver, fake_request, make_driver

PREFIX = tuple(range(20, 31))  # 11 tokens: two pages and a tail of one unit


def serve(path: Path) -> SchedulerDriver:
    """Serve `a`, then `b` with its prefix, one step at a time."""
    policy = CachePolicy(unit_tokens=2)
    driver = make_driver(num_pages=20, num_state_pages=2, policy=policy)
    recorder = open_recorder(path, driver.state.table, driver.limits)
    for request in (fake_request("a", PREFIX), fake_request("b", (*PREFIX, 7, 8))):
        recorder.write(Submitted(request))
        driver.submit(request)
        while driver.state.running or driver.state.waiting:
            recorder.write(Planned(frozenset()))
            step = driver.plan()
            assert step is not None
            result = driver.executor.peek(step.step_id)
            recorder.write(Committed(GroupResult(step_id=step.step_id, results=(result,))))
            driver.commit()
    recorder.close()
    return driver


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert view_cache.main([*arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_end_is_the_state_of_the_scheduler(tmp_path: Path):
    path = tmp_path / "record"
    driver = serve(path)
    assert view_cache.find(path, None).replicas == (driver.state,)


def test_a_step_shows_who_holds_which_page_and_what_is_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plans = serve(tmp_path / "record").executor.plans
    plan = next(plan for plan in plans if plan.admitted and plan.step_id)
    (copy,), (row,) = plan.copies, plan.rows
    lines = shown(capsys, str(tmp_path / "record"), "--step", str(plan.step_id))
    assert f"step {plan.step_id} was planned last; in flight: {plan.step_id}" in lines
    assert "  admit b hit=10 junction=0" in lines
    assert f"  copy {copy.source} to {copy.target}, 2 tokens" in lines
    assert "  b slot=0 computed=10 prompt=13 cached=10 output=0" in lines
    pages = {int(line.split()[0]): line.split() for line in lines if line.split()[0].isdigit()}
    first, second, own = row.attention_pages[:3]
    assert pages[first][1:3] == ["published", "b[0:4]"]
    assert pages[second][1:3] == ["published", "b[4:8]"]
    assert pages[own][1:3] == ["published", "b[8:12]"]
    assert pages[own][-3:] == ["after", "step", str(plan.step_id)]  # not to be used yet
    assert pages[copy.source][1] == "idle"
    (tail,) = (word for word in pages[copy.source] if word.endswith("@10"))
    assert [pages[page][1:] for page in row.state_source] == [["idle", f"state:{tail[3:]}"]] * 2
    counts = next(line for line in lines if line.startswith("counts: "))
    assert "looked_up_tokens=24 full_hit_tokens=0 partial_hit_tokens=10" in counts


def test_replicas_are_shown_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    driver = make_driver(num_pages=20)
    path = tmp_path / "record"
    recorder = open_recorder(path, driver.state.table, driver.limits, num_replicas=2)
    for name in "ab":
        recorder.write(Submitted(fake_request(name)))
    recorder.write(Planned(frozenset()))
    recorder.close()
    lines = shown(capsys, str(path))
    second = lines.index("replica 1:")
    assert lines[0] == "replica 0:"
    assert "  a tokens 0 to 2, state 2-4 to 2-4" in lines[:second]
    assert "  b tokens 0 to 2, state 2-4 to 2-4" in lines[second:]


def test_a_step_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    serve(tmp_path / "record")
    assert view_cache.main([str(tmp_path / "record"), "--step", "999"]) == 1
    assert "step 999 is not in" in capsys.readouterr().err
