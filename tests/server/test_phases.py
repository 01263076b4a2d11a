"""The life of a server: starting, serving, draining, failing; what health and reflection say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from k3jax.config import ConfigError
from serving.rpc.bundle import PIECE_BYTES, build_bundle
from serving.rpc.lifecycle import Served
from serving.rpc.protocol import SERVICE_NAME, common
from serving.server import OnFailure, ServerError, StoppedWhileLoadingError
from serving.tokenizer import load_zip
from tests.fakes import FakeExecutor, fake_geometry, fake_request, solo_tokens
from tests.server.harness import (
    PROMPT,
    Harness,
    SlowExecutor,
    collect,
    fake_load,
    messages,
    request,
    serving,
    status_of,
    write_model_folder,
)

SERVICES = ("", SERVICE_NAME)


async def health_of(harness: Harness) -> tuple[bool, set[str]]:
    """What `HealthCheck` says, and the statuses of the standard health service."""
    reply = await harness.stub.HealthCheck(messages.HealthCheckRequest())
    stub = health_pb2_grpc.HealthStub(harness.channel)
    statuses = set()
    for service in SERVICES:
        check = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        statuses.add(health_pb2.HealthCheckResponse.ServingStatus.Name(check.status))
    return reply.healthy, statuses


def blocked_load() -> tuple[Callable[[OnFailure], Served], threading.Event]:
    """A load that waits for an event."""
    event = threading.Event()
    load = fake_load()

    def wait(on_failure: OnFailure) -> Served:
        event.wait(timeout=30)
        return load(on_failure)

    return wait, event


async def test_kf_v08_port_is_open_but_not_ready_while_the_model_is_loaded(tmp_path: Path):
    load, loaded = blocked_load()
    folder = write_model_folder(tmp_path)
    async with serving(load, folder=folder, wait_ready=False) as harness:
        assert await health_of(harness) == (False, {"NOT_SERVING"})
        status, text, _ = await status_of(harness.stub.Generate(request()))
        assert status == "UNAVAILABLE"
        assert "starting" in text
        # A gateway registers the worker with this much.
        info = await harness.stub.GetModelInfo(messages.GetModelInfoRequest())
        assert info.served_model_name == "fake"
        assert await bundle_of(harness) == build_bundle(folder).data
        assert not (await harness.stub.GetLoads(messages.GetLoadsRequest())).loads
        loaded.set()
        await harness.until(lambda: harness.lifecycle.is_serving)
        assert await health_of(harness) == (True, {"SERVING"})
        assert len((await collect(harness.stub.Generate(request()))).token_ids) == 4


async def test_health_watch_sees_serving_and_draining():
    load, loaded = blocked_load()
    async with serving(load, wait_ready=False) as harness:
        stub = health_pb2_grpc.HealthStub(harness.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        seen = [(await watch.read()).status]
        loaded.set()
        seen.append((await watch.read()).status)
        harness.server.stop()
        seen.append((await watch.read()).status)
    names = health_pb2.HealthCheckResponse.ServingStatus
    assert [names.Name(status) for status in seen] == ["NOT_SERVING", "SERVING", "NOT_SERVING"]


async def test_kf_v21_drain_lets_running_and_queued_requests_end_and_refuses_new_ones():
    executor = FakeExecutor(fake_geometry(), max_rows=3)
    executor.gate.clear()  # whoever has come is there when the drain begins
    async with serving(fake_load(executor, max_rows=3), drain_s=60) as harness:
        calls = [harness.stub.Generate(request(f"r{i}", max_tokens=40)) for i in range(5)]
        answers = [asyncio.create_task(collect(call)) for call in calls]
        await harness.until(lambda: harness.service.num_open == 5)
        harness.server.stop()
        await harness.until(lambda: harness.lifecycle.phase == "draining")
        assert await health_of(harness) == (False, {"NOT_SERVING"})
        status, text, _ = await status_of(harness.stub.Generate(request("late")))
        assert status == "UNAVAILABLE"
        assert "draining" in text
        executor.gate.set()
        for i, answer in enumerate(await asyncio.gather(*answers)):
            expected = solo_tokens(fake_request(f"r{i}", PROMPT, max_tokens=40))
            assert answer.token_ids == expected
        await harness.running  # ends without an error: exit code 0


async def test_kf_v21_drain_limit_ends_what_is_left_with_a_status():
    executor = SlowExecutor(fake_geometry(page_tokens=64))
    load = fake_load(executor, page_tokens=64, max_context_tokens=3000)
    async with serving(load, drain_s=0.05) as harness:
        call = harness.stub.Generate(request(max_tokens=2900))
        await harness.until(lambda: harness.counts().generated_tokens > 0)
        harness.server.stop()
        status, _, _ = await status_of(call)
        assert status == "UNAVAILABLE"
        await harness.running
        assert harness.engine.health().status == "stopped"
        assert harness.counts().free_pages == harness.counts().total_pages


async def test_second_stop_cuts_the_drain_short():
    executor = SlowExecutor(fake_geometry(page_tokens=64))
    load = fake_load(executor, page_tokens=64, max_context_tokens=3000)
    async with serving(load, drain_s=600) as harness:
        call = harness.stub.Generate(request(max_tokens=2900))
        await harness.until(lambda: harness.counts().generated_tokens > 0)
        harness.server.stop()
        harness.server.stop()
        status, _, _ = await status_of(call)
        assert status == "UNAVAILABLE"
        await harness.running


async def test_kf_v08_engine_failure_ends_streams_and_the_server():
    executor = SlowExecutor(fake_geometry())
    executor.fail_at_step = 6
    async with serving(fake_load(executor)) as harness:
        call = harness.stub.Generate(request(max_tokens=30))
        status, text, num_replies = await status_of(call)
        assert status == "INTERNAL"
        assert "RuntimeError" in text
        assert num_replies > 0
        with pytest.raises(ServerError, match="the fake device failed"):
            await harness.running
        assert harness.lifecycle.phase == "failed"


async def test_failed_load_is_the_error_of_the_server():
    def load(on_failure: OnFailure) -> Served:
        raise ConfigError("mesh does not divide: got tp3; expected a divisor of 8")

    async with serving(load) as harness:
        with pytest.raises(ConfigError, match="tp3"):
            await harness.running
        assert harness.lifecycle.phase == "failed"


async def test_stop_while_loading_does_not_wait_for_the_load():
    load, loaded = blocked_load()
    async with serving(load, wait_ready=False) as harness:
        harness.server.stop()
        with pytest.raises(StoppedWhileLoadingError):
            await harness.running
        loaded.set()


async def test_second_server_on_the_port_is_refused_and_the_first_goes_on():
    async with serving() as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(ServerError, match=f"port is in use: got 127.0.0.1:{port}"):
            async with serving(port=port):
                pass
        assert len((await collect(first.stub.Generate(request()))).token_ids) == 4


async def test_port_is_free_again_after_the_server_has_ended():
    async with serving() as first:
        port = int(first.address.rpartition(":")[2])
        await collect(first.stub.Generate(request()))
    async with serving(port=port) as second:
        assert len((await collect(second.stub.Generate(request()))).token_ids) == 4


async def test_reflection_lists_and_describes_the_service():
    async with serving() as harness:
        stub = reflection_pb2_grpc.ServerReflectionStub(harness.channel)

        async def ask(**question: str) -> Any:
            call = stub.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(**question)])
            )
            return await anext(aiter(call))

        reply = await ask(list_services="")
        names = {service.name for service in reply.list_services_response.service}
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
        reply = await ask(file_containing_symbol=SERVICE_NAME)
        assert reply.file_descriptor_response.file_descriptor_proto


async def test_other_engine_services_are_not_there():
    # A gateway asks five services what this server is; four must answer UNIMPLEMENTED.
    async with serving() as harness:
        call = harness.channel.unary_unary("/sglang.grpc.scheduler.SglangScheduler/HealthCheck")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(b"")
    assert error.value.code().name == "UNIMPLEMENTED"


async def bundle_of(harness: Harness) -> bytes:
    chunks = [c async for c in harness.stub.GetTokenizer(common.GetTokenizerRequest())]
    assert all(len(chunk.data) <= PIECE_BYTES for chunk in chunks)
    assert all(not chunk.sha256 for chunk in chunks[:-1])
    assert len(chunks[-1].sha256) == 64
    return b"".join(chunk.data for chunk in chunks)


async def test_tokenizer_bundle_comes_in_pieces_and_loads(tmp_path: Path):
    folder = write_model_folder(tmp_path)
    noise = "".join(map(chr, range(0x4E00, 0x9000))) * 4
    (folder / "chat_template.jinja").write_text(noise)
    async with serving(folder=folder) as harness:
        data = await bundle_of(harness)
    tokenizer = load_zip(data)
    assert len(data) > PIECE_BYTES
    assert tokenizer is not None
    assert tokenizer.encode("hi") == [104, 105]


async def test_model_without_tokenizer_says_so():
    async with serving() as harness:
        call = harness.stub.GetTokenizer(common.GetTokenizerRequest())
        status, text, num_replies = await status_of(call)
    assert (status, num_replies) == ("NOT_FOUND", 0)
    assert "tokenizer" in text


async def test_server_info_and_loads_follow_the_engine():
    executor = SlowExecutor(fake_geometry(), max_rows=1, num_pages=1000)
    limits = {"max_rows": 1, "max_prefill_rows": 1, "num_pages": 1000, "max_context_tokens": 3000}
    async with serving(fake_load(executor, **limits)) as harness:
        calls = [harness.stub.Generate(request(f"r{i}", max_tokens=2900)) for i in range(2)]
        await harness.until(lambda: harness.counts().waiting == 1)
        await harness.until(lambda: harness.counts().generated_tokens > 0)
        info = await harness.stub.GetServerInfo(messages.GetServerInfoRequest())
        assert info.active_requests == 2
        assert info.last_receive_timestamp > 0
        reply = await harness.stub.GetLoads(messages.GetLoadsRequest())
        (load,) = reply.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
        assert load.num_waiting_uncached_tokens == len(PROMPT)
        assert 0 < load.token_usage < 1
        assert load.max_running_requests == 1
        assert not (await harness.stub.GetLoads(messages.GetLoadsRequest(dp_rank=1))).loads
        for call in calls:
            call.cancel()
        await harness.until_idle()
        (load,) = (await harness.stub.GetLoads(messages.GetLoadsRequest())).loads
        assert (load.num_total_reqs, load.num_used_tokens, load.token_usage) == (0, 0, 0)


async def test_every_replica_reports_its_load():
    executor = SlowExecutor(fake_geometry(), num_pages=2000)
    limits = {"num_pages": 2000, "max_context_tokens": 3000}
    async with serving(fake_load(executor, num_replicas=2, **limits), num_replicas=2) as harness:
        calls = [harness.stub.Generate(request(f"r{i}", max_tokens=2900)) for i in range(3)]
        await harness.until(lambda: harness.counts().running == 3)
        info = await harness.stub.GetServerInfo(messages.GetServerInfoRequest())
        assert info.data_parallel_size == 2
        reply = await harness.stub.GetLoads(messages.GetLoadsRequest())
        assert reply.dp_rank_count == 2
        loads = [(load.dp_rank, load.num_running_reqs) for load in reply.loads]
        assert loads == [(0, 2), (1, 1)]
        for rank in (0, 1):
            reply = await harness.stub.GetLoads(messages.GetLoadsRequest(dp_rank=rank))
            assert [load.dp_rank for load in reply.loads] == [rank]
        for call in calls:
            call.cancel()
        await harness.until_idle()
