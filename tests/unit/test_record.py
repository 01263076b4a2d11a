"""Records of an engine, and what their replay must give: the same steps and the same outputs."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serving import replicas
from serving.engine import Engine
from serving.page_table import PageTable, empty_table
from serving.page_table.policy import CachePolicy
from serving.plan import GroupResult, Output, StepResult
from serving.record import (
    Committed,
    Ended,
    Event,
    Flushed,
    Planned,
    Recorder,
    RecordError,
    Setup,
    Submitted,
    open_recorder,
    read_record,
    replay,
)
from serving.request import Request, RequestError
from serving.scheduler import Limits
from tests.fakes import FakeDevices, FakeExecutor, fake_geometry, fake_limits, fake_request

WAIT_S = 30.0
NUM_PAGES = 24
PREFIX = tuple(range(20, 31))


def setup() -> tuple[PageTable, Limits]:
    geometry = fake_geometry(page_tokens=4, num_state_pages=1)
    policy = CachePolicy(unit_tokens=2, keep_answer_end=True)
    return empty_table(geometry, NUM_PAGES, policy), fake_limits(geometry, num_pages=NUM_PAGES)


class FullDisk(io.StringIO):
    def write(self, s: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Run:
    """An engine on a fake device that serves requests and keeps a record."""

    def __init__(self, recorder: Recorder, devices: FakeDevices | None = None):
        table, limits = setup()
        self.executor = FakeExecutor(
            table.geometry, num_pages=NUM_PAGES, not_finite={("broken", 15)}
        )
        self.devices = devices or FakeDevices(self.executor)
        tables = [table] * len(self.devices.replicas)
        self.engine = Engine(self.devices, limits, tables, recorder=recorder)
        self.outputs: list[Output] = []

    def serve(self, requests: list[Request], *, abort: str = "") -> None:
        """Serve requests that arrive together. `abort` ends one of them at its first token."""
        ended = threading.Semaphore(0)

        def on_output(output: Output) -> None:
            self.outputs.append(output)
            if output.request_id == abort:
                self.engine.abort([abort])
            if output.finish_reason is not None:
                ended.release()

        for replica in self.devices.replicas:  # the first step lasts until all have arrived
            replica.gate.clear()
        accepted = [self.engine.submit(request, on_output) for request in requests]
        for replica in self.devices.replicas:
            replica.gate.set()
        for future in accepted:
            future.result(WAIT_S)
        for _ in requests:
            assert ended.acquire(timeout=WAIT_S)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record"


@pytest.fixture
def run(record: Path) -> Iterator[Run]:
    run = Run(open_recorder(record, *setup()))
    run.engine.start()
    yield run
    run.engine.stop()
    assert run.engine.join(WAIT_S)


def serve_everything(run: Run) -> None:
    """Shared prefixes, more requests than fit, an abort, a failure, a flush, a refusal."""
    run.serve([fake_request("first", PREFIX, max_tokens=9)])
    crowd = [fake_request(f"r{i}", (*PREFIX, i), max_tokens=20, seed=i) for i in range(6)]
    run.serve([*crowd, fake_request("long", PREFIX, max_tokens=30)], abort="long")
    run.serve([fake_request("broken", (*PREFIX, 1, 2, 3, 4))])
    run.engine.flush().result(WAIT_S)
    run.executor.gate.clear()
    first, second = (run.engine.submit(fake_request("twin"), run.outputs.append) for _ in range(2))
    run.executor.gate.set()
    first.result(WAIT_S)
    with pytest.raises(RequestError, match="in use"):
        second.result(WAIT_S)
    run.engine.stop()
    assert run.engine.join(WAIT_S)


def test_replay_makes_the_same_steps_and_outputs(run: Run, record: Path):
    serve_everything(run)
    read, events = read_record(record)
    moments = list(replay(read, events))
    steps = [moment.plan for moment in moments if moment.plan is not None]
    plans = [plan for step in steps for plan in step.plans if plan is not None]
    outputs = [output for moment in moments for output in moment.outputs]
    assert plans == run.executor.plans
    assert [o._replace(error=None) for o in outputs] == [
        o._replace(error=None) for o in run.outputs
    ]
    assert {o.finish_reason for o in outputs} == {None, "length", "abort", "error"}
    assert any(plan.admitted and plan.admitted[0].hit_tokens for plan in plans)
    assert [moment.refusal.status for moment in moments if moment.refusal] == ["ALREADY_EXISTS"]
    assert replicas.is_idle(moments[-1].replicas)


def test_record_keeps_the_setup(record: Path):
    table, limits = setup()
    open_recorder(record, table, limits).close()
    read, events = read_record(record)
    assert read == Setup(table.geometry, NUM_PAGES, table.policy, limits)
    assert not list(events)


RESULT = StepResult(
    step_id=7,
    tokens=np.array([3, 4, 5], np.int32),
    finite=np.array([True, False, True]),
    accepted=((1, 2), (), (3,)),
)


@pytest.mark.parametrize("idle", [(), (None, None)], ids=["one replica", "three replicas"])
def test_every_event_is_read_as_it_was_written(idle: tuple[None, ...], record: Path):
    result = GroupResult(step_id=7, results=(*idle, RESULT))
    request = fake_request("ä", (1, 2), stop_token_ids=(4,), ignore_eos=True)
    more = dataclasses.replace(
        request.sampling, stop=("x", "ä"), logit_bias=((3, 1.5),), min_tokens=2, logprobs=0
    )
    request = dataclasses.replace(request, sampling=more)
    written: list[Event] = [
        Submitted(request),
        Planned(frozenset({"b", "ä"})),
        Planned(frozenset()),
        Ended("ä", RequestError("INTERNAL", "why")),
        Ended("b"),
        Flushed(),
    ]
    recorder = open_recorder(record, *setup())
    for event in [*written, Committed(result)]:
        recorder.write(event)
    recorder.close()
    *events, last = read_record(record)[1]
    assert [_comparable(event) for event in events] == [_comparable(event) for event in written]
    assert isinstance(last, Committed)
    assert last.result.step_id == 7
    *others, read = last.result.results
    assert tuple(others) == idle
    assert read is not None
    assert read.step_id == 7
    assert read.tokens.tolist() == [3, 4, 5]
    assert read.finite.tolist() == [True, False, True]
    assert read.accepted == RESULT.accepted


def test_record_of_one_replica_is_that_of_its_scheduler(record: Path):
    recorder = open_recorder(record, *setup())
    recorder.write(Committed(GroupResult(step_id=7, results=(RESULT,), expert_load=(9,))))
    recorder.close()
    first, last = map(json.loads, record.read_text().splitlines())
    assert set(first) == {"op", "format", "geometry", "num_pages", "policy", "limits"}
    assert last == {
        "op": "commit", "step": 7, "tokens": [3, 4, 5], "not_finite": [1],
        "accepted": [[1, 2], [], [3]],
    }  # fmt: skip


def test_replay_places_requests_on_the_same_replicas(record: Path):
    table, limits = setup()
    devices = FakeDevices(*(FakeExecutor(table.geometry, num_pages=NUM_PAGES) for _ in range(2)))
    recorder = open_recorder(record, table, limits, num_replicas=2)
    run = Run(recorder, devices)
    run.engine.start()
    run.serve([fake_request(f"r{i}", (*PREFIX, i % 3), max_tokens=5 + i) for i in range(12)])
    run.engine.stop()
    assert run.engine.join(WAIT_S)
    read, events = read_record(record)
    moments = list(replay(read, events))
    assert [moment.plan for moment in moments if moment.plan is not None] == devices.steps
    assert all(replica.plans for replica in devices.replicas)
    assert [output for moment in moments for output in moment.outputs] == run.outputs
    assert replicas.is_idle(moments[-1].replicas)


def test_line_that_was_cut_off_is_left_out(record: Path):
    recorder = open_recorder(record, *setup())
    recorder.write(Ended("a"))
    recorder.write(Ended("b"))
    recorder.close()
    record.write_text(record.read_text()[:-3])
    assert list(read_record(record)[1]) == [Ended("a")]


@pytest.mark.parametrize(
    "line", ['{"op":"dance"}', '{"op":"commit"}', "[]", "x", '{"op":"setup","format":9}']
)
def test_line_that_is_not_understood_is_named(line: str, record: Path):
    open_recorder(record, *setup()).close()
    with record.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordError, match="line 2 is not understood"):
        list(read_record(record)[1])


@pytest.mark.parametrize("text", ["", '{"op":"plan"}\n'])
def test_file_without_setup_is_refused(text: str, record: Path):
    record.write_text(text)
    with pytest.raises(RecordError, match="setup of a scheduler in line 1"):
        read_record(record)


def test_old_record_is_not_overwritten(record: Path):
    record.write_text("old")
    with pytest.raises(FileExistsError):
        open_recorder(record, *setup())
    assert record.read_text() == "old"


def test_full_disk_ends_the_record_and_not_the_engine(caplog: pytest.LogCaptureFixture):
    broken = Run(Recorder(FullDisk()))
    broken.engine.start()
    broken.serve([fake_request("a")])
    broken.engine.stop()
    assert broken.engine.join(WAIT_S)
    assert broken.outputs[-1].finish_reason == "length"
    assert [entry.message for entry in caplog.records] == ["record_ended"]


def _comparable(event: Event) -> object:
    """Errors have no equality of their own."""
    if isinstance(event, Ended) and event.error is not None:
        return event.request_id, event.error.status, event.error.message
    return event
