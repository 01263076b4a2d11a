"""What a client that asks for more than tokens gets: stop strings, several answers, log
probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import EOS, FakeExecutor, fake_geometry, fake_request, solo_tokens
from tests.server.harness import (
    PROMPT,
    Answer,
    SlowExecutor,
    collect,
    fake_load,
    messages,
    request,
    serving,
    status_of,
    write_model_folder,
)

TEXT = "abc \U0001f600 zeta eta theta, and more".encode()


def speaking(text: bytes = TEXT, request_id: str = "a") -> FakeExecutor:
    """A device that answers a request with a text, one byte a token."""
    script = {(request_id, len(PROMPT) + place): byte for place, byte in enumerate(text)}
    return FakeExecutor(fake_geometry(), scripted=script)


async def ask(
    tmp_path: Path, executor: FakeExecutor, *, stream: bool = True, **sampling: Any
) -> Answer:
    async with serving(fake_load(executor), folder=write_model_folder(tmp_path)) as harness:
        answer = await collect(
            harness.stub.Generate(request(stream=stream, max_tokens=len(TEXT), **sampling))
        )
        await harness.until_idle()
    return answer


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("stop", [" zeta eta theta", "\U0001f600", "a"])
async def test_kf_v13_answer_ends_with_the_token_that_completes_a_stop_string(
    tmp_path: Path, stop: str, stream: bool
):
    executor = speaking()
    answer = await ask(tmp_path, executor, stream=stream, stop=["never", stop])
    assert answer.complete is not None
    end = TEXT.index(stop.encode()) + len(stop.encode())
    ids = answer.token_ids if stream else tuple(answer.complete.output_ids)
    assert bytes(ids) == TEXT[:end]
    assert answer.complete.finish_reason == "stop"
    assert answer.complete.matched_stop_str == stop
    assert answer.complete.completion_tokens == (0 if stream else end)
    # One step was on its way when the end was seen.
    assert len(executor.plans) <= end + 1


async def test_text_that_lacks_the_stop_string_goes_on_to_its_end(tmp_path: Path):
    answer = await ask(tmp_path, speaking(), stop=["theta."], include_stop_str_in_output=True)
    assert bytes(answer.token_ids) == TEXT
    assert answer.complete is not None
    assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("length", "")


async def test_min_tokens_hold_for_stop_strings_and_the_end_token_is_no_text(tmp_path: Path):
    # The fake device masks nothing: what min_tokens do to end tokens is the real one's to show.
    answer = await ask(tmp_path, speaking(b"xx.x" + bytes([EOS])), stop=["x"], min_tokens=3)
    assert bytes(answer.token_ids) == b"xx.x"
    answer = await ask(tmp_path, speaking(b"yy" + bytes([EOS])), stop=["`"])  # the byte of EOS
    assert answer.complete is not None
    assert answer.complete.matched_token_id == EOS


async def test_every_answer_to_a_prompt_equals_a_request_with_its_seed():
    async with serving() as harness:
        calls = [request("s", n=3, seed=7), request("u", n=2, seed=9, stream=False)]
        streamed, whole = await asyncio.gather(*(every(harness.stub.Generate(c)) for c in calls))
        await harness.until_idle()
    for index in range(3):
        mine = [reply for reply in streamed if index_of(reply) == index]
        assert [reply.WhichOneof("response") for reply in mine] == ["chunk"] * (len(mine) - 1) + [
            "complete"
        ]
        tokens = tuple(id for reply in mine for id in reply.chunk.token_ids)
        assert tokens == solo_tokens(fake_request("x", PROMPT, seed=7 + index))
    assert sorted(reply.complete.index for reply in whole) == [0, 1]
    for reply in whole:
        want = solo_tokens(fake_request("x", PROMPT, seed=9 + reply.complete.index))
        assert tuple(reply.complete.output_ids) == want
        assert reply.complete.completion_tokens == len(want)


async def test_several_answers_are_refused_or_aborted_together():
    executor = SlowExecutor(fake_geometry(), max_rows=2)
    async with serving(fake_load(executor, max_rows=2, max_waiting=3)) as harness:
        first = asyncio.create_task(every(harness.stub.Generate(request(n=3, max_tokens=50))))
        await harness.until(lambda: harness.counts().running == 2)
        for request_id in ("a", "a#1"):  # they keep their rows
            harness.engine.pause(request_id)
        for taken in (request("a", n=2), request("a#1"), request("a#2")):
            status, text, _ = await status_of(harness.stub.Generate(taken))
            assert (status, "in use" in text) == ("ALREADY_EXISTS", True)
        status, text, _ = await status_of(harness.stub.Generate(request("b", n=5)))
        assert (status, "queue is full" in text) == ("RESOURCE_EXHAUSTED", True)
        await harness.until(lambda: harness.counts().waiting == 1)
        await harness.stub.Abort(messages.AbortRequest(request_ids=["a"]))
        replies = await first
        await harness.until_idle()
    ends = [reply.complete for reply in replies if reply.HasField("complete")]
    assert [(end.index, end.finish_reason) for end in ends] == [(i, "abort") for i in range(3)]


async def test_log_probabilities_come_with_their_tokens():
    async with serving() as harness:
        streamed, whole, bare = [
            await collect(harness.stub.Generate(message))
            for message in (
                request(logprobs=2, prompt_logprobs=1, max_tokens=9),
                request(logprobs=2, prompt_logprobs=1, max_tokens=9, stream=False),
                request(logprobs=0),
            )
        ]
    for chunk in streamed.chunks:
        told = chunk.output_logprobs
        assert list(told.token_ids) == list(chunk.token_ids)
        assert list(told.token_logprobs) == [-id / 8 for id in chunk.token_ids]
        assert [list(top.token_ids) for top in told.top_logprobs] == [[0, 1]] * len(chunk.token_ids)
        assert [list(top.values) for top in told.top_logprobs] == [[-1, -2]] * len(chunk.token_ids)
    first, *others = streamed.chunks
    assert not any(chunk.HasField("input_logprobs") for chunk in others)
    prompt = first.input_logprobs
    assert list(prompt.token_ids) == list(PROMPT)
    assert [one.value if one.HasField("value") else None for one in prompt.token_logprobs] == [
        None, -PROMPT[1] / 8, -PROMPT[2] / 8,
    ]  # fmt: skip
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [0], [0]]
    assert streamed.complete is not None
    assert not streamed.complete.HasField("output_logprobs")
    assert whole.complete is not None
    assert whole.complete.input_logprobs == prompt
    assert list(whole.complete.output_logprobs.token_ids) == list(streamed.token_ids)
    assert all(not chunk.output_logprobs.top_logprobs for chunk in bare.chunks)
    assert all(
        len(chunk.output_logprobs.token_logprobs) == len(chunk.token_ids) for chunk in bare.chunks
    )


async def test_reply_beyond_four_megabytes_is_refused_before_any_work():
    load = fake_load(num_pages=20_000, max_context_tokens=60_010)
    async with serving(load) as harness:
        big = request(logprobs=20, max_tokens=60_000, stream=False)
        status, text, _ = await status_of(harness.stub.Generate(big))
        assert status == "INVALID_ARGUMENT"
        assert all(word in text for word in ("logprobs 20", "60000 max_tokens", "4194304"))
        assert harness.counts().steps == 0


async def test_truncated_prompt_is_what_is_continued():
    async with serving() as harness:
        message = request(prompt=(9,) * 90 + PROMPT, truncate_prompt_tokens=len(PROMPT))
        answer = await collect(harness.stub.Generate(message))
    assert answer.token_ids == solo_tokens(fake_request("a", PROMPT))
    assert answer.complete is not None
    assert answer.complete.prompt_tokens == len(PROMPT)


async def every(call: Any) -> list[messages.GenerateResponse]:
    """All replies of a call."""
    async with asyncio.timeout(20):
        return [reply async for reply in call]


def index_of(reply: messages.GenerateResponse) -> int:
    return getattr(reply, reply.WhichOneof("response")).index
