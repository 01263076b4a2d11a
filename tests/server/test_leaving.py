"""Clients that leave: cancelled, disconnected, over their deadline, aborted, or too slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc.aio
import pytest

from serving.rpc.lifecycle import Served
from serving.rpc.protocol import Stub
from serving.server import OnFailure
from tests.fakes import fake_geometry, fake_request, solo_tokens
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
)

FREE_WITHIN_S = 1.0  # KF-V02


def slow_load(**limits: int) -> Callable[[OnFailure], Served]:
    """A server whose requests last long enough to be caught."""
    geometry = fake_geometry(page_tokens=64)
    executor = SlowExecutor(geometry, max_rows=limits.get("max_rows", 4))
    return fake_load(executor, page_tokens=64, max_context_tokens=3000, **limits)


# phase: the condition that the only other request, if any, leaves a new one in it
PHASES: dict[str, Callable[[Harness], Callable[[], bool]]] = {
    "queue": lambda harness: lambda: harness.counts().waiting == 1,
    "prefill": lambda harness: lambda: harness.counts().running == 1,
    "decode": lambda harness: lambda: harness.counts().generated_tokens > 0,
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_kf_v02_cancelled_request_frees_everything_within_a_second(stream: bool):
    async with serving(slow_load()) as harness:
        call = harness.stub.Generate(request(max_tokens=2900, stream=stream))
        await harness.until(lambda: harness.counts().generated_tokens > 0)
        call.cancel()
        await harness.until_idle(FREE_WITHIN_S)
        assert harness.counts().generated_tokens < 2900


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
@pytest.mark.parametrize("phase", PHASES)
async def test_kf_v02_request_that_leaves_in_any_phase_frees_everything(phase: str, how: str):
    load = slow_load(max_rows=1, max_prefill_rows=1, max_prefill_tokens=4)
    async with serving(load) as harness:
        keeper = None
        if phase == "queue":
            keeper = harness.stub.Generate(request("keeper", max_tokens=2000))
            await harness.until(lambda: harness.counts().running == 1)
        num_before = harness.service.num_open
        prompt = tuple(i % 90 for i in range(2000)) if phase == "prefill" else PROMPT
        async with grpc.aio.insecure_channel(harness.address) as channel:
            timeout_s = 0.2 if how == "deadline" else None
            message = request("victim", prompt, max_tokens=900)
            call = Stub(channel).Generate(message, timeout=timeout_s)
            await harness.until(lambda: harness.service.num_open == num_before + 1)
            await harness.until(PHASES[phase](harness))
            if how == "cancel":
                call.cancel()
            elif how == "deadline":
                status, _, _ = await status_of(call)
                assert status == "DEADLINE_EXCEEDED"
        # Leaving the block has closed the channel.
        await harness.until(lambda: harness.service.num_open == num_before, FREE_WITHIN_S)
        await harness.until(lambda: harness.counts().waiting == 0, FREE_WITHIN_S)
        if keeper is not None:
            assert harness.counts().running == 1
            keeper.cancel()
        await harness.until_idle(FREE_WITHIN_S)


async def test_survivors_of_cancelled_batch_mates_equal_their_solo_runs():
    async with serving() as harness:
        calls = {f"r{i}": harness.stub.Generate(request(f"r{i}", max_tokens=30)) for i in range(8)}
        for id in ("r1", "r4", "r6"):
            calls.pop(id).cancel()
        answers = await asyncio.gather(*map(collect, calls.values()))
        await harness.until_idle()
    for id, answer in zip(calls, answers, strict=True):
        assert answer.token_ids == solo_tokens(fake_request(id, PROMPT, max_tokens=30))


async def test_kf_v04_aborted_request_is_told_and_frees_its_pages():
    async with serving(slow_load()) as harness:
        answer = asyncio.create_task(collect(harness.stub.Generate(request(max_tokens=2900))))
        await harness.until(lambda: harness.counts().generated_tokens > 2)
        await harness.stub.Abort(messages.AbortRequest(request_ids=["a"]))
        got = await answer
        await harness.until_idle(FREE_WITHIN_S)
    assert got.complete is not None
    assert got.complete.finish_reason == "abort"
    expected = solo_tokens(fake_request("a", PROMPT, max_tokens=len(got.token_ids)))
    assert got.token_ids == expected


async def test_kf_v03_abort_of_unknown_finished_and_repeated_ids_succeeds():
    async with serving() as harness:
        await collect(harness.stub.Generate(request("done")))
        for ids in (["nobody"], ["done"], ["done", "done"], []):
            await harness.stub.Abort(messages.AbortRequest(request_ids=ids))
        answer = await collect(harness.stub.Generate(request("done")))
    assert len(answer.token_ids) == 4


async def test_kf_v03_aborts_that_race_with_completion_leave_the_server_up():
    async with serving() as harness:
        for i in range(60):
            call = asyncio.create_task(collect(harness.stub.Generate(request(f"r{i}"))))
            for _ in range(i % 7):
                await asyncio.sleep(0)
            await harness.stub.Abort(messages.AbortRequest(request_ids=[f"r{i}"]))
            answer = await call
            assert answer.complete is not None
            assert answer.complete.finish_reason in ("abort", "length")
        await harness.until_idle()


async def test_client_that_does_not_read_pauses_its_own_request_only():
    # Small windows, so that the transport holds little of what the client has not read.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    load = fake_load(page_tokens=1024, max_context_tokens=60_000)
    async with serving(load, output_buffer_tokens=8, channel_options=options) as harness:
        slow = harness.stub.Generate(request("slow", max_tokens=50_000, ignore_eos=True))
        await slow.read()
        steps = await _until_still(harness)
        answer = await collect(harness.stub.Generate(request("other", max_tokens=20)))
        assert answer.token_ids == solo_tokens(fake_request("other", PROMPT, max_tokens=20))
        assert harness.counts().steps > steps
        assert harness.counts().running == 1  # it keeps its pages
        slow.cancel()
        await harness.until_idle(FREE_WITHIN_S)


async def _until_still(harness: Harness) -> int:
    """Wait until the engine starts no more steps; return how many there were."""
    last, since = -1, 0.0

    def is_still() -> bool:
        nonlocal last, since
        if (steps := harness.counts().steps) != last:
            last, since = steps, time.monotonic()
        return time.monotonic() - since > 0.05

    await harness.until(is_still)
    return last
