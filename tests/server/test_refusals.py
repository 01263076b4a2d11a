"""Bad input: one clear status each, nothing sent before it, nothing left behind."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from serving.rpc.protocol import common
from tests.fakes import VOCAB_SIZE, FakeExecutor, fake_geometry, fake_request, solo_tokens
from tests.server.harness import (
    PROMPT,
    SlowExecutor,
    collect,
    fake_load,
    messages,
    request,
    serving,
    status_of,
)

UNSUPPORTED_SAMPLING: dict[str, Any] = {
    "json_schema": "{}",
    "regex": "a",
    "grammar": "g",
    "structural_tag": "{}",
    "json_object": True,
    "choice": messages.ChoiceConstraint(choices=["a"]),
}
UNSUPPORTED_FIELDS: dict[str, Any] = {
    "kv_transfer_params": messages.KvTransferParams(remote_host="h"),
    "kv_transfer_params_json": "{}",
    "mm_inputs": messages.MultimodalInputs(),
    "extra_mm_inputs": [messages.MultimodalInputs()],
    "media_refs": messages.MediaRefs(),
}


def changed(**fields: Any) -> messages.GenerateRequest:
    """A good request with some fields replaced."""
    message = request()
    message.MergeFrom(messages.GenerateRequest(**fields))
    return message


def without_prompt() -> messages.GenerateRequest:
    message = request()
    message.ClearField("tokenized")
    return message


def with_unknown_field() -> messages.GenerateRequest:
    message = request()
    message.MergeFromString(bytes([0xF8, 0x06, 0x01]))  # field 111, varint 1
    return message


# case: request, status, what the message must hold
CASES: dict[str, tuple[Callable[[], messages.GenerateRequest], str, tuple[str, ...]]] = {
    "no prompt": (without_prompt, "INVALID_ARGUMENT", ("prompt", "tokenized", "text")),
    "kf_v10 empty prompt": (lambda: request(prompt=()), "INVALID_ARGUMENT", ("prompt", "empty")),
    "text without tokenizer": (
        lambda: changed(text="x"), "UNIMPLEMENTED", ("text", "no tokenizer", "input_ids"),
    ),
    "kf_v11 id beyond the vocabulary": (
        lambda: request(prompt=(1, VOCAB_SIZE)),
        "INVALID_ARGUMENT", ("prompt[1]", str(VOCAB_SIZE), f"0..{VOCAB_SIZE - 1}"),
    ),
    "kf_v11 largest id": (
        lambda: request(prompt=(2**32 - 1,)), "INVALID_ARGUMENT", ("prompt[0]", "4294967295"),
    ),
    "kf_v09 prompt fills the context": (
        lambda: request(prompt=(1,) * 64, max_tokens=1),
        "INVALID_ARGUMENT", ("prompt", "got 64", "at most 63"),
    ),
    "kf_v09 prompt and output exceed the context": (
        lambda: request(prompt=(1,) * 10, max_tokens=64),
        "INVALID_ARGUMENT", ("max_tokens", "10 + 64", "54"),
    ),
    "max_tokens 0": (
        lambda: request(max_tokens=0), "INVALID_ARGUMENT", ("max_tokens", "got 0", ">= 1"),
    ),
    "temperature negative": (
        lambda: request(temperature=-1.0), "INVALID_ARGUMENT", ("temperature", "-1.0"),
    ),
    "temperature NaN": (
        lambda: request(temperature=math.nan), "INVALID_ARGUMENT", ("temperature", "nan"),
    ),
    "temperature infinite": (
        lambda: request(temperature=math.inf), "INVALID_ARGUMENT", ("temperature", "inf"),
    ),
    "top_p above 1": (lambda: request(top_p=1.5), "INVALID_ARGUMENT", ("top_p", "1.5")),
    "top_p negative": (lambda: request(top_p=-0.5), "INVALID_ARGUMENT", ("top_p", "-0.5")),
    "top_p NaN": (lambda: request(top_p=math.nan), "INVALID_ARGUMENT", ("top_p", "nan")),
    "stop id beyond the vocabulary": (
        lambda: request(stop_token_ids=[VOCAB_SIZE]),
        "INVALID_ARGUMENT", ("stop_token_ids[0]", str(VOCAB_SIZE)),
    ),
    "n too large": (lambda: request(n=105), "INVALID_ARGUMENT", ("n is", "105", "1..104")),
    "min_p above 1": (lambda: request(min_p=1.5), "INVALID_ARGUMENT", ("min_p", "1.5")),
    "presence_penalty NaN": (
        lambda: request(presence_penalty=math.nan), "INVALID_ARGUMENT", ("presence_penalty", "nan"),
    ),
    "frequency_penalty too large": (
        lambda: request(frequency_penalty=2.5), "INVALID_ARGUMENT", ("frequency_penalty", "2.5"),
    ),
    "repetition_penalty negative": (
        lambda: request(repetition_penalty=-1.0), "INVALID_ARGUMENT", ("repetition_penalty", "-1"),
    ),
    "logit_bias beyond the vocabulary": (
        lambda: request(logit_bias={VOCAB_SIZE: 1.0}),
        "INVALID_ARGUMENT", ("logit_bias[0]", str(VOCAB_SIZE)),
    ),
    "logit_bias too large": (
        lambda: request(logit_bias={3: 101.0}), "INVALID_ARGUMENT", ("logit_bias[3]", "101.0"),
    ),
    "logit_bias too long": (
        lambda: request(logit_bias=dict.fromkeys(range(1024), 1.0), min_tokens=1),
        "INVALID_ARGUMENT", ("logit_bias", "1025", "1024"),
    ),
    "min_tokens above max_tokens": (
        lambda: request(min_tokens=5), "INVALID_ARGUMENT", ("min_tokens", "got 5", "max_tokens 4"),
    ),
    "stop without tokenizer": (
        lambda: request(stop=["x"]), "UNIMPLEMENTED", ("stop", "no tokenizer", "stop_token_ids"),
    ),
    "logprobs of all tokens": (
        lambda: request(logprobs=-1), "INVALID_ARGUMENT", ("logprobs", "-1", "0..20"),
    ),
    "prompt_logprobs too many": (
        lambda: request(prompt_logprobs=21), "INVALID_ARGUMENT", ("prompt_logprobs", "21", "0..20"),
    ),
    "truncate_prompt_tokens 0": (
        lambda: request(truncate_prompt_tokens=0),
        "INVALID_ARGUMENT", ("truncate_prompt_tokens", "got 0", "-1"),
    ),
    "rank that does not exist": (
        lambda: changed(data_parallel_rank=1), "INVALID_ARGUMENT", ("data_parallel_rank", "0..0"),
    ),
    "request_id too long": (
        lambda: request("i" * 513), "INVALID_ARGUMENT", ("request_id", "513", "512"),
    ),
    "kf_v22 unknown field": (with_unknown_field, "UNIMPLEMENTED", ("111", "GenerateRequest")),
} | {
    f"kf_v22 {name}": (
        lambda name=name, value=value: request(**{name: value}), "UNIMPLEMENTED", (name,),
    )
    for name, value in UNSUPPORTED_SAMPLING.items()
} | {
    f"kf_v22 {name}": (
        lambda name=name, value=value: changed(**{name: value}), "UNIMPLEMENTED", (name,),
    )
    for name, value in UNSUPPORTED_FIELDS.items()
}  # fmt: skip


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("case", CASES)
async def test_bad_request_gets_its_status_and_leaves_nothing(case: str, stream: bool):
    build, status, words = CASES[case]
    message = build()
    message.stream = stream
    executor = FakeExecutor(fake_geometry())
    async with serving(fake_load(executor)) as harness:
        got_status, text, num_replies = await status_of(harness.stub.Generate(message))
        assert (got_status, num_replies) == (status, 0)
        assert all(word in text for word in words), text
        answer = await collect(harness.stub.Generate(request()))
        await harness.until_idle()
        assert harness.counts().prompt_tokens == len(PROMPT)
    assert answer.token_ids == solo_tokens(fake_request("a", PROMPT))


async def test_values_that_ask_for_nothing_are_accepted():
    neutral = {"n": 1, "repetition_penalty": 1.0, "min_p": -0.0, "skip_special_tokens": True}
    message = request(**neutral, spaces_between_special_tokens=True, json_object=False)
    message.tokenized.original_text = "whatever"
    async with serving() as harness:
        answer = await collect(harness.stub.Generate(message))
    assert len(answer.token_ids) == 4


async def test_kf_c16_request_that_never_fits_the_pool_is_refused_and_one_that_fits_exactly_ends():
    # 3 state pages, the null page, and 4 pages of 4 tokens: 16 cached tokens.
    async with serving(fake_load(num_pages=8)) as harness:
        too_large = request("large", max_tokens=15)
        status, text, _ = await status_of(harness.stub.Generate(too_large))
        assert status == "INVALID_ARGUMENT"
        assert "never fits" in text
        answer = await collect(harness.stub.Generate(request("exact", max_tokens=14)))
        assert len(answer.token_ids) == 14
        await harness.until_idle()


async def test_kf_v01_live_id_is_refused_and_the_first_request_is_unaffected():
    executor = FakeExecutor(fake_geometry())
    executor.gate.clear()
    async with serving(fake_load(executor)) as harness:
        first = asyncio.create_task(collect(harness.stub.Generate(request(max_tokens=9))))
        await harness.until(lambda: harness.counts().running == 1)
        for _ in range(2):
            status, text, _ = await status_of(harness.stub.Generate(request(max_tokens=2)))
            assert status == "ALREADY_EXISTS"
            assert "request_id" in text
        executor.gate.set()
        expected = solo_tokens(fake_request("a", PROMPT, max_tokens=9))
        assert (await first).token_ids == expected
        # The id is free again as soon as its stream has ended.
        again = await collect(harness.stub.Generate(request(max_tokens=9)))
        assert again.token_ids == expected


async def test_kf_v07_full_server_refuses_at_once_and_accepted_requests_finish():
    executor = SlowExecutor(fake_geometry(), num_pages=1000, max_rows=2)
    bounds = {"max_rows": 2, "max_waiting": 4, "max_context_tokens": 250}
    async with serving(fake_load(executor, num_pages=1000, **bounds)) as harness:

        def ask(request_id: str) -> asyncio.Task[Any]:
            call = harness.stub.Generate(request(request_id, max_tokens=200))
            return asyncio.create_task(collect(call))

        accepted = [ask("a0"), ask("a1")]
        await harness.until(lambda: harness.counts().running == 2)
        for request_id in ("a0", "a1"):  # they keep their rows until the others were refused
            harness.engine.pause(request_id)
        accepted += [ask(f"a{i}") for i in range(2, 6)]
        await harness.until(lambda: harness.counts().waiting == 4)
        begin = time.monotonic()
        refused = await asyncio.gather(
            *(status_of(harness.stub.Generate(request(f"b{i}"))) for i in range(94))
        )
        seconds = time.monotonic() - begin
        for request_id in ("a0", "a1"):
            harness.engine.resume(request_id)
        answers = await asyncio.gather(*accepted)
        await harness.until_idle()
    assert {status for status, _, _ in refused} == {"RESOURCE_EXHAUSTED"}
    assert seconds < 2.0  # of all 94; one takes about a millisecond
    assert all(len(answer.token_ids) == 200 for answer in answers)


async def test_bug_in_a_handler_is_internal_and_costs_only_its_request():
    def no_seed() -> int:
        raise ZeroDivisionError("a bug")

    async with serving(draw_seed=no_seed) as harness:
        status, text, num_replies = await status_of(harness.stub.Generate(request(seed=None)))
        assert (status, num_replies) == ("INTERNAL", 0)
        assert "ZeroDivisionError" in text
        answer = await collect(harness.stub.Generate(request()))
        assert len(answer.token_ids) == 4


async def test_kf_k09_request_with_non_finite_logits_ends_with_internal():
    executor = FakeExecutor(fake_geometry(), not_finite=[("bad", 5)])
    async with serving(fake_load(executor)) as harness:
        bad = asyncio.create_task(status_of(harness.stub.Generate(request("bad", max_tokens=9))))
        good = asyncio.create_task(collect(harness.stub.Generate(request("good", max_tokens=9))))
        status, _, num_replies = await bad
        assert status == "INTERNAL"
        assert num_replies <= 2  # what came before stays
        expected = solo_tokens(fake_request("good", PROMPT, max_tokens=9))
        assert (await good).token_ids == expected
        await harness.until_idle()


async def test_methods_that_are_not_there_say_so():
    async with serving() as harness:
        stub = harness.stub
        calls = {
            "Embed": stub.Embed(messages.EmbedRequest()),
            "profiles": stub.StartProfile(common.StartProfileRequest()),
        }
        for word, call in calls.items():
            assert (await call.code()).name == "UNIMPLEMENTED"
            assert word in await call.details()


async def test_malformed_message_does_not_stop_the_server():
    async with serving() as harness:
        raw = harness.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        status, _, _ = await status_of(raw(b"\xff\xff\xff"))
        assert status != "OK"
        answer = await collect(harness.stub.Generate(request()))
        assert len(answer.token_ids) == 4
