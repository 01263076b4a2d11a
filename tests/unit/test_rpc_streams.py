"""Outputs on their way to a client: merged, bounded, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import threading

from k3jax.results import TokenLogprobs
from serving.plan import FinishReason, Output
from serving.rpc.streams import OutputBridge, OutputStream, next_outputs


def output(*token_ids: int, finish: FinishReason | None = None) -> Output:
    return Output(
        request_id="a",
        token_ids=token_ids,
        prompt_tokens=3,
        completion_tokens=len(token_ids),
        finish_reason=finish,
    )


def stream(max_tokens: int = 4) -> tuple[OutputStream, list[str]]:
    """A stream, and the log of what it asks of the engine."""
    log: list[str] = []
    pause, resume = (lambda: log.append("pause")), (lambda: log.append("resume"))
    arrived = asyncio.Event()
    one = OutputStream(max_tokens=max_tokens, pause=pause, resume=resume, arrived=arrived)
    return one, log


def taken(stream: OutputStream) -> Output:
    got = stream.take()
    assert got is not None
    return got


async def test_outputs_that_wait_are_read_as_one():
    outputs, _ = stream()
    outputs.deliver(output(1))
    outputs.deliver(output(2, 3, finish="length"))
    got = taken(outputs)
    assert (got.token_ids, got.finish_reason) == ((1, 2, 3), "length")


async def test_full_stream_pauses_once_and_resumes_when_it_is_read():
    outputs, log = stream(max_tokens=3)
    for token in range(6):
        outputs.deliver(output(token))
    assert log == ["pause"]
    assert taken(outputs).token_ids == (0, 1, 2, 3, 4, 5)
    assert log == ["pause", "resume"]


async def test_reader_that_keeps_up_is_never_paused():
    outputs, log = stream(max_tokens=3)
    for token in range(6):
        outputs.deliver(output(token))
        assert taken(outputs).token_ids == (token,)
    assert log == []


async def test_nothing_follows_the_last_output():
    outputs, _ = stream()
    outputs.deliver(output(1, finish="stop"))
    outputs.deliver(output(2))
    assert taken(outputs).token_ids == (1,)
    assert outputs.take() is None
    assert outputs.has_ended


async def test_bridge_carries_a_step_from_another_thread_with_one_wake_up():
    loop = asyncio.get_running_loop()
    bridge = OutputBridge(loop)
    streams = [stream()[0] for _ in range(50)]
    wake_ups = []
    call_soon = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: wake_ups.append(args) or call_soon(*args)  # type: ignore

    def step() -> None:
        for index, one in enumerate(streams):
            bridge.post(one, output(index))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()  # the loop does not run meanwhile
    await asyncio.sleep(0)
    got = [taken(one).token_ids for one in streams]
    assert got == [(index,) for index in range(50)]
    assert len(wake_ups) == 1


async def test_bridge_to_a_closed_loop_drops_what_comes():
    loop = asyncio.new_event_loop()
    bridge = OutputBridge(loop)
    loop.close()
    bridge.post(stream()[0], output(1))


async def test_outputs_of_several_streams_are_read_together_by_index():
    arrived = asyncio.Event()
    streams = [
        OutputStream(max_tokens=9, pause=lambda: None, resume=lambda: None, arrived=arrived)
        for _ in range(3)
    ]
    reader = asyncio.create_task(next_outputs(streams, arrived))
    await asyncio.sleep(0)
    told = TokenLogprobs(-0.5, (), ())
    streams[2].deliver(output(1)._replace(logprobs=(told,)))
    streams[0].deliver(output(7))
    streams[2].deliver(output(2)._replace(logprobs=(told,)))
    got = await reader
    assert [(index, one.token_ids) for index, one in got] == [(0, (7,)), (2, (1, 2))]
    assert got[1][1].logprobs == (told, told)
