"""Messages of one answer, output by output."""

from __future__ import annotations

import dataclasses

import pytest

from k3jax.results import TokenLogprobs
from serving.plan import FinishReason, Output
from serving.request import Request, RequestError
from serving.rpc.protocol import messages
from serving.rpc.replies import MAX_REPLY_BYTES, Choice, check_size
from tests.fakes import fake_request

TOLD = TokenLogprobs(-0.5, (-0.25,), (7,))


def asking(**fields: int) -> Request:
    plain = fake_request(prompt=(5, 6), max_tokens=9)
    return dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, **fields))


def output(*token_ids: int, prompt: int = 0, finish: FinishReason | None = None) -> Output:
    """An output with log probabilities of its tokens, and of some of the prompt's."""
    return Output(
        request_id="a", token_ids=token_ids, prompt_tokens=2, completion_tokens=0,
        finish_reason=finish, logprobs=(TOLD,) * len(token_ids), prompt_logprobs=(TOLD,) * prompt,
    )  # fmt: skip


def replies(choice: Choice, *outputs: Output) -> list[messages.GenerateResponse]:
    return [reply for one in outputs for reply in choice.replies(one)]


def test_a_stream_tells_of_the_prompt_once_and_of_each_token_once():
    choice = Choice(2, asking(logprobs=1, prompt_logprobs=1), is_streamed=True)
    first, second, end = replies(choice, output(1, prompt=1), output(2, 3), output(finish="abort"))
    assert list(first.chunk.input_logprobs.token_ids) == [5, 6]
    assert not second.chunk.HasField("input_logprobs")
    assert list(second.chunk.output_logprobs.token_ids) == [2, 3]
    assert second.chunk.completion_tokens == 2
    assert not end.complete.HasField("output_logprobs")
    assert {first.chunk.index, second.chunk.index, end.complete.index} == {2}
    assert choice.num_tokens == 3


def test_an_answer_that_is_not_streamed_tells_everything_at_its_end():
    choice = Choice(0, asking(logprobs=1, prompt_logprobs=1), is_streamed=False)
    (end,) = replies(choice, output(1, prompt=1), output(2, 3), output(4, finish="length"))
    assert list(end.complete.output_ids) == [1, 2, 3, 4]
    assert len(end.complete.output_logprobs.top_logprobs) == 4
    assert len(end.complete.input_logprobs.token_logprobs) == 2


def test_a_prompt_of_one_token_has_a_place_without_a_number():
    one = dataclasses.replace(asking(prompt_logprobs=0), prompt=(5,))
    first, _ = replies(Choice(0, one, is_streamed=True), output(1, finish="length"))
    (place,) = first.chunk.input_logprobs.token_logprobs
    assert not place.HasField("value")


def test_the_size_that_is_checked_is_no_smaller_than_the_messages():
    prompt = tuple(range(3000))
    request = dataclasses.replace(asking(prompt_logprobs=20), prompt=prompt)
    told = TokenLogprobs(-0.5, (-0.25,) * 20, (163_839,) * 20)
    choice = Choice(0, request, is_streamed=True)
    news = output(1)._replace(prompt_logprobs=(told,) * (len(prompt) - 1))
    (first,) = replies(choice, news)
    size = first.ByteSize() / len(prompt)
    fits = dataclasses.replace(request, prompt=(1,) * int(0.9 * MAX_REPLY_BYTES / size))
    check_size(fits, is_streamed=True, vocab_size=163_840)
    long = dataclasses.replace(request, prompt=(1,) * int(1.0 + MAX_REPLY_BYTES / size))
    with pytest.raises(RequestError, match="prompt_logprobs 20 with"):
        check_size(long, is_streamed=True, vocab_size=163_840)
