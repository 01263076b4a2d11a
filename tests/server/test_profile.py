"""StartProfile and StopProfile: traces of the engine's steps."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from serving.profiler import Profiler, ProfilerStateError
from serving.request import RequestError
from serving.rpc.protocol import common
from serving.tracing import XlaTracer
from tests.server.harness import collect, fake_load, request, serving


class FakeTracer:
    """Notes what was asked of it; `fails` makes it raise."""

    def __init__(self, *, fails: bool = False):
        self.calls: list[object] = []
        self._fails = fails

    def start(self, folder: Path, *, with_python: bool) -> None:
        self.calls.append((folder.name, with_python))
        if self._fails:
            raise RuntimeError("no tracer")

    def stop(self) -> None:
        self.calls.append("stop")


def test_the_steps_that_were_asked_for_are_traced(tmp_path: Path):
    tracer = FakeTracer()
    profiler = Profiler(tmp_path, tracer)
    profiler.start(output_dir="a", start_step=2, num_steps=3, with_python=True)
    is_last = []
    for _ in range(2):
        is_last.append(profiler.dispatching())
    assert tracer.calls == []
    for _ in range(5):
        is_last.append(profiler.dispatching())
    assert tracer.calls == [("a", True)]
    assert is_last == [False, False, False, False, True, False, False]
    assert profiler.stop() == tmp_path / "a"
    assert tracer.calls == [("a", True), "stop"]
    assert not profiler.dispatching()


def test_bad_values_and_a_second_profile_are_refused(tmp_path: Path):
    profiler = Profiler(tmp_path / "root", FakeTracer())
    for field, value in (("output_dir", "../x"), ("output_dir", str(tmp_path)), ("num_steps", 0),
                         ("start_step", -1)):  # fmt: skip
        with pytest.raises(RequestError, match=f"{field} is wrong: got {value!r}; expected"):
            profiler.start(**{field: value})
    with pytest.raises(ProfilerStateError, match="no profile"):
        profiler.stop()
    profiler.start(output_dir=str(tmp_path / "root" / "whole"))
    with pytest.raises(ProfilerStateError, match="is being taken into"):
        profiler.start()
    assert profiler.stop() is None  # no step came


def test_a_tracer_that_fails_ends_the_profile_alone(tmp_path: Path):
    profiler = Profiler(tmp_path, FakeTracer(fails=True))
    profiler.start(num_steps=2)
    assert not profiler.dispatching()
    with pytest.raises(ProfilerStateError, match="no profile"):
        profiler.stop()


async def test_clients_profile_a_running_server(tmp_path: Path):
    tracer = FakeTracer()
    profiler = Profiler(tmp_path, tracer)
    async with serving(fake_load(profiler=profiler)) as harness:
        stub = harness.stub
        started = await stub.StartProfile(common.StartProfileRequest(output_dir="x", num_steps=2))
        assert started.success
        assert str(tmp_path / "x") in started.message
        again = await stub.StartProfile(common.StartProfileRequest())
        assert not again.success
        assert "is being taken" in again.message
        await collect(stub.Generate(request(max_tokens=6)))
        await harness.until(lambda: tracer.calls == [("x", False), "stop"])
        stopped = await stub.StopProfile(common.StopProfileRequest())
        assert not stopped.success
        assert "no profile" in stopped.message
        refused = stub.StartProfile(common.StartProfileRequest(profile_by_stage=True))
        assert (await refused.code()).name == "UNIMPLEMENTED"
        assert "profile_by_stage" in await refused.details()


def test_a_trace_is_written_for_perfetto(tmp_path: Path):
    profiler = Profiler(tmp_path, XlaTracer())
    profiler.start(output_dir="t", num_steps=1)
    assert profiler.dispatching()
    jax.block_until_ready(jnp.ones(3) + 1)
    profiler.stop()
    assert len(list((tmp_path / "t").rglob("perfetto_trace.json.gz"))) == 1
